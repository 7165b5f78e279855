"""SGLang's processes, as they begin: none outlives the server, from its first moment on.

SGLang ties them to their parent only when they have imported everything; one whose parent was
killed before that would stay for good.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """A scheduler process, from start to end."""
    _end_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """The detokenizer process, from start to end."""
    _end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
