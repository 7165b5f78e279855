"""SGLang's processes, as they begin: none outlives the server, and a pause leaves nothing untold.

SGLang ties them to their parent only when they have imported everything; one whose parent was
killed before that would stay for good.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

PR_SET_PDEATHSIG = 1


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """A scheduler process, from start to end."""
    _end_with_parent()
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    settle_at_pauses(Scheduler)
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """The detokenizer process, from start to end."""
    _end_with_parent()
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


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
