"""Packed experts of a trainer, for servers that have each matrix of each expert by itself."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import rollwire_transport as transport
from torch import Tensor

from rollwire_client._publishing.problems import mismatch, shape_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_transport import Gathered

    from rollwire_client._publishing.names import Match
    from rollwire_client._publishing.tensors import TensorOrFunction


def unpack(
    local_name: str, value: TensorOrFunction, match: Match
) -> Iterator[tuple[str, Tensor | functools.partial[Gathered]]]:
    """The matrices of a tensor that packs them, by their names on the servers, as views of it.

    A function is called, and a DTensor gathered, once, when the first matrix is needed.
    """
    if isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
        yield from zip(match.names, _views(value, match), strict=True)
        return
    packed = _Packed(local_name, value, match)
    del value
    for place, name in enumerate(match.names):
        yield name, functools.partial(packed.matrix, place)


class _Packed:
    def __init__(self, local_name: str, value: TensorOrFunction, match: Match) -> None:
        self._local_name = local_name
        self._value: TensorOrFunction | None = value
        self._match = match
        self._views: list[Tensor] = []

    def matrix(self, place: int) -> Gathered:
        if (value := self._value) is not None:
            self._value = None
            tensor, self._cast_from = transport.materialize(value)
            got = transport.describe(self._local_name, tensor)
            if got.shape != self._match.spec.shape:
                raise mismatch(shape_problem(got, self._match.spec))
            self._views = _views(tensor, self._match)
        return transport.Gathered(self._views[place], self._cast_from)


def _views(tensor: Tensor, match: Match) -> list[Tensor]:
    experts, rows, columns = tensor.shape
    each = len(match.names) // experts
    by_expert = tensor.view(experts, each, rows // each, columns)
    return [matrix for expert in by_expert.unbind() for matrix in expert.unbind()]
