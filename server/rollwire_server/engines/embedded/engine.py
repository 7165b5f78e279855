"""The embedded engine: a thread that steps a runner, and the asyncio side that commands it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rollwire_server.engines.base import EngineError, Load, NoMemoryError
from rollwire_server.engines.embedded.checkpoint import first_line
from rollwire_server.engines.embedded.startup import start_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollwire.types import KvPolicy, SleepingWeights, WeightTag
    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor

    from rollwire_server.engines.base import Applied, EngineInfo, SequenceSpec, Sink, StagedUpdate
    from rollwire_server.engines.embedded.config import EmbeddedConfig
    from rollwire_server.engines.embedded.runner import Runner

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between two steps, and who waits for it."""

    do: Callable[[Runner], Any]
    result: asyncio.Future[Any] | None


class EmbeddedEngine:
    """Samples a Hugging Face causal language model in this process; implements ``Engine``.

    One thread owns the model and steps it while there is something to compute. Commands reach it
    through one queue and are taken between steps, in order, also while it is held or idle. All that
    it has to tell goes to the event loop by ``call_soon_threadsafe``, so in order too.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._runner: Runner | None = None
        self._info: EngineInfo | None = None
        self._gone = "the engine has not started"

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        """See ``Engine``."""
        if self._thread is not None:
            raise EngineError("the engine has been started before; make a new one")
        loop = asyncio.get_running_loop()
        started: asyncio.Future[tuple[Runner, EngineInfo]] = loop.create_future()
        self._thread = threading.Thread(
            target=self._main,
            args=(loop, sink, server_id, started),
            name="rollwire-engine",
            daemon=True,  # a program that forgets to stop its engine can still exit
        )
        self._thread.start()
        self._runner, self._info = await started
        return self._runner.tag

    async def stop(self) -> None:
        """See ``Engine``."""
        if self._thread is None:
            return
        self._commands.put(None)
        await self._ended.wait()
        self._thread.join()

    def describe(self) -> EngineInfo:
        """See ``Engine``."""
        if self._info is None:
            raise EngineError(self._gone)
        return self._info

    def load(self) -> Load:
        """See ``Engine``."""
        return self._runner.load() if self._runner is not None else Load(0, 0, 0, 0)

    def submit(self, spec: SequenceSpec) -> None:
        """See ``Engine``."""
        runner = self._living()
        runner.check(spec)
        runner.announce()
        self._commands.put(_Command(lambda r: r.add(spec), None))

    async def abort(self, keys: Sequence[int]) -> None:
        """See ``Engine``."""
        with contextlib.suppress(_GoneError):
            if keys:
                await self._call(lambda runner: runner.table.remove(keys))

    async def hold(self) -> None:
        """See ``Engine``."""
        with contextlib.suppress(_GoneError):
            await self._call(lambda runner: runner.hold())

    async def release(self) -> None:
        """See ``Engine``."""
        await self._call(lambda runner: runner.release())

    def schema(self) -> list[TensorSpec]:
        """See ``Engine``."""
        return self._living().weights.schema()

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See ``Engine``."""
        return await self._call(lambda runner: runner.weights.stage(manifest))

    async def commit(self, staged: StagedUpdate, weights: WeightTag, policy: KvPolicy) -> Applied:
        """See ``Engine``."""
        return await self._call(lambda runner: runner.commit(staged.tensors, weights, policy))

    async def digests(self) -> dict[str, int]:
        """See ``Engine``."""
        return await self._call(lambda runner: runner.weights.digests())

    async def sleep(self, weights: SleepingWeights) -> int:
        """See ``Engine``."""
        return await self._call(lambda runner: runner.sleep(weights))

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """See ``Engine``."""
        await self._call(lambda runner: runner.wake(reload_checkpoint=reload_checkpoint))

    def _living(self) -> Runner:
        if self._runner is None:
            raise _GoneError(self._gone)
        return self._runner

    async def _call(self, do: Callable[[Runner], T]) -> T:
        """What ``do`` returns or raises, run on the engine's thread between two steps."""
        self._living()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.put(_Command(do, result))
        return await result

    def _end(self, started: asyncio.Future[Any], sink: Sink, error: BaseException | None) -> None:
        """The last thing that the thread tells: it is over, for ``error`` if there is one."""
        self._runner = None
        if not started.done():
            self._gone = "the engine did not start"
            started.set_exception(error or EngineError(self._gone))
            error = None
        else:
            self._gone = "the engine has stopped"
        if error is not None:
            self._gone = f"the engine is dead: {type(error).__name__}: {error}"
            sink.on_failure(error)
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None and command.result is not None:
                _settle(command.result, None, _GoneError(self._gone))
        self._ended.set()

    # What follows runs on the engine's thread.

    def _main(
        self,
        loop: asyncio.AbstractEventLoop,
        sink: Sink,
        server_id: str,
        started: asyncio.Future[tuple[Runner, EngineInfo]],
    ) -> None:
        error: BaseException | None = None
        with contextlib.suppress(_LoopClosedError):
            tell = _Teller(loop)
            try:
                runner, info = start_runner(self._config, server_id)
                tell(_settle, started, (runner, info), None)
                self._serve(runner, sink, tell)
            except _LoopClosedError:
                raise
            except BaseException as e:
                error = e
            tell(self._end, started, sink, error)

    def _serve(self, runner: Runner, sink: Sink, tell: _Teller) -> None:
        """Steps and obeys until told to stop; waits while there is nothing to compute."""
        busy = False
        while True:
            try:
                while True:
                    command = self._commands.get(block=not busy)
                    if command is None:
                        return
                    _obey(command, runner, tell)
                    busy = True  # it may have brought something to compute
            except queue.Empty:
                step = runner.step()
            busy = step is not None
            if step is not None:
                tell(sink.on_step, step)


class _GoneError(EngineError):
    """The engine does not run, so that nothing is sampled either."""


class _LoopClosedError(Exception):
    """Nobody is left to tell."""


class _Teller:
    """Calls functions on the event loop, in the order of its own calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise _LoopClosedError from error


def _obey(command: _Command, runner: Runner, tell: _Teller) -> None:
    if command.result is None:
        command.do(runner)
        return
    try:
        value = command.do(runner)
    except torch.OutOfMemoryError as error:
        full = NoMemoryError(f"the device is full: {first_line(error)}")
        tell(_settle, command.result, None, full)
    except torch.AcceleratorError as error:
        failure = EngineError(f"the device fails: {first_line(error)}")
        tell(_settle, command.result, None, failure)
    except Exception as error:
        tell(_settle, command.result, None, error)
    else:
        tell(_settle, command.result, value, None)


def _settle(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
