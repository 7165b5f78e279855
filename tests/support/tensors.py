"""Tensors of every kind that may travel, for Hypothesis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from rollwire_transport import packed_nbytes, packed_views
from rollwire_transport._manifest import DTYPES
from torch import Tensor

if TYPE_CHECKING:
    from rollwire_transport import Manifest

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.just((300,))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits: NaNs with payloads, denormals, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype, shape and strides."""
    shape = draw(shapes)
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    layout = draw(st.sampled_from(("contiguous", "transposed", "strided", "conjugate")))
    seed = draw(st.integers(0, 2**32))
    if layout == "transposed":
        reverse = tuple(range(len(shape)))[::-1]
        return random_tensor(dtype, shape[::-1], seed).permute(reverse)
    if layout == "strided" and shape:
        return random_tensor(dtype, (*shape, 3), seed)[..., 1]
    if layout == "conjugate" and dtype.is_complex:
        return random_tensor(dtype, shape, seed).conj()
    return random_tensor(dtype, shape, seed)


@st.composite
def weights(draw: st.DrawFn) -> dict[str, Tensor]:
    """Named tensors, some of them the same memory, at least one."""
    result = {f"t{i}": t for i, t in enumerate(draw(st.lists(tensors(), min_size=1, max_size=5)))}
    for number, source in enumerate(draw(st.lists(st.sampled_from(sorted(result)), max_size=3))):
        result[f"tied{number}"] = result[source]
    return result


def room_in_one(manifest: Manifest) -> dict[str, Tensor]:
    """As ``room_for``, in one memory as in the buckets."""
    sent = [spec for spec in manifest.tensors if spec.alias_of is None]
    return packed_views(sent, torch.full((packed_nbytes(sent),), 99, dtype=torch.uint8))


def content(tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor)
    return bytes(plain.view(-1).view(torch.uint8).tolist())


def room_for(manifest: Manifest) -> dict[str, Tensor]:
    """Where a manifest's tensors may be received; full of something else."""
    return {
        spec.name: random_tensor(DTYPES[spec.dtype], spec.shape, seed=99)
        for spec in manifest.tensors
        if spec.alias_of is None
    }
