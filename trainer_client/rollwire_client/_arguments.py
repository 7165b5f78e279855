"""Checks of what a caller gives, and words that several messages share.

A value of another type is a TypeError; one out of range, or NaN, is a ValueError. Both name the
argument.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = "a version: an integer from 0 to 2^63 - 1"
MAX_SECONDS = 1e9  # timers and messages can carry it, and nobody waits for longer
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def number(name: str, value: object, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """``value`` as a finite float from ``minimum`` to ``maximum``."""
    expected = f"a number from {minimum:g} " + ("on" if maximum == math.inf else f"to {maximum:g}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_mismatch(name, value, expected))
    try:
        found = float(value)
    except OverflowError:  # an int beyond all floats
        found = math.inf
    if not (math.isfinite(found) and minimum <= found <= maximum):
        raise ValueError(_mismatch(name, value, expected))
    return found


def seconds(name: str, value: object, *, minimum: float = 0.0) -> float:
    return number(name, value, minimum=minimum, maximum=MAX_SECONDS)


def all_seconds(timeouts: DataclassInstance) -> None:
    for field in dataclasses.fields(timeouts):
        seconds(f"{type(timeouts).__name__}.{field.name}", getattr(timeouts, field.name))


def integer(name: str, value: object, *, minimum: int = 0, maximum: int | None = None) -> int:
    """``value`` as an int from ``minimum`` to ``maximum``: of any type of integers, numpy's too."""
    expected = f"an integer from {minimum} " + ("on" if maximum is None else f"to {maximum}")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_mismatch(name, value, expected))
    whole = int(value)
    if whole < minimum or (maximum is not None and whole > maximum):
        raise ValueError(_mismatch(name, value, expected))
    return whole


def checked_version(name: str, value: object) -> int | None:
    """``value`` as a version of weights, the trainer's step: any integer of 63 bits, or None."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise TypeError(_mismatch(name, value, VERSION))
    try:
        step = operator.index(value)  # type: ignore[arg-type]  # tensors of one integer too
    except TypeError:
        raise TypeError(_mismatch(name, value, VERSION)) from None
    if not 0 <= step < 1 << 63:
        raise ValueError(_mismatch(name, value, VERSION))
    return step


def server_address(value: str) -> str:
    """``value``, if it is HOST:PORT; an IPv6 address is in brackets, as in [::1]:50051."""
    if not isinstance(value, str):
        raise TypeError(f"the address {value!r} is not text such as '127.0.0.1:50051'")
    if not (match := _ADDRESS.fullmatch(value)) or not 0 < int(match["port"]) < 65536:
        raise ValueError(
            f"{value!r} is not HOST:PORT, such as 127.0.0.1:50051, with a port from 1 to 65535"
        )
    return value


def _mismatch(name: str, value: object, expected: str) -> str:
    return f"{name} is {reprlib.repr(value)}, not {expected}"


def update_text(version: int | None) -> str:
    return "an update without a version" if version is None else f"version {version}"


def servers_text(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"
