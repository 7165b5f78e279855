"""Digests, which tell whether bytes arrived as they were sent.

They detect accidents, not attackers: who can change the bytes can change the digest too.
All arithmetic is on unsigned 64-bit integers, modulo 2^64; ``>>`` shifts zeros in.

``mix`` is the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014), a bijection::

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
             x ^= x >> 27;  x *= 0x94D049BB133111EB
             x ^= x >> 31

**Sum of a span.** A tensor's bytes (its elements in row-major order, little-endian) are read as
little-endian 64-bit words w_0, w_1, …, the last one padded with zero bytes. With
G = 0x9E3779B97F4A7C15 the sum over words i of a span is::

    S = Σ mix(w_i + i · G)

The index i counts from the start of the tensor, so the sums of a tensor's spans add up to its sum.
A change within one word always changes S, as mix is a bijection; one of several words is missed
with a probability of about 2^-64.

**Digest of a tensor.** ``mix(S + salt)``, where salt is the 8 bytes, little-endian, of BLAKE2b with
digest size 8 and personalization "rollwire" (padded with zeros to 16 bytes) over: the name's
length in bytes (u32) and the name in UTF-8; the dtype's length (u32) and its name; the number of
dimensions (u32) and each dimension (u64), all little-endian. An empty tensor has S = 0.

**Digest of a set of tensors.** The sum of their digests. Aliases are no members of it.

**Digest of a bucket.** With b its index in the manifest and S_0, S_1, … the sums of its spans::

    h = mix(b + 1);  for each S_j:  h = mix((h ^ S_j) + G)

Padding between spans is not covered.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rollwire_transport._manifest import Span, TensorSpec, as_bytes, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_STEPS_BACK = [(shift, pow(factor, -1, 1 << 64)) for shift, factor in reversed(_STEPS)]

# Words that are mixed at a time: on a CPU few enough that they and two scratch rows stay in the L2
# cache, elsewhere enough that a launch takes far longer than its start.
_CPU_TILE = 1 << 16
_DEVICE_TILE = 1 << 22

# Fewer words than this are not worth another CPU thread.
_CPU_MIN_SHARE = 1 << 19


def mix(value: int) -> int:
    value &= _MASK
    for shift, factor in _STEPS:
        value = (value ^ value >> shift) * factor & _MASK
    return value


def _unmix(value: int) -> int:
    for shift, inverse in _STEPS_BACK:
        value = value * inverse & _MASK
        value ^= value >> shift ^ value >> 2 * shift
    return value


def tensor_digest(spec: TensorSpec, tensor: Tensor) -> int:
    """The digest of one tensor, of any strides, on any device.

    Raises:
        ValueError: The tensor is not what the spec says.
    """
    _check(spec, tensor)
    return digest_of_sum(spec, int(compile_sums([tensor])()))


def tensor_digests(specs: Iterable[TensorSpec], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each tensor that has a spec, without aliases.

    Those of one GPU are computed by one launch, and waited for once.

    Raises:
        ValueError: A tensor is not what its spec says.
    """
    by_device: dict[torch.device, list[TensorSpec]] = {}
    for spec in specs:
        if spec.alias_of is None:
            _check(spec, tensors[spec.name])
            by_device.setdefault(tensors[spec.name].device, []).append(spec)
    digests = {}
    for there in by_device.values():
        totals = compile_sums([tensors[spec.name] for spec in there])().tolist()
        for spec, total in zip(there, totals, strict=True):
            digests[spec.name] = digest_of_sum(spec, total)
    return digests


def compile_sums(
    tensors: Sequence[Tensor], firsts: Sequence[int] | None = None
) -> Callable[[], Tensor]:
    """A function that sums each tensor's content at the time of the call.

    It returns int64 sums on the tensors' device without waiting for it; ``digest_of_sum`` makes
    digests of them. The tensors are dense, on one device, and stay where they are. On a GPU each
    call is one launch, however many they are. ``firsts`` has the index of each one's first word,
    for pieces of tensors.
    """
    firsts = firsts or [0] * len(tensors)
    triton = triton_kernels(tensors[0].device.type)
    if triton is None or not all(t.is_contiguous() and t.data_ptr() % 8 == 0 for t in tensors):
        return lambda: torch.stack([_tensor_sum(*one) for one in zip(tensors, firsts, strict=True)])
    held = [as_bytes(tensor) for tensor in tensors]
    base = held[0]
    ranges = [
        triton.ByteRange(t.data_ptr() - base.data_ptr(), t.numel(), first)
        for t, first in zip(held, firsts, strict=True)
    ]
    grouped_sums = triton.GroupedSums([ranges], [0], base.device)

    def sums() -> Tensor:
        out = torch.zeros(4 + len(held), dtype=torch.int64, device=base.device)
        grouped_sums.sum(0, base, out, digest=False)
        return out[4:]

    return sums


def sum_digests(digests: Iterable[int]) -> int:
    """The digest of a set of tensors from their own."""
    return sum(digests) & _MASK


def digest_of_sum(spec: TensorSpec, total: int) -> int:
    """The digest of a tensor whose spans' sums add up to ``total``."""
    return mix(total + _salt(spec))


def sum_of_digest(spec: TensorSpec, digest: int) -> int:
    """The sum of a tensor's spans, from its digest."""
    return (_unmix(digest) - _salt(spec)) & _MASK


@functools.lru_cache(maxsize=1 << 16)
def _salt(spec: TensorSpec) -> int:
    name, dtype = spec.name.encode(), spec.dtype.encode()
    text = struct.pack(
        f"<I{len(name)}sI{len(dtype)}sI{len(spec.shape)}Q",
        *(len(name), name, len(dtype), dtype, len(spec.shape), *spec.shape),
    )
    salt = hashlib.blake2b(text, digest_size=8, person=b"rollwire").digest()
    return int.from_bytes(salt, "little")


def bucket_digest(index: int, sums: Sequence[int]) -> int:
    """The digest of a bucket from the sums of its spans, both as int64."""
    value = mix(index + 1)
    for total in sums:
        value = mix((value ^ total & _MASK) + GOLDEN)
    return signed(value)


@functools.cache
def triton_kernels(device_type: str) -> ModuleType | None:
    if device_type != "cuda":
        return None
    try:  # Triton comes with torch for CUDA, but wants a C compiler
        from rollwire_transport import _digest_triton as digest_triton

        some = torch.zeros(40, dtype=torch.uint8, device=device_type)
        grouped_sums = digest_triton.GroupedSums(
            [[digest_triton.ByteRange(0, 8, 0)]], [0], some.device
        )
        for digest in (False, True):  # compiles
            grouped_sums.sum(0, some, some.view(torch.int64), digest=digest)
    except Exception as error:  # whatever it is, torch alone does it too
        logger.warning("digests are slower without Triton: %s: %s", type(error).__name__, error)
        return None
    return digest_triton


def _check(spec: TensorSpec, tensor: Tensor) -> None:
    if (found := describe(spec.name, tensor, spec.alias_of)) != spec:
        raise ValueError(f"the tensor is {found}, the spec is {spec}")


def _tensor_sum(tensor: Tensor, first: int) -> Tensor:
    data = as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
    return span_sum(data, Span(0, 8 * first, 0, data.numel()))


def span_sum(data: Tensor, span: Span) -> Tensor:
    """The sum of a span of a bucket's bytes, an int64 scalar on their device."""
    sum_words = _sum_words_cpu if data.device.type == "cpu" else _sum_words
    piece = data[span.bucket_offset : span.bucket_offset + span.length]
    if piece.data_ptr() % 8 or piece.storage_offset() % 8:  # never so in a bucket
        piece = piece.clone()
    whole, first = span.length // 8 * 8, span.tensor_offset // 8
    total = sum_words(piece[:whole].view(torch.int64), first)
    if whole < span.length:
        last = piece.new_zeros(8)
        last[: span.length - whole] = piece[whole:]
        total = total + sum_words(last.view(torch.int64), first + whole // 8)
    return total


def _sum_words(words: Tensor, first: int) -> Tensor:
    total = words.new_zeros(())
    for start in range(0, words.numel(), _DEVICE_TILE):
        tile = words[start : start + _DEVICE_TILE]
        begin = first + start
        x = torch.arange(begin, begin + tile.numel(), device=words.device)
        total += mix_words(x.mul_(signed(GOLDEN)).add_(tile)).sum()
    return total


def mix_words(words: Tensor) -> Tensor:
    """``mix`` of each word, int64, in place."""
    for shift, factor in _STEPS:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 64 - shift) - 1))
        if factor != 1:
            words.mul_(signed(factor))
    return words


_CPU_KEYS = np.arange(_CPU_TILE, dtype=np.uint64) * np.uint64(GOLDEN)


def _sum_words_cpu(words: Tensor, first: int) -> Tensor:
    # By numpy, which shifts unsigned words where torch must shift and mask.
    source: NDArray[np.uint64] = words.numpy().view(np.uint64)
    parts = min(torch.get_num_threads(), len(source) // _CPU_MIN_SHARE)
    if parts < 2:
        total = _sum_part(source, first)
    else:
        bounds = [len(source) * i // parts for i in range(parts + 1)]
        with ThreadPoolExecutor(parts) as pool:
            sums = [
                pool.submit(_sum_part, source[start:stop], first + start)
                for start, stop in itertools.pairwise(bounds)
            ]
            total = sum(future.result() for future in sums)
    return torch.tensor(signed(total & _MASK))


def _sum_part(source: NDArray[np.uint64], first: int) -> int:
    scratch = np.empty((2, min(len(source), _CPU_TILE)), dtype=np.uint64)
    total = 0
    for start in range(0, len(source), _CPU_TILE):
        tile = source[start : start + _CPU_TILE]
        x, shifted = scratch[:, : len(tile)]
        np.add(_CPU_KEYS[: len(tile)], np.uint64((first + start) * GOLDEN & _MASK), out=x)
        np.add(x, tile, out=x)
        for shift, factor in _STEPS:
            np.right_shift(x, np.uint64(shift), out=shifted)
            np.bitwise_xor(x, shifted, out=x)
            if factor != 1:
                np.multiply(x, np.uint64(factor), out=x)
        total += int(x.sum(dtype=np.uint64))
    return total


def signed(value: int) -> int:
    """The same 64 bits as a number that torch takes."""
    return value - (1 << 64) if value >> 63 else value
