"""Addresses that no other process of this machine's tests uses."""

from __future__ import annotations

import functools
import os
import socket


@functools.cache
def _number(_pid: int) -> int:
    """Of this process alone, from 1 to 254: the kernel lends a socket's name once at a time."""
    for number in range(1, 255):
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(f"\0rollwire-tests-{number}")
        except OSError:
            taken.close()
        else:
            taken.detach()  # it stays open until this process ends
            return number
    raise RuntimeError("254 test processes run on this machine already")


def number() -> int:
    """From 1 to 254."""
    return _number(os.getpid())


def host(which: int = 1) -> str:
    """A loopback address. Ports of servers there stay theirs while they are started again: what
    connects to anything does so from 127.0.0.1.
    """
    return f"127.213.{number()}.{which}"
