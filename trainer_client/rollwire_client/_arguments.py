"""Numbers that a caller gives, checked by their names where they are given.

What is no number at all is a TypeError; one that cannot be meant, such as NaN, is a ValueError.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = "a version: an integer from 0 to 2^63 - 1"
LONGEST = 1e9  # seconds; timers and messages can carry it, and nobody waits for longer


def number(name: str, value: object, *, least: float = 0.0, most: float = math.inf) -> float:
    """``value`` as a finite float from ``least`` to ``most``."""
    fitting = f"a number from {least:g} " + ("on" if most == math.inf else f"to {most:g}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_misfit(name, value, fitting))
    try:
        found = float(value)
    except OverflowError:  # an int beyond all floats
        found = math.inf
    if not (math.isfinite(found) and least <= found <= most):
        raise ValueError(_misfit(name, value, fitting))
    return found


def seconds(name: str, value: object, *, least: float = 0.0) -> float:
    """``value`` as a time that can be waited for."""
    return number(name, value, least=least, most=LONGEST)


def all_seconds(timeouts: DataclassInstance) -> None:
    """Checks a dataclass whose fields are all times."""
    for field in dataclasses.fields(timeouts):
        seconds(f"{type(timeouts).__name__}.{field.name}", getattr(timeouts, field.name))


def integer(name: str, value: object, *, least: int = 0, most: int | None = None) -> int:
    """``value`` as an int from ``least`` to ``most``: of any type of integers, numpy's too."""
    fitting = f"an integer from {least} " + ("on" if most is None else f"to {most}")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_misfit(name, value, fitting))
    whole = int(value)
    if whole < least or (most is not None and whole > most):
        raise ValueError(_misfit(name, value, fitting))
    return whole


def checked_version(name: str, value: object) -> int | None:
    """``value`` as a version of weights, the trainer's step: any integer of 63 bits, or None."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise TypeError(_misfit(name, value, VERSION))
    try:
        step = operator.index(value)  # type: ignore[arg-type]  # tensors of one integer too
    except TypeError:
        raise TypeError(_misfit(name, value, VERSION)) from None
    if not 0 <= step < 1 << 63:
        raise ValueError(_misfit(name, value, VERSION))
    return step


def _misfit(name: str, value: object, fitting: str) -> str:
    return f"{name} is {reprlib.repr(value)}, not {fitting}"
