"""Sequences that have ended and whose tokens stay for somebody, and how much memory they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollwire_server.sequences.sequence import Sequence


class Retained:
    """Ended sequences, oldest first.

    Args:
        most: Sequences.
        most_bytes: Of all of them together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: dict[Sequence, int] = {}
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether they are more than there should be."""
        return len(self._sizes) > self._most or self._bytes > self._most_bytes

    @property
    def oldest(self) -> Sequence:
        """The one that ended first."""
        return next(iter(self._sizes))

    def add(self, sequence: Sequence) -> None:
        """Takes one that has ended, once."""
        if sequence not in self._sizes:
            self._sizes[sequence] = size = sequence.held_bytes()
            self._bytes += size

    def discard(self, sequence: Sequence) -> None:
        """Lets one go, if it is there."""
        self._bytes -= self._sizes.pop(sequence, 0)
