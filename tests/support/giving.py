"""The many ways in which a trainer may give a policy to ``Publisher.publish``."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    Tensors = dict[str, Tensor]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # which are tied on the servers

SOURCES = ("mapping", "callable", "functions", "copies")
TIED = ("absent", "alias", "own", "own, transposed", "head alone")
DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Giving:
    """A way to give it; ``seed`` is of the order, and of what a partial update leaves out."""

    source: str = "mapping"
    tied: str = "absent"
    dtype: str = "float32"
    partial: bool = False
    shuffled: bool = False
    seed: int = 0

    def give(self, tensors: Tensors) -> tuple[Any, Tensors]:
        """What is given, and the values in float32 that servers should get."""
        order = random.Random(self.seed)
        dtype = getattr(torch, self.dtype)
        names = list(tensors)
        if self.partial:
            names = order.sample(names, order.randint(1, len(names) - 1))
        sent = {name: tensors[name].to(dtype) for name in names}
        values = {name: tensor.float().clone() for name, tensor in sent.items()}
        if EMBEDDING in sent:
            self._tie(sent)
        names = list(sent)
        if self.shuffled:
            order.shuffle(names)
        if self.source == "mapping":
            return {name: sent[name] for name in names}, values

        def source() -> Iterator[tuple[str, Any]]:
            for name in names:
                match self.source:
                    case "functions":
                        yield name, sent[name].clone
                    case "copies":
                        yield name, sent[name].clone()
                    case _:
                        yield name, sent[name]

        return source, values

    def _tie(self, sent: Tensors) -> None:
        match self.tied:
            case "alias":
                sent[HEAD] = sent[EMBEDDING]
            case "own":
                sent[HEAD] = sent[EMBEDDING].clone()
            case "own, transposed":
                sent[HEAD] = sent[EMBEDDING].t().contiguous().t()
            case "head alone":
                sent[HEAD] = sent.pop(EMBEDDING)
