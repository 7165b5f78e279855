"""The embedded engine: a thread that runs a model step by step, and its asyncio interface."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rollwire_transport import on_side_stream
from rollwire_transport._concurrency import fast_thread_switching

from rollwire_server.engines.base import EngineError, EngineLoad, NoMemoryError
from rollwire_server.engines.embedded.startup import start_runner
from rollwire_server.engines.memory import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollwire.types import SleepingWeights, WeightTag
    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor

    from rollwire_server.engines.base import (
        CommitStats,
        EngineInfo,
        PreparedDelta,
        SequenceSpec,
        Sink,
        StagedUpdate,
    )
    from rollwire_server.engines.embedded.runner import ModelRunner
    from rollwire_server.engines.embedded.startup import EmbeddedConfig

T = TypeVar("T")


class _NotRunningError(EngineError):
    """The engine does not run, so it samples nothing either."""


class EmbeddedEngine:
    """Samples a Hugging Face causal language model in this process; implements ``Engine``.

    One thread owns the model and steps it while there is something to compute. Commands reach it
    through one queue and run between steps, in order, also while it is held or idle. Everything it
    reports goes to the event loop by ``call_soon_threadsafe``, so in order too.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        self._config = config
        # What to run, and the future of its result if somebody waits for it; None ends the thread.
        self._commands: queue.SimpleQueue[
            tuple[Callable[[ModelRunner], Any], asyncio.Future[Any] | None] | None
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._runner: ModelRunner | None = None
        self._info: EngineInfo | None = None
        self._why_not_running = "the engine has not started"

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        if self._thread is not None:
            raise EngineError("the engine has been started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        started: asyncio.Future[tuple[ModelRunner, EngineInfo]] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._main,
            args=(server_id, started),
            name="rollwire-engine",
            daemon=True,  # a program that forgets to stop its engine can still exit
        )
        self._thread.start()
        self._runner, self._info = await started
        return self._runner.tag

    async def stop(self) -> None:
        if self._thread is None:
            return
        self._commands.put(None)
        await self._ended.wait()
        self._thread.join()

    def describe(self) -> EngineInfo:
        if self._info is None:
            raise EngineError(self._why_not_running)
        return self._info

    def load(self) -> EngineLoad:
        return self._runner.load() if self._runner is not None else EngineLoad(0, 0, 0, 0)

    def submit(self, spec: SequenceSpec) -> None:
        self._running().accept(spec)
        self._commands.put((lambda runner: runner.add(spec), None))

    async def abort(self, keys: Sequence[int]) -> None:
        with contextlib.suppress(_NotRunningError):
            if keys:
                await self._call(lambda runner: runner.scheduler.remove(keys))

    async def hold(self) -> None:
        with contextlib.suppress(_NotRunningError):
            await self._call(lambda runner: runner.hold())

    async def release(self) -> None:
        await self._call(lambda runner: runner.release())

    def schema(self) -> list[TensorSpec]:
        return list(self._running().weights.specs)

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        return await self._call(lambda runner: runner.weights.stage(manifest))

    async def prepare_delta(
        self, manifest: Manifest, staged: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> PreparedDelta:
        weights = self._running().weights
        # Beside the engine's thread, which goes on to sample: weights are only read.
        return await _in_worker_thread(
            weights.device, lambda: weights.prepare_delta(manifest, staged, before)
        )

    async def commit(
        self, staged: StagedUpdate, weights: WeightTag, max_kv_lag: int | None
    ) -> CommitStats:
        return await self._call(lambda runner: runner.commit(staged, weights, max_kv_lag))

    async def digests(self) -> dict[str, int]:
        return await self._call(lambda runner: runner.weights.digests())

    async def sleep(self, weights: SleepingWeights) -> int:
        return await self._call(lambda runner: runner.sleep(weights))

    async def wake(self, *, reload_checkpoint: bool) -> None:
        await self._call(lambda runner: runner.wake(reload_checkpoint=reload_checkpoint))

    def _running(self) -> ModelRunner:
        if self._runner is None:
            raise _NotRunningError(self._why_not_running)
        return self._runner

    async def _call(self, run: Callable[[ModelRunner], T]) -> T:
        """Runs a command on the engine's thread between two steps."""
        self._running()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.put((run, result))
        return await result

    def _on_thread_end(self, started: asyncio.Future[Any], error: BaseException | None) -> None:
        self._runner = None
        if not started.done():
            self._why_not_running = "the engine did not start"
            started.set_exception(error or EngineError(self._why_not_running))
        elif error is None:
            self._why_not_running = "the engine has stopped"
        else:
            self._why_not_running = f"the engine is dead: {type(error).__name__}: {error}"
            self._sink.on_failure(error)
        while not self._commands.empty():
            match self._commands.get_nowait():
                case (_, asyncio.Future() as result):
                    _resolve(result, None, _NotRunningError(self._why_not_running))
        self._ended.set()

    # What follows runs on the engine's thread.

    def _main(
        self, server_id: str, started: asyncio.Future[tuple[ModelRunner, EngineInfo]]
    ) -> None:
        error: BaseException | None = None
        try:
            runner, info = start_runner(self._config, server_id)
            self._post(_resolve, started, (runner, info), None)
            self._serve(runner)
        except BaseException as e:
            error = e
        self._post(self._on_thread_end, started, error)

    def _serve(self, runner: ModelRunner) -> None:
        """Runs commands and steps until told to stop; waits while there is nothing to compute."""
        busy = False
        while True:
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                step = runner.step()
                busy = step is not None
                if step is not None:
                    self._post(self._sink.on_step, step)
            else:
                if command is None:
                    return
                self._execute(*command, runner)
                busy = True  # there may be something to compute now

    def _execute(
        self,
        run: Callable[[ModelRunner], Any],
        result: asyncio.Future[Any] | None,
        runner: ModelRunner,
    ) -> None:
        if result is None:
            run(runner)
            return
        try:
            value = run(runner)
        except torch.OutOfMemoryError as error:
            full = NoMemoryError(f"the device is full: {first_line(error)}")
            self._post(_resolve, result, None, full)
        except torch.AcceleratorError as error:
            failure = EngineError(f"the device fails: {first_line(error)}")
            self._post(_resolve, result, None, failure)
        except Exception as error:
            self._post(_resolve, result, None, error)
        else:
            self._post(_resolve, result, value, None)

    def _post(self, function: Callable[..., object], *args: object) -> None:
        """Has the event loop call a function."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, and nobody left to report to
            self._commands.put(None)


async def _in_worker_thread(device: torch.device, work: Callable[[], T]) -> T:
    """Runs work beside the engine's thread, on a stream of its own."""
    # The worker may hold its work and the result for a moment longer than they are waited for:
    # memory that the next update may need. So both pass through lists.
    works, results = [on_side_stream(device, work)], []

    def run() -> None:
        try:
            with fast_thread_switching():
                results.append(works.pop()())
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise

    await asyncio.to_thread(run)
    return results.pop()


def _resolve(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
