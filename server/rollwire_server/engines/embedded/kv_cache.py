"""The keys and values of every slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WIDTH_STEP = 16
"""The number of keys that a row attends to is padded to a multiple of this."""


def round_up(n: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``n``."""
    return -(-n // step) * step


class KvCache:
    """Keys and values of ``slots`` sequences of up to ``context`` tokens, two tensors a layer.

    The layout is [slot, token, head, dim]. A layer's heads and dims are those of the first keys and
    values that it stores. Entries that were never written are zero, and written ones are finite:
    padding is masked by adding -inf to scores, which does not hide NaN.
    """

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        self.slots = slots
        self.context = round_up(context, WIDTH_STEP)
        self.device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def resized(self, slots: int, context: int) -> KvCache:
        """An empty cache of another size for the same layers."""
        other = KvCache(slots, context, self.device)
        for index, (keys, values) in self._layers.items():
            other._layers[index] = (other._zeros(keys), other._zeros(values))
        return other

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; ``key`` and ``value`` are [1, heads, tokens, dim]."""
        if index not in self._layers:
            by_token = (key.transpose(1, 2), value.transpose(1, 2))
            self._layers[index] = (self._zeros(by_token[0]), self._zeros(by_token[1]))
        return self._layers[index]

    def copy(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first ``tokens`` entries of slots ``sources`` to slots ``targets``."""
        for states in self._tensors():
            states[targets, :tokens] = states[sources, :tokens]

    def clear(self, slots: Tensor) -> None:
        """Sets all entries of slots to zero."""
        for states in self._tensors():
            states[slots] = 0

    def free(self) -> int:
        """Frees the memory until ``reallocate``; returns the bytes freed."""
        freed = self.nbytes
        for states in self._tensors():
            states.untyped_storage().resize_(0)
        return freed

    def reallocate(self) -> None:
        """Takes back the memory that ``free`` freed; all entries are zero."""
        for states in self._tensors():
            states.untyped_storage().resize_(states.numel() * states.itemsize)
            states.zero_()

    @property
    def nbytes(self) -> int:
        return sum(states.untyped_storage().nbytes() for states in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [states for layer in self._layers.values() for states in layer]

    def _zeros(self, like: Tensor) -> Tensor:
        """[slots, context, heads, dim], with heads and dim of ``like`` [_, _, heads, dim]."""
        return like.new_zeros(self.slots, self.context, *like.shape[2:])
