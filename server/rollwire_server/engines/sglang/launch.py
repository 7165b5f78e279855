"""Starts SGLang and ends it, from a thread that lives as long as SGLang's processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import threading
from concurrent.futures import Future
from functools import partial
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.end_tokens import end_token_ids
from rollwire_server.engines.sglang import processes
from rollwire_server.engines.sglang.memory_files import MemoryFile
from rollwire_server.engines.sglang.messages import SglangInfo
from rollwire_server.engines.sglang.outputs import manager_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

    from rollwire_server.engines.sglang.config import SglangConfig
    from rollwire_server.engines.sglang.outputs import ManagerListener

T = TypeVar("T")

# Not min_new_tokens, for which SGLang needs a tokenizer.
SAMPLING_PARAMETERS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "seed",
    }
)
LOADER = "rollwire_server.engines.sglang.loader.load"


class Launcher:
    """Starts one SGLang and ends it.

    The scheduler's processes die with the thread that started them (PR_SET_PDEATHSIG), so that
    thread lives on.
    """

    def __init__(self, config: SglangConfig, listener: ManagerListener) -> None:
        self._config = config
        self._listener = listener
        self._thread = _LauncherThread("rollwire-sglang")
        self._engine: Any = None
        self._other_children: set[BaseProcess] | None = None  # of this process, not SGLang's
        self._failures: MemoryFile | None = None

    async def start(self) -> Any:
        """Starts SGLang's engine; raises EngineError with one line if that fails."""
        with _own_logging(), _own_environment():
            self._engine = await asyncio.wrap_future(self._thread.call(self._launch))
        return self._engine

    async def stop(self) -> None:
        """Ends its processes. Idempotent, also before ``start`` and after a failed one."""
        if self._thread.runs:
            await asyncio.wrap_future(self._thread.call(self._shut_down))
        self._thread.stop()
        self._engine = None
        if self._failures is not None:
            self._failures.close()
            self._failures = None

    def failure(self) -> str:
        """Why the first process that failed did so, in its own words; empty if unknown."""
        text = self._failures.read() if self._failures is not None else ""
        return next(iter(text.splitlines()), "")

    def info(self) -> SglangInfo:
        engine, manager = self._engine, self._engine.tokenizer_manager
        args = engine.server_args
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        model = manager.model_config
        sampling = SAMPLING_PARAMETERS
        if args.enable_deterministic_inference:
            sampling -= {"min_p"}  # its sampler has no min-p with seeds
        return SglangInfo(
            vocab_size=model.vocab_size,
            # With one more output token SGLang would end the sequence too early.
            context_length=min(manager.context_len, scheduler["max_req_input_len"]),
            eos_token_ids=end_token_ids(
                model.hf_config, model.hf_generation_config, model.vocab_size
            ),
            own_end_tokens=frozenset(model.hf_eos_token_id or ()),
            dtype=model.dtype,
            kv_tokens=scheduler["max_total_num_tokens"],
            deterministic=bool(args.enable_deterministic_inference) and not self._config.on_cpu,
            logprobs_before_temperature=_is_set("SGLANG_RETURN_ORIGINAL_LOGPROB"),
            can_release_memory=bool(args.enable_memory_saver),
            keeps_weights_on_release=bool(args.enable_weights_cpu_backup),
            sampling_parameters=sampling,
            processes=list(engine.get_all_child_pids()),
            ranks=args.tp_size,
            routed_experts=bool(args.enable_return_routed_experts) and not self._config.on_cpu,
        )

    def _launch(self) -> Any:
        # SGLang's processes inherit the mask. Ctrl-C reaches them too, but the server answers it.
        # Starting the resource tracker would unblock the signal, so that comes first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if self._config.on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        try:
            from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
        except ModuleNotFoundError as error:
            raise EngineError(f"needs {error.name}: pip install 'rollwire[sglang]'") from error
        manager = partial(manager_class(), self._listener)
        self._other_children = set(active_children())
        failures = self._failures = MemoryFile()

        class OurEngine(Engine):  # type: ignore[misc]  # no types
            run_scheduler_process_func = staticmethod(
                partial(processes.run_scheduler, failures.path)
            )
            run_detokenizer_process_func = staticmethod(
                partial(processes.run_detokenizer, failures.path)
            )
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
            line = self.failure() or line
            raise EngineError(f"SGLang did not start: {line}") from error
        # The watchdog would end this process. The bridge notices deaths itself.
        watchdog = engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        return engine

    def _shut_down(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            _remove_sockets(self._engine.port_args)
        elif self._other_children is not None:  # a failed start left processes behind
            from sglang.srt.utils import kill_process_tree

            for child in set(active_children()) - self._other_children:
                kill_process_tree(child.pid)


class _LauncherThread:
    """Runs calls one after the other, and lives until it is stopped.

    A daemon, unlike an executor's thread: a start of SGLang that hangs must not keep the server
    from exiting.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        if not self.runs:
            self._thread.start()
        self._calls.put(run)
        return result

    def stop(self) -> None:
        """Ends the thread after the calls under way. Idempotent."""
        if self.runs:
            self._calls.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _remove_sockets(port_args: Any) -> None:
    """Removes the socket files of SGLang's processes."""
    for address in vars(port_args).values():
        if isinstance(address, str) and address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Restores logging, which SGLang sets up for the whole process when it is imported."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Restores NCCL's variables, which SGLang sets for its processes.

    ``NCCL_CUMEM_ENABLE`` must be the same at both ends of a weight transfer.
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
