"""Changed words of tensors: what they do to the tensors' sums, and how they get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport._digest import GOLDEN, mix_words, signed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class ChangedRuns:
    """Runs of changed words of 16 bits, each in a tensor of its own, on one device.

    Attributes:
        positions: int32, of all runs: positions in their buckets, ascending in each run.
        bits: int16, the new bits of these words.
        ends: Where each run ends among them.
        shifts: What is added to a run's positions, to get those in its tensor.
        tensors: The bytes of each run's tensor: whole words of 64 bits.
    """

    positions: Tensor
    bits: Tensor
    ends: Sequence[int]
    shifts: Sequence[int]
    tensors: Sequence[Tensor]


class RunWriter:
    """Writes changed words where they belong."""

    def __init__(self, runs: ChangedRuns) -> None:
        self._runs = runs

    def sums(self) -> Tensor:
        """By how much each run changes the sum of its tensor (int64)."""
        return torch.stack([_change_of_sum(*run) for run in self._each()])

    def apply(self) -> None:
        """Writes the new bits."""
        for tensor, positions, bits in self._each():
            tensor.view(torch.int16).index_copy_(0, positions, bits)

    def _each(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        runs = self._runs
        begins = [0, *runs.ends[:-1]]
        for tensor, begin, end, shift in zip(
            runs.tensors, begins, runs.ends, runs.shifts, strict=True
        ):
            yield tensor, runs.positions[begin:end].long() + shift, runs.bits[begin:end]


def _change_of_sum(tensor: Tensor, positions: Tensor, bits: Tensor) -> Tensor:
    words = positions >> 2  # of 64 bits: several changed words of 16 may lie in one of them
    touched, number = torch.unique_consecutive(words, return_inverse=True)
    moved = (positions & 3) * 16
    masks, merged = (
        torch.zeros_like(touched).index_add_(0, number, part << moved)
        for part in (torch.full_like(positions, 0xFFFF), bits.long() & 0xFFFF)
    )
    old = tensor.view(torch.int64)[touched]
    new = (old & ~masks) | merged
    keys = touched * signed(GOLDEN)
    return (mix_words(new + keys) - mix_words(old + keys)).sum()
