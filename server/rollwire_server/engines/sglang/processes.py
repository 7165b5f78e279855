"""Patches of SGLang's own processes, applied as they begin."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PR_SET_PDEATHSIG = 1


class MemoryFile:
    """Short texts from SGLang's processes to the server, in memory: no disk can be full.

    Processes of the same user find it at ``path``, until it is closed.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rollwire-text")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> str:
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self._descriptor)


def append(path: str, text: str) -> None:
    """Appends to a memory file of another process; raises OSError if that is closed."""
    with Path(path).open("ab", buffering=0) as file:  # one write: texts do not mix
        file.write(text.encode())


def run_scheduler(failures: str, *args: Any, **kwargs: Any) -> None:
    """Runs a scheduler process; its failure is appended to the memory file ``failures``."""
    _die_with_parent()
    logging.getLogger("sglang.srt.managers.scheduler").addHandler(FailureHandler(failures))
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    report_results_at_pause(Scheduler)
    shorten_running_outputs(SchedulerOutputStreamer)
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(failures: str, *args: Any, **kwargs: Any) -> None:
    _die_with_parent()
    logger = logging.getLogger("sglang.srt.managers.detokenizer_manager")
    logger.addHandler(FailureHandler(failures))
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def report_results_at_pause(scheduler: type) -> None:
    """Has SGLang report what it has sampled when it pauses in place.

    With overlapped steps one result waits in ``result_queue`` while the next step runs. A pause
    would leave it there until sampling continues, and its tokens would be reported after the
    commit, under the new weights. So it is reported at once, and skipped when its turn comes.
    """
    pause, process = scheduler.pause_generation, scheduler.process_batch_result  # type: ignore[attr-defined]
    settled = SimpleNamespace(reqs=[])  # an empty batch, for code that looks ahead

    def pause_generation(self: Any, asked: Any) -> Any:
        answer = pause(self, asked)
        if asked.mode == "in_place" and self.enable_overlap:
            for i, (batch, result) in enumerate(self.result_queue):
                if batch is not settled:
                    process(self, batch, result)
                    self.result_queue[i] = (settled, None)
        return answer

    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        return None if batch is settled else process(self, batch, result)

    scheduler.pause_generation = pause_generation  # type: ignore[attr-defined]
    scheduler.process_batch_result = process_batch_result  # type: ignore[attr-defined]


def shorten_running_outputs(streamer: type) -> None:
    """Has SGLang report only the new tokens of running sequences.

    It reports some forty fields of each sequence a step, with pickled timings among them. With
    hundreds of sequences that takes longer than the step on the device.
    """
    import msgspec
    from sglang.srt.managers.io_struct import BatchTokenIDOutput

    nothing: dict[str, Any] = {
        f.name: [] for f in msgspec.structs.fields(BatchTokenIDOutput) if f.required
    }
    stream = streamer._stream_output_generation  # type: ignore[attr-defined]

    def stream_output_generation(
        self: Any, reqs: Any, return_logprob: Any, skip_req: Any = None, *rest: Any, **more: Any
    ) -> None:
        others, rids, tokens, logprobs = [], [], [], []
        for req in reqs:
            if not _just_runs(req):
                others.append(req)
            elif req is not skip_req and (end := len(req.output_ids)) > req.send_token_offset:
                rids.append(req.rid)
                tokens.append(req.output_ids[req.send_token_offset :])
                start = req.send_output_token_logprobs_offset
                logprobs.append(req.logprob.output_token_logprobs_val[start:end])
                req.send_token_offset = req.send_output_token_logprobs_offset = end
        if rids:
            fields = {"rids": rids, "output_ids": tokens, "output_token_logprobs_val": logprobs}
            self.send_to_detokenizer.send_output(BatchTokenIDOutput(**{**nothing, **fields}))
        if others or not reqs:
            stream(self, others, return_logprob, skip_req, *rest, **more)

    streamer._stream_output_generation = stream_output_generation  # type: ignore[attr-defined]


def _just_runs(req: Any) -> bool:
    """Whether a sequence continues and has nothing to report but tokens."""
    return bool(
        req.send_token_offset
        and req.stream
        and req.return_logprob
        and not req.logprob.top_logprobs_num
        and not req.finished()
    )


class FailureHandler(logging.Handler):
    """Records what ended a process: SGLang only logs a traceback, and exits with 0."""

    def __init__(self, failures: str) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "hit an exception" in message:
            with contextlib.suppress(OSError):
                append(self._failures, f"{_error_of(message)}\n")


def _error_of(traceback: str) -> str:
    """The first line of the error at the end of a traceback."""
    lines = traceback.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if not line.startswith(" ")), lines[-1])


def _die_with_parent() -> None:
    # SGLang does this only after its imports: if its parent is killed before, it would live on.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
