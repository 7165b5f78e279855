"""Sleep and WakeUp: a server that gives its device memory back for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from rollwire.reasons import Reason
from rollwire.types import ServerState, SleepingWeights

from rollwire_server.background import outcome, result
from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, from_engine_error
from rollwire_server.state import Rpc, StateMachine

if TYPE_CHECKING:
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.weights.updates import Updates

log = structlog.get_logger()


class Memory:
    """Puts one server to sleep and wakes it up; goes through once begun, whoever waits for it."""

    def __init__(
        self,
        engine: Engine,
        state: StateMachine,
        sequences: Sequences,
        updates: Updates,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engine = engine
        self._state = state
        self._sequences = sequences
        self._updates = updates
        self._tasks = tasks
        self._one_at_a_time = asyncio.Lock()
        self._asleep = SleepingWeights.KEEP

    async def sleep(self, weights: SleepingWeights) -> int:
        """Ends what is live, frees the KV cache and the weights as asked; returns bytes freed.

        Where the engine fails at it, the server goes on as before, without what was live.
        """
        return await result(self._tasks.create_task(outcome(self._sleep(weights))))

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """Takes the memory back; no-op when awake.

        Weights that were discarded are gone: the server then awaits an update, or reloads the
        checkpoint that it started with.
        """
        await result(self._tasks.create_task(outcome(self._wake(reload_checkpoint))))

    async def _sleep(self, weights: SleepingWeights) -> int:
        async with self._one_at_a_time:
            self._state.check(Rpc.SLEEP)
            self._check_supported(weights)
            await self._updates.drop(Reason.SLEEPING, "the server goes to sleep")
            self._state.check(Rpc.SLEEP)
            self._state.enter(ServerState.SLEEPING, "sleep")
            try:
                await self._sequences.interrupt_all("the server goes to sleep")
                freed = await self._engine.sleep(weights)
            except EngineError as error:
                log.error("the server cannot fall asleep", why=str(error))  # noqa: TRY400  no bug
                self._state.enter(ServerState.SERVING, "sleep failed")
                state = f"nothing was freed, and the server is {self._state.current.value}"
                raise from_engine_error(error, state) from error
            self._asleep = weights
            return freed

    def _check_supported(self, weights: SleepingWeights) -> None:
        advice = self._engine.describe().unsupported_sleep.get(weights)
        if advice is not None:
            raise ServiceError(
                Reason.UNSUPPORTED_SLEEP,
                f"this server does not sleep with weights {weights.name}: {advice}; it is "
                f"{self._state.current.value} as before",
            )

    async def _wake(self, reload_checkpoint: bool) -> None:  # noqa: FBT001
        async with self._one_at_a_time:
            self._state.check(Rpc.WAKE_UP)
            if self._state.current is not ServerState.SLEEPING:
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
                if reload_checkpoint:
                    await self._updates.served.reloaded()
            except EngineError as error:
                log.error("the server cannot wake up", why=str(error))  # noqa: TRY400  no bug
                state = "the server sleeps on: wake it up again, or use another server"
                raise from_engine_error(error, state) from error
            empty = discarded and not reload_checkpoint
            after = ServerState.AWAITING_WEIGHTS if empty else ServerState.SERVING
            self._state.enter(after, "wake up")
