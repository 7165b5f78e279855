"""One publish: announce → transfer → check → commit → report, or discard."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.conversion import duration_to_proto, weight_tag_from_proto
from rollwire.types import UpdatePhase
from rollwire.v1 import weights_pb2

from rollwire_client._concurrency import cancel_all, run_to_end
from rollwire_client._errors import (
    ClosedError,
    DigestMismatchError,
    PublishError,
    PublishFailedError,
    SchemaMismatchError,
    ServerUnreachableError,
    StalePublisherError,
)
from rollwire_client._publishing.publish_handle import (
    PublishProgress,
    PublishReport,
    ServerReport,
)
from rollwire_client._publishing.publish_target import PublishTarget
from rollwire_client._publishing.transfer import WeightTransfer
from rollwire_client._rpc import conversion
from rollwire_client._rpc.host_address import local_address
from rollwire_client._wording import update_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._publishing.change_detector import ChangeDetector
    from rollwire_client._publishing.settings import PublishSettings
    from rollwire_client._publishing.sharded.coordinator import Coordinator
    from rollwire_client._publishing.tensor_source import TensorSource

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.25  # between two checks for changes while tensors are sent


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """What is published.

    Attributes:
        version: The trainer's step; None if untagged.
        specs: Of the tensors, aliases included.
        source: Gives the tensors, aliases left out.
        device: Where they lie; None is the CPU.
        partial: Tensors that are not named stay as they are.
        allow_version_rollback: The version may be below that of a server.
        expected_digest: The update is committed only if its content has this digest.
    """

    version: int | None
    specs: Sequence[transport.TensorSpec]
    source: TensorSource
    device: torch.device | None
    partial: bool
    allow_version_rollback: bool
    expected_digest: int | None


class Publish:
    """Publishes one update to some servers of a fleet.

    Args:
        pool: Of the fleet; learns what its servers commit.
        servers: Those that get the update.
        settings: Of the publisher.
        update: What is published.
        detector: Watches the tensors; a change before the release ends the publish.
        coordinator: Of the other ranks of a sharded trainer, whose tensors must not change either.

    Raises:
        SchemaMismatchError: The tensors cannot be laid out.
    """

    def __init__(
        self,
        pool: ServerPool,
        servers: Sequence[ServerHandle],
        settings: PublishSettings,
        update: UpdateSpec,
        *,
        detector: ChangeDetector,
        coordinator: Coordinator | None,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._update = update
        self._detector = detector
        self._coordinator = coordinator
        self._checked_at = 0.0
        try:
            self._manifest = transport.plan(
                update.specs, bucket_bytes=settings.bucket_bytes, partial=update.partial
            )
        except transport.ManifestError as error:
            raise SchemaMismatchError(f"the tensors cannot be sent: {error}") from error
        update_id = uuid.uuid4().hex
        self.progress = PublishProgress(
            update.version, update_id, sum(bucket.size for bucket in self._manifest.buckets)
        )
        self._request = weights_pb2.UpdateWeightsRequest(
            publisher=settings.publisher,
            update_id=update_id,
            version=update.version,
            allow_version_rollback=update.allow_version_rollback,
            manifest=conversion.manifest_to_proto(self._manifest),
            stage_lease=duration_to_proto(settings.timeouts.stage_lease),
        )
        self._targets = [
            PublishTarget(server.client, settings.publisher, update_id, settings.timeouts)
            for server in servers
        ]
        self._commits: dict[PublishTarget, weights_pb2.CommitWeightsResponse] = {}

    async def run(self) -> PublishReport:
        """Publishes; servers that have not committed when this ends have discarded the update.

        Raises:
            PublishFailedError: No server committed.
            PublishError: The publish cannot go on.
        """
        began = asyncio.get_running_loop().time()
        staging = [
            asyncio.create_task(target.stage(self._request, self._pool.policy))
            for target in self._targets
        ]
        try:
            with self._detector:
                await self._wait_until_announced()
                self.progress.announced.set()
                digest = await self._transfer()
                await self._check_content(digest)
                self.progress.released.set()
            await self._commit(digest)
            seconds = asyncio.get_running_loop().time() - began
        finally:
            await run_to_end(self._discard_uncommitted(staging))
        return self._report(digest, seconds)

    async def _wait_until_announced(self) -> None:
        await asyncio.gather(
            *(t.wait(lambda t: t.phase is not UpdatePhase.ANNOUNCED) for t in self._targets)
        )
        for target in self._targets:
            if isinstance(target.error, StalePublisherError):
                raise target.error
        await self._require_a_server("no server takes the update")

    async def _transfer(self) -> int:
        """Moves the tensors; returns the digest of what was sent."""
        settings = self._settings
        transfer = WeightTransfer(
            self._manifest,
            self._update.source,
            device=self._update.device,
            backends=[settings.backend] if settings.backend else self._common_backends(),
            host=settings.host or await self._find_host(),
            timeouts=settings.timeouts,
            progress=self._on_progress,
        )
        try:
            await transfer.run(self._targets)
        except BaseException:
            await transfer.close()
            raise
        try:
            self._pool.create_task(transfer.close())  # the servers need not wait for that
        except ClosedError:
            await transfer.close()
            raise
        await self._require_a_server("no server has received it")
        return transfer.digest

    async def _check_content(self, digest: int) -> None:
        """Checks that every server has what was sent, and that this was the policy."""
        for target in self._targets:
            if target.staged and target.digest != digest:
                target.fail(
                    DigestMismatchError(
                        f"{target.address}: received an update of digest {target.digest:016x}, "
                        f"sent was {digest:016x}",
                        server=target.address,
                    )
                )
        await self._require_a_server("no server has received the update intact")
        if self._coordinator is not None:
            await self._coordinator.confirm_unchanged()
        self._detector.check()
        expected = self._update.expected_digest
        if expected not in {None, digest}:
            raise DigestMismatchError(
                f"the tensors are not those of {update_text(self._update.version)}: their digest "
                f"is {digest:016x}, the fleet serves {expected:016x}; give the tensors of that "
                "version, or publish a new one; nothing was committed"
            )

    async def _commit(self, digest: int) -> None:
        async def commit(target: PublishTarget) -> None:
            response = await target.commit(digest, self._settings.kv_policy)
            if response is not None:
                self._commits[target] = response
                self._pool.committed(target.address, weight_tag_from_proto(response.weights))

        with self._pool.policy.committing(
            self._update.version,
            None if self._update.partial else digest,  # of a partial update's result none is known
            rollback=self._update.allow_version_rollback,
        ):
            await asyncio.gather(*(commit(target) for target in self._targets if target.staged))
        await self._require_a_server("no server has committed it")

    async def _discard_uncommitted(self, staging: Sequence[asyncio.Task[None]]) -> None:
        await cancel_all(staging)
        await asyncio.gather(
            *(
                target.discard()
                for target in self._targets
                if target not in self._commits
                and target.phase is not UpdatePhase.ANNOUNCED
                # One that is gone discards it by its lease.
                and not isinstance(target.error, ServerUnreachableError)
            )
        )

    def _report(self, digest: int, seconds: float) -> PublishReport:
        version = self._update.version
        for target in self._targets:
            if target.error is not None:
                logger.warning("%s is not on every server: %s", update_text(version), target.error)
        return PublishReport(
            version=version,
            update_id=self.progress.update_id,
            digest=digest,
            bytes=self.progress.total_bytes,
            seconds=seconds,
            servers=tuple(self._report_of(target) for target in self._targets),
        )

    def _report_of(self, target: PublishTarget) -> ServerReport:
        response = self._commits.get(target, weights_pb2.CommitWeightsResponse())
        return ServerReport(
            address=target.address,
            weights=weight_tag_from_proto(response.weights) if target in self._commits else None,
            error=target.error,
            received_bytes=target.received_bytes,
            staging_seconds=target.staging_seconds,
            apply_seconds=response.timing.apply_ns / 1e9,
            paused_seconds=response.timing.paused_ns / 1e9,
            held_sequences=response.timing.held_sequences,
            kv_tokens_to_recompute=response.timing.kv_tokens_to_recompute,
            already_current=response.already_current,
        )

    async def _require_a_server(self, problem: str) -> None:
        """Raises PublishFailedError if all servers have failed."""
        if any(target.error is None for target in self._targets):
            return
        served = await asyncio.gather(*(target.describe_weights() for target in self._targets))
        details = [f"{t.error} [{now}]" for t, now in zip(self._targets, served, strict=True)]
        raise PublishFailedError(
            f"{update_text(self._update.version)} was not published, {problem}: "
            f"{'; '.join(details)}",
            {t.address: t.error for t in self._targets if t.error is not None},
        )

    def _common_backends(self) -> list[str]:
        """The backends that all can use, the best for where the tensors lie first."""
        available = transport.available_backends(device=self._update.device)
        usable = [name for name, availability in available.items() if availability.ok]
        targets = [target for target in self._targets if target.error is None]
        if common := [name for name in usable if all(name in t.transports for t in targets)]:
            return common
        theirs = "; ".join(f"{t.address}: {', '.join(t.transports) or 'none'}" for t in targets)
        raise PublishError(
            "no backend that this trainer and all servers can use: here "
            f"{', '.join(usable) or 'none'}; {theirs}"
        )

    async def _find_host(self) -> str:
        addresses = [target.address for target in self._targets if target.error is None]
        try:
            return await asyncio.to_thread(local_address, addresses)
        except OSError as error:
            raise PublishError(
                f"servers cannot reach this machine: {error}; pass an address as `host`"
            ) from error

    def _on_progress(self, sent_bytes: int) -> None:
        """Called in the sender's thread; a change of the tensors ends the transfer early."""
        self.progress.sent_bytes = sent_bytes
        if (now := time.monotonic()) - self._checked_at > _CHECK_SECONDS:
            self._checked_at = now
            self._detector.check()
