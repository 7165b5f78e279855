"""How SGLang is configured, started and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rollwire.types import LogprobBasis, SleepingWeights

from rollwire_server.engines.base import (
    SAMPLING_PARAMETERS,
    EngineError,
    EngineInfo,
    end_token_ids,
)
from rollwire_server.engines.memory import first_line
from rollwire_server.engines.sglang import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

MAX_TOP_LOGPROBS = 64
UNRESPONSIVE_SECONDS = 20.0  # without an answer, before the scheduler counts as dead

LOADER = "rollwire_server.engines.sglang.loader.load"
"""The name by which SGLang's processes call what puts weights in place."""

# Arguments of SGLang that the server sets itself.
OWN = {
    "model_path",
    "dtype",
    "device",
    "base_gpu_id",
    "context_length",
    "max_running_requests",
    "skip_tokenizer_init",
    "custom_weight_loader",
    "stream_interval",
    "dp_size",
    "watchdog_timeout",
}

# SGLang's own watchdog would take a pause for a hang, and end SGLang.
NEVER_SECONDS = 1e9

# On a CPU SGLang would choose backends that are not there.
ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 65536,
}


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """How to start ``SglangEngine``; see ``ServerSettings``."""

    model: str  # a checkpoint directory
    dtype: str  # as torch names it; "auto": the checkpoint's
    device: str  # "cpu", "cuda", or the first of several devices: "cuda:1"
    max_running_sequences: int
    context_length: int | None = None  # None: the model's
    staging: str = "auto"  # "device", "host", or "auto": on the devices if they have room
    unresponsive_seconds: float = UNRESPONSIVE_SECONDS
    arguments: dict[str, Any] = field(default_factory=dict)  # more of SGLang's ``ServerArgs``

    def __post_init__(self) -> None:
        if refused := sorted(OWN & self.arguments.keys()):
            raise EngineError(f"--engine-arg: {', '.join(refused)}: the server sets this itself")
        if self.arguments.get("pp_size", 1) != 1:
            raise EngineError("--engine-arg: pp-size is not supported: use tp-size")
        if not isinstance(self.unresponsive_seconds, int | float) or self.unresponsive_seconds <= 0:
            raise EngineError("--engine-arg: unresponsive-seconds must be a number above 0")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def devices(self) -> list[torch.device]:
        """The device of each scheduler process; one on a CPU."""
        if self.on_cpu:
            return [torch.device("cpu")]
        first, step = torch.device(self.device).index or 0, self.arguments.get("gpu_id_step", 1)
        ranks = self.arguments.get("tp_size", 1)
        return [torch.device("cuda", first + i * step) for i in range(ranks)]

    def server_args(self) -> dict[str, Any]:
        """The fields of SGLang's ``ServerArgs``."""
        arguments = {
            "grammar_backend": "none",
            "log_level": "error",
            **(ON_CPU if self.on_cpu else {}),
            **self.arguments,
            "model_path": self.model,
            "dtype": self.dtype,
            "device": self.devices[0].type,
            "base_gpu_id": self.devices[0].index or 0,
            "context_length": self.context_length,
            "max_running_requests": self.max_running_sequences,
            "skip_tokenizer_init": True,
            "custom_weight_loader": [LOADER],
            "stream_interval": 1,
            "watchdog_timeout": NEVER_SECONDS,
        }
        return {name: value for name, value in arguments.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SglangInfo:
    """What a started SGLang is."""

    described: EngineInfo  # but for the staging of updates
    own_end_tokens: frozenset[int]  # where it ends a sequence that does not ignore stops
    dtype: torch.dtype
    kv_tokens: int  # the capacity of its KV cache
    can_release_memory: bool
    processes: list[int]
    ranks: int  # its scheduler processes, each with its shard of the weights


class Launcher:
    """Starts one SGLang and ends it.

    The scheduler's processes die with the thread that started them (PR_SET_PDEATHSIG), so that
    thread lives on. It is a daemon, unlike an executor's: a start of SGLang that hangs must not
    keep the server from exiting.
    """

    def __init__(
        self, config: SglangConfig, manager_class: Callable[[], Callable[..., Any]]
    ) -> None:
        self._config = config
        self._manager_class = manager_class
        self._thread = threading.Thread(target=self._run, name="rollwire-sglang", daemon=True)
        self._stop = threading.Event()
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        for future in (self._started, self._ended):
            future.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it
        self._engine: Any = None
        self._other_children: set[BaseProcess] | None = None  # of this process, not SGLang's
        self._failures: processes.MemoryFile | None = None

    async def start(self) -> Any:
        """Starts SGLang; returns its tokenizer manager."""
        with _unchanged_process():
            self._thread.start()
            await asyncio.wrap_future(self._started)
        return self._engine.tokenizer_manager

    async def stop(self) -> None:
        """Ends its processes. Idempotent, also before ``start`` and after a failed one."""
        if self._thread.ident is not None:
            self._stop.set()
            await asyncio.wrap_future(self._ended)
            self._thread.join()
        self._engine = None
        if self._failures is not None:
            self._failures.close()
            self._failures = None

    def failure(self) -> str:
        """Why the first process that failed did so, in its own words; empty if unknown."""
        text = self._failures.read() if self._failures is not None else ""
        return next(iter(text.splitlines()), "")

    def info(self) -> SglangInfo:
        config, engine, manager = self._config, self._engine, self._engine.tokenizer_manager
        args, model = engine.server_args, manager.model_config
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        before_temperature = _is_set("SGLANG_RETURN_ORIGINAL_LOGPROB")
        sampling = SAMPLING_PARAMETERS  # not min_new_tokens, for which SGLang needs a tokenizer
        if args.enable_deterministic_inference:
            sampling -= {"min_p"}  # its sampler has no min-p with seeds
        described = EngineInfo(
            engine="sglang",
            model=config.model,
            device=config.devices[0],
            staging="host",
            staging_bytes=0,
            vocab_size=model.vocab_size,
            # With one more output token SGLang would end the sequence too early.
            context_length=min(manager.context_len, scheduler["max_req_input_len"]),
            eos_token_ids=end_token_ids(
                model.hf_config, model.hf_generation_config, model.vocab_size
            ),
            logprob_bases=frozenset(
                {LogprobBasis.MODEL if before_temperature else LogprobBasis.TEMPERATURE}
            ),
            deterministic=bool(args.enable_deterministic_inference) and not config.on_cpu,
            max_running_sequences=config.max_running_sequences,
            max_top_logprobs=min(MAX_TOP_LOGPROBS, model.vocab_size),
            routed_experts=bool(args.enable_return_routed_experts) and not config.on_cpu,
            sampling_parameters=sampling,
            scaled_prompt_logprobs=False,
            unsupported_sleep=unsupported_sleep(args),
        )
        return SglangInfo(
            described,
            own_end_tokens=frozenset(model.hf_eos_token_id or ()),
            dtype=model.dtype,
            kv_tokens=scheduler["max_total_num_tokens"],
            can_release_memory=bool(args.enable_memory_saver),
            processes=list(engine.get_all_child_pids()),
            ranks=args.tp_size,
        )

    # What follows runs on the launcher's thread.

    def _run(self) -> None:
        _settle(self._started, self._launch)
        self._stop.wait()
        _settle(self._ended, self._shut_down)

    def _launch(self) -> None:
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
        manager = self._manager_class()
        self._other_children = set(active_children())
        self._failures = failures = processes.MemoryFile()
        path = failures.path

        class OurEngine(Engine):  # type: ignore[misc]  # no types
            run_scheduler_process_func = staticmethod(partial(processes.run_scheduler, path))
            run_detokenizer_process_func = staticmethod(partial(processes.run_detokenizer, path))
            init_tokenizer_manager_func = staticmethod(
                lambda *args, **kwargs: init_tokenizer_manager(
                    *args, **{**kwargs, "TokenizerManagerClass": manager}
                )
            )

        try:
            self._engine = OurEngine(**self._config.server_args())
        except Exception as error:
            why = self.failure() or first_line(error)
            raise EngineError(f"SGLang did not start: {why}") from error
        # The watchdog would end this process. The bridge notices deaths itself.
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()

    def _shut_down(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            for address in vars(self._engine.port_args).values():  # its processes' socket files
                if isinstance(address, str) and address.startswith("ipc://"):
                    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        elif self._other_children is not None:  # a failed start left processes behind
            from sglang.srt.utils import kill_process_tree

            for child in set(active_children()) - self._other_children:
                kill_process_tree(child.pid)


def _settle(future: Future[None], function: Callable[[], None]) -> None:
    try:
        function()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restores logging and NCCL's variables, which SGLang sets up for the whole process.

    ``NCCL_CUMEM_ENABLE`` must be the same at both ends of a weight transfer.
    """

    def nccl() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}

    root = logging.getLogger()
    handlers, level, variables = root.handlers[:], root.level, nccl()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in nccl():
            del os.environ[name]
        os.environ.update(variables)


def unsupported_sleep(args: Any) -> dict[SleepingWeights, str]:
    """For ``EngineInfo``, by SGLang's arguments."""
    if not args.enable_memory_saver or args.enable_weights_cpu_backup:
        return {}  # without its memory saver nothing is freed
    return {
        SleepingWeights.HOST_BACKUP: "SGLang keeps one with --engine-arg "
        "enable-weights-cpu-backup=true alone; ask for KEEP or DISCARD"
    }


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")
