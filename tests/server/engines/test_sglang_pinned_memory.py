"""Host memory of staged updates: pinned when it is allocated, in every process that copies it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_server.engines import memory as engine_memory
from rollwire_server.engines.memory import PinnedMemory, allocate_on_host
from rollwire_server.engines.sglang import loader
from support.engines import staged_update
from support.sglang_weights import Copying, Fragile, weights_of

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
NBYTES = 128  # of an update, its tensors padded


class Pages:
    """In the place of CUDA, which is not there: locks pages up to a limit, as a container may."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        self.pinned = 0

    def pin(self, memory: torch.Tensor, device: torch.device) -> Pinned:
        return Pinned(self, memory)


class Pinned:
    """What ``PinnedMemory`` is to CUDA."""

    def __init__(self, pages: Pages, memory: torch.Tensor) -> None:
        self.error: str | None = None
        self._pages, self._address = pages, memory.data_ptr()
        if sum(pages.held.values()) + memory.nbytes > pages.limit:
            self.error = "cudaHostRegister: out of memory"
            return
        assert self._address not in pages.held
        pages.held[self._address] = memory.nbytes
        pages.pinned += 1

    def release(self) -> None:
        if self.error is None:
            del self._pages.held[self._address]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """The pages of the server."""
    pages = Pages()
    monkeypatch.setattr(engine_memory, "PinnedMemory", pages.pin)
    return pages


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Those of SGLang's process."""
    pages = Pages()
    monkeypatch.setattr(loader, "PinnedMemory", pages.pin)
    return pages


@pytest.mark.parametrize("model", [Copying(), Fragile()])
async def test_memory_is_pinned_once_at_both_ends(
    tmp_path: Path, model: Copying, here: Pages, there: Pages
) -> None:
    async with weights_of(model, tmp_path) as weights:
        await weights.allocate_staging()
        for value in (1, 2):
            assert sum(here.held.values()) == sum(there.held.values()) == NBYTES
            staged = await weights.stage(weights.specs)
            for tensor in staged.values():
                tensor.fill_(value)
            await weights.apply(staged_update(staged))
            del staged, tensor
            assert model.fused.eq(value).all()
        assert (here.pinned, there.pinned) == (1, 1)


@pytest.mark.parametrize("few", ["here", "there"])
async def test_memory_that_cannot_be_pinned_is_used_with_one_warning(
    tmp_path: Path,
    few: str,
    here: Pages,
    there: Pages,
    caplog: pytest.LogCaptureFixture,
) -> None:
    {"here": here, "there": there}[few].limit = NBYTES - 1
    model = Copying()
    async with weights_of(model, tmp_path) as weights:
        await weights.allocate_staging()
        (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "out of memory" in told.getMessage()
        assert "ulimit -l" in told.getMessage()
        for specs in (weights.specs, weights.specs[:1], weights.specs):
            staged = await weights.stage(specs)
            for tensor in staged.values():
                tensor.fill_(3)
            await weights.apply(staged_update(staged))
            del staged, tensor
        assert model.fused.eq(3).all()
        assert caplog.records[-1] is told


async def test_memory_is_unpinned_before_it_is_freed(
    tmp_path: Path, here: Pages, there: Pages
) -> None:
    async with weights_of(Copying(), tmp_path) as weights:
        await weights.allocate_staging()
        late: list[torch.Tensor] = [*(await weights.stage(weights.specs)).values()]
        first = {*here.held}
        await weights.stage(weights.specs)
        assert len(here.held) == 2  # while a transfer may still write there
        assert len(there.held) == 1
        late.clear()
        assert len(here.held) == 1
        assert first.isdisjoint(here.held)
    specs = weights.specs
    memory = allocate_on_host(specs)
    memory.pin(CPU)
    assert len(here.held) == 2
    del memory
    assert len(here.held) == 1


@pytest.mark.parametrize(
    ("device", "fails", "calls"),
    [
        ("cuda", False, ["cudaHostRegister", "cudaHostUnregister"]),
        ("cuda", True, ["cudaHostRegister"]),
        ("cpu", False, []),
    ],
)
def test_only_what_was_pinned_is_unpinned(
    monkeypatch: pytest.MonkeyPatch, device: str, fails: bool, calls: list[str]
) -> None:
    called = []

    def call(_: PinnedMemory, name: str, address: int, *_more: int) -> None:
        assert address == memory.data_ptr()
        called.append(name)
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(PinnedMemory, "_call", call)
    memory = torch.empty(NBYTES, dtype=torch.uint8)
    pinned = PinnedMemory(memory, torch.device(device))
    pinned.release()
    assert (pinned.error, called) == ("out of memory" if fails else None, calls)
