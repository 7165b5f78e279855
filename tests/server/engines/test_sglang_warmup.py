"""What SGLang samples before its server is ready."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from rollwire_server.engines.base import EngineError
from rollwire_server.engines.sglang.messages import SchedulerOutput
from rollwire_server.engines.sglang.warmup import WarmUp

if TYPE_CHECKING:
    from rollwire_server.engines.sglang.messages import SchedulerRequest


class Compiling:
    """In the place of the bridge: tells tokens of what it is sent, later."""

    def __init__(self, warm_up: WarmUp, *, dies_at: int | None = None) -> None:
        self.sent: list[SchedulerRequest] = []
        self._warm_up = warm_up
        self._dies_at = dies_at

    async def send(self, request: SchedulerRequest) -> None:
        self.sent.append(request)
        say = asyncio.get_running_loop().call_soon
        if len(self.sent) == self._dies_at:
            say(self._warm_up.on_death, EngineError("SGLang is dead: no kernel"))
            return
        for ended in (None, "length"):
            say(
                self._warm_up.on_outputs,
                [SchedulerOutput(request.rid, [1], [-1.0], [], [], 0, ended)],
            )


async def test_one_sequence_comes_first_and_then_some_side_by_side() -> None:
    warm_up = WarmUp()
    bridge = Compiling(warm_up)
    await warm_up.run(bridge, context_length=40, at_once=3)  # type: ignore[arg-type]
    assert [len(request.input_ids) for request in bridge.sent] == [32, 32, 31, 30]
    assert all(len(r.input_ids) + r.max_new_tokens <= 40 for r in bridge.sent)
    assert {len(request.rid) for request in bridge.sent} == {16}
    assert len({request.rid for request in bridge.sent}) == 4


@pytest.mark.parametrize("dies_at", [1, 3])
async def test_a_death_ends_it(dies_at: int) -> None:
    warm_up = WarmUp()
    bridge = Compiling(warm_up, dies_at=dies_at)
    with pytest.raises(EngineError, match="no kernel"):
        await warm_up.run(bridge, context_length=40, at_once=3)  # type: ignore[arg-type]


async def test_a_context_without_room_needs_none() -> None:
    warm_up = WarmUp()
    bridge = Compiling(warm_up)
    await warm_up.run(bridge, context_length=8, at_once=3)  # type: ignore[arg-type]
    assert not bridge.sent
