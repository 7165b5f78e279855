"""Where a model puts the tensors of a checkpoint: learned once, from its own loader.

SGLang's models fuse and shard what they load, each in its own way. Here ``load_weights`` runs over
tensors without memory, and each copy that it asks for is noted and not made. Later all copies of an
update are made as one, in milliseconds. A loader that does more than copy has no recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

COPY = torch.ops.aten.copy_.default
# What pads a parameter: done when the model was first loaded, and never changed since.
PADDING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class NoRecipeError(Exception):
    """Loading this model takes more than copies."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy: what of a tensor goes where.

    Attributes:
        target: Part of a parameter.
        size, stride, offset: Of the source, in elements of the contiguous checkpoint tensor.
    """

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensor: Tensor) -> Tensor:
        """What is copied of a checkpoint's ``tensor``, as a view."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


Recipe = dict[str, list[Piece]]
"""The copies of each checkpoint tensor; none of one that this process has no part of."""


def learn(model: nn.Module, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> Recipe:
    """How ``model`` loads tensors of these names, dtypes and shapes; raises NoRecipeError."""
    sources = {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in tensors
    }
    noting = _Noting(sources)
    with torch.no_grad(), noting:
        model.load_weights(sources.items())  # type: ignore[operator]  # as SGLang's models have it
    return noting.recipe


def copies(recipe: Recipe, staged: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Targets and sources of an update, for one grouped copy."""
    targets, sources = [], []
    for name, tensor in staged.items():
        for piece in recipe[name]:
            targets.append(piece.target)
            sources.append(piece.source(tensor))
    return targets, sources


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies out of ``sources`` and lets nothing else change anything."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipe: Recipe = {name: [] for name in sources}
        self._names = {_memory(tensor): name for name, tensor in sources.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func is COPY:
            target, source = args[:2]
            name = self._names.get(_memory(source))
            if name is None or target.is_meta or source.dtype != self._dtypes[name]:
                raise NoRecipeError("it copies what is not of the checkpoint")
            read = source.expand(target.shape)
            piece = Piece(target, tuple(read.shape), read.stride(), read.storage_offset())
            self.recipe[name].append(piece)
            return target
        if func in PADDING and not args[0].is_meta:
            return args[0]
        raise NoRecipeError(f"it calls {func}")


def _memory(tensor: Tensor) -> int:
    """The same for all views of one memory, also where there is none."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  torch names it no other way
