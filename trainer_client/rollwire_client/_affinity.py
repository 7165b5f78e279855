"""The process and the event loop in which something was opened, and may be used.

A forked child has none of gRPC's threads; torch's DataLoader and ``multiprocessing`` fork by
default on Linux. So a child must not touch the gRPC objects that it inherited, and cannot use gRPC
itself once its parent has: whoever tries gets an error at once.
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
    # gRPC's own fork handlers start threads in the child, which work on the parent's connections:
    # children die, and messages of the parent are lost. gRPC reads the variable when it is
    # imported, and again after a reset; the value at its first use counts.
    os.environ[_FORK_SUPPORT] = "0"
    # Private to gRPC, and there from 1.80 to 1.85 at least. Without it the variable has an effect
    # only if gRPC was not imported before.
    getattr(cygrpc, "reset_grpc_config_vars", lambda: None)()

_grpc_objects: weakref.WeakSet[Any] = weakref.WeakSet()
_grpc_process: int | None = None  # which used gRPC first: this one or an ancestor


class LoopAffinity:
    """The process and the event loop that opened ``name``, as messages have it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._loop = _running_loop()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened it."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises NotOpenHereError in another process or event loop."""
        self.check_process()
        loop = _running_loop()
        if loop is self._loop or loop is None or self._loop is None:
            return
        state = "has ended" if self._loop.is_closed() else "is not this one"
        raise NotOpenHereError(
            f"this {self._name} was opened in an event loop that {state}: open one in each "
            "asyncio.run and each thread, or use SyncFleet, which any thread may"
        )

    def check_process(self) -> None:
        if self.forked:
            raise NotOpenHereError(
                f"this {self._name} was opened in process {self._process}, of which process "
                f"{os.getpid()} is a fork: use it there; or start this process with "
                "multiprocessing's 'spawn' or 'forkserver' (DataLoader: "
                "multiprocessing_context='spawn'), and open one in it"
            )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def use_grpc(item: Any) -> None:
    """Registers a channel, call or server of gRPC, which forked children must not end."""
    global _grpc_process
    if _grpc_process is None and os.environ.get(_FORK_SUPPORT, "").lower() in {"1", "true", "yes"}:
        logger.warning(
            "%s is on: gRPC's fork handlers kill forked children of a process with an open Fleet, "
            "and break its rollouts; leave it out, or set it to 0",
            _FORK_SUPPORT,
        )
    _grpc_process = os.getpid()
    _grpc_objects.add(item)


def check_grpc() -> None:
    """Raises NotOpenHereError in a forked child of a process that has used gRPC."""
    if _grpc_process is not None and _grpc_process != os.getpid():
        raise NotOpenHereError(
            f"process {os.getpid()} is a fork of process {_grpc_process}, which had connected to "
            "servers: no fork of it can. Start this process with multiprocessing's 'spawn' or "
            "'forkserver' (DataLoader: multiprocessing_context='spawn'), or before the first Fleet "
            "is opened"
        )


def _keep_untouched() -> None:
    """In a forked child: freeing or cancelling the copies would end those of the parent."""
    for item in _grpc_objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))  # never freed
        if hasattr(item, "cancel"):  # a call, whose tasks may be cancelled here
            item.cancel = _cancelled


def _cancelled() -> NoReturn:
    raise asyncio.CancelledError


os.register_at_fork(after_in_child=_keep_untouched)
