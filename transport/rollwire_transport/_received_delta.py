"""The server's end of a delta: the digests that it leads to, and its changes put in place."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport._changed_runs import ChangedRuns, RunWriter
from rollwire_transport._delta import (
    HEAD_BYTES,
    decode,
    delta_kernels,
    full_size,
    not_a_delta,
)
from rollwire_transport._digest import (
    compile_sums,
    digest_of_sum,
    sum_of_digest,
)
from rollwire_transport._layout import padded_nbytes
from rollwire_transport._manifest import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollwire_transport._delta import DecodedDelta
    from rollwire_transport._delta_triton import GpuRunWriter
    from rollwire_transport._manifest import Bucket, Manifest, Span


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
        self._pieces: list[_WholePiece] = []
        for index, spec in enumerate(manifest.tensors):
            if spec.alias_of is None:
                self._targets[index] = self._in_words(as_bytes(serving[spec.name]))
        encoded = {}
        for number, bucket in enumerate(manifest.buckets):
            delta = deltas[str(number)]
            if bucket.size < full_size(bucket):
                encoded[bucket] = delta
                continue
            self._pieces += [
                _WholePiece(s.tensor, s.tensor_offset, delta[s.bucket_offset :][: s.length])
                for s in bucket.spans
            ]
        self._changed_tensors: list[int] = []
        self._changes: RunWriter | GpuRunWriter | None = None
        if encoded:
            self._changed_tensors, self._changes = _decoded(encoded, self._targets)

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
        if self._changes is not None:
            sums = self._changes.sums().tolist()
            for index, change in zip(self._changed_tensors, sums, strict=True):
                totals[index] += change
        for index, change in self._sums_of_pieces():
            totals[index] += change
        specs = self._manifest.tensors
        return {
            specs[index].name: digest_of_sum(specs[index], total) for index, total in totals.items()
        }

    def apply(self) -> None:
        """Puts the changes in place; waits for no device."""
        if self._changes is not None:
            self._changes.apply()
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

    def _sums_of_pieces(self) -> Iterator[tuple[int, int]]:
        if not self._pieces:
            return
        firsts = [piece.offset // 8 for piece in self._pieces]
        new = compile_sums([piece.new for piece in self._pieces], firsts)().tolist()
        old = compile_sums([self._target(piece) for piece in self._pieces], firsts)().tolist()
        for piece, after, before in zip(self._pieces, new, old, strict=True):
            yield piece.tensor, after - before


@dataclass(frozen=True, slots=True)
class _WholePiece:
    """Bytes of one tensor that were sent whole."""

    tensor: int
    offset: int
    new: Tensor


def _decoded(
    encoded: Mapping[Bucket, Tensor], targets: Mapping[int, Tensor]
) -> tuple[list[int], RunWriter | GpuRunWriter | None]:
    """The tensor of each run of changed words, and the runs; ManifestError if it is no delta of
    these buckets.
    """
    if any(delta.numel() < HEAD_BYTES for delta in encoded.values()):
        raise not_a_delta()
    heads = torch.stack([delta[:HEAD_BYTES].view(torch.int64) for delta in encoded.values()])
    decoded = [decode(*one) for one in zip(encoded.values(), heads.tolist(), strict=True)]
    spans = [span for bucket in encoded for span in bucket.spans]
    counts = [len(bucket.spans) for bucket in encoded]
    edges = torch.tensor(
        [[s.bucket_offset // 2, (s.bucket_offset + s.length + 1) // 2] for s in spans],
        dtype=torch.int32,
    ).to(heads.device)
    bounds = torch.cat(
        [
            torch.searchsorted(one.positions, of_one.contiguous())
            for one, of_one in zip(decoded, torch.split(edges, counts), strict=True)
        ]
    ).tolist()
    lengths = [last - first for first, last in bounds]
    until = [0, *itertools.accumulate(lengths)]  # how many changed words the spans before have
    after = itertools.accumulate(counts)
    done = 0
    totals = torch.stack([one.totals for one in decoded]).tolist()
    for bucket, one, last_span, (count, end) in zip(encoded, decoded, after, totals, strict=True):
        done += count
        if (
            count != one.bits.numel()
            or end > padded_nbytes(full_size(bucket)) // 2
            or until[last_span] != done
        ):
            raise not_a_delta()
        if any(_changes_padding(span, one) for span in bucket.spans if span.length % 2):
            raise not_a_delta()
    runs = [i for i, length in enumerate(lengths) if length]
    if not runs:
        return [], None
    kernels = delta_kernels(heads.device.type)
    tensors = [spans[i].tensor for i in runs]
    changed = ChangedRuns(
        torch.cat([one.positions for one in decoded]),
        torch.cat([one.bits for one in decoded]),
        ends=[until[i + 1] for i in runs],
        shifts=[(spans[i].tensor_offset - spans[i].bucket_offset) // 2 for i in runs],
        tensors=[targets[tensor] for tensor in tensors],
    )
    return tensors, RunWriter(changed) if kernels is None else kernels.GpuRunWriter(changed)


def _changes_padding(span: Span, decoded: DecodedDelta) -> bool:
    """Whether the byte changes that follows a span of odd length in its last word."""
    last = (span.bucket_offset + span.length) // 2
    return bool((decoded.bits[decoded.positions == last] >> 8).any())
