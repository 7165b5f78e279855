"""The fields of a request's body: each is read once, and one that nobody reads is refused.

A field that changes what is sampled must never be ignored. So a request names a field that the
gateway does not know, or cannot do, and gets an error that says which.
"""

from __future__ import annotations

import math
import reprlib
import sys
from typing import TYPE_CHECKING, Any

from rollwire_client._gateway.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST_SHOWN = 80  # characters of a wrong value, in messages
_MAX_FLOAT = sys.float_info.max
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _LONGEST_SHOWN


class Fields:
    """A JSON object that a request brought; null counts as absent."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid(f"{path or 'the body'} is not a JSON object", path or None)
        self._path = path
        self._left = {name: item for name, item in value.items() if item is not None}

    def get(self, name: str) -> Any:
        """A field that is still to be read."""
        return self._left.get(name)

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def number(self, *names: str) -> float | None:
        name, value = self._first(names)
        if value is None:
            return None
        if not _is_number(value) or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            raise self.wrong(name, value, "a number")
        return float(value)

    def integer(
        self, *names: str, minimum: int | None = None, maximum: int | None = None
    ) -> int | None:
        name, value = self._first(names)
        if value is None:
            return None
        low = -math.inf if minimum is None else minimum
        high = math.inf if maximum is None else maximum
        if not _is_integer(value) or not low <= value <= high:
            end = "on" if maximum is None else f"to {maximum}"
            bounds = f" from {minimum} {end}" if minimum is not None else ""
            raise self.wrong(name, value, f"an integer{bounds}")
        return int(value)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """One text or a list of them."""
        value = self.take(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise self.wrong(name, value, "a text, or a list of texts")
        if not all(values):
            raise self.wrong(name, value, "texts of at least one character")
        return tuple(values)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        value = self.take(name)
        if value is not None and not is_token_ids(value):
            raise self.wrong(name, value, "a list of token ids")
        return None if value is None else tuple(value)

    def object(self, name: str) -> Fields:
        """An object within this one; without fields if it is absent."""
        return Fields(self.take(name, {}), self._name(name))

    def only(self, name: str, *values: Any) -> None:
        """A field that the gateway cannot do: only the values that change nothing are taken."""
        value = self.take(name)
        if value is None or any(_same(value, neutral) for neutral in values):
            return
        supported = f"only {' or '.join(map(repr, values))} is" if values else "it is not"
        raise invalid(
            f"{self._name(name)} is {shown(value)}: {supported} supported",
            self._name(name),
            "unsupported_value",
        )

    def off(self, name: str) -> None:
        """A switch that the gateway cannot turn on."""
        self.only(name, *(False,))

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that change nothing of what is sampled."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuses what nobody has read."""
        if self._left:
            name = next(iter(self._left))
            raise invalid(
                f"{self._name(name)[:_LONGEST_SHOWN]} is not supported: leave it out",
                self._name(name),
                "unsupported_parameter",
            )

    def wrong(self, name: str, value: Any, expected: str) -> Exception:
        return invalid(f"{self._name(name)} is {shown(value)}, not {expected}", self._name(name))

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The value of a field that has several names, of which one may be given."""
        given = [name for name in names if name in self._left]
        if len(given) > 1:
            raise invalid(f"{' and '.join(given)} mean the same: give one of them", given[1])
        name = given[0] if given else names[0]
        return name, self.take(name)

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_integer(item) and item >= 0 for item in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def shown(value: Any) -> str:
    text = _shortened.repr(value)  # never the whole of a large or deep one
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
