"""Keys and values of every slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .batch import WIDTH_STEP, round_up

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KvCache:
    """Keys and values of ``slots`` sequences of up to ``context`` tokens, one pair a layer.

    A layer is made when its first keys arrive, so that their shape is the model's own business.
    Laid out [slot, token, head, dim]. What was not written is zero, and what was is finite: padding
    is masked by adding -inf to scores, which does not hide NaN.
    """

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self.context = round_up(context, WIDTH_STEP)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; ``key`` and ``value`` are [1, heads, tokens, dim]."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def copy(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first ``tokens`` entries of slots ``sources`` to slots ``targets``."""
        for states in self._tensors():
            states[targets, :tokens] = states[sources, :tokens]

    def clear(self, slots: Tensor) -> None:
        """Makes slots as new."""
        for states in self._tensors():
            states[slots] = 0

    @property
    def nbytes(self) -> int:
        """Of what is allocated."""
        return sum(states.nbytes for states in self._tensors())

    def free(self) -> None:
        """Drops the memory; it comes back with the next keys."""
        self._layers.clear()

    def _tensors(self) -> list[Tensor]:
        return [states for layer in self._layers.values() for states in layer]

    def _zeros(self, states: Tensor) -> Tensor:
        _, heads, _, dim = states.shape
        return states.new_zeros(self.slots, self.context, heads, dim)
