"""The server's end of a delta: the digests that it leads to, and its changes put in place."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport._delta import decode, full_size
from rollwire_transport._digest import (
    GOLDEN,
    compile_sums,
    digest_of_sum,
    mix_words,
    signed,
    sum_of_digest,
)
from rollwire_transport._errors import ManifestError
from rollwire_transport._layout import padded_nbytes
from rollwire_transport._manifest import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollwire_transport._manifest import Manifest

# Changed words whose sums are computed at a time: on a device a launch should take longer than its
# start, and its memory is taken beside what serves.
_TILE = 1 << 24


class ReceivedDelta:
    """A delta that was received whole. It holds the memory of its changes, and of the deltas.

    Args:
        manifest: Its layout.
        deltas: What was received, in the ``delta_layout`` of the manifest.
        serving: The tensors that it changes, by name; contiguous, on the device of ``deltas``. They
            must not change before ``apply``.

    Raises:
        ManifestError: What was received is not a delta of this layout.
    """

    def __init__(
        self, manifest: Manifest, deltas: Mapping[str, Tensor], serving: Mapping[str, Tensor]
    ) -> None:
        self._manifest = manifest
        self._targets: dict[int, Tensor] = {}  # bytes, whole words of 64 bits
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._changes: list[_ChangedWords] = []
        self._pieces: list[_WholePiece] = []
        for index, spec in enumerate(manifest.tensors):
            if spec.alias_of is None:
                self._targets[index] = self._in_words(as_bytes(serving[spec.name]))
        for number, bucket in enumerate(manifest.buckets):
            delta = deltas[str(number)]
            if bucket.size == full_size(bucket):
                self._pieces += [
                    _WholePiece(s.tensor, s.tensor_offset, delta[s.bucket_offset :][: s.length])
                    for s in bucket.spans
                ]
                continue
            positions, bits = decode(delta, full_size(bucket))
            begins = [span.bucket_offset // 2 for span in bucket.spans]
            ends = [(span.bucket_offset + span.length + 1) // 2 for span in bucket.spans]
            bounds = torch.searchsorted(
                positions, torch.tensor([begins, ends], device=positions.device)
            )
            changed = 0
            for span, first, last in zip(bucket.spans, *bounds.tolist(), strict=True):
                if first < last:
                    moved = positions[first:last] + (span.tensor_offset - span.bucket_offset) // 2
                    self._changes.append(_ChangedWords(span.tensor, moved, bits[first:last]))
                    changed += last - first
            if changed != positions.numel():
                raise ManifestError([f"the delta of bucket {number} changes what is no tensor"])

    def digests(self, before: Mapping[str, int]) -> dict[str, int]:
        """The digest that each tensor will have, from those that they have now.

        It follows from the changed words alone. Their old bits are read where they lie, so that it
        is another one if they are not those on which the delta builds.
        """
        totals = {
            index: sum_of_digest(spec, before[spec.name])
            for index, spec in enumerate(self._manifest.tensors)
            if spec.alias_of is None
        }
        for index, change in itertools.chain(self._sums_of_changes(), self._sums_of_pieces()):
            totals[index] += change
        specs = self._manifest.tensors
        return {
            specs[index].name: digest_of_sum(specs[index], total) for index, total in totals.items()
        }

    def apply(self) -> None:
        """Puts the changes in place; waits for no device."""
        for changes in self._changes:
            words = self._targets[changes.tensor].view(torch.int16)
            words.index_copy_(0, changes.positions, changes.bits)
        for piece in self._pieces:
            self._target(piece).copy_(piece.new, non_blocking=True)
        for tensor, copy in self._copied:
            tensor.copy_(copy[: tensor.numel()], non_blocking=True)

    def _in_words(self, tensor: Tensor) -> Tensor:
        """A tensor's bytes; a padded copy, if they are not whole words of 64 bits."""
        if not (tensor.numel() % 8 or tensor.data_ptr() % 8 or tensor.storage_offset() % 8):
            return tensor
        copy = tensor.new_zeros(padded_nbytes(tensor.numel()))
        copy[: tensor.numel()] = tensor
        self._copied.append((tensor, copy))
        return copy

    def _target(self, piece: _WholePiece) -> Tensor:
        return self._targets[piece.tensor][piece.offset :][: piece.new.numel()]

    def _sums_of_changes(self) -> Iterator[tuple[int, int]]:
        tile: list[_ChangedWords] = []
        words = 0
        for changes in self._changes:
            tile.append(changes)
            words += changes.positions.numel()
            if words >= _TILE:
                yield from self._sums_of(tile)
                tile, words = [], 0
        if tile:
            yield from self._sums_of(tile)

    def _sums_of(self, tile: Sequence[_ChangedWords]) -> Iterator[tuple[int, int]]:
        positions = torch.cat([changes.positions for changes in tile])
        bits = torch.cat([changes.bits for changes in tile]).long() & 0xFFFF
        device = positions.device
        ends = list(itertools.accumulate(changes.positions.numel() for changes in tile))
        begins = [0, *ends[:-1]]
        words = positions >> 2  # of 64 bits
        old = torch.cat(
            [
                self._targets[c.tensor].view(torch.int64).index_select(0, words[begin:end])
                for c, begin, end in zip(tile, begins, ends, strict=True)
            ]
        )
        # Several changed words of 16 bits may lie in one of 64.
        is_first = torch.ones_like(words, dtype=torch.bool)
        is_first[1:] = words[1:] != words[:-1]
        is_first[torch.tensor(begins, device=device)] = True
        number = is_first.cumsum(0) - 1
        first = is_first.nonzero().squeeze(1)
        shift = (positions & 3) * 16
        masks, merged = (
            torch.zeros_like(first).index_add_(0, number, part << shift)
            for part in (torch.full_like(bits, 0xFFFF), bits)
        )
        old = old[first]
        new = (old & ~masks) | merged
        keys = words[first] * signed(GOLDEN)
        sums = (mix_words(new + keys) - mix_words(old + keys)).cumsum(0)
        until = sums[number[torch.tensor(ends, device=device) - 1]].tolist()
        for changes, before, after in zip(tile, [0, *until[:-1]], until, strict=True):
            yield changes.tensor, after - before

    def _sums_of_pieces(self) -> Iterator[tuple[int, int]]:
        if not self._pieces:
            return
        firsts = [piece.offset // 8 for piece in self._pieces]
        new = compile_sums([piece.new for piece in self._pieces], firsts)().tolist()
        old = compile_sums([self._target(piece) for piece in self._pieces], firsts)().tolist()
        for piece, after, before in zip(self._pieces, new, old, strict=True):
            yield piece.tensor, after - before


@dataclass(frozen=True, slots=True)
class _ChangedWords:
    """Changed words of 16 bits of one tensor: their positions in it, and their new bits."""

    tensor: int
    positions: Tensor  # int64, ascending
    bits: Tensor  # int16


@dataclass(frozen=True, slots=True)
class _WholePiece:
    """Bytes of one tensor that were sent whole."""

    tensor: int
    offset: int
    new: Tensor
