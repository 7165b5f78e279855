"""TRL's trainers sample from rollwire's servers (``pip install 'rollwire[trl]'``).

    trainer = GRPOTrainer(model=…, reward_funcs=…, args=GRPOConfig(…), train_dataset=…)
    with RollwireGeneration(trainer, SyncFleet(["10.0.0.1:7000", "10.0.0.2:7000"])):
        trainer.train()

Raises MissingDependencyError when it is imported without a release of TRL that it is tested with.
"""

from rollwire_client.integrations._versions import check_installed

SUPPORTED = ">=1.16,<1.17"
check_installed("trl", SUPPORTED)

from rollwire_client.integrations.trl._async_grpo import AsyncRollouts  # noqa: E402
from rollwire_client.integrations.trl._generation import RollwireGeneration  # noqa: E402

__all__ = ["SUPPORTED", "AsyncRollouts", "RollwireGeneration"]
