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
    from rollwire_client._publishing.sharded.coordination import Coordinator
    from rollwire_client._publishing.tensors import ChangeDetector, TensorSource
    from rollwire_client._publishing.tied import TiedTensors

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.25  # between two checks for changes while tensors are sent


@dataclass(eq=False)
class PublishProgress:
    """How far a publish is. Its handle has this, and nothing that holds memory."""

    total_bytes: int
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
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
    expected_digest: int | None  # other content is not committed
    detector: ChangeDetector  # a change before the release ends the publish
    tied: TiedTensors  # which the sender's thread learns of
    coordinator: Coordinator | None  # of other ranks, whose tensors must not change either

    def __post_init__(self) -> None:
        self.progress = PublishProgress(sum(bucket.size for bucket in self.manifest.buckets))
        self._checked_at = 0.0
        self._casts: tuple[DtypeCast, ...] = ()
        self._changes = Changes()
        self._targets = [
            PublishTarget(
                server.client,
                self.publisher,
                self.progress.update_id,
                self.timeouts,
                self._changes,
            )
            for server in self.servers
        ]

    async def run(self, source: TensorSource) -> PublishReport:
        """Publishes what ``source`` gives, aliases left out. Servers that have not committed when
        this ends have discarded the update.
        """
        began = asyncio.get_running_loop().time()
        request = weights_pb2.UpdateWeightsRequest(
            publisher=self.publisher,
            update_id=self.progress.update_id,
            version=self.version,
            allow_version_rollback=self.allow_version_rollback,
            manifest=manifest_to_proto(self.manifest),
            stage_lease=duration_to_proto(self.timeouts.stage_lease),
        )
        if (kept := self.pool.groups.group) is not None:
            request.kept_group.epoch = kept.epoch
            request.kept_group.transfers = kept.link.transfers
        staging = [
            asyncio.create_task(target.stage(request, self.pool.policy)) for target in self._targets
        ]
        try:
            with self.detector:
                await self._wait_until_announced()
                self.progress.announced.set()
                digest = await self._transfer(source)
                await self._check_content(digest)
                self.progress.released.set()
            await self._commit(digest)
            seconds = asyncio.get_running_loop().time() - began
        finally:
            await run_to_end(self._discard_uncommitted(staging))
        return self._report(digest, seconds)

    async def _wait_until_announced(self) -> None:
        await self._changes.until(
            lambda: all(
                target.error is not None or target.phase is not UpdatePhase.ANNOUNCED
                for target in self._targets
            )
        )
        for target in self._targets:
            if isinstance(target.error, StalePublisherError):
                raise target.error
        await self._require_a_server("no server takes the update")

    async def _transfer(self, source: TensorSource) -> int:
        """Moves the tensors; returns the digest of what was sent."""
        transfer = WeightTransfer(
            self.manifest,
            source,
            cast=self.cast,
            device=self.device,
            backends=[self.backend] if self.backend else self._common_backends(),
            find_host=self._find_host,
            groups=self.pool.groups,
            changes=self._changes,
            timeouts=self.timeouts,
            progress=self._on_progress,
        )
        try:
            await transfer.run(self._targets)
            self.pool.create_task(transfer.close())  # the servers need not wait for that
        except BaseException:
            await transfer.close()
            raise
        await self._require_a_server("no server has received it")
        self.tied.check(transfer.digests)
        self._casts = _count_casts(self.manifest, transfer.casts)
        return transfer.digest

    async def _check_content(self, digest: int) -> None:
        """Checks that every server has what was sent, and that this was the policy."""
        for target in self._targets:
            if target.staged and target.digest != digest:
                target.fail(
                    DigestMismatchError(
                        f"{target.address}: received an update of digest {target.digest:016x}, "
                        f"but {digest:016x} was sent",
                        server=target.address,
                    )
                )
        await self._require_a_server("no server has received the update intact")
        if self.coordinator is not None:
            await self.coordinator.confirm_unchanged()
        self.detector.check()
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
            await asyncio.gather(*(commit(target) for target in self._targets if target.staged))
        await self._require_a_server("no server has committed it")

    async def _discard_uncommitted(self, staging: Sequence[asyncio.Task[None]]) -> None:
        await cancel_all(staging)
        await asyncio.gather(
            *(
                target.discard()
                for target in self._targets
                if target.committed is None
                and target.phase is not UpdatePhase.ANNOUNCED
                # One that is gone discards it by its lease.
                and not isinstance(target.error, ServerUnreachableError)
            )
        )

    def _report(self, digest: int, seconds: float) -> PublishReport:
        for target in self._targets:
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
            servers=tuple(_server_report(target) for target in self._targets),
            casts=self._casts,
        )

    async def _require_a_server(self, problem: str) -> None:
        """Raises PublishFailedError if all servers have failed."""
        if any(target.error is None for target in self._targets):
            return
        served = await asyncio.gather(*(target.describe_weights() for target in self._targets))
        details = [f"{t.error} [{now}]" for t, now in zip(self._targets, served, strict=True)]
        raise PublishFailedError(
            f"{update_text(self.version)} was not published, {problem}: {'; '.join(details)}",
            {t.address: t.error for t in self._targets if t.error is not None},
        )

    def _common_backends(self) -> list[str]:
        """The backends that all can use, the best for where the tensors lie first."""
        available = transport.available_backends(device=self.device)
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
        if self.host:
            return self.host
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
            self.detector.check()


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
    )
