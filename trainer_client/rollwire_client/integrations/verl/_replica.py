"""verl's rollout replica, whose engine is a fleet of rollwire servers that run somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollwire_client.integrations.verl._actor import RolloutActor
from rollwire_client.integrations.verl._options import FleetOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OPTIONS = "actor_rollout_ref.rollout.engine_kwargs.rollwire"

_NOT_HYBRID = (
    "the rollout `rollwire` has no hybrid (colocated) mode yet, in which the trainer and the "
    "rollouts share GPUs: its servers run on GPUs of their own. Set "
    "actor_rollout_ref.hybrid_engine=False, and use a trainer of verl's with separate rollouts, "
    "such as one_step_off_policy or fully_async_policy"
)


class RollwireReplica(RolloutReplica):
    """A client of all servers of the fleet, in a process without a GPU."""

    async def init_standalone(self) -> None:
        """Starts the client and opens its fleet."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def init_hybrid(self, worker_group: Any) -> NoReturn:
        raise NotImplementedError(_NOT_HYBRID)

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> NoReturn:
        raise NotImplementedError(_NOT_HYBRID)

    async def init_colocated(self, resource_pool: Any) -> NoReturn:
        raise NotImplementedError(_NOT_HYBRID)

    async def launch_servers(self) -> None:
        """Starts the actor that verl's clients call.

        Raises:
            ValueError: The configuration asks for what rollwire cannot do, or names no servers.
        """
        self._check_supported()
        options = FleetOptions.of(self.config.engine_kwargs.get("rollwire") or {}, OPTIONS)
        server = (
            ray.remote(num_cpus=0)(RolloutActor)
            .options(
                name=f"rollwire_server_{self.replica_rank}{self.name_suffix}",
                max_concurrency=self.max_concurrency,
            )
            .remote(options, self.config)
        )
        await server.open.remote()
        self.servers = [server]
        self.workers = [server]  # verl tells the workers of a replica when weights are sent
        self._server_handle = server
        self._server_address = f"rollwire-{self.replica_rank}"

    def _check_supported(self) -> None:
        if self.is_reward_model or self.is_teacher_model:
            raise NotImplementedError(
                "the rollout `rollwire` samples for the actor only: reward models and teachers "
                "need a rollout of verl's own"
            )
        backend = self.config.checkpoint_engine.backend
        if backend != "rollwire":
            raise ValueError(
                f"the checkpoint engine is {backend!r}, which cannot reach rollwire's servers: set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=rollwire"
            )
        if self.config.enable_rollout_routing_replay:
            raise NotImplementedError(
                "the rollout `rollwire` does not give routed experts to verl yet: set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            )


class HybridRollout(BaseRollout):
    """What verl looks up for the hybrid mode only: it refuses that by name."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(_NOT_HYBRID)

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: AsyncIterator[Any], **_: Any) -> None: ...
