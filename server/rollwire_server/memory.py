"""Sleep and WakeUp: a server that gives its device memory back for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollwire_server.engines.base import EngineError, SleepingWeights
from rollwire_server.errors import Reason, ServiceError
from rollwire_server.lifecycle import Event, Lifecycle, Rpc, State
from rollwire_server.outcomes import outcome, result

if TYPE_CHECKING:
    from rollwire_server.engines.base import Engine
    from rollwire_server.rollouts import Rollouts
    from rollwire_server.updates import Updates


class Memory:
    """Puts one server to sleep and wakes it up; goes through once begun, whoever waits for it."""

    def __init__(
        self,
        engine: Engine,
        lifecycle: Lifecycle,
        rollouts: Rollouts,
        updates: Updates,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._rollouts = rollouts
        self._updates = updates
        self._tasks = tasks
        self._one_at_a_time = asyncio.Lock()
        self._asleep = SleepingWeights.KEEP

    async def sleep(self, weights: SleepingWeights) -> int:
        """Ends what is live, frees the KV cache and the weights as asked; returns bytes freed."""
        return await result(self._tasks.create_task(outcome(self._sleep(weights))))

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """Takes the memory back; no-op when awake.

        Weights that were discarded are gone: the server then awaits an update, or reloads the
        checkpoint that it started with.
        """
        await result(self._tasks.create_task(outcome(self._wake(reload_checkpoint))))

    async def _sleep(self, weights: SleepingWeights) -> int:
        async with self._one_at_a_time:
            self._lifecycle.check(Rpc.SLEEP)
            await self._updates.drop(Reason.SLEEPING, "the server goes to sleep")
            self._lifecycle.check(Rpc.SLEEP)
            self._lifecycle.happened(Event.SLEPT)
            self._asleep = weights
            await self._rollouts.interrupt_all("the server goes to sleep")
            return await self._engine.sleep(weights)

    async def _wake(self, reload_checkpoint: bool) -> None:  # noqa: FBT001
        async with self._one_at_a_time:
            self._lifecycle.check(Rpc.WAKE_UP)
            if self._lifecycle.state is not State.SLEEPING:
                return
            discarded = self._asleep is SleepingWeights.DISCARD
            if reload_checkpoint and not discarded:
                raise ServiceError(
                    Reason.BAD_REQUEST,
                    "reload_checkpoint is for weights that were discarded, and these are kept",
                    field="reload_checkpoint",
                )
            try:
                await self._engine.wake(reload_checkpoint=reload_checkpoint)
            except EngineError as error:
                raise ServiceError(Reason.STAGING_FAILED, str(error)) from error
            if reload_checkpoint:
                await self._updates.served.reloaded()
            empty = discarded and not reload_checkpoint
            self._lifecycle.happened(Event.WOKE_EMPTY if empty else Event.WOKE)
