"""verl's trainers sample from rollwire's servers (``pip install 'rollwire[verl]'``).

verl loads this module by its entry point, in every process that imports verl. It makes known the
rollout ``rollwire`` and the checkpoint engine ``rollwire``:

    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.rollout.name=rollwire
    +actor_rollout_ref.rollout.engine_kwargs.rollwire.servers=[10.0.0.1:7000,10.0.0.2:7000]
    actor_rollout_ref.rollout.checkpoint_engine.backend=rollwire
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollwire.servers=[…the same…]

Raises MissingDependencyError when it is imported without a release of verl that it is tested with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollwire_client.integrations._versions import check_installed

SUPPORTED = ">=0.9.1,<0.10"
check_installed("verl", SUPPORTED)

from verl.checkpoint_engine.base import CheckpointEngineRegistry  # noqa: E402
from verl.workers.rollout import base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

from rollwire_client.integrations.verl._checkpoint_engine import (  # noqa: E402
    RollwireCheckpointEngine,
)
from rollwire_client.integrations.verl._replica import RollwireReplica  # noqa: E402

if TYPE_CHECKING:
    from rollwire_client.integrations.verl._client import (
        RollwireAgentLoopManager,
        RollwireServerClient,
    )

__all__ = [
    "SUPPORTED",
    "RollwireAgentLoopManager",
    "RollwireCheckpointEngine",
    "RollwireReplica",
    "RollwireServerClient",
]


def __getattr__(name: str) -> Any:
    # Every process that imports verl imports this, and few of them need verl's agents.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollwire_client.integrations.verl import _client

    return getattr(_client, name)


RolloutReplicaRegistry.register("rollwire", lambda: RollwireReplica)
CheckpointEngineRegistry.register("rollwire")(RollwireCheckpointEngine)
# There is no function for this table.
base._ROLLOUT_REGISTRY["rollwire", "async"] = (  # noqa: SLF001
    "rollwire_client.integrations.verl._replica.HybridRollout"
)
