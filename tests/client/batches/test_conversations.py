"""Groups whose samples are conversations, held by a function of the caller."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest
from client.batches.support import ids
from client.scripted import until
from rollwire_client import (
    Batcher,
    CallbackError,
    Carry,
    DropReason,
    FinishReason,
    Fleet,
    Prompt,
    Sampling,
    TimedOutError,
    Timeouts,
)
from rollwire_client._batches import group as groups
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rollwire_client import Conversation, Session

TOOL = (70, 71)
SAMPLING = Sampling(max_new_tokens=3)


def prompts(first: int = 1) -> Iterator[Prompt]:
    while True:
        yield Prompt(str(first), [first, first])
        first += 1


async def use_a_tool(session: Session, prompt: Prompt) -> None:
    """As many turns as the prompt's number says, and a tool's output between them."""
    for turn in range(prompt.token_ids[0]):
        if turn:
            session.append(TOOL)
        await session.generate()


def fleet_of(*servers: FakeServer) -> Fleet:
    return Fleet([server.address for server in servers], timeouts=Timeouts(close=0.2))


def batcher_of(fleet: Fleet, rollout: object = use_a_tool, **options: object) -> Batcher:
    options = {"seed": 1, "group_size": 2, "sampling": SAMPLING, "bar": False, **options}
    return Batcher(fleet, rollout=rollout, **options)


async def test_each_sample_is_a_conversation_of_its_own() -> None:
    scored: list[Conversation] = []

    def reward(_: Prompt, conversation: Conversation) -> float:
        scored.append(conversation)
        return len(conversation.turns)

    async with (
        FakeServer(version=1) as one,
        FakeServer(version=1) as two,
        fleet_of(one, two) as fleet,
        batcher_of(fleet, reward=reward) as batcher,
    ):
        batch = await batcher.collect(prompts(), 3)
        requests = {r.request_id: r for server in (one, two) for r in server.requests}
    assert ids(batch.finished) == ["1", "2", "3"]
    assert batch.finished.lengths == (3, 3, 6, 6, 9, 9)  # the tool's tokens do not count
    seeds = set()
    for number, group in enumerate(batch.groups, start=1):
        assert group.complete
        assert group.versions == {1}
        assert group.rewards == (number, number)
        for sample in group.samples:
            talk = sample.conversation
            assert talk in scored
            assert sample.turns == talk.turns
            assert sample.trajectory == talk.turns[-1]
            assert talk.token_ids[:2] == (number, number)
            mask = [False] * 2 + ([True] * 3 + [False] * 2) * (number - 1) + [True] * 3
            assert list(talk.mask) == mask
            seeds |= {requests[turn.request_id].sampling.seed for turn in talk.turns}
        assert len({t.servers for s in group.samples for t in s.turns}) == 1  # a shared prefix
    assert len(seeds) == 12


async def test_the_same_run_draws_the_same() -> None:
    said = []
    for _ in range(2):
        async with FakeServer() as server, fleet_of(server) as fleet, batcher_of(fleet) as batcher:
            batch = await batcher.collect(prompts(), 3)
        said.append([s.conversation.token_ids for group in batch.groups for s in group.samples])
    assert said[0] == said[1]
    assert len(set(said[0])) == 6


async def test_a_function_that_raises_is_called_again_and_then_costs_its_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    async def fails(session: Session, prompt: Prompt) -> None:
        calls.append(prompt.id)
        await use_a_tool(session, prompt)
        if prompt.id == "2" or (prompt.id == "3" and calls.count("3") == 1):
            raise ZeroDivisionError("the tool is broken")

    async with (
        FakeServer() as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, fails, group_size=1) as batcher,
    ):
        batch = await batcher.collect(prompts(), 3)
    assert ids(batch.finished) == ["1", "3", "4"]
    (dropped,) = batch.dropped.of(DropReason.FAILED).groups
    assert dropped.prompt.id == "2"
    assert isinstance(dropped.error, CallbackError)
    assert dropped.error.callback == "rollout"
    assert isinstance(dropped.error.__cause__, ZeroDivisionError)
    assert [calls.count(name) for name in "1234"] == [1, 3, 2, 1]
    assert batch.finished.lengths == (3, 9, 12)  # each from its beginning
    warned = [r.getMessage() for r in caplog.records if "sampled again" in r.getMessage()]
    assert len(warned) == 2  # one for "2", one for "3"


async def test_what_the_function_must_not_do() -> None:
    async def seeds(session: Session, _: Prompt) -> None:
        await session.generate(Sampling(seed=5))

    async def says_nothing(session: Session, _: Prompt) -> None:
        session.append(TOOL)

    async with FakeServer() as server, fleet_of(server) as fleet:
        for function, problem in ((seeds, "has a seed"), (says_nothing, "sampled nothing")):
            async with batcher_of(fleet, function, refills=0) as batcher:
                with pytest.raises(CallbackError, match=problem):
                    await batcher.collect(prompts(), 1)
        with pytest.raises(TypeError, match="not a coroutine function"):
            batcher_of(fleet, lambda *_: None)
    assert server.requests == []


async def test_a_conversation_ends_when_the_function_returns() -> None:
    kept: list[Session] = []
    turns: list[asyncio.Task] = []

    async def keeps(session: Session, prompt: Prompt) -> None:
        await use_a_tool(session, prompt)
        kept.append(session)

    async def leaves_a_turn(session: Session, prompt: Prompt) -> None:
        await use_a_tool(session, prompt)
        turns.append(asyncio.create_task(session.generate(Sampling(max_new_tokens=4000))))
        await until(lambda: server.running == 1)

    async with FakeServer() as server, fleet_of(server) as fleet:
        async with batcher_of(fleet, keeps, group_size=1) as batcher:
            batch = await batcher.collect(prompts(), 1, prefetch=1)
            await until(lambda: len(kept) == 2 and server.running == 0)
            for session in kept:
                before = session.conversation()
                for change in (lambda s=session: s.append(TOOL), lambda s=session: s.rewind(0)):
                    with pytest.raises(RuntimeError, match="has ended"):
                        change()
                with pytest.raises(RuntimeError, match="has ended"):
                    await session.generate()
                assert session.conversation() == before
                turn = await session.fork().generate()  # a fork is the function's own
                assert turn.prompt_ids == before.token_ids
            assert batch.finished.lengths == (3,)
        async with batcher_of(fleet, leaves_a_turn, group_size=1, refills=0) as batcher:
            with pytest.raises(CallbackError, match="returned while a turn was under way"):
                await batcher.collect(iter([Prompt("1", [1])]), 1)
        for task in turns:
            task.cancel()
        await asyncio.wait(turns)


async def test_a_turn_that_is_out_of_time_drops_the_group() -> None:
    async def late(session: Session, prompt: Prompt) -> None:
        await session.generate()
        if prompt.id == "1":
            raise TimedOutError("as scripted")

    async with (
        FakeServer() as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, late, group_size=1) as batcher,
    ):
        batch = await batcher.collect(prompts(), 1)
    assert [group.dropped for group in batch.dropped.groups] == [DropReason.CUT]
    assert len(server.requests) == 2  # it was not drawn again


async def test_a_conversation_goes_on_while_the_trainer_learns() -> None:
    go_on = asyncio.Event()

    async def waits(session: Session, prompt: Prompt) -> None:
        await session.generate()
        if prompt.id != "1":
            await go_on.wait()
            session.append(TOOL)
            await session.generate()

    async with (
        FakeServer(version=1) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, waits, max_lag=3) as batcher,
    ):
        source = prompts()
        first = await batcher.collect(source, 1, over_sample=2, tail=Carry(), version=1)
        assert ids(first.finished) == ["1"]
        (carried,) = first.carried.groups
        await until(lambda: len(server.requests) == 4)
        assert not carried.complete
        server.commit(2)
        go_on.set()
        second = await batcher.collect(source, 1, tail=Carry(), version=2)
    (group,) = second.groups
    assert (group.prompt.id, group.versions) == ("2", {1, 2})
    assert len(server.requests) == 6  # nothing was sampled twice


async def test_an_old_turn_makes_a_conversation_stale() -> None:
    async def waits(session: Session, prompt: Prompt) -> None:
        await session.generate()
        if prompt.id == "1":
            await asyncio.Event().wait()

    async with (
        FakeServer(version=1) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, waits, max_lag=1) as batcher,
    ):
        source, dropped = prompts(), []
        for version in (1, 2, 3):
            server.commit(version)
            batch = await batcher.collect(source, 1, over_sample=2, tail=Carry(), version=version)
            dropped.append([(g.prompt.id, g.dropped) for g in batch.dropped.groups])
    assert dropped == [[], [], [("1", DropReason.STALE)]]


async def test_a_conversation_whose_last_turn_was_aborted_begins_again() -> None:
    ends: list[FinishReason] = []

    async def notes(session: Session, _: Prompt) -> None:
        turn = await session.generate()
        ends.append(turn.finish.reason)

    async with (
        FakeServer(tokens_per_second=100) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, notes, group_size=1, sampling=Sampling(max_new_tokens=20)) as batcher,
    ):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await until(lambda: server.running == 1)
        await fleet._pool.servers[0].client.abort_all()
        await until(lambda: len(server.requests) == 2)
        (live,) = batcher._buffer.groups.values()
        assert not live.snapshot().complete
        (group,) = (await collecting).groups
    assert ends == [FinishReason.ABORTED, FinishReason.LENGTH]
    assert len(group.samples[0].conversation.turns) == 1


async def test_a_saved_conversation_begins_again(tmp_path: Path) -> None:
    for_ever = asyncio.Event()

    async def waits(session: Session, prompt: Prompt) -> None:
        await session.generate()
        if prompt.id == "2":
            await for_ever.wait()

    async with FakeServer() as server, fleet_of(server) as fleet:
        async with batcher_of(fleet, waits) as batcher:
            await batcher.collect(prompts(), 1, prefetch=2)
            await until(lambda: len(server.requests) == 6)
            batcher.save(tmp_path / "buffer")
        async with batcher_of(fleet) as batcher:
            batcher.load(tmp_path / "buffer")
            batch = await batcher.collect(iter(()), 2)
    assert sorted(ids(batch.finished)) == ["2", "3"]
    assert batch.finished.lengths == (6, 6, 9, 9)


async def test_closing_ends_conversations_on_the_servers_too() -> None:
    ended: list[str] = []

    async def notes(session: Session, prompt: Prompt) -> None:
        try:
            await session.generate(Sampling(max_new_tokens=4000))
        finally:
            ended.append(prompt.id)

    async with FakeServer(tokens_per_second=50) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet, notes) as batcher:
            collecting = asyncio.create_task(batcher.collect(prompts(), 2))
            await until(lambda: server.running == 4)
            collecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await collecting
        assert sorted(ended) == ["1", "1", "2", "2"]
        await until(lambda: server.running == 0)


@pytest.mark.parametrize("says", [None, ZeroDivisionError("as scripted")])
async def test_a_function_that_catches_its_end_is_not_called_again(
    says: Exception | None,
) -> None:
    called: list[str] = []

    async def catches_all(session: Session, prompt: Prompt) -> None:
        called.append(prompt.id)
        try:
            await session.generate(Sampling(max_new_tokens=4000))
        except BaseException:
            if says is not None:
                raise says from None

    async with FakeServer(tokens_per_second=50) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet, catches_all) as batcher:
            collecting = asyncio.create_task(batcher.collect(prompts(), 2))
            await until(lambda: server.running == 4)
            collecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await collecting
            async with asyncio.timeout(20):
                await batcher.close()
        assert sorted(called) == ["1", "1", "2", "2"]
        await until(lambda: server.running == 0)


@pytest.mark.parametrize("how", ["close", "evaluate"])
async def test_a_function_that_never_ends_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setattr(groups, "_CANCEL_TIMEOUT", 0.05)
    go_on = asyncio.Event()
    told: list[str] = []

    async def goes_on(session: Session, prompt: Prompt) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await session.generate(Sampling(max_new_tokens=4000))
        await go_on.wait()
        try:
            await session.generate()
        except RuntimeError as error:
            told.append(str(error))

    async with FakeServer(tokens_per_second=50) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet, goes_on, group_size=1) as batcher:
            two = list(itertools.islice(prompts(), 2))
            working = batcher.collect(two, 2) if how == "close" else batcher.evaluate(two)
            running = asyncio.create_task(working)
            await until(lambda: server.running == 2)
            async with asyncio.timeout(20):
                if how == "evaluate":
                    running.cancel()
                await batcher.close()
                await asyncio.wait([running])
        left = [r.getMessage() for r in caplog.records if "has not ended" in r.getMessage()]
        assert [text.partition(" has")[0] for text in sorted(left)] == [
            f"the rollout of prompt '{number}', sample 0," for number in (1, 2)
        ]
        await until(lambda: server.running == 0)
        go_on.set()
        await until(lambda: len(told) == 2)
    assert all("was cancelled" in text for text in told)


async def test_a_dead_server_costs_no_turn() -> None:
    async with (
        FakeServer(tokens_per_second=100) as one,
        FakeServer() as two,
        fleet_of(one, two) as fleet,
        batcher_of(fleet) as batcher,
    ):
        collecting = asyncio.create_task(batcher.collect(prompts(3), 2))
        await until(lambda: one.running > 0)
        await one.stop()
        batch = await collecting
    assert batch.finished.lengths == (9, 9, 12, 12)


async def test_conversations_are_evaluated_too() -> None:
    async with (
        FakeServer(version=5) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, reward=lambda _, talk: sum(talk.mask)) as batcher,
    ):
        found = await batcher.evaluate([Prompt("a", [2]), Prompt("b", [3])], samples=2)
    assert found.version == 5
    assert found.samples.rewards == (6, 6, 9, 9)
