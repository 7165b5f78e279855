"""A fleet that routes and resumes, against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import pytest
from client.scripted import (
    ScriptedServer,
    Sequence,
    expected_token,
    scripted,
    until,
    was_published,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire.v1 import common_pb2
from rollwire_client import (
    ClosedError,
    FinishReason,
    Fleet,
    InvalidRequestError,
    PrefixMismatchError,
    ProtocolError,
    Retries,
    RolloutFailedError,
    Sampling,
    ServerInfo,
    ServerNotReadyError,
    ServerUnreachableError,
    StepFailedError,
    TimedOutError,
    Timeouts,
    UnavailableError,
    WeightTag,
)
from support.examples import examples

PROMPT = [1, 2, 3]
FAST = Retries(attempts=3, seconds=5, first_delay=0.001)


def tokens(count: int) -> tuple[int, ...]:
    return tuple(expected_token(PROMPT, i) for i in range(count))


def fleet_of(*servers: ScriptedServer, **options) -> Fleet:
    options.setdefault("retries", FAST)
    options.setdefault("timeouts", Timeouts(close=0.2))
    return Fleet([server.address for server in servers], **options)


def after(count: int, then) -> object:
    """A script that sends ``count`` tokens and then does something else."""

    async def script(sequence: Sequence) -> None:
        if count:
            await sequence.send(count)
        await then(sequence)

    return script


async def interrupt(sequence: Sequence) -> None:
    await sequence.finish("INTERRUPTED")


async def cut(sequence: Sequence) -> None:
    await sequence.cut()


async def hang(sequence: Sequence) -> None:
    await asyncio.Event().wait()


async def drain(sequence: Sequence) -> None:
    await sequence.fail(grpc.StatusCode.UNAVAILABLE, "DRAINING")


@pytest.mark.parametrize("sent", [0, 1, 7])
@pytest.mark.parametrize("trouble", [interrupt, cut, drain])
async def test_an_interrupted_sequence_equals_an_uninterrupted_one(
    pair: list[ScriptedServer], sent: int, trouble
) -> None:
    for server in pair:
        server.scripts = [after(sent, trouble)]
    async with fleet_of(*pair) as fleet:
        trajectory = await fleet.generate(
            PROMPT, Sampling(max_new_tokens=20, seed=1), request_id="one"
        )
    assert trajectory.token_ids == tokens(20)
    assert len(trajectory.logprobs) == 20
    assert trajectory.finish.reason is FinishReason.LENGTH
    assert trajectory.finish.output_tokens == 20
    requests = sorted((r for s in pair for r in s.requests), key=lambda r: r.attempt)
    assert [r.attempt for r in requests] == list(range(len(requests)))
    assert {r.request_id for r in requests} == {"one"}
    assert {r.sampling.max_new_tokens for r in requests} == {20}
    assert tuple(requests[1].output_token_ids) == tokens(sent)


async def test_a_stream_shows_no_interruption(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.scripts = [after(3, interrupt), after(2, cut)]
    async with fleet_of(*pair) as fleet:
        chunks = [chunk async for chunk in fleet.stream(PROMPT, Sampling(max_new_tokens=30))]
    offset = 0
    for chunk in chunks:
        assert chunk.offset == offset
        offset += len(chunk.token_ids)
    assert sum((chunk.token_ids for chunk in chunks), ()) == tokens(30)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@settings(max_examples=examples(25))
@given(
    plan=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([interrupt, cut, drain])), max_size=6
    )
)
def test_any_interruptions_lose_nothing(plan: list) -> None:
    async def run() -> None:
        async with scripted(2) as servers:
            scripts = [after(sent, trouble) for sent, trouble in plan]
            for server in servers:
                server.scripts = scripts  # one list: whichever server is next
            async with fleet_of(*servers, retries=Retries(attempts=9, first_delay=0)) as fleet:
                trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=40))
            assert trajectory.token_ids == tokens(40)
            assert trajectory.complete

    asyncio.run(run())


async def test_a_complete_prefix_needs_only_its_finish(server: ScriptedServer) -> None:
    server.scripts = [after(8, cut)]
    async with fleet_of(server) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=8))
    assert trajectory.token_ids == tokens(8)
    assert trajectory.complete


async def test_a_prefix_meets_no_older_weights(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.weights.version = 4

    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        sequence.server.weights.version = 6
        sequence.server.weights.revision += 1
        await sequence.send(2)
        await sequence.finish("INTERRUPTED")

    for server in pair:
        server.scripts = [script]
    async with fleet_of(*pair) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=9))
        later = await fleet.generate(
            PROMPT, Sampling(max_new_tokens=2), min_weight_version=9, request_id="later"
        )
    first, *resumed = sorted((r for s in pair for r in s.requests), key=lambda r: r.attempt)
    assert not first.HasField("min_weight_version")
    assert {r.min_weight_version for r in resumed if r.request_id == first.request_id} == {6}
    assert {r.min_weight_version for s in pair for r in s.requests if r.request_id == "later"} == {
        9
    }
    assert trajectory.complete
    assert later.complete


async def test_sequences_go_to_the_least_busy_server(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.default = hang
    async with fleet_of(*pair) as fleet, asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=100)))
            for _ in range(10)
        ]
        await until(lambda: sum(len(s.requests) for s in pair) == 10)
        assert [len(s.requests) for s in pair] == [5, 5]
        started.append(tasks.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=1000))))
        await until(lambda: sum(len(s.requests) for s in pair) == 11)
        busy = max(pair, key=lambda s: len(s.requests))
        for n in range(5):
            started.append(tasks.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=100))))
            await until(lambda n=n: sum(len(s.requests) for s in pair) == 12 + n)
        assert len(busy.requests) == 6
        for task in started:
            task.cancel()


async def test_servers_that_are_not_ready_get_nothing(pair: list[ScriptedServer]) -> None:
    pair[0].state = common_pb2.SERVER_STATE_AWAITING_WEIGHTS
    async with fleet_of(*pair) as fleet:
        await asyncio.gather(*(fleet.generate(PROMPT) for _ in range(4)))
        assert [len(s.requests) for s in pair] == [0, 4]


async def test_a_server_that_comes_up_is_used(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.state = common_pb2.SERVER_STATE_SLEEPING
    async with fleet_of(*pair, probe_interval=0.02) as fleet:
        task = asyncio.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=4)))
        while not task.done():
            pair[1].state = common_pb2.SERVER_STATE_SERVING
            await asyncio.sleep(0.01)
        assert task.result().servers == (pair[1].address,)


async def test_servers_behind_the_policy_get_nothing(pair: list[ScriptedServer]) -> None:
    pair[0].weights.version, pair[0].weights.digest = 1, 11
    pair[1].weights.version, pair[1].weights.digest = 2, 22
    async with fleet_of(*pair, probe_interval=0.02) as fleet:
        was_published(fleet, WeightTag(2, 1, "any", 22))
        await asyncio.gather(*(fleet.generate(PROMPT) for _ in range(4)))
        assert [len(s.requests) for s in pair] == [0, 4]
        pair[0].weights.version, pair[0].weights.digest = 2, 22
        await until(lambda: fleet._pool.servers[0].problem is None)
        await asyncio.gather(*(fleet.generate(PROMPT) for _ in range(4)))
        assert [len(s.requests) for s in pair] == [2, 6]


async def test_a_dead_server_costs_only_itself(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.default = after(3, hang)
    async with fleet_of(*pair) as fleet, asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=10))) for _ in range(6)
        ]
        await until(lambda: [m.outstanding_tokens for m in fleet._pool.servers] == [21, 21])
        pair[1].default = Sequence.rest
        await pair[0].stop()
        await until(lambda: sum(task.done() for task in running) == 3)
        done = [task for task in running if task.done()]
        assert all(t.result().token_ids == tokens(10) for t in done)
        assert {t.result().servers for t in done} == {(pair[0].address, pair[1].address)}
        for task in running:
            task.cancel()


async def test_a_frozen_server_is_left(pair: list[ScriptedServer]) -> None:
    async def freeze(sequence: Sequence) -> None:
        await sequence.send(3)
        sequence.server.mute = True
        await asyncio.Event().wait()

    for server in pair:
        server.scripts = [freeze]
    pair[1].scripts = []
    timeouts = Timeouts(silence=0.1, probe=1, close=0.1)
    async with fleet_of(*pair, timeouts=timeouts) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=10))
    assert trajectory.servers == (pair[0].address, pair[1].address)
    assert trajectory.token_ids == tokens(10)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", InvalidRequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_MISMATCH", PrefixMismatchError),
    ],
)
async def test_a_refusal_is_not_tried_again(
    pair: list[ScriptedServer], code: grpc.StatusCode, reason: str, kind: type
) -> None:
    async def refuse(sequence: Sequence) -> None:
        await sequence.fail(code, reason)

    for server in pair:
        server.default = after(2, refuse)
    async with fleet_of(*pair) as fleet:
        with pytest.raises(kind) as caught:
            await fleet.generate(PROMPT)
        assert fleet._pool.servers[0].problem is None
    assert caught.value.trajectory.token_ids == tokens(2)
    assert sum(len(s.requests) for s in pair) == 1


async def test_a_gap_is_not_papered_over(server: ScriptedServer) -> None:
    async def gap(sequence: Sequence) -> None:
        await sequence.send(2)
        await sequence.send(2, offset=3)

    server.default = gap
    async with fleet_of(server) as fleet:
        with pytest.raises(ProtocolError):
            await fleet.generate(PROMPT)
    assert len(server.requests) == 1


async def step_fails(sequence: Sequence) -> None:
    await sequence.send(2)
    await sequence.fail(grpc.StatusCode.INTERNAL, "STEP_FAILED")


async def test_a_step_that_failed_is_tried_on_one_other_server(pair: list[ScriptedServer]) -> None:
    pair[0].default = step_fails
    async with fleet_of(*pair) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=9))
        assert trajectory.token_ids == tokens(9)
        assert trajectory.servers == (pair[0].address, pair[1].address)
        pair[1].default = step_fails
        with pytest.raises(StepFailedError) as caught:
            await fleet.generate(PROMPT, Sampling(max_new_tokens=9))
        assert [member.problem for member in fleet._pool.servers] == [None, None]
    assert caught.value.trajectory is not None
    assert caught.value.trajectory.token_ids == tokens(4)
    assert [len(server.requests) for server in pair] == [2, 2]


async def test_attempts_without_a_token_are_limited(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.default = interrupt
        server.scripts = [after(2, interrupt)]
    async with fleet_of(*pair) as fleet:
        with pytest.raises(RolloutFailedError, match="interrupted the sequence") as caught:
            await fleet.generate(PROMPT, request_id="hopeless")
    assert "hopeless" in str(caught.value)
    assert len(caught.value.causes) == 3
    assert all(isinstance(cause, ServerNotReadyError) for cause in caught.value.causes)
    assert len(caught.value.trajectory.token_ids) in {2, 4}  # one server's, or both


async def test_time_without_a_server_is_limited(server: ScriptedServer) -> None:
    server.state = common_pb2.SERVER_STATE_SLEEPING
    began = time.monotonic()
    async with fleet_of(server, retries=Retries(seconds=0.2)) as fleet:
        with pytest.raises(RolloutFailedError, match=f"{server.address}: is sleeping"):
            await fleet.generate(PROMPT)
    assert time.monotonic() - began < 30  # not for the minutes that are the default


async def test_the_time_that_a_sequence_ran_is_no_time_without_a_server(
    server: ScriptedServer,
) -> None:
    retries = Retries(seconds=4, first_delay=0.001)
    began = time.monotonic()

    async def script(sequence: Sequence) -> None:
        while time.monotonic() - began < 1.1 * retries.seconds:
            await sequence.send()
            await asyncio.sleep(0.05)
        server.state = common_pb2.SERVER_STATE_SLEEPING
        await sequence.finish("INTERRUPTED")

    async with fleet_of(server, retries=retries, probe_interval=0.02) as fleet:
        server.scripts = [script]
        task = asyncio.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=1000)))
        await until(lambda: server.state == common_pb2.SERVER_STATE_SLEEPING)
        await until(lambda: "is sleeping" in str(fleet._pool.servers[0].problem))
        assert not task.done()
        server.state = common_pb2.SERVER_STATE_SERVING
        assert (await task).token_ids == tokens(1000)


async def test_the_callers_time_counts_over_all_attempts(server: ScriptedServer) -> None:
    server.default = after(1, interrupt)
    async with fleet_of(server) as fleet:
        with pytest.raises(TimedOutError) as caught:
            await fleet.generate(PROMPT, Sampling(max_new_tokens=4000), timeout=0.3)
    assert caught.value.trajectory.token_ids == tokens(len(server.requests))
    times = [r.timeout.ToTimedelta().total_seconds() for r in server.requests]
    assert times[0] == 0.3
    assert times == sorted(times, reverse=True)


async def test_a_full_queue_is_no_failure(pair: list[ScriptedServer]) -> None:
    async def full(sequence: Sequence) -> None:
        await sequence.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")

    for server in pair:
        server.scripts = [full]
    async with fleet_of(*pair) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=4))
    assert trajectory.complete
    assert sum(len(s.requests) for s in pair) == 3


async def test_leaving_a_rollout_aborts_it(server: ScriptedServer) -> None:
    server.default = after(2, hang)
    async with fleet_of(server) as fleet:
        async with contextlib.aclosing(fleet.stream(PROMPT, request_id="left")) as stream:
            async for _ in stream:
                break
        assert await server.aborted.get() == "left"
        task = asyncio.create_task(fleet.generate(PROMPT, request_id="cancelled"))
        await until(lambda: len(server.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await server.aborted.get() == "cancelled"
        await until(lambda: fleet._pool.servers[0].outstanding_tokens == 0)


async def test_closing_ends_what_is_under_way(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.default = hang
    async with fleet_of(*pair) as fleet:
        running = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: any(s.requests for s in pair))
        for server in pair:
            server.state = common_pb2.SERVER_STATE_SLEEPING
        for member in fleet._pool.servers:
            await member.probe()
        waiting = asyncio.create_task(fleet.generate(PROMPT))
        await asyncio.sleep(0)
    assert (await running).finish.reason is FinishReason.ABORTED
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await fleet.generate(PROMPT)


async def test_a_fleet_starts_without_its_dead_servers(server: ScriptedServer) -> None:
    async with Fleet([server.address, "127.0.0.1:9"], retries=FAST) as fleet:
        assert (await fleet.generate(PROMPT)).complete
        infos = await fleet.info()
    assert isinstance(infos[server.address], ServerInfo)
    assert isinstance(infos["127.0.0.1:9"], ServerUnreachableError)


async def test_a_fleet_of_which_no_server_answers_says_so() -> None:
    fleet = Fleet(["127.0.0.1:9", "127.0.0.1:10"], timeouts=Timeouts(start=0))
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9.*127\.0\.0\.1:10"):
        await fleet.__aenter__()
    with pytest.raises(ClosedError, match="the fleet is not open"):
        await fleet.generate(PROMPT)


async def test_a_fleet_waits_for_servers_that_still_start(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    await server.stop()
    fleet = fleet_of(server)
    opening = asyncio.create_task(fleet.__aenter__())
    await until(lambda: "waiting up to 60 s for a server" in caplog.text)
    server.state = common_pb2.SERVER_STATE_STARTING
    await server.start(server.address)
    await until(lambda: fleet._pool.servers[0].info is not None)
    assert not opening.done()
    server.state = common_pb2.SERVER_STATE_AWAITING_WEIGHTS  # an update is what it waits for
    await opening
    server.state = common_pb2.SERVER_STATE_SERVING
    assert (await fleet.generate(PROMPT)).complete
    await fleet.close()
    assert caplog.text.count("waiting up to 60 s for a server") == 1


async def test_a_fleet_that_is_not_open_says_so(server: ScriptedServer) -> None:
    fleet = fleet_of(server)
    for _ in range(2):  # never opened, then closed
        for call in (fleet.generate(PROMPT), fleet.info(), fleet.newest_version()):
            with pytest.raises(ClosedError, match="the fleet is not open: use it within"):
                await call
        async with fleet:
            await fleet.info()


async def test_the_newest_version_is_that_of_the_servers_that_answer(
    pair: list[ScriptedServer],
) -> None:
    async with fleet_of(*pair) as fleet:
        assert await fleet.newest_version() is None
        pair[0].weights.version = 0
        assert await fleet.newest_version() == 0
        pair[1].weights.version = 7
        assert await fleet.newest_version() == 7
        await pair[1].stop()
        assert await fleet.newest_version() == 0
        await pair[0].stop()
        with pytest.raises(
            UnavailableError, match=f"{pair[0].address}: cannot be reached.*{pair[1].address}"
        ):
            await fleet.newest_version()


async def test_a_fleet_needs_servers() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Fleet([])
