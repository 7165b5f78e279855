"""SGLang's processes, as they begin: none outlives the server, a pause leaves nothing untold, and
what ends them is told.

SGLang ties them to their parent only when they have imported everything; one whose parent was
killed before that would stay for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

from rollwire_server.engines.sglang.notes import write

PR_SET_PDEATHSIG = 1


def run_scheduler(note: str, *args: Any, **kwargs: Any) -> None:
    """A scheduler process, from start to end; its failure is written to ``note``."""
    _end_with_parent()
    _tell_failures("sglang.srt.managers.scheduler", note)
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.managers.scheduler_components.output_streamer import (
        SchedulerOutputStreamer,
    )

    settle_at_pauses(Scheduler)
    tell_running_briefly(SchedulerOutputStreamer)
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(note: str, *args: Any, **kwargs: Any) -> None:
    """The detokenizer process, from start to end; its failure is written to ``note``."""
    _end_with_parent()
    _tell_failures("sglang.srt.managers.detokenizer_manager", note)
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def settle_at_pauses(scheduler: type) -> None:
    """Has SGLang report what it has sampled when it pauses in place.

    With overlapped steps one result waits in ``result_queue`` while the next step runs. A pause
    leaves it there until sampling goes on, and its tokens would be told after a commit that they
    were sampled before. So it is reported at once, and skipped when its turn comes.
    """
    pause, process = scheduler.pause_generation, scheduler.process_batch_result  # type: ignore[attr-defined]
    settled = SimpleNamespace(reqs=[])  # a batch of nothing, to whoever looks ahead

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


def tell_running_briefly(streamer: type) -> None:
    """Has SGLang tell of sequences that just run what they sampled, and no more.

    A step tells some forty things of each sequence, its timings pickled among them. With hundreds
    of sequences that takes longer than a step of the device.
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
            told = {"rids": rids, "output_ids": tokens, "output_token_logprobs_val": logprobs}
            self.send_to_detokenizer.send_output(BatchTokenIDOutput(**{**nothing, **told}))
        if others or not reqs:
            stream(self, others, return_logprob, skip_req, *rest, **more)

    streamer._stream_output_generation = stream_output_generation  # type: ignore[attr-defined]


def _just_runs(req: Any) -> bool:
    """It goes on, and what it was asked to tell beside its tokens has been told."""
    return bool(
        req.send_token_offset
        and req.stream
        and req.return_logprob
        and not req.logprob.top_logprobs_num
        and not req.finished()
    )


class _Failures(logging.Handler):
    """Writes what ended a process to a note: SGLang logs a traceback then, and exits with 0."""

    def __init__(self, note: str) -> None:
        super().__init__(logging.ERROR)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        if "hit an exception" in told:
            with contextlib.suppress(OSError):
                write(self._note, f"{_error_of(told)}\n")


def _error_of(traceback: str) -> str:
    """The first line of the error that a traceback ends with."""
    lines = traceback.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if not line.startswith(" ")), lines[-1])


def _tell_failures(logger: str, note: str) -> None:
    logging.getLogger(logger).addHandler(_Failures(note))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
