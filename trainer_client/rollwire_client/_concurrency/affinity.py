"""Where something was opened, and may be used: in one process, and in one event loop.

gRPC's threads do not come along when a process forks, as torch's DataLoader and ``multiprocessing``
do by default on Linux. So a forked child must leave alone what it inherited, and cannot use gRPC
itself once its parent has. Whoever tries is told so at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import weakref
from typing import Any, NoReturn

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from rollwire_client._errors import NotOpenHereError

logger = logging.getLogger(__name__)

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
if _FORK_SUPPORT not in os.environ:
    # gRPC's own handlers of forks start threads in the child, which work on the parent's
    # connections: children die, and messages of the parent are lost. gRPC reads this when it is
    # imported, and again after a reset; what it is when it is first used, counts.
    os.environ[_FORK_SUPPORT] = "0"
    # Private to gRPC, there from 1.80 to 1.85 at least. Without it the setting counts where gRPC
    # was not imported before.
    getattr(cygrpc, "reset_grpc_config_vars", lambda: None)()


class LoopAffinity:
    """The process and the event loop that opened something.

    Args:
        what: It was, as messages name it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = os.getpid()
        self._loop = _running_loop()

    @property
    def forked(self) -> bool:
        """Whether this is another process: a forked child of the one that opened it."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises NotOpenHereError in a forked child, and in another event loop."""
        self.check_process()
        loop = _running_loop()
        if loop is self._loop or loop is None or self._loop is None:
            return
        state = "has ended" if self._loop.is_closed() else "is not this one"
        raise NotOpenHereError(
            f"this {self._what} was opened in an event loop that {state}: open one in each "
            "asyncio.run and each thread, or use SyncFleet, which any thread may"
        )

    def check_process(self) -> None:
        """Raises NotOpenHereError in a forked child."""
        if self.forked:
            raise NotOpenHereError(
                f"this {self._what} was opened in process {self._process}, of which process "
                f"{os.getpid()} is a fork: {_ADVICE}"
            )


_ADVICE = (
    "use it there; or start this process with multiprocessing's 'spawn' or 'forkserver' "
    "(DataLoader: multiprocessing_context='spawn'), and open one in it"
)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_in_use: weakref.WeakSet[Any] = weakref.WeakSet()  # objects of gRPC that are connected
_user: int | None = None  # the process that used gRPC first, this one or an ancestor


def use_grpc(item: Any) -> None:
    """Says that ``item`` is a channel, call or server of gRPC in this process.

    A forked child keeps its copy for ever, and untouched: to end it would end the parent's.
    """
    global _user
    if _user is None and os.environ.get(_FORK_SUPPORT, "").lower() in {"1", "true", "yes"}:
        logger.warning(
            "%s is on: gRPC's handlers of forks kill forked children of a process with an open "
            "Fleet, and break its rollouts; leave it out, or say 0",
            _FORK_SUPPORT,
        )
    _user = os.getpid()
    _in_use.add(item)


def check_grpc() -> None:
    """Raises NotOpenHereError in a forked child of a process that has used gRPC."""
    if _user is not None and _user != os.getpid():
        raise NotOpenHereError(
            f"process {os.getpid()} is a fork of process {_user}, which had connected to servers: "
            "no fork of it can. Start this process with multiprocessing's 'spawn' or 'forkserver' "
            "(DataLoader: multiprocessing_context='spawn'), or before the first Fleet is opened"
        )


def _leave_alone() -> None:
    for item in _in_use:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))  # never freed
        if hasattr(item, "cancel"):  # a call, whose tasks may be cancelled here
            item.cancel = _cancelled


def _cancelled() -> NoReturn:
    raise asyncio.CancelledError


os.register_at_fork(after_in_child=_leave_alone)
