"""Models as SGLang loads them, small, and their weights with the loader in this process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from rollwire_server.engines.base import EngineInfo
from rollwire_server.engines.sglang import loader
from rollwire_server.engines.sglang.launch import SglangInfo
from rollwire_server.engines.sglang.weights import SglangWeights
from safetensors.torch import save_file
from torch import nn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from torch import Tensor


class Copying(nn.Module):
    """A model that fuses "good" and "late", of so many rows each, and does no more than that."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.rows = rows
        self.fused = nn.Parameter(torch.zeros(2 * rows, 2))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            good, late = self.fused.data.split(self.rows)
            (late if name == "late" else good).copy_(tensor)


class Fragile(Copying):
    """One that computes what it loads, and fails at one tensor, as it may."""

    fails_at = "bad"

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == self.fails_at:
                raise KeyError(name)
            super().load_weights([(name, tensor * 1)])


DESCRIBED = EngineInfo(
    engine="sglang", model="none", device=torch.device("cpu"), staging="host", staging_bytes=0,
    vocab_size=4, context_length=8, eos_token_ids=(), logprob_bases=frozenset(),
    deterministic=False, max_running_sequences=4, max_top_logprobs=4, routed_experts=False,
    sampling_parameters=frozenset(),
)  # fmt: skip
FACTS = SglangInfo(
    DESCRIBED, own_end_tokens=frozenset(), dtype=torch.float32, kv_tokens=8,
    can_release_memory=False, processes=[], ranks=1,
)  # fmt: skip


class Beside:
    """In the place of the bridge: obeys in this process, as a scheduler process would."""

    def __init__(self, model: Copying) -> None:
        self.model = model

    async def update(self, command: str, seconds: float) -> None:
        loader.load(self.model, [(command, torch.empty(0))])


@contextlib.asynccontextmanager
async def weights_of(model: Copying, folder: Path) -> AsyncIterator[SglangWeights]:
    """Those of "good" and "late", which a checkpoint in ``folder`` has as zeros."""
    (folder / "config.json").write_text("{}")
    tensors = {name: torch.zeros(model.rows, 2) for name in ("good", "late")}
    save_file(tensors, folder / "m.safetensors")
    weights = SglangWeights(Beside(model), FACTS, folder, torch.device("cpu"))  # type: ignore[arg-type]
    await weights.read()
    yield weights
