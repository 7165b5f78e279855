"""One publish, from its announcement to its report."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.conversion import duration_to_proto, weight_tag_from_proto
from rollwire.types import UpdatePhase
from rollwire.v1 import weights_pb2

from rollwire_client._concurrency.tasks import cancel_all, run_to_end
from rollwire_client._errors import (
    ClosedError,
    DigestMismatchError,
    PublishError,
    PublishFailedError,
    SchemaMismatchError,
    ServerUnreachableError,
    StalePublisherError,
)
from rollwire_client._publishing.publish_target import PublishTimeouts, Recipient
from rollwire_client._publishing.report import PublishReport, ServerReport
from rollwire_client._publishing.transfer import Transfer
from rollwire_client._rpc import conversion
from rollwire_client._rpc.host_address import local_address
from rollwire_client._wording import update_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch
    from rollwire.types import KvPolicy

    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._publishing.change_detector import Changes
    from rollwire_client._publishing.schema import Source

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.25  # between two looks for changes while tensors are sent

# By whether the tensors lie on a GPU. UCX stands in a tenth of NCCL's time, takes no SM from
# decoding, and serves members that share a GPU.
_PREFERRED = {False: ("gloo", "ucx", "nccl"), True: ("ucx", "nccl", "gloo")}


class Publish:
    """One update of some members of a fleet: announce → transfer → commit, or discard.

    With ``expected_digest`` it is committed only if the content turns out to be that; and in any
    case only if ``changes`` has noticed none, and ``confirm``, which asks others, does not raise.

    Attributes:
        version: The trainer's step.
        update_id: Names it on the servers.
        total_bytes: What each server gets.
        sent_bytes: What all of them have.
        announced: Set when every server is ready, or out.
        released: Set when every server has everything, or is out.

    Raises:
        SchemaMismatchError: The tensors cannot be laid out.
    """

    def __init__(
        self,
        pool: ServerPool,
        members: Sequence[ServerHandle],
        publisher: weights_pb2.Publisher,
        version: int | None,
        specs: Sequence[transport.TensorSpec],
        source: Source,
        *,
        changes: Changes,
        confirm: Callable[[], Awaitable[None]] | None,
        device: torch.device | None,
        partial: bool,
        allow_version_rollback: bool,
        bucket_bytes: int | None,
        backend: str | None,
        host: str | None,
        kv_policy: KvPolicy,
        timeouts: PublishTimeouts,
        expected_digest: int | None = None,
    ) -> None:
        self.version = version
        self.update_id = uuid.uuid4().hex
        self.sent_bytes = 0
        self.announced = asyncio.Event()
        self.released = asyncio.Event()
        self._pool = pool
        self._source = source
        self._changes = changes
        self._confirm = confirm
        self._checked_at = 0.0
        self._device = device
        self._backend = backend
        self._host = host
        self._kv_policy = kv_policy
        self._timeouts = timeouts
        self._expected_digest = expected_digest
        try:
            self._manifest = transport.plan(specs, bucket_bytes=bucket_bytes, partial=partial)
        except transport.ManifestError as error:
            raise SchemaMismatchError(f"the tensors cannot be sent: {error}") from error
        self.total_bytes = sum(bucket.size for bucket in self._manifest.buckets)
        self._request = weights_pb2.UpdateWeightsRequest(
            publisher=publisher,
            update_id=self.update_id,
            version=self.version,
            allow_version_rollback=allow_version_rollback,
            manifest=conversion.manifest(self._manifest),
            stage_lease=duration_to_proto(timeouts.stage_lease),
        )
        self._recipients = [
            Recipient(member.client, publisher, self.update_id, timeouts) for member in members
        ]
        self._committed: dict[Recipient, weights_pb2.CommitWeightsResponse] = {}

    async def run(self) -> PublishReport:
        """Publishes; servers that have not committed when this ends have discarded the update.

        Raises:
            PublishFailedError: No server committed.
            PublishError: It cannot go on.
        """
        began = asyncio.get_running_loop().time()
        following = [
            asyncio.create_task(r.follow(self._request, self._pool.policy))
            for r in self._recipients
        ]
        try:
            with self._changes:
                await self._announce()
                digest = await self._transfer()
            await self._commit(digest)
            seconds = asyncio.get_running_loop().time() - began
        finally:
            await run_to_end(self._end(following))
        for recipient in self._recipients:
            if recipient.error is not None:
                logger.warning(
                    "%s is not on every server: %s", update_text(self.version), recipient.error
                )
        return PublishReport(
            version=self.version,
            update_id=self.update_id,
            digest=digest,
            bytes=self.total_bytes,
            seconds=seconds,
            servers=tuple(self._report(recipient) for recipient in self._recipients),
        )

    async def _announce(self) -> None:
        await asyncio.gather(
            *(r.wait(lambda r: r.phase is not UpdatePhase.ANNOUNCED) for r in self._recipients)
        )
        for recipient in self._recipients:
            if isinstance(recipient.error, StalePublisherError):
                raise recipient.error
        await self._require("no server takes the update")
        self.announced.set()

    async def _transfer(self) -> int:
        """Moves the tensors; returns the digest of what was sent."""
        transfer = Transfer(
            self._manifest,
            self._source,
            device=self._device,
            backends=[self._backend] if self._backend else self._common_backends(),
            host=self._host or await self._find_host(),
            timeouts=self._timeouts,
            progress=self._progressed,
        )
        try:
            await transfer.run(self._recipients)
        except BaseException:
            await transfer.close()
            raise
        try:
            self._pool.create_task(transfer.close())  # the servers need not wait for that
        except ClosedError:
            await transfer.close()
            raise
        await self._require("no server has received it")
        for recipient in self._recipients:
            if recipient.staged and recipient.digest != transfer.digest:
                recipient.fail(_other_digest(recipient, transfer.digest))
        await self._require("no server has received what was sent")
        if self._confirm is not None:
            await self._confirm()
        self._changes.check()
        if self._expected_digest not in {None, transfer.digest}:
            raise DigestMismatchError(
                f"the tensors are not those of {update_text(self.version)}: their digest is "
                f"{transfer.digest:016x}, the fleet serves {self._expected_digest:016x}; give the "
                "tensors of that version, or publish a new one; nothing was committed"
            )
        self.released.set()
        return transfer.digest

    async def _commit(self, digest: int) -> None:
        async def commit(recipient: Recipient) -> None:
            answer = await recipient.commit(digest, self._kv_policy)
            if answer is not None:
                self._committed[recipient] = answer
                self._pool.committed(recipient.address, weight_tag_from_proto(answer.weights))

        with self._pool.policy.committing(
            self.version,
            None if self._manifest.partial else digest,  # else what it does not name is unknown
            rollback=self._request.allow_version_rollback,
        ):
            await asyncio.gather(*(commit(r) for r in self._recipients if r.staged))
        await self._require("no server has committed it")

    async def _require(self, problem: str) -> None:
        """Raises if every server is out."""
        if any(recipient.error is None for recipient in self._recipients):
            return
        served = await asyncio.gather(*(r.serves() for r in self._recipients))
        told = [f"{r.error} [{now}]" for r, now in zip(self._recipients, served, strict=True)]
        raise PublishFailedError(
            f"{update_text(self.version)} was not published, {problem}: {'; '.join(told)}",
            {r.address: r.error for r in self._recipients if r.error is not None},
        )

    async def _end(self, following: Sequence[asyncio.Task[None]]) -> None:
        """Makes servers drop what they did not commit; one that is gone does so by itself."""
        await cancel_all(following)
        await asyncio.gather(
            *(
                recipient.discard()
                for recipient in self._recipients
                if recipient not in self._committed
                and recipient.phase is not UpdatePhase.ANNOUNCED
                and not isinstance(recipient.error, ServerUnreachableError)
            )
        )

    def _common_backends(self) -> list[str]:
        """Those that all can use, the best for where the tensors lie first."""
        on_gpu = self._device is not None and self._device.type == "cuda"
        available = transport.available_backends()
        usable = [name for name in _PREFERRED[on_gpu] if available[name].ok]
        servers = [r for r in self._recipients if r.error is None]
        if common := [name for name in usable if all(name in r.transports for r in servers)]:
            return common
        told = "; ".join(f"{r.address}: {', '.join(r.transports) or 'none'}" for r in servers)
        raise PublishError(
            f"no transport that all can use: here {', '.join(usable) or 'none'}; {told}"
        )

    async def _find_host(self) -> str:
        addresses = [r.address for r in self._recipients if r.error is None]
        try:
            return await asyncio.to_thread(local_address, addresses)
        except OSError as error:
            raise PublishError(
                f"no address of this machine by which servers reach it: {error}; name one as `host`"
            ) from error

    def _progressed(self, sent_bytes: int) -> None:
        """In the sender's thread. What has changed by now need not be sent to its end."""
        self.sent_bytes = sent_bytes
        if (now := time.monotonic()) - self._checked_at > _CHECK_SECONDS:
            self._checked_at = now
            self._changes.check()

    def _report(self, recipient: Recipient) -> ServerReport:
        answer = self._committed.get(recipient, weights_pb2.CommitWeightsResponse())
        return ServerReport(
            address=recipient.address,
            weights=weight_tag_from_proto(answer.weights) if recipient in self._committed else None,
            error=recipient.error,
            received_bytes=recipient.received_bytes,
            staging_seconds=recipient.seconds,
            apply_seconds=answer.timing.apply_ns / 1e9,
            paused_seconds=answer.timing.paused_ns / 1e9,
            held_sequences=answer.timing.held_sequences,
            kv_tokens_to_recompute=answer.timing.kv_tokens_to_recompute,
            already_current=answer.already_current,
        )


def _other_digest(recipient: Recipient, sent: int) -> DigestMismatchError:
    return DigestMismatchError(
        f"{recipient.address}: received an update of digest {recipient.digest:016x}, sent was "
        f"{sent:016x}",
        server=recipient.address,
    )
