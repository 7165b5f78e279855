"""Host memory of staged updates: page-locked ahead of the commit, as far as that goes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_server.engines.sglang import loader
from rollwire_server.engines.sglang.page_lock import PageLock
from support.calls import until
from support.engines import staged_update
from support.executed import maps
from support.sglang_weights import Copying, Fragile, weights_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor


class Pages:
    """In the place of CUDA, which is not there: locks pages up to a limit, as a container may."""

    def __init__(self, limit: int, piece: int | None = 8) -> None:
        self.piece = piece
        self.limit = limit
        self.held: dict[int, int] = {}
        self.refused = threading.Event()

    def lock(self, address: int, nbytes: int) -> None:
        if sum(self.held.values()) + nbytes > self.limit:
            self.refused.set()
            raise RuntimeError("cudaHostRegister: out of memory")
        self.held[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.held[address]

    async def are(self, nbytes: int) -> None:
        """Returns when so many bytes are locked."""

        async def held() -> bool:
            return sum([*self.held.values()]) == nbytes

        await until(held, 60)


class Copied(Fragile):
    """One that refuses what CUDA would: a tensor of which a part is locked."""

    pages = Pages(0)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            touched = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            held = [i for i in touched if any(a <= i < a + n for a, n in self.pages.held.items())]
            if held and len(held) != len(touched):
                raise RuntimeError("invalid argument")
            super().load_weights([(name, tensor)])


@pytest.mark.parametrize("model", [Copying(), Copied()])
@pytest.mark.parametrize("limit", [128, 72, 8, 0])
async def test_an_update_that_cannot_be_page_locked_gets_in_place_and_that_is_told_once(
    tmp_path: Path,
    model: Copying,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 128 bytes; 72 and 8 end within a tensor."""
    pages = Pages(limit)
    if isinstance(model, Copied):
        model.pages = pages
    monkeypatch.setattr(loader, "pages_of", lambda device: pages)
    caplog.set_level(logging.WARNING, "rollwire_server.engines.sglang.weights")
    async with weights_of(model, tmp_path) as weights:
        caplog.clear()
        for value in (1, 2):
            staged = await weights.stage(weights.specs)
            await pages.are(limit)
            if limit < 128:
                assert await asyncio.to_thread(pages.refused.wait, 60)
            for tensor in staged.values():
                tensor.fill_(value)
            await weights.put(staged_update(staged))
            assert model.fused.eq(value).all()
            await pages.are(0)
            pages.refused.clear()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (0 if limit == 128 else 1)
    assert all("out of memory" in line and "ulimit -l" in line for line in told)


async def test_an_update_that_is_discarded_is_unlocked_and_its_memory_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(128)
    monkeypatch.setattr(loader, "pages_of", lambda device: pages)
    async with weights_of(Copying(), tmp_path) as weights:
        staged = await weights.stage(weights.specs)
        inode = os.stat(staged.layout.parts[0]["path"]).st_ino  # noqa: PTH116
        await pages.are(128)
        assert maps(os.getpid(), f" {inode} ")
        await weights.let_go_of_discarded()
        await pages.are(128)  # it may yet be committed
        del staged
        gc.collect()
        await weights.let_go_of_discarded()
        await pages.are(0)

        async def unmapped() -> bool:
            return not maps(os.getpid(), f" {inode} ")

        await until(unmapped, 60)


@pytest.mark.parametrize("limit", [128, 127])
async def test_where_copies_cannot_go_across_pieces_all_is_locked_or_nothing(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(limit, piece=None)
    monkeypatch.setattr(loader, "pages_of", lambda device: pages)
    model = Copying()
    async with weights_of(model, tmp_path) as weights:
        staged = await weights.stage(weights.specs)
        await pages.are(128 if limit == 128 else 0)
        assert len(pages.held) == (limit == 128)
        for tensor in staged.values():
            tensor.fill_(3)
        await weights.put(staged_update(staged))
        assert model.fused.eq(3).all()
        await pages.are(0)


def test_a_commit_waits_for_the_pages_under_way_and_no_more() -> None:
    second, go = threading.Event(), threading.Event()

    class Slow(Pages):
        def lock(self, address: int, nbytes: int) -> None:
            if self.held:
                second.set()
                assert go.wait(60)
            super().lock(address, nbytes)

    memory = torch.zeros(32, dtype=torch.uint8)
    pages = Slow(1 << 30)
    lock = PageLock(memory, pages)
    assert second.wait(60)
    stopping = threading.Thread(target=lock.stop)
    stopping.start()
    assert lock._stop.wait(60)
    assert stopping.is_alive()
    go.set()
    stopping.join(60)
    assert (lock.locked, lock.missing, lock.error) == (16, 16, None)
    cut = [lock.cuts(memory[begin:end]) for begin, end in [(0, 16), (16, 32), (15, 17), (0, 32)]]
    assert cut == [False, False, True, True]
