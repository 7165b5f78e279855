"""verl's checkpoint engine: the actor's ranks publish to rollwire's servers."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
import torch
from verl.checkpoint_engine.base import CheckpointEngine

from rollwire_client._errors import PublishError
from rollwire_client._publishing.sharded.ranks import Ranks
from rollwire_client.integrations.verl._options import FleetOptions, PublishOptions
from rollwire_client.integrations.verl._weights import RereadableWeights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from torch import Tensor

    from rollwire_client._data import PublishReport
    from rollwire_client._publishing.publisher import Publisher

logger = logging.getLogger(__name__)

_OPTIONS = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollwire"
# What rank 0 keeps of the weights, in device memory: some more buckets than are under way, of the
# largest size that ``Publisher`` chooses by itself.
_BUCKETS_KEPT, _BUCKET_BYTES = 4, 256 << 20


class RollwireCheckpointEngine(CheckpointEngine):
    """One rank of verl's actor, which publishes together with the others.

    Rank 0 sends; the other ranks gather in step with it. The first publish may lower the servers'
    version, as a trainer may have resumed from an older checkpoint; later ones must raise it.

    Args:
        bucket_size: Ignored; ``bucket_bytes`` says the size of a bucket.
        is_master: Ignored; rank 0 sends.
        **options: See ``FleetOptions`` and ``PublishOptions``.

    Raises:
        ValueError: An option is missing, does not exist, or has an invalid value.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:  # noqa: FBT001, FBT002, ARG002 - verl's
        self._publishing, others = PublishOptions.split(options)
        self._servers = FleetOptions.of(others, _OPTIONS)
        self._ranks: Ranks | None = None
        self._publisher: Publisher | None = None  # on rank 0
        self._last: PublishReport | None = None
        self._unchanged = 0  # publishes in a row

    def prepare(self) -> None:
        """Nothing: servers allocate memory for an update when it is announced."""

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],  # noqa: ARG003
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nothing: each publish forms its own group, with the servers."""
        return {"rank": [*range(actor_wg_world_size)]}, {"rank": [-1] * rollout_world_size}

    def init_process_group(self, rank: int) -> None:
        """Connects the actor's ranks, the first time; all of them call it."""
        world = torch.distributed.group.WORLD
        if world is None:
            raise PublishError(f"rank {rank} of the actor has no process group to connect over")
        if self._ranks is None:
            self._ranks = Ranks(world)

    def finalize(self) -> None:
        """Nothing: the fleet and the transport group stay for the next publish."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes ``weights`` as version ``global_steps``; all ranks call it.

        Returns:
            Metrics, on rank 0.

        Raises:
            PublishError: See ``Ranks.publish`` and ``PublishOptions``.
        """
        if self._ranks is None:
            raise PublishError("the ranks are not connected: call init_process_group before")
        publisher = await self._open() if self._ranks.rank == 0 else None
        source = await self._source(weights, publisher)
        try:
            handle = await self._ranks.publish(
                publisher, global_steps, source, allow_version_rollback=self._last is None
            )
        finally:
            await asyncio.to_thread(source.close)
        if handle is None:
            return {}
        report = await handle.committed
        before, self._last = self._last, report
        report.require(self._publishing.require)
        if before is not None and report.version != before.version:
            self._check_changed(before, report)
        return _metrics(report)

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Refused: rollwire's servers receive weights themselves."""
        raise PublishError(
            "the checkpoint engine `rollwire` publishes to rollwire's servers only: set "
            "actor_rollout_ref.rollout.name=rollwire, or another checkpoint engine"
        )
        yield

    async def _open(self) -> Publisher:
        if self._publisher is None:
            fleet = await self._servers.fleet().__aenter__()  # open until the process ends
            self._publisher = self._publishing.publisher(fleet)
        return self._publisher

    async def _source(
        self, weights: Iterable[tuple[str, Tensor]], publisher: Publisher | None
    ) -> RereadableWeights:
        if publisher is None:
            return RereadableWeights(weights, None, 0)
        sizes = {spec.name: transport.packed_nbytes([spec]) for spec in await publisher.schema()}
        keep = _BUCKETS_KEPT * max(self._publishing.bucket_bytes or 0, _BUCKET_BYTES)
        return RereadableWeights(weights, sizes, keep)

    def _check_changed(self, before: PublishReport, now: PublishReport) -> None:
        """Without a gradient a step changes nothing, but verl's not publishing what it trains looks
        the same; it lasts longer.
        """
        self._unchanged = self._unchanged + 1 if now.digest == before.digest else 0
        limit = self._publishing.max_unchanged
        if self._unchanged and (limit is None or self._unchanged <= limit):
            logger.warning(
                "version %s has the same weights as version %s", now.version, before.version
            )
        elif self._unchanged:
            raise PublishError(
                f"the last {self._unchanged + 1} versions, up to {now.version}, have the same "
                "weights: what verl gives to publish is not what it trains. The servers have "
                "committed them. With LoRA, set actor_rollout_ref.model.lora.merge=True. If so "
                "many steps may leave the weights as they are, as with a learning rate of 0, raise "
                f"{_OPTIONS}.max_unchanged"
            )


def _metrics(report: PublishReport) -> dict[str, float]:
    return {
        "rollwire/publish_seconds": report.seconds,
        "rollwire/paused_seconds": max(server.paused_seconds for server in report.servers),
        "rollwire/published_bytes": float(report.bytes),
        "rollwire/servers_updated": float(len(report.servers) - len(report.failed)),
        "rollwire/servers_failed": float(len(report.failed)),
    }
