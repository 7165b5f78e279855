"""One publish: announce → transfer → check → commit → report, or discard."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.conversion import duration_to_proto, weight_tag_from_proto
from rollwire.reasons import Reason
from rollwire.types import UpdatePhase
from rollwire.v1 import weights_pb2

from rollwire_client._arguments import update_text
from rollwire_client._concurrency import cancel_all, run_to_end
from rollwire_client._data import DtypeCast, PublishReport, ServerReport
from rollwire_client._errors import (
    DigestMismatchError,
    PublishError,
    PublishFailedError,
    ServerUnreachableError,
    StalePublisherError,
)
from rollwire_client._publishing.payload import Payload
from rollwire_client._publishing.publish_target import Changes, PublishTarget
from rollwire_client._publishing.transfer import WeightTransfer
from rollwire_client._rpc.channel import local_address
from rollwire_client._rpc.conversion import manifest_to_proto

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rollwire_client._data import PublishTimeouts
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._publishing.policy_copy import CopiedPolicy, PolicyCopy
    from rollwire_client._publishing.sharded.coordination import Coordinator
    from rollwire_client._publishing.tensors import ChangeDetector, TensorSource
    from rollwire_client._publishing.tied import TiedTensors

logger = logging.getLogger(__name__)

_REFUSALS_OF_DELTAS = {
    Reason.BASE_MISMATCH.name,
    Reason.UNSUPPORTED_ENCODING.name,
    # A delta may need memory where a full update needs none, and is read before it is staged.
    Reason.STAGING_FAILED.name,
    Reason.MANIFEST_MISMATCH.name,
}
_CHECK_SECONDS = 0.25  # between two checks for changes while tensors are sent
_RENEWED_AFTER = 1 / 3  # of a lease


@dataclass(eq=False)
class PublishProgress:
    """How far a publish is. Its handle has this, and nothing that holds memory."""

    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    total_bytes: int = 0
    sent_bytes: int = 0
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, kw_only=True)
class Publish:
    """Publishes one update to some servers of a fleet."""

    pool: ServerPool
    servers: Sequence[ServerHandle]
    publisher: weights_pb2.Publisher
    backend: str | None
    host: str | None
    max_kv_lag: int | None  # None keeps all keys and values, 0 keeps none
    timeouts: PublishTimeouts
    version: int | None
    manifest: transport.Manifest
    device: torch.device | None  # where they lie; None is the CPU
    allow_version_rollback: bool
    cast: bool  # floating-point tensors, to the dtypes of the manifest
    copy: PolicyCopy | None  # None: all is sent out of the trainer's tensors
    expected_digest: int | None  # other content is not committed
    detector: ChangeDetector  # a change before the release ends the publish
    tied: TiedTensors  # which the thread that reads the source learns of
    coordinator: Coordinator | None  # of other ranks, whose tensors must not change either

    def __post_init__(self) -> None:
        self.progress = PublishProgress()
        self._checked_at = 0.0
        self._casts: tuple[DtypeCast, ...] = ()
        self._changed_share: float | None = None
        self._changes = Changes()
        self._targets: dict[str, PublishTarget] = {}  # by address
        self._staging: list[asyncio.Task[None]] = []
        self._transferred: list[Payload] = []

    async def run(self, source: TensorSource) -> PublishReport:
        """Publishes what ``source`` gives, aliases left out. Servers that have not committed when
        this ends have discarded the update.
        """
        began = asyncio.get_running_loop().time()
        try:
            copied = await self._copy_policy(source)
            if copied is None:
                digest = await self._send_directly(source)
            else:
                digest = await self._send_copy(copied)
            await self._commit(digest)
            seconds = asyncio.get_running_loop().time() - began
        finally:
            await run_to_end(self._discard_uncommitted())
        if self.copy is not None and copied is not None:
            self.copy.committed(self.pool.policy.current)
        return self._report(digest, seconds, copied)

    async def _copy_policy(self, source: TensorSource) -> CopiedPolicy | None:
        """Reads the source into the publisher's copy, if there is to be one."""
        if self.copy is None or not any(s.info and s.info.accepts_deltas for s in self.servers):
            return None
        with self.detector:
            copied = await self.copy.take(self.manifest, source, device=self.device, cast=self.cast)
            if copied is not None:
                self._changed_share = copied.changed_share
                await self._check_source(copied.digests, copied.casts)
        return copied

    async def _send_directly(self, source: TensorSource) -> int:
        """Sends what the source gives while it is read; returns the digest of that."""
        payload = Payload(self.manifest, source, cast=self.cast, is_copy=False)
        with self.detector:
            self._announce(payload, self.servers)
            await self._wait_until_announced()
            await self._require_a_server("no server takes the update")
            self.progress.announced.set()
            transfer = await self._transfer(payload)
            await self._require_a_server("no server has received it")
            self._fail_differing(payload, transfer.digest)
            await self._require_a_server("no server has received the update intact")
            await self._check_source(transfer.digests, transfer.casts)
            self.progress.released.set()
        return transfer.digest

    async def _send_copy(self, copied: CopiedPolicy) -> int:
        """Sends the copy, while the trainer may change its tensors; returns its digest."""
        if copied.delta is not None:
            self._announce(copied.delta, copied.takers_of_delta(self.servers))
        others = [server for server in self.servers if server.address not in self._targets]
        self._announce(copied.full, others)
        await self._wait_until_announced()
        await self._send_whole_instead(copied, self._refusing())
        await self._require_a_server("no server takes the update")
        self.progress.announced.set()
        self.progress.released.set()
        if copied.delta is not None and self._takers(copied.delta):
            await self._transfer(copied.delta)
            differing = self._differing(copied.delta, copied.digest)
            await self._send_whole_instead(copied, [*self._refusing(), *differing])
        if self._takers(copied.full):
            await self._transfer(copied.full)
            self._fail_differing(copied.full, copied.digest)
        await self._require_a_server("no server has received the update intact")
        return copied.digest

    def _announce(self, payload: Payload, servers: Sequence[ServerHandle]) -> None:
        if not servers:
            return
        request = weights_pb2.UpdateWeightsRequest(
            publisher=self.publisher,
            update_id=self.progress.update_id,
            version=self.version,
            allow_version_rollback=self.allow_version_rollback,
            manifest=manifest_to_proto(payload.manifest),
            stage_lease=duration_to_proto(self.timeouts.stage_lease),
            changed_share=self._changed_share,
        )
        kept = self.pool.groups.group
        # Only what is sent first can use it again.
        if not self._targets and kept and kept.can_serve(server.address for server in servers):
            request.kept_group.epoch = kept.epoch
            request.kept_group.transfers = kept.link.transfers
        for server in servers:
            target = PublishTarget(
                server.client,
                payload,
                self.publisher,
                self.progress.update_id,
                self.timeouts,
                self._changes,
            )
            self._targets[server.address] = target
            self._staging.append(asyncio.create_task(target.stage(request, self.pool.policy)))
        payloads = {*self._transferred, *(target.payload for target in self._targets.values())}
        self.progress.total_bytes = sum(payload.nbytes for payload in payloads)

    async def _wait_until_announced(self) -> None:
        await self._changes.until(
            lambda: all(
                target.error is not None or target.phase is not UpdatePhase.ANNOUNCED
                for target in self._targets.values()
            )
        )
        for target in self._targets.values():
            if isinstance(target.error, StalePublisherError):
                raise target.error

    async def _send_whole_instead(
        self, copied: CopiedPolicy, targets: Sequence[PublishTarget]
    ) -> None:
        """Announces the whole policy to servers that hold something else than the delta's base."""
        if not targets:
            return
        addresses = [target.address for target in targets]
        logger.info("gets the whole policy, not what changed: %s", ", ".join(addresses))
        await asyncio.gather(*(target.discard() for target in targets if target.error is None))
        self._announce(copied.full, [s for s in self.servers if s.address in addresses])
        await self._wait_until_announced()

    async def _transfer(self, payload: Payload) -> WeightTransfer:
        """Moves a payload to the servers that it was announced to."""
        takers = self._takers(payload)
        sent_before = sum(sent.nbytes for sent in self._transferred)

        def progress(sent_bytes: int) -> None:  # called in the sender's thread
            self.progress.sent_bytes = sent_before + sent_bytes
            if not payload.is_copy:  # a change of the tensors ends the transfer early
                self._check_now_and_then()

        transfer = WeightTransfer(
            payload,
            device=self.device,
            backends=[self.backend] if self.backend else self._common_backends(takers),
            find_host=self._find_host,
            groups=None if self._transferred else self.pool.groups,
            changes=self._changes,
            timeouts=self.timeouts,
            progress=progress,
        )
        renewing = asyncio.create_task(self._renew_leases())
        try:
            await transfer.run(takers)
            self.pool.create_task(transfer.close())  # the servers need not wait for that
        except BaseException:
            await transfer.close()
            raise
        finally:
            await cancel_all([renewing])
        self._transferred.append(payload)
        return transfer

    async def _renew_leases(self) -> None:
        """Servers that have received everything wait for the others, which may take much longer:
        for the whole policy, or after a group failed.
        """
        while True:
            await asyncio.sleep(self.timeouts.stage_lease * _RENEWED_AFTER)
            staged = [target for target in self._targets.values() if target.staged]
            await asyncio.gather(*(target.renew_lease() for target in staged))

    def _takers(self, payload: Payload) -> list[PublishTarget]:
        targets = self._targets.values()
        return [t for t in targets if t.payload is payload and t.error is None]

    def _differing(self, payload: Payload, digest: int) -> list[PublishTarget]:
        """The servers that have something else than what was sent, though all has arrived."""
        return [t for t in self._takers(payload) if t.staged and t.digest != digest]

    def _refusing(self) -> list[PublishTarget]:
        """The servers that cannot take the delta, but may take the whole policy."""
        return [target for target in self._targets.values() if _refuses_delta(target)]

    def _fail_differing(self, payload: Payload, digest: int) -> None:
        for target in self._differing(payload, digest):
            target.fail(
                DigestMismatchError(
                    f"{target.address}: received an update of digest {target.digest:016x}, "
                    f"but {digest:016x} was sent",
                    server=target.address,
                )
            )

    async def _check_source(self, digests: Mapping[str, int], casts: Mapping[str, str]) -> None:
        """Checks what was read: that it is the policy, and has not changed meanwhile."""
        self.tied.check(digests)
        self._casts = _count_casts(self.manifest, casts)
        if self.coordinator is not None:
            await self.coordinator.confirm_unchanged()
        self.detector.check()
        digest = transport.sum_digests(digests.values())
        if self.expected_digest not in {None, digest}:
            raise DigestMismatchError(
                f"the tensors are not those of {update_text(self.version)}: their digest is "
                f"{digest:016x}, the fleet serves {self.expected_digest:016x}; give the tensors of "
                "that version, or publish a new one; nothing was committed"
            )

    async def _commit(self, digest: int) -> None:
        async def commit(target: PublishTarget) -> None:
            await target.commit(digest, self.max_kv_lag)
            if (committed := target.committed) is not None:
                self.pool.committed(target.address, weight_tag_from_proto(committed.weights))

        with self.pool.policy.committing(
            self.version,
            None if self.manifest.partial else digest,  # that of the result is not known then
            rollback=self.allow_version_rollback,
        ):
            staged = [target for target in self._targets.values() if target.staged]
            await asyncio.gather(*(commit(target) for target in staged))
        await self._require_a_server("no server has committed it")

    async def _discard_uncommitted(self) -> None:
        await cancel_all(self._staging)
        await asyncio.gather(
            *(
                target.discard()
                for target in self._targets.values()
                if target.committed is None
                and target.phase is not UpdatePhase.ANNOUNCED
                # One that is gone discards it by its lease.
                and not isinstance(target.error, ServerUnreachableError)
            )
        )

    def _report(self, digest: int, seconds: float, copied: CopiedPolicy | None) -> PublishReport:
        targets = [self._targets[server.address] for server in self.servers]
        for target in targets:
            if target.error is not None:
                logger.warning(
                    "%s is not on every server: %s", update_text(self.version), target.error
                )
        return PublishReport(
            version=self.version,
            update_id=self.progress.update_id,
            digest=digest,
            bytes=self.progress.total_bytes,
            seconds=seconds,
            servers=tuple(_server_report(target) for target in targets),
            casts=self._casts,
            changed_share=self._changed_share,
            find_seconds=0.0 if copied is None else copied.seconds,
        )

    async def _require_a_server(self, problem: str) -> None:
        """Raises PublishFailedError if all servers have failed."""
        targets = self._targets.values()
        if any(target.error is None for target in targets):
            return
        served = await asyncio.gather(*(target.describe_weights() for target in targets))
        details = [f"{t.error} [{now}]" for t, now in zip(targets, served, strict=True)]
        raise PublishFailedError(
            f"{update_text(self.version)} was not published, {problem}: {'; '.join(details)}",
            {t.address: t.error for t in targets if t.error is not None},
        )

    def _common_backends(self, targets: Sequence[PublishTarget]) -> list[str]:
        """The backends that all can use, the best for where the tensors lie first."""
        available = transport.available_backends(device=self.device)
        usable = [name for name, availability in available.items() if availability.ok]
        if common := [name for name in usable if all(name in t.transports for t in targets)]:
            return common
        theirs = "; ".join(f"{t.address}: {', '.join(t.transports) or 'none'}" for t in targets)
        raise PublishError(
            "no backend that this trainer and all servers can use: here "
            f"{', '.join(usable) or 'none'}; {theirs}"
        )

    async def _find_host(self) -> str:
        if self.host:
            return self.host
        addresses = [t.address for t in self._targets.values() if t.error is None]
        try:
            return await asyncio.to_thread(local_address, addresses)
        except OSError as error:
            raise PublishError(
                f"servers cannot reach this machine: {error}; pass an address as `host`"
            ) from error

    def _check_now_and_then(self) -> None:
        if (now := time.monotonic()) - self._checked_at > _CHECK_SECONDS:
            self._checked_at = now
            self.detector.check()


def _refuses_delta(target: PublishTarget) -> bool:
    is_delta = target.payload.encoding is transport.Encoding.DELTA
    return is_delta and target.error is not None and target.error.reason in _REFUSALS_OF_DELTAS


def _count_casts(manifest: transport.Manifest, dtypes: Mapping[str, str]) -> tuple[DtypeCast, ...]:
    counts = Counter(
        (dtypes[spec.name], spec.dtype) for spec in manifest.tensors if spec.name in dtypes
    )
    return tuple(DtypeCast(*dtypes, count) for dtypes, count in counts.items())


def _server_report(target: PublishTarget) -> ServerReport:
    committed = target.committed
    timing = weights_pb2.CommitTiming() if committed is None else committed.timing
    return ServerReport(
        address=target.address,
        weights=None if committed is None else weight_tag_from_proto(committed.weights),
        error=target.error,
        received_bytes=target.received_bytes,
        staging_seconds=target.staging_seconds,
        apply_seconds=timing.apply_ns / 1e9,
        paused_seconds=timing.paused_ns / 1e9,
        held_sequences=timing.held_sequences,
        kv_tokens_to_recompute=timing.kv_tokens_to_recompute,
        already_current=committed is not None and committed.already_current,
        encoding=target.payload.encoding.value,
    )
