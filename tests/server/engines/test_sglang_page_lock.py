"""Host memory of staged updates: page-locked when it is taken, in every process that copies it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from rollwire_server.engines.loading.shared_memory import on_host
from rollwire_server.engines.sglang import loader
from rollwire_server.engines.sglang import weights as server
from support.engines import staged_update
from support.sglang_weights import Copying, Fragile, weights_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch

NBYTES = 128  # of an update, its tensors padded


class Pages:
    """In the place of CUDA, which is not there: locks pages up to a limit, as a container may."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        self.locked = 0

    def lock(self, address: int, nbytes: int) -> None:
        if sum(self.held.values()) + nbytes > self.limit:
            raise RuntimeError("cudaHostRegister: out of memory")
        assert address not in self.held
        self.held[address] = nbytes
        self.locked += 1

    def unlock(self, address: int) -> None:
        del self.held[address]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """The pages of the server."""
    pages = Pages()
    monkeypatch.setattr(server, "pages_of", lambda device: pages)
    return pages


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Those of SGLang's process."""
    pages = Pages()
    monkeypatch.setattr(loader, "pages_of", lambda device: pages)
    return pages


@pytest.mark.parametrize("model", [Copying(), Fragile()])
async def test_memory_is_locked_once_at_both_ends(
    tmp_path: Path, model: Copying, here: Pages, there: Pages
) -> None:
    async with weights_of(model, tmp_path) as weights:
        await weights.take_memory()
        for value in (1, 2):
            assert sum(here.held.values()) == sum(there.held.values()) == NBYTES
            staged = await weights.stage(weights.specs)
            for tensor in staged.values():
                tensor.fill_(value)
            await weights.put(staged_update(staged))
            del staged, tensor
            assert model.fused.eq(value).all()
        assert (here.locked, there.locked) == (1, 1)


@pytest.mark.parametrize("few", ["here", "there"])
async def test_what_cannot_be_locked_is_used_as_it_is_and_that_is_told_once(
    tmp_path: Path, few: str, here: Pages, there: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    {"here": here, "there": there}[few].limit = NBYTES - 1
    model = Copying()
    async with weights_of(model, tmp_path) as weights:
        await weights.take_memory()
        (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "out of memory" in told.getMessage()
        assert "ulimit -l" in told.getMessage()
        for specs in (weights.specs, weights.specs[:1], weights.specs):
            staged = await weights.stage(specs)
            for tensor in staged.values():
                tensor.fill_(3)
            await weights.put(staged_update(staged))
            del staged, tensor
        assert model.fused.eq(3).all()
        assert caplog.records[-1] is told


async def test_memory_is_unlocked_before_it_is_freed(
    tmp_path: Path, here: Pages, there: Pages
) -> None:
    async with weights_of(Copying(), tmp_path) as weights:
        await weights.take_memory()
        late: list[torch.Tensor] = [*(await weights.stage(weights.specs)).values()]
        first = {*here.held}
        await weights.stage(weights.specs)
        assert len(here.held) == 2  # while a transfer may still write there
        assert len(there.held) == 1
        late.clear()
        assert len(here.held) == 1
        assert first.isdisjoint(here.held)
    specs = weights.specs
    memory = on_host(specs)
    memory.lock(here)
    assert len(here.held) == 2
    del memory
    assert len(here.held) == 1
