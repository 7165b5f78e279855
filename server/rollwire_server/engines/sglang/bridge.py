"""SGLang as the engine sees it; what depends on SGLang's version is in this file and ``processes``.

Runs on 0.5.17 and on 0.5.23. What is relied on, in both:

- ``skip_tokenizer_init``: the scheduler's outputs come straight to the tokenizer manager of this
  process, as columns of what is new. The manager is subclassed to take them as they are: its own
  streams are cumulative, share lists, and lose the order of tokens and answers.
- Outputs and answers travel over two sockets, so the answer to a command says nothing about outputs
  before it. ``ConfigureLoggingReq`` is sent back over the outputs' own socket: an echo that arrives
  after all of them.
- Aborts match ids by prefix, so ids are all of one length.
- A pause in place leaves a result that it has not reported; ``processes`` has it reported.
- The scheduler's children die with the thread that started them (PR_SET_PDEATHSIG): it lives on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rollwire_server.engines.base import EngineError, RoutedExperts

from . import processes
from .caller import Caller
from .messages import Chunk, Facts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from torch import Tensor

    from .config import SglangConfig
    from .messages import Receiver, Request

LOADER = "rollwire_server.engines.sglang.loader.load"
UPDATE_SECONDS = 600.0
"""For one weight command: reading a large checkpoint takes minutes."""

T = TypeVar("T")


class Bridge:
    """One SGLang: started, spoken to, stopped.

    Every call raises EngineError once SGLang is dead.

    Attributes:
        receiver: Where it reports.
    """

    def __init__(self, config: SglangConfig, receiver: Receiver) -> None:
        self._config = config
        self.receiver = receiver
        self._launcher = Caller("rollwire-sglang")
        self._engine: Any = None
        self._manager: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._dead: EngineError | None = None
        self._died = asyncio.Event()
        self._watched: list[int] = []
        self._ranks = 1
        self._expert_dtype = torch.uint16
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._echoed = 0
        self._stopping = False

    # Life.

    async def start(self) -> Facts:
        """Starts SGLang's processes; raises EngineError with one line when that fails."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals here
            # Its processes send this to their parent when they fail.
            self._loop.add_signal_handler(signal.SIGQUIT, self._on_child_failed)
        with _own_logging(), _own_environment():
            self._engine = await asyncio.wrap_future(self._launcher.call(self._launch))
        self._manager = self._engine.tokenizer_manager
        self._manager.auto_create_handle_loop()
        facts = self._facts()
        self._ranks = facts.ranks
        self._expert_dtype = _expert_dtype(self._manager.model_config.hf_text_config)
        self._watch(facts.processes)
        return facts

    async def stop(self) -> None:
        """Ends its processes. Idempotent, also before ``start`` and after a failed one."""
        self._stopping = True
        for descriptor in self._watched:
            self._living_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._watched = []
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
            self._reading = None
        if self._loop is not None and self._launcher.runs:
            await asyncio.wrap_future(self._launcher.call(self._shut_down))
        self._launcher.stop()
        if self._loop is not None:
            with contextlib.suppress(ValueError, RuntimeError):
                self._loop.remove_signal_handler(signal.SIGQUIT)
        self._engine = self._manager = None

    def _launch(self) -> Any:
        """On the launcher's thread; its import takes seconds too."""
        # SGLang's processes inherit the mask: Ctrl-C reaches them too, and is the server's to
        # answer. The resource tracker's start would unblock it, so that comes first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if self._config.on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        try:
            from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
        except ModuleNotFoundError as error:
            raise EngineError(f"needs {error.name}: install SGLang beside rollwire") from error
        manager = partial(_manager_class(), self)

        class OurEngine(Engine):  # type: ignore[misc]  # no types
            run_scheduler_process_func = staticmethod(processes.run_scheduler)
            run_detokenizer_process_func = staticmethod(processes.run_detokenizer)
            init_tokenizer_manager_func = staticmethod(
                lambda *args, **kwargs: init_tokenizer_manager(
                    *args, **{**kwargs, "TokenizerManagerClass": manager}
                )
            )

        arguments = self._config.server_args(LOADER)
        try:
            engine = OurEngine(**{k: v for k, v in arguments.items() if v is not None})
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise EngineError(f"SGLang did not start: {line}") from error
        # It would end this process; deaths are seen by ``_watch``, and told.
        watchdog = engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        return engine

    def _shut_down(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            return
        from sglang.srt.utils import kill_process_tree  # what a failed start left

        kill_process_tree(os.getpid(), include_parent=False)

    def _facts(self) -> Facts:
        engine, manager = self._engine, self._manager
        args = engine.server_args
        told = engine._scheduler_init_result.scheduler_infos[0]
        model = manager.model_config
        unsupported = {"min_new_tokens"}  # needs a tokenizer
        if args.enable_deterministic_inference:
            unsupported.add("min_p")  # its sampler has no min-p with seeds
        return Facts(
            vocab_size=model.vocab_size,
            # One more output token would end it before its time; longer inputs are refused.
            context_length=min(manager.context_len, told["max_req_input_len"]),
            eos_token_ids=tuple(sorted(model.hf_eos_token_id or ())),
            dtype=model.dtype,
            kv_tokens=told["max_total_num_tokens"],
            deterministic=bool(args.enable_deterministic_inference) and not self._config.on_cpu,
            logprobs_before_temperature=_is_set("SGLANG_RETURN_ORIGINAL_LOGPROB"),
            can_release_memory=bool(args.enable_memory_saver),
            keeps_weights_on_release=bool(args.enable_weights_cpu_backup),
            unsupported_sampling=frozenset(unsupported),
            processes=list(engine.get_all_child_pids()),
            ranks=args.tp_size * args.pp_size,
            routed_experts=bool(args.enable_return_routed_experts) and not self._config.on_cpu,
        )

    def _watch(self, processes: Sequence[int]) -> None:
        """A process that ends is noticed at once."""
        for pid in processes:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self.die(f"its process {pid} has ended")
                return
            self._watched.append(descriptor)
            self._living_loop().add_reader(descriptor, self.die, f"its process {pid} has ended")

    def _on_child_failed(self) -> None:
        self.die("one of its processes failed: its own log lines say why")

    def die(self, why: str) -> None:
        """Gives SGLang up: whoever waits for it learns that, and so does the receiver."""
        if self._dead is not None or self._stopping:
            return
        self._dead = EngineError(f"SGLang is dead: {why}")
        self._died.set()
        self.receiver.on_death(self._dead)

    # Commands.

    async def send(self, request: Request) -> None:
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
            "ignore_eos": not request.stop_token_ids,
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
        manager = self._living()
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
        """Asks the scheduler to end a sequence; a last chunk says that it did."""
        from sglang.srt.managers.io_struct import AbortReq

        self._living()._dispatch_to_scheduler(AbortReq(rid=rid))

    async def pause(self) -> None:
        """Stops sampling; returns when all that was sampled has been reported."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._promptly(
            self._living().pause_generation(PauseGenerationReqInput(mode="in_place"))
        )
        await self._promptly(self.echo())

    async def go_on(self) -> None:
        """Samples again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._promptly(self._living().continue_generation(ContinueGenerationReqInput()))

    async def echo(self) -> None:
        """Returns when the scheduler has answered, after all that it reported before."""
        from sglang.srt.managers.io_struct import ConfigureLoggingReq

        manager = self._living()
        self._echoed += 1
        name = f"echo-{self._echoed}"
        echo = self._echoes[name] = self._living_loop().create_future()
        try:
            manager._dispatch_to_scheduler(ConfigureLoggingReq(rid=name))
            await self._or_dead(echo)
        finally:
            del self._echoes[name]

    async def update(self, command: str) -> None:
        """Runs a command of ``loader.load`` in every scheduler process, between two steps."""
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self._living()
        # A name and an empty tensor: the weights themselves do not travel this way.
        message = MultiprocessingSerializer.serialize([(command, torch.empty(0))])
        asked = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[message] * self._ranks,
            load_format=LOADER,
            flush_cache=False,
        )
        async with asyncio.timeout(UPDATE_SECONDS):
            if hasattr(manager, "begin_weight_update"):  # since 0.5.21
                begin, end = io_struct.BeginWeightUpdateReqInput, io_struct.EndWeightUpdateReqInput
                await self._succeeds(manager.begin_weight_update(begin()))
                try:
                    await self._succeeds(manager.update_weights_from_tensor(asked))
                finally:
                    await self._succeeds(manager.end_weight_update(end()))
            else:
                await self._succeeds(manager.update_weights_from_tensor(asked))

    async def release_memory(self, tags: list[str]) -> None:
        """Gives device memory back: "kv_cache", "weights"."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        asked = ReleaseMemoryOccupationReqInput(tags=tags)
        await self._promptly(self._living().release_memory_occupation(asked))

    async def take_memory(self, tags: list[str]) -> None:
        """Takes it again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        asked = ResumeMemoryOccupationReqInput(tags=tags)
        await self._promptly(self._living().resume_memory_occupation(asked))

    async def _succeeds(self, call: Awaitable[tuple[bool, str]]) -> None:
        success, message = await self._or_dead(call)
        if not success:
            raise EngineError(f"SGLang's update failed: {message}")

    async def _promptly(self, call: Awaitable[T]) -> T:
        """What ``call`` returns; SGLang is dead if that takes longer than it may be silent."""
        limit = self._config.unresponsive_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._or_dead(call)
        except TimeoutError:
            self.die(f"its scheduler has not answered for {limit:g} s")
            raise self._dead or EngineError("SGLang does not run") from None

    async def _or_dead(self, call: Awaitable[T]) -> T:
        """What ``call`` returns, unless SGLang dies meanwhile."""
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

    def _living(self) -> Any:
        if self._dead is not None:
            raise self._dead
        if self._manager is None:
            raise EngineError("SGLang does not run")
        return self._manager

    def _living_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise EngineError("SGLang does not run")
        return self._loop

    # What the manager below hands over.

    def read(self, reader: Callable[[], Awaitable[None]]) -> None:
        """Runs the manager's loop as a task of this bridge."""

        async def reading() -> None:
            try:
                await reader()
            except Exception as error:  # whatever it is, nothing is read any more
                self.die(f"reading its outputs failed: {type(error).__name__}: {error}")

        self._reading = self._living_loop().create_task(reading(), name="sglang outputs")

    def on_outputs(self, outputs: Any) -> None:
        """One step's columns."""
        dtype = self._expert_dtype
        self.receiver.on_chunks([_chunk(outputs, i, dtype) for i in range(len(outputs.rids))])

    def on_tokens(self, outputs: Any) -> None:
        """Those of sequences that just run."""
        columns = zip(
            outputs.rids, outputs.output_ids, outputs.output_token_logprobs_val, strict=True
        )
        self.receiver.on_chunks(
            [Chunk(rid, list(ids), list(told), [], [], 0, None) for rid, ids, told in columns]
        )

    def on_aborted(self, rid: str) -> None:
        """A sequence that ended before it was scheduled."""
        self.receiver.on_chunks([Chunk(rid, [], [], [], [], 0, "aborted")])

    def on_echo(self, name: str | None) -> None:
        """An echo came back."""
        echo = self._echoes.get(name or "")
        if echo is not None and not echo.done():
            echo.set_result(None)


def _manager_class() -> type:
    """SGLang's tokenizer manager, with its outputs handed over as they come."""
    from sglang.srt.managers.io_struct import (
        AbortReq,
        BatchTokenIDOutput,
        ConfigureLoggingReq,
        async_sock_recv,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class OurManager(TokenizerManager):  # type: ignore[misc]  # no types
        def __init__(self, bridge: Bridge, *args: Any, **kwargs: Any) -> None:
            self._bridge = bridge
            super().__init__(*args, **kwargs)

        def auto_create_handle_loop(self) -> None:
            """Without its signal handlers: signals are the server's."""
            if self.event_loop is None:  # type: ignore[has-type]
                self.event_loop = asyncio.get_running_loop()
                self._bridge.read(self.handle_loop)

        async def handle_loop(self) -> None:
            while True:
                received = await async_sock_recv(self.recv_from_detokenizer)
                if isinstance(received, BatchTokenIDOutput):
                    if not received.finished_reasons:  # see ``processes.tell_running_briefly``
                        self._bridge.on_tokens(received)
                        continue
                    for rid, reason in zip(received.rids, received.finished_reasons, strict=True):
                        if reason is not None:
                            self.rid_to_state.pop(rid, None)
                    self._bridge.on_outputs(received)
                elif isinstance(received, AbortReq):
                    self.rid_to_state.pop(received.rid, None)
                    self._bridge.on_aborted(received.rid)
                elif isinstance(received, ConfigureLoggingReq):
                    self._bridge.on_echo(received.rid)
                else:
                    self._result_dispatcher(received)

    return OurManager


def _chunk(outputs: Any, i: int, expert_dtype: torch.dtype) -> Chunk:
    tokens = list(outputs.output_ids[i])
    reason = outputs.finished_reasons[i]
    top: list[tuple[list[int], list[float]]] = []
    if outputs.output_top_logprobs_val and outputs.output_top_logprobs_val[i]:
        ids, values = outputs.output_top_logprobs_idx[i], outputs.output_top_logprobs_val[i]
        top = [(list(a), list(b)) for a, b in zip(ids, values, strict=True)][: len(tokens)]
    prompt = outputs.input_token_logprobs_val[i] if outputs.input_token_logprobs_val else []
    rows = outputs.routed_experts[i] if outputs.routed_experts else None
    return Chunk(
        rid=outputs.rids[i],
        token_ids=tokens,
        logprobs=list(outputs.output_token_logprobs_val[i])[: len(tokens)],
        top=top,
        prompt_logprobs=[value for value in prompt if value is not None],
        cached_tokens=outputs.cached_tokens[i],
        ended=None if reason is None else _told(reason),
        routed_experts=None if rows is None else _routed(rows, expert_dtype),
    )


def _routed(rows: Tensor, dtype: torch.dtype) -> RoutedExperts:
    tokens, layers, top_k = rows.shape
    experts = rows.to(dtype).numpy().tobytes()
    return RoutedExperts(0, tokens, layers, top_k, experts, dtype.itemsize)


def _expert_dtype(config: Any) -> torch.dtype:
    """What an expert's number fits in."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    known = [count for name in names if isinstance(count := getattr(config, name, None), int)]
    return torch.uint8 if known and max(known) <= 1 << 8 else torch.uint16


def _told(reason: dict[str, Any]) -> str:
    message = reason.get("message")
    return f"{reason['type']}: {message}" if message else str(reason["type"])


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Undoes that SGLang sets up logging for the whole process, by its import and its start."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Undoes what SGLang sets of NCCL, once its processes have it: ``NCCL_CUMEM_ENABLE`` has to be
    the same at both ends of a transfer.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            del os.environ[name]
        os.environ.update(before)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")
