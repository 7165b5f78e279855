"""What the server remembers of requests, and for how long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from rollwire.reasons import Reason
from rollwire.types import Finish, FinishReason
from rollwire_server.engines.base import SamplingParams, SequenceSpec, Step
from rollwire_server.errors import ServiceError
from rollwire_server.sequences import registry
from rollwire_server.sequences.sequence import ReadyQueue, Request
from support.engine_room import serving

if TYPE_CHECKING:
    from rollwire_server.sequences.manager import Sequences


def asked(
    sequences: Sequences, name: str, *, attempt: int = 0, tokens: int = 1, grace: float = 0.0
) -> Request:
    spec = SequenceSpec(sequences.next_key(), (1,), SamplingParams(tokens))
    return Request(name, attempt, spec, detach_grace=grace)


async def test_a_lower_attempt_is_stale_however_many_others_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "MAX_ATTEMPTS", 10)
    async with serving() as (sequences, _, _):
        live = sequences.start(asked(sequences, "mine", attempt=5, tokens=4000), ReadyQueue())
        for number in range(30):
            sequences.start(asked(sequences, f"other {number}"), ReadyQueue())
        with pytest.raises(ServiceError) as caught:
            sequences.start(asked(sequences, "mine", attempt=1), ReadyQueue())
        assert caught.value.reason is Reason.STALE_ATTEMPT
        assert live.sequence.end is None


async def test_of_what_has_finished_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_KEPT", 3)
    async with serving() as (sequences, _, _), asyncio.timeout(60):
        for number in range(6):
            sequences.start(asked(sequences, f"request {number}", grace=60), ReadyQueue())
            await sequences.wait_idle()
        for number in (5, 4, 3):  # picked up
            cursor = sequences.start(asked(sequences, f"request {number}", grace=60), ReadyQueue())
            assert cursor.sequence.end is not None
        anew = sequences.start(asked(sequences, "request 2", grace=60), ReadyQueue())
        assert anew.sequence.end is None


async def test_a_grace_is_no_longer_than_a_sequence() -> None:
    async with serving() as (sequences, _, _):
        cursor = sequences.start(asked(sequences, "a", grace=1e9), ReadyQueue())
        assert cursor.sequence.request.detach_grace == 60


@pytest.mark.parametrize("column", ["keys", "token_ids", "logprobs", "oldest_kv_revisions"])
async def test_a_step_with_ragged_columns_ends_the_server_and_no_token_is_told(
    monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    async with serving() as (sequences, _, _):
        died: list[BaseException] = []
        monkeypatch.setattr(sequences, "_engine_died", died.append)
        cursors = [
            sequences.start(asked(sequences, name, tokens=4000), ReadyQueue())
            for name in ("a", "b")
        ]
        keys = [cursor.sequence.request.spec.key for cursor in cursors]
        step = Step(sequences.weights, keys, [7, 8], [-1.0, -2.0], [0, 0])
        getattr(step, column).pop()
        sequences.on_step(step)
        (error,) = died
        assert "a bug of the engine" in str(error)
        for cursor in cursors:
            end = cursor.sequence.end
            assert isinstance(end, Finish)
            assert (end.reason, end.output_tokens) == (FinishReason.INTERRUPTED, 0)
            assert "one step has " in end.message
        sequences.on_step(Step(sequences.weights, keys, [7, 8], [-1.0, -2.0]))
        assert [len(cursor.sequence.tokens) for cursor in cursors] == [0, 0]
