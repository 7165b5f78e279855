"""Tensors as specs and as bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollwire_transport._manifest import TensorSpec

logger = logging.getLogger(__name__)

# What may travel: every dtype whose elements are whole bytes that can be copied as they are.
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
ITEMSIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def describe(name: str, tensor: Tensor, alias_of: str | None = None) -> TensorSpec:
    """The spec of a tensor; of a DTensor, with its global shape.

    Raises:
        ValueError: It is no tensor, sparse, or of a dtype that cannot travel.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: a {type(tensor).__name__} is no tensor of torch's")  # noqa: TRY004
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not torch.strided:
        raise ValueError(
            f"{name}: a {tensor.layout} tensor of {dtype} cannot travel; send it dense"
        )
    return TensorSpec(name, dtype, tuple(tensor.shape), alias_of)


def describe_all(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> list[TensorSpec]:
    """The specs of tensors in their order, with aliases recognised.

    An alias is a tensor with the storage, offset, dtype, shape and strides of an earlier one. All
    of ``tensors`` are held until this returns, so that an address is never taken for another's.

    Raises:
        ValueError: One of them cannot travel; see ``describe``.
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
    """Equal for two live tensors that are one memory seen in one way."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    pointer = local.untyped_storage().data_ptr()
    if pointer == 0:  # meta and empty tensors have no memory to tell them by
        return id(tensor)
    layout = (local.storage_offset(), local.dtype, tuple(local.shape), local.stride())
    return (local.device, pointer, tuple(tensor.shape), *layout)


def materialize(given: Tensor | Callable[[], Tensor]) -> Tensor:
    """What a source gives, as a tensor that lies here: a function is called, a DTensor gathered,
    which all ranks of its mesh have to do side by side.
    """
    tensor = given() if callable(given) else given
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def close_source(items: object) -> None:
    """Ends what a source gave to iterate over, in the thread that iterated."""
    if (close := getattr(items, "close", None)) is None:  # no generator
        return
    try:
        close()
    except Exception:
        logger.exception("the source raised something when it was closed")


def nbytes(spec: TensorSpec) -> int:
    """How many bytes a tensor of this spec has."""
    size = ITEMSIZES[spec.dtype]
    for dimension in spec.shape:
        size *= dimension
    return size


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as one run of uint8: a view, never a copy.

    Raises:
        ValueError: It is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError("not contiguous")
    # Not view(-1): a tensor of one element is contiguous whatever its strides, which stay.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
