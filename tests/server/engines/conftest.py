from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_server.engines.embedded.checkpoint import build
from support.engines import Driver, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    """What ``builtin:tiny`` is, as transformers runs it."""
    return build("builtin:tiny").eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="session")
def tiny_moe() -> PreTrainedModel:
    return build("builtin:tiny-moe").eval().requires_grad_(requires_grad=False)


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    """An engine with few slots and little prefill a step, so that everything interleaves."""
    config = EmbeddedConfig(
        "builtin:tiny", device="cpu", max_running_sequences=4, prefill_tokens=48
    )
    async with running(EmbeddedEngine(config)) as started:
        yield started
        load = started.engine.load()
        assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
