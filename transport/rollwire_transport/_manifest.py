"""The layout of a weight update as plain data, and tensors as specs and as bytes."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


class Encoding(enum.Enum):
    """What the bytes of a span are."""

    FULL = "full"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: As in the checkpoint.
        dtype: torch's name for it: "bfloat16", "float8_e4m3fn", …
        shape: Its dimensions; () is a scalar.
        alias_of: The tensor whose memory this one shares (tied embeddings). Only that one is sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one tensor's bytes in a bucket; ``tensor`` is an index into ``Manifest.tensors``."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent as one message: ``size`` bytes (for a delta: at most)."""

    size: int
    spans: tuple[Span, ...]
    sender: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of an update.

    Attributes:
        tensors: Those that are sent, then their aliases.
        buckets: In the order in which they are sent.
        encoding: Full bytes, or what changed.
        partial: Tensors that are not named keep their values.
        base_digest: For a delta: the digest of the weights that the receiver must hold.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    encoding: Encoding = Encoding.FULL
    partial: bool = False
    base_digest: int | None = None


# What can be sent: every dtype whose elements are whole bytes that can be copied as they are.
# Names that this torch does not know are left out.
_NAMES = (
    "bool",
    *("uint8", "uint16", "uint32", "uint64"),
    *("int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
    *("complex32", "complex64", "complex128"),
)
DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in _NAMES if hasattr(torch, n)}
_PLAIN = {Tensor, torch.nn.Parameter}  # of whose attributes none is looked up in vain
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ITEMSIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def describe(name: str, tensor: Tensor, alias_of: str | None = None) -> TensorSpec:
    """The spec of a tensor; of a DTensor, with its global shape.

    Raises:
        ValueError: It is no tensor, sparse, or of a dtype that cannot be sent.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: a {type(tensor).__name__} is not a torch tensor")  # noqa: TRY004
    dtype = _DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor of {str(tensor.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name}: a {kind} cannot be sent; make it dense")
    return TensorSpec(name, dtype, tuple(tensor.shape), alias_of)


def describe_all(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> list[TensorSpec]:
    """The specs of tensors in their order, with aliases detected.

    An alias is a tensor with the storage, offset, dtype, shape and strides of an earlier one. All
    of ``tensors`` are held until this returns, so that no address is reused meanwhile.

    Raises:
        ValueError: One of them cannot be sent; see ``describe``.
    """
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    first: dict[Any, str] = {}
    specs: list[TensorSpec] = []
    for name, tensor in items:
        spec = describe(name, tensor)
        source = first.setdefault(_identity(tensor), name)
        specs.append(spec if source == name else replace(spec, alias_of=source))
    return specs


def _identity(tensor: Tensor) -> Any:
    """A key that is equal for two live tensors that view the same memory in the same way."""
    local = tensor
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        local = tensor.to_local()
    pointer = local.untyped_storage().data_ptr()
    if pointer == 0:  # meta and empty tensors have no address
        return id(tensor)
    layout = (local.storage_offset(), local.dtype, local.shape, local.stride())
    return (local.device, pointer, tensor.shape, *layout)


def nbytes(spec: TensorSpec) -> int:
    size = ITEMSIZES[spec.dtype]
    for dimension in spec.shape:
        size *= dimension
    return size


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a one-dimensional view of uint8."""
    if not tensor.is_contiguous():
        raise ValueError("not contiguous")
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor.detach()
    # Not view(-1): a tensor of one element is contiguous whatever its strides, which stay.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
