"""What SGLang samples before its server is ready."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rollwire_server.engines.base import EngineError, EngineLoad
from rollwire_server.engines.sglang import SglangConfig, SglangEngine
from rollwire_server.engines.sglang.sequences import SchedulerOutput
from rollwire_server.engines.sglang.weights import SglangWeights
from support.contract import flags
from support.engines import Recorder
from support.sglang_weights import DESCRIBED, FACTS

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from rollwire_server.engines.sglang.launch import SglangInfo
    from rollwire_server.engines.sglang.sequences import SchedulerRequest


class Compiling:
    """In the place of the bridge: tells tokens of what it is sent, later."""

    def __init__(self, engine: SglangEngine, context: int, dies_at: int, refuses_at: int) -> None:
        self.sent: list[SchedulerRequest] = []
        self._engine = engine
        self._info = replace(FACTS, described=replace(DESCRIBED, context_length=context))
        self._dies_at, self._refuses_at = dies_at, refuses_at

    async def start(self) -> SglangInfo:
        return self._info

    async def stop(self) -> None: ...

    async def run_critical(self, work: Awaitable[None], what: str) -> None:
        await work

    async def send(self, request: SchedulerRequest) -> None:
        self.sent.append(request)
        say = asyncio.get_running_loop().call_soon
        if len(self.sent) == self._refuses_at:
            raise EngineError("SGLang refuses the sequence: no room")
        if len(self.sent) == self._dies_at:
            say(self._engine._on_death, EngineError("SGLang is dead: no kernel"))
            return
        for number in range(request.max_new_tokens):
            ended = "length" if number == request.max_new_tokens - 1 else None
            output = SchedulerOutput(request.rid, [1], [-1.0], [], [], 0, ended)
            say(self._engine._on_outputs, [output])

    async def update(self, command: str, seconds: float) -> None:
        raise EngineError("warm by now")

    async def barrier(self) -> None:
        raise EngineError("SGLang is dead: unheard")


async def warmed_up(
    folder: Path, context: int, *, dies_at: int = 0, refuses_at: int = 0
) -> tuple[list[SchedulerRequest], str]:
    """What SGLang was sent, and what ended the engine's start."""
    flags("sglang", folder)
    engine = SglangEngine(SglangConfig(str(folder / "model"), "auto", "cpu", 3))
    bridge = engine._bridge = Compiling(engine, context, dies_at, refuses_at)  # type: ignore[assignment]
    with pytest.raises(EngineError) as caught:
        await engine.start("server", Recorder())
    assert engine.load() == EngineLoad(0, 0, 0, 0)
    await engine.stop()
    return bridge.sent, str(caught.value)


async def test_one_sequence_comes_first_and_then_some_side_by_side(tmp_path: Path) -> None:
    sent, end = await warmed_up(tmp_path, 40)
    assert "warm by now" in end
    assert [len(request.input_ids) for request in sent] == [32, 32, 31, 30]
    assert all(len(r.input_ids) + r.max_new_tokens <= 40 for r in sent)
    assert len({request.rid for request in sent}) == 4
    assert {request.cache_key for request in sent} == {"revision -1"}, "none is shared later"


@pytest.mark.parametrize("dies_at", [1, 3])
async def test_a_death_ends_it(tmp_path: Path, dies_at: int) -> None:
    _, end = await warmed_up(tmp_path, 40, dies_at=dies_at)
    assert end == "SGLang is dead: no kernel"


async def test_so_does_a_sequence_that_is_refused(tmp_path: Path) -> None:
    _, end = await warmed_up(tmp_path, 40, refuses_at=2)
    assert end == "SGLang cannot sample: SGLang refuses the sequence: no room"


async def test_a_context_without_room_needs_none(tmp_path: Path) -> None:
    sent, end = await warmed_up(tmp_path, 8)
    assert not sent
    assert "warm by now" in end


async def test_a_death_that_nobody_heard_of_before_it_served_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> int:
        return 0

    monkeypatch.setattr(SglangWeights, "read", nothing)
    monkeypatch.setattr(SglangWeights, "allocate_staging", nothing)
    flags("sglang", tmp_path)
    config = SglangConfig(str(tmp_path / "model"), "auto", "cpu", 3, unresponsive_seconds=0.01)
    engine, recorder = SglangEngine(config), Recorder()
    engine._bridge = Compiling(engine, 8, 0, 0)  # type: ignore[assignment]
    await engine.start("server", recorder)
    async with asyncio.timeout(30):
        await recorder.until(lambda: recorder.failure is not None)
    assert str(recorder.failure) == "SGLang is dead: unheard"
    await engine.stop()
