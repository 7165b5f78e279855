"""One SGLang: started, commanded, stopped.

Whatever depends on SGLang's version is in this file, in ``launch`` and in ``processes``. Runs on
0.5.17 to 0.5.23. It relies on the following:

- With ``skip_tokenizer_init`` the scheduler's outputs come straight to the tokenizer manager of
  this process, as columns of what is new. The manager is subclassed to receive them directly: its
  own streams are cumulative, share lists, and lose the order of tokens and answers.
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

from rollwire_server.engines.base import EngineError, RoutedExperts
from rollwire_server.engines.sglang.launch import LOADER, Launcher
from rollwire_server.engines.sglang.sequences import SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from torch import Tensor

    from rollwire_server.engines.sglang.launch import SglangConfig, SglangInfo
    from rollwire_server.engines.sglang.sequences import SchedulerRequest

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Bridge:
    """One SGLang. Every call raises EngineError once it is dead.

    ``on_outputs`` gets the outputs of each step, ``on_death`` the error when it has died or does
    not answer; both on the event loop, in order.
    """

    def __init__(
        self,
        config: SglangConfig,
        on_outputs: Callable[[list[SchedulerOutput]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._launcher = Launcher(config, self._manager_class)
        self._manager: Any = None
        self._messages: Any = None  # SGLang's module of them
        self._reading: asyncio.Task[None] | None = None
        self._dead: EngineError | None = None
        self._died = asyncio.Event()
        self._watched: list[int] = []
        self._ranks = 1
        self._own_end_tokens: frozenset[int] = frozenset()
        self._barriers: dict[str, asyncio.Future[None]] = {}
        self._barrier_count = 0

    async def start(self) -> SglangInfo:
        """Starts SGLang's processes; raises EngineError with one line if that fails."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals here
            # SGLang's processes send SIGQUIT to their parent when they fail.
            loop.add_signal_handler(signal.SIGQUIT, self._on_child_failed)
        manager = self._manager = await self._launcher.start()
        from sglang.srt.managers import io_struct

        self._messages = io_struct
        manager.event_loop = loop
        self._reading = loop.create_task(
            self.run_critical(manager.handle_loop(), "reading its outputs"), name="sglang outputs"
        )
        info = self._launcher.info()
        self._ranks = info.ranks
        self._own_end_tokens = info.own_end_tokens
        self._watch(info.processes)
        return info

    async def stop(self) -> None:
        """Ends its processes. Idempotent, also before ``start`` and after a failed one."""
        self._dead = self._dead or EngineError("SGLang is being stopped")
        self._died.set()
        loop = asyncio.get_running_loop()
        for descriptor in self._watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._watched = []
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
            self._reading = None
        await self._launcher.stop()
        with contextlib.suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGQUIT)
        self._manager = None

    def _watch(self, processes: Sequence[int]) -> None:
        for pid in processes:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._on_end(pid, None)
                return
            self._watched.append(descriptor)
            asyncio.get_running_loop().add_reader(descriptor, self._on_end, pid, descriptor)

    def _on_end(self, pid: int, descriptor: int | None) -> None:
        if self._launcher.failure():
            self._on_child_failed()
        else:
            self._declare_dead(f"its process {pid} {_how_it_ended(descriptor)}")

    def _on_child_failed(self) -> None:
        why = self._launcher.failure() or "its own log lines say why"
        self._declare_dead(f"one of its processes failed: {why}")

    def _declare_dead(self, why: str) -> None:
        """Fails every call that waits for SGLang."""
        if self._dead is None:
            self._dead = EngineError(f"SGLang is dead: {why}")
            self._died.set()
            self._on_death(self._dead)

    async def run_critical(self, work: Awaitable[None], what: str) -> None:
        """Runs work without which SGLang is of no use; it counts as dead if that fails."""
        try:
            await work
        except Exception as error:
            logger.exception("a bug: %s failed", what)
            self._declare_dead(f"{what} failed: {type(error).__name__}: {error}")

    async def send(self, request: SchedulerRequest) -> None:
        """Queues a sequence; raises EngineError when SGLang refuses it."""
        manager = self._running()
        spec, sampling = request.spec, request.spec.sampling
        asked = self._messages.GenerateReqInput(
            rid=request.rid,
            input_ids=request.input_ids,
            sampling_params={
                "max_new_tokens": request.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "sampling_seed": (sampling.seed + 2**63) % 2**64 - 2**63,  # as a signed integer
                "stop_token_ids": sorted(sampling.stop_token_ids) or None,
                # SGLang would also end at its own end tokens, so it may only look for stops if
                # those are among the request's. Otherwise ``SequenceTable`` finds the stop, a step
                # or two later.
                "ignore_eos": not sampling.stop_token_ids >= self._own_end_tokens,
            },
            return_logprob=True,
            logprob_start_len=0 if request.prompt_logprobs else -1,
            top_logprobs_num=spec.top_logprobs,
            return_routed_experts=spec.routed_experts,
            stream=True,
            extra_key=request.cache_key,
        )
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
        self._running()._dispatch_to_scheduler(self._messages.AbortReq(rid=rid))

    async def pause(self) -> None:
        """Stops sampling; returns when every sampled token has been reported."""
        manager = self._running()
        asked = self._messages.PauseGenerationReqInput(mode="in_place")
        await self._answer(manager.pause_generation(asked))
        await self.barrier()

    async def resume(self) -> None:
        manager = self._running()
        asked = self._messages.ContinueGenerationReqInput()
        await self._answer(manager.continue_generation(asked))

    async def barrier(self) -> None:
        """Returns when the scheduler has answered and everything before that has been reported."""
        manager = self._running()
        self._barrier_count += 1
        name = f"echo-{self._barrier_count}"
        barrier = self._barriers[name] = asyncio.get_running_loop().create_future()
        try:
            manager._dispatch_to_scheduler(self._messages.ConfigureLoggingReq(rid=name))
            await self._answer(barrier)
        finally:
            del self._barriers[name]

    async def release_memory(self, tags: list[str]) -> None:
        """Frees device memory by its tags: "kv_cache", "weights"."""
        manager = self._running()
        asked = self._messages.ReleaseMemoryOccupationReqInput(tags=tags)
        await self._answer(manager.release_memory_occupation(asked))

    async def resume_memory(self, tags: list[str]) -> None:
        manager = self._running()
        asked = self._messages.ResumeMemoryOccupationReqInput(tags=tags)
        await self._answer(manager.resume_memory_occupation(asked))

    async def update(self, command: str, seconds: float) -> None:
        """Runs a command of ``loader.load`` in every scheduler process, between two steps.

        It may take ``seconds``. A cancellation takes effect after the command: one under way would
        be in the way of the next.
        """
        work = self._update(self._running(), command)
        updating = asyncio.create_task(self._answer(work, seconds=seconds))
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
        from sglang.srt.utils import MultiprocessingSerializer

        # A name and an empty tensor: the weights themselves do not travel this way.
        message = MultiprocessingSerializer.serialize([(command, torch.empty(0))])
        asked = self._messages.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[message] * self._ranks,
            load_format=LOADER,
            flush_cache=False,
        )
        if not hasattr(manager, "begin_weight_update"):  # since 0.5.21
            _succeeded(await manager.update_weights_from_tensor(asked))
            return
        _succeeded(await manager.begin_weight_update(self._messages.BeginWeightUpdateReqInput()))
        end = self._messages.EndWeightUpdateReqInput()
        try:
            answer = await manager.update_weights_from_tensor(asked)
        except Exception:  # after a cancellation SGLang is dead and does not answer
            await manager.end_weight_update(end)
            raise
        _succeeded(await manager.end_weight_update(end))
        _succeeded(answer)

    async def _answer(self, call: Awaitable[T], *, seconds: float = 0.0) -> T:
        """Awaits ``call``, which may take ``seconds`` longer than SGLang may be silent."""
        limit = self._config.unresponsive_seconds + seconds
        calling: asyncio.Future[T] = asyncio.ensure_future(call)
        dying = asyncio.ensure_future(self._died.wait())
        both: list[asyncio.Future[Any]] = [calling, dying]
        try:
            await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            self._declare_dead(f"its scheduler has not answered for {limit:.3g} s")
            raise self._dead or EngineError("SGLang is not running")
        finally:
            calling.cancel()
            dying.cancel()

    def _running(self) -> Any:
        if self._dead is not None:
            raise self._dead
        if self._manager is None:
            raise EngineError("SGLang is not running")
        return self._manager

    def _on_barrier(self, name: str | None) -> None:
        barrier = self._barriers.get(name or "")
        if barrier is not None and not barrier.done():
            barrier.set_result(None)

    def _manager_class(self) -> type:
        """SGLang's tokenizer manager, made to report to this bridge."""
        from sglang.srt.managers.io_struct import (
            AbortReq,
            BatchTokenIDOutput,
            ConfigureLoggingReq,
            async_sock_recv,
        )
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        bridge = self

        class OurManager(TokenizerManager):  # type: ignore[misc]  # no types
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._expert_dtype = _expert_dtype(self.model_config.hf_text_config)

            def auto_create_handle_loop(self) -> None:
                """The bridge does that, without SGLang's signal handlers."""

            async def handle_loop(self) -> None:
                while True:
                    received = await async_sock_recv(self.recv_from_detokenizer)
                    if isinstance(received, BatchTokenIDOutput):
                        self._hand_over(_outputs(received, self._expert_dtype))
                    elif isinstance(received, AbortReq):  # it ended before it was scheduled
                        self._hand_over([_bare(received.rid, [], [], ended="aborted")])
                    elif isinstance(received, ConfigureLoggingReq):
                        bridge._on_barrier(received.rid)
                    else:
                        self._result_dispatcher(received)

            def _hand_over(self, outputs: list[SchedulerOutput]) -> None:
                for chunk in outputs:
                    if chunk.ended is not None:
                        self.rid_to_state.pop(chunk.rid, None)
                bridge._on_outputs(outputs)

        return OurManager


def _outputs(outputs: Any, expert_dtype: torch.dtype) -> list[SchedulerOutput]:
    """Splits the columns of one step by sequence."""
    if outputs.finished_reasons:
        return [_chunk(outputs, i, expert_dtype) for i in range(len(outputs.rids))]
    # Running sequences: see ``processes.shorten_running_outputs``.
    columns = (outputs.rids, outputs.output_ids, outputs.output_token_logprobs_val)
    return [
        _bare(rid, list(ids), list(logprobs)) for rid, ids, logprobs in zip(*columns, strict=True)
    ]


def _bare(
    rid: str, token_ids: list[int], logprobs: list[float], *, ended: str | None = None
) -> SchedulerOutput:
    return SchedulerOutput(rid, token_ids, logprobs, [], [], 0, ended)


def _chunk(outputs: Any, i: int, expert_dtype: torch.dtype) -> SchedulerOutput:
    tokens = list(outputs.output_ids[i])
    reason = outputs.finished_reasons[i]
    top: list[tuple[list[int], list[float]]] = []
    if outputs.output_top_logprobs_val and outputs.output_top_logprobs_val[i]:
        ids, values = outputs.output_top_logprobs_idx[i], outputs.output_top_logprobs_val[i]
        top = [(list(a), list(b)) for a, b in zip(ids, values, strict=True)][: len(tokens)]
    prompt = outputs.input_token_logprobs_val[i] if outputs.input_token_logprobs_val else []
    rows = outputs.routed_experts[i] if outputs.routed_experts else None
    return SchedulerOutput(
        rid=outputs.rids[i],
        token_ids=tokens,
        logprobs=list(outputs.output_token_logprobs_val[i])[: len(tokens)],
        top=top,
        prompt_logprobs=[value for value in prompt if value is not None],
        cached_tokens=outputs.cached_tokens[i],
        ended=None if reason is None else _end_reason(reason),
        routed_experts=None if rows is None else _routed(rows, expert_dtype),
    )


def _routed(rows: Tensor, dtype: torch.dtype) -> RoutedExperts:
    tokens, layers, top_k = rows.shape
    experts = rows.to(dtype).numpy().tobytes()
    return RoutedExperts(0, tokens, layers, top_k, experts, dtype.itemsize)


def _expert_dtype(config: Any) -> torch.dtype:
    """The smallest type that holds an expert's number."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    known = [count for name in names if isinstance(count := getattr(config, name, None), int)]
    return torch.uint8 if known and max(known) <= 1 << 8 else torch.uint16


def _end_reason(reason: dict[str, Any]) -> str:
    message = reason.get("message")
    return f"{reason['type']}: {message}" if message else str(reason["type"])


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
