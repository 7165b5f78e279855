"""Sleep and WakeUp: a server frees its device memory for a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from rollwire.reasons import Reason
from rollwire.types import ServerState, SleepingWeights

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, bad_request, from_engine_error, result_of, spawn
from rollwire_server.state import Rpc, StateChange, StateMachine

if TYPE_CHECKING:
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.weights.manager import UpdateManager

log = structlog.get_logger()


@dataclass(eq=False)
class SleepController:
    """What has begun is completed, also when its caller goes away."""

    _engine: Engine
    _state: StateMachine
    _sequences: Sequences
    _updates: UpdateManager
    _tasks: asyncio.TaskGroup
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sleeping_weights: SleepingWeights = SleepingWeights.KEEP

    @property
    def sleeping_weights(self) -> SleepingWeights | None:
        """What became of the weights; None while the server is not asleep."""
        asleep = self._state.current is ServerState.SLEEPING
        return self._sleeping_weights if asleep else None

    async def sleep(self, weights: SleepingWeights) -> int:
        """Interrupts all sequences, then frees the KV cache and the weights as asked; returns the
        bytes freed. When the engine fails to sleep, the server continues to serve.
        """
        return await result_of(spawn(self._tasks, self._sleep(weights), "sleep"))

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """Allocates the memory again. If the weights were discarded, the server then awaits an
        update, or reloads the checkpoint that it started with.
        """
        work = self._wake(reload_checkpoint=reload_checkpoint)
        await result_of(spawn(self._tasks, work, "wake up"))

    async def _sleep(self, weights: SleepingWeights) -> int:
        async with self._lock:
            self._state.check(Rpc.SLEEP)
            self._check_supported(weights)
            await self._updates.discard_current(Reason.SLEEPING, "the server goes to sleep")
            self._state.check(Rpc.SLEEP)
            self._sleeping_weights = weights
            self._state.apply(StateChange.SLEPT)
            try:
                await self._sequences.interrupt_all("the server goes to sleep")
                freed = await self._engine.sleep(weights)
            except EngineError as error:
                log.error("the server cannot fall asleep", why=str(error))  # noqa: TRY400  no bug
                self._state.apply(StateChange.SLEEP_FAILED)
                state = f"nothing was freed, and the server is {self._state.current.value}"
                raise from_engine_error(error, state) from error
            return freed

    def _check_supported(self, weights: SleepingWeights) -> None:
        advice = self._engine.describe().unsupported_sleep.get(weights)
        if advice is not None:
            raise ServiceError(
                Reason.UNSUPPORTED_SLEEP,
                f"this server does not support sleep with weights {weights.name}: {advice}; it is "
                f"still {self._state.current.value}",
            )

    async def _wake(self, *, reload_checkpoint: bool) -> None:
        async with self._lock:
            self._state.check(Rpc.WAKE_UP)
            if self._state.current is not ServerState.SLEEPING:
                return
            discarded = self._sleeping_weights is SleepingWeights.DISCARD
            if reload_checkpoint and not discarded:
                raise bad_request(
                    "reload_checkpoint",
                    "reload_checkpoint is for weights that were discarded, and these were kept",
                )
            try:
                await self._engine.wake(reload_checkpoint=reload_checkpoint)
                if reload_checkpoint:
                    await self._updates.weights.reloaded()
            except EngineError as error:
                log.error("the server cannot wake up", why=str(error))  # noqa: TRY400  no bug
                state = "the server still sleeps: call WakeUp again, or use another server"
                raise from_engine_error(error, state) from error
            empty = discarded and not reload_checkpoint
            self._state.apply(StateChange.WOKE_EMPTY if empty else StateChange.WOKE)
