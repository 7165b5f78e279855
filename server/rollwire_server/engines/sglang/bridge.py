"""One SGLang: started, commanded, stopped.

Whatever depends on SGLang's version is in this file, in ``launch``, ``outputs`` and ``processes``.
Runs on 0.5.17 to 0.5.23. It relies on the following:

- With ``skip_tokenizer_init`` the scheduler's outputs come straight to the tokenizer manager of
  this process, as columns of what is new (``outputs``).
- Outputs and answers travel over two sockets, so an answer does not say that all outputs before it
  have arrived. ``ConfigureLoggingReq`` comes back over the socket of the outputs, after all of
  them: a barrier.
- Aborts match ids by prefix, so all ids have the same length.
- A pause in place leaves one result unreported; ``processes`` reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.sglang.launch import LOADER, Launcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rollwire_server.engines.sglang.config import SglangConfig
    from rollwire_server.engines.sglang.messages import (
        OutputReceiver,
        SchedulerOutput,
        SchedulerRequest,
        SglangInfo,
    )

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Bridge:
    """One SGLang. Every call raises EngineError once it is dead.

    Attributes:
        receiver: Receives its outputs.
    """

    def __init__(self, config: SglangConfig, receiver: OutputReceiver) -> None:
        self._config = config
        self.receiver = receiver
        self._launcher = Launcher(config, self)
        self._manager: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._dead: EngineError | None = None
        self._died = asyncio.Event()
        self._watched: list[int] = []
        self._ranks = 1
        self._own_end_tokens: frozenset[int] = frozenset()
        self._barriers: dict[str, asyncio.Future[None]] = {}
        self._barrier_count = 0
        self._stopping = False

    # Life.

    async def start(self) -> SglangInfo:
        """Starts SGLang's processes; raises EngineError with one line if that fails."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals here
            # SGLang's processes send SIGQUIT to their parent when they fail.
            self._loop.add_signal_handler(signal.SIGQUIT, self._on_child_failed)
        engine = await self._launcher.start()
        self._manager = engine.tokenizer_manager
        self._manager.auto_create_handle_loop()
        info = self._launcher.info()
        self._ranks = info.ranks
        self._own_end_tokens = info.own_end_tokens
        self._watch(info.processes)
        return info

    async def stop(self) -> None:
        """Ends its processes. Idempotent, also before ``start`` and after a failed one."""
        self._stopping = True
        self._dead = self._dead or EngineError("SGLang is being stopped")
        self._died.set()
        for descriptor in self._watched:
            self._running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._watched = []
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
            self._reading = None
        await self._launcher.stop()
        if self._loop is not None:
            with contextlib.suppress(ValueError, RuntimeError):
                self._loop.remove_signal_handler(signal.SIGQUIT)
        self._manager = None

    def _watch(self, processes: Sequence[int]) -> None:
        for pid in processes:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._on_end(pid, None)
                return
            self._watched.append(descriptor)
            self._running_loop().add_reader(descriptor, self._on_end, pid, descriptor)

    def _on_end(self, pid: int, descriptor: int | None) -> None:
        if self._launcher.failure():
            self._on_child_failed()
        else:
            self.declare_dead(f"its process {pid} {_how_it_ended(descriptor)}")

    def _on_child_failed(self) -> None:
        why = self._launcher.failure() or "its own log lines say why"
        self.declare_dead(f"one of its processes failed: {why}")

    def declare_dead(self, why: str) -> None:
        """Fails every call that waits for SGLang, and tells the receiver."""
        if self._dead is not None or self._stopping:
            return
        self._dead = EngineError(f"SGLang is dead: {why}")
        self._died.set()
        self.receiver.on_death(self._dead)

    async def run_critical(self, work: Awaitable[None], what: str) -> None:
        """Runs work without which SGLang is of no use; it counts as dead if that fails."""
        try:
            await work
        except Exception as error:
            logger.exception("a bug: %s failed", what)
            self.declare_dead(f"{what} failed: {type(error).__name__}: {error}")

    # Commands.

    async def send(self, request: SchedulerRequest) -> None:
        """Queues a sequence; raises EngineError when SGLang refuses it."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "sampling_seed": (request.seed + 2**63) % 2**64 - 2**63,  # as a signed integer
            "stop_token_ids": sorted(request.stop_token_ids) or None,
            # SGLang would also end at its own end tokens, so it may only look for stops if those
            # are among the request's. Otherwise ``SequenceTable`` finds the stop, a step or two
            # later.
            "ignore_eos": not request.stop_token_ids >= self._own_end_tokens,
        }
        asked = GenerateReqInput(
            rid=request.rid,
            input_ids=request.input_ids,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=0 if request.prompt_logprobs else -1,
            top_logprobs_num=request.top_logprobs,
            return_routed_experts=request.routed_experts,
            stream=True,
            extra_key=request.cache_key,
        )
        manager = self._running()
        try:
            asked.normalize_batch_and_arguments()
            manager._init_req_state(asked)
            tokenized = await manager._tokenize_one_request(asked)
            sent = manager._send_one_request(tokenized)
            if inspect.isawaitable(sent):  # 0.5.17: it is a plain function
                await sent
        except Exception as error:
            manager.rid_to_state.pop(request.rid, None)
            raise EngineError(f"SGLang refuses the sequence: {error}") from error

    def abort(self, rid: str) -> None:
        """Asks the scheduler to end a sequence; a last output says that it did."""
        from sglang.srt.managers.io_struct import AbortReq

        self._running()._dispatch_to_scheduler(AbortReq(rid=rid))

    async def pause(self) -> None:
        """Stops sampling; returns when every sampled token has been reported."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._within_silence_limit(
            self._running().pause_generation(PauseGenerationReqInput(mode="in_place"))
        )
        await self.barrier()

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._within_silence_limit(
            self._running().continue_generation(ContinueGenerationReqInput())
        )

    async def barrier(self) -> None:
        """Returns when the scheduler has answered and everything before that has been reported."""
        from sglang.srt.managers.io_struct import ConfigureLoggingReq

        manager = self._running()
        self._barrier_count += 1
        name = f"echo-{self._barrier_count}"
        barrier = self._barriers[name] = self._running_loop().create_future()
        try:
            manager._dispatch_to_scheduler(ConfigureLoggingReq(rid=name))
            await self._within_silence_limit(barrier)
        finally:
            del self._barriers[name]

    async def update(self, command: str, seconds: float) -> None:
        """Runs a command of ``loader.load`` in every scheduler process, between two steps.

        SGLang counts as dead if that takes ``seconds`` longer than it may be silent. A cancellation
        takes effect after the command: one under way would be in the way of the next.
        """
        limit = self._config.unresponsive_seconds + seconds
        updating = asyncio.create_task(self._within(limit, self._update(self._running(), command)))
        cancelled: asyncio.CancelledError | None = None
        while not updating.done():
            try:
                await asyncio.wait([updating])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            updating.exception()  # retrieved
            raise cancelled
        updating.result()

    async def _update(self, manager: Any, command: str) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        # A name and an empty tensor: the weights themselves do not travel this way.
        message = MultiprocessingSerializer.serialize([(command, torch.empty(0))])
        asked = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[message] * self._ranks,
            load_format=LOADER,
            flush_cache=False,
        )
        if not hasattr(manager, "begin_weight_update"):  # since 0.5.21
            _succeeded(await manager.update_weights_from_tensor(asked))
            return
        begin, end = io_struct.BeginWeightUpdateReqInput, io_struct.EndWeightUpdateReqInput
        _succeeded(await manager.begin_weight_update(begin()))
        try:
            answer = await manager.update_weights_from_tensor(asked)
        except Exception:  # after a cancellation SGLang is dead and does not answer
            await manager.end_weight_update(end())
            raise
        _succeeded(await manager.end_weight_update(end()))
        _succeeded(answer)

    async def release_memory(self, tags: list[str]) -> None:
        """Frees device memory by its tags: "kv_cache", "weights"."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        asked = ReleaseMemoryOccupationReqInput(tags=tags)
        await self._within_silence_limit(self._running().release_memory_occupation(asked))

    async def resume_memory(self, tags: list[str]) -> None:
        """Allocates it again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        asked = ResumeMemoryOccupationReqInput(tags=tags)
        await self._within_silence_limit(self._running().resume_memory_occupation(asked))

    async def _within_silence_limit(self, call: Awaitable[T]) -> T:
        """Awaits ``call``; SGLang counts as dead if that takes longer than it may be silent."""
        return await self._within(self._config.unresponsive_seconds, call)

    async def _within(self, limit: float, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(limit):
                return await self._unless_dead(call)
        except TimeoutError:
            self.declare_dead(f"its scheduler has not answered for {limit:.3g} s")
            raise self._dead or EngineError("SGLang is not running") from None

    async def _unless_dead(self, call: Awaitable[T]) -> T:
        """Awaits ``call``; raises EngineError if SGLang dies meanwhile."""
        calling: asyncio.Future[T] = asyncio.ensure_future(call)
        dying = asyncio.ensure_future(self._died.wait())
        both: list[asyncio.Future[Any]] = [calling, dying]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._dead is not None and not calling.done():
                raise self._dead
            return calling.result()
        finally:
            calling.cancel()
            dying.cancel()

    def _running(self) -> Any:
        if self._dead is not None:
            raise self._dead
        if self._manager is None:
            raise EngineError("SGLang is not running")
        return self._manager

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise EngineError("SGLang is not running")
        return self._loop

    # ManagerListener.

    def read(self, reader: Callable[[], Awaitable[None]]) -> None:
        self._reading = self._running_loop().create_task(
            self.run_critical(reader(), "reading its outputs"), name="sglang outputs"
        )

    def on_outputs(self, outputs: list[SchedulerOutput]) -> None:
        self.receiver.on_outputs(outputs)

    def on_barrier(self, name: str | None) -> None:
        barrier = self._barriers.get(name or "")
        if barrier is not None and not barrier.done():
            barrier.set_result(None)


def _how_it_ended(descriptor: int | None) -> str:
    """How a process ended, by its pidfd. Its zombie is left to whoever started it."""
    if descriptor is None:
        return "has ended"
    with contextlib.suppress(ChildProcessError):
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if end is not None and end.si_code == os.CLD_EXITED:
            return f"has ended with {end.si_status}"
        if end is not None:
            return f"was ended by {signal.Signals(end.si_status).name}"
    return "has ended"


def _succeeded(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise EngineError(f"SGLang's update failed: {message}")
