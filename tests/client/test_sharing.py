"""A fleet that async and sync code of one process share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from client.publishing import publishing
from client.scripted_weights import policy
from rollwire_client import ClosedError, Fleet, Sampling, Timeouts, _loop_calls
from rollwire_client._concurrency import LoopAffinity
from rollwire_client._loop_calls import LoopCalls
from rollwire_client.sync import SyncFleet, SyncPublisher

if TYPE_CHECKING:
    import concurrent.futures

    from client.scripted import ScriptedServer, Sequence

TURN = Sampling(max_new_tokens=5)
CLOSE = Timeouts(close=0.2)


async def hang(_: Sequence) -> None:
    await asyncio.Event().wait()


async def test_sync_code_uses_a_fleet_that_async_code_has_opened() -> None:
    async with publishing(2) as (servers, fleet, _):

        def train() -> None:
            with SyncFleet.of(fleet) as shared:
                report = SyncPublisher(shared).publish_and_wait(3, policy())
                assert report.failed == ()
                assert shared.policy == fleet.policy is not None
                assert shared.policy.version == 3
                assert shared.generate([1], TURN).complete
                many = shared.generate_many([[1], [2]], TURN, n=3)
                assert [[t.prompt_ids for t in group] for group in many] == [[(1,)] * 3, [(2,)] * 3]
                session = shared.session([1, 2])
                session.generate(TURN)
                assert len(session.token_ids) == 7
            with pytest.raises(ClosedError):
                shared.generate([1], TURN)

        await asyncio.to_thread(train)
        assert (await fleet.generate([1], TURN)).versions == (3,) * 5  # it is open still
        shared = SyncFleet.of(fleet)
        with pytest.raises(RuntimeError, match="cannot wait for itself"):
            shared.generate([1], TURN)
        assert len(servers) == 2
    with pytest.raises(ClosedError):
        await asyncio.to_thread(shared.generate, [1], TURN)
    with pytest.raises(ClosedError, match="not open"):
        SyncFleet.of(fleet)


def test_a_loop_that_has_ended_takes_no_calls() -> None:
    async def run() -> SyncFleet:
        fleet = Fleet(["127.0.0.1:9"], timeouts=Timeouts(start=0))
        fleet._pool.affinity.bind()  # as if it were open and nobody had closed it
        return SyncFleet.of(fleet)

    shared = asyncio.run(run())
    with pytest.raises(ClosedError):
        shared.generate([1], TURN)


def test_a_call_that_a_loop_took_at_its_end_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loop_calls, "_LOOP_CHECK_SECONDS", 0.05)
    loop = asyncio.new_event_loop()
    schedule, taken = loop.call_soon_threadsafe, threading.Event()

    def taking(*call: Any) -> object:
        try:
            return schedule(*call)
        finally:
            taken.set()

    async def work() -> None:
        raise AssertionError("nobody runs it")

    def close() -> None:
        assert taken.wait(60)
        loop.close()

    monkeypatch.setattr(loop, "call_soon_threadsafe", taking)
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError, match="was closed meanwhile"):
        LoopCalls(loop, LoopAffinity("SyncFleet", bound=False)).call(work())
    closing.join()


@pytest.mark.parametrize("begun", [False, True])
def test_what_was_submitted_to_a_loop_that_closes_is_told(
    monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    monkeypatch.setattr(_loop_calls, "_LOOP_CHECK_SECONDS", 0.05)
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop, LoopAffinity("SyncFleet", bound=False))
    never = loop.create_future()

    async def work() -> None:
        await never

    futures = [calls.submit(work()) for _ in range(2)]
    if begun:  # and nobody cancels it, as asyncio.run does to what began before its end
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    for future in futures:
        with pytest.raises(ClosedError, match="was closed meanwhile"):
            future.result(60)
    with pytest.raises(ClosedError):
        calls.submit(work())


async def test_async_code_uses_a_fleet_that_sync_code_has_opened(server: ScriptedServer) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def agent(fleet: Fleet, prompt: int, *, tokens: int) -> tuple[int, ...]:
        loops.append(asyncio.get_running_loop())
        sampling = Sampling(max_new_tokens=tokens)
        many = await asyncio.gather(*(fleet.generate([prompt], sampling) for _ in range(3)))
        return many[0].token_ids

    async def never_ends(_: Fleet) -> None:
        await asyncio.Event().wait()

    def train() -> concurrent.futures.Future[None]:
        with SyncFleet([server.address], timeouts=CLOSE) as fleet:
            done = fleet.submit(agent, 5, tokens=4).result(60)
            assert done == fleet.generate([5], Sampling(max_new_tokens=4)).token_ids
            failed = fleet.submit(agent, -5, tokens=4)
            with pytest.raises(Exception, match="prompt_token_ids"):
                failed.result(60)

            server.default = hang
            cancelled = fleet.submit(agent, 5, tokens=4)
            assert cancelled.cancel()
            left = fleet.submit(never_ends)
        with pytest.raises(ClosedError):
            fleet.submit(agent, 5, tokens=4)
        return left

    left = await asyncio.to_thread(train)
    with pytest.raises(ClosedError):  # with the fleet
        left.result(60)
    assert set(loops) != {asyncio.get_running_loop()}
