"""Odd, late and racing calls: each is answered by name, and the server serves on."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid

import grpc
import pytest
import rollwire_transport as transport
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2
from support.calls import Api, Generation, Output, generate, reason_of, request
from support.publishing import TERMS, Update, next_version, publish, random_weights, status

LONG = 3000


async def update(api: Api, seed: int, version: int | None, **fields: object) -> Update:
    fields = {"term": next(TERMS), **fields}
    return Update(api, await random_weights(api, seed), version, **fields)  # type: ignore[arg-type]


async def refusal(step: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await step  # type: ignore[misc]
    return reason_of(caught.value)


@pytest.mark.parametrize(
    "host", ["a..b", "x" * 70, "5" * 200, "127.0.0.1:80", "[::1", "é", "256.0.0.1"]
)
async def test_a_host_that_is_none(api: Api, host: str) -> None:
    change = await update(api, 1, await next_version(api))
    await change.announce()
    assert await refusal(change.prepare(uuid.uuid4().hex, host=host)) == "TRANSPORT_FAILED"
    await change.transfer()
    await change.commit()
    assert (await generate(api, request((1,), 3))).reason == "LENGTH"


async def test_an_offer_that_is_none(api: Api) -> None:
    change = await update(api, 1, await next_version(api))
    await change.announce()
    for offer in (b"", b"\xff" * 257, bytes(4_000_000)):
        epoch = uuid.uuid4().hex
        await change.prepare(epoch)
        async with asyncio.timeout(20):  # a large one is read at once
            connecting = change.join(weights_pb2.JOIN_STEP_CONNECT, epoch, offer=offer)
            assert await refusal(connecting) == "TRANSPORT_FAILED"
    await change.transfer()
    await change.commit()
    assert (await generate(api, request((1,), 3))).reason == "LENGTH"


async def test_a_kept_group_is_used_again_once_and_by_those_who_know_it(api: Api) -> None:
    former = await update(api, 1, await next_version(api))
    await former.announce()
    epoch = uuid.uuid4().hex
    link = transport.open_link("gloo", epoch=epoch, rank=0, world_size=2)
    try:
        offers = link.offers({1: (await former.prepare(epoch)).answer})
        connect = {"step": weights_pb2.JOIN_STEP_CONNECT, "epoch": epoch, "offer": offers[1]}
        connecting = asyncio.create_task(former.join(**connect))
        await asyncio.to_thread(link.connect, 20)
        await connecting
        await former.send(link)
        await former.until(weights_pb2.UPDATE_PHASE_STAGED)
        await former.commit()

        for other in (("", 0), (epoch, 0), (epoch, 2), (uuid.uuid4().hex, 1)):
            change = await update(api, 2, await next_version(api), kept=other)
            await change.announce()
            assert (change.last.phase, change.last.epoch) == (weights_pb2.UPDATE_PHASE_READY, "")
            await change.discard()
        change = await update(api, 2, await next_version(api), kept=(epoch, 1))
        await change.announce()
        assert change.last.phase == weights_pb2.UPDATE_PHASE_RECEIVING
        assert change.last.epoch == epoch
        # It would receive twice over one link.
        assert await refusal(change.join(**connect)) == "TRANSPORT_FAILED"
        await change.send(link)
        await change.until(weights_pb2.UPDATE_PHASE_STAGED)
        assert change.last.digest == change.sender.digest
        await change.commit()
    finally:
        await asyncio.to_thread(link.close)

    change = await update(api, 3, await next_version(api), kept=(epoch, 2))
    await change.announce()
    async with asyncio.timeout(5):  # whose other end is closed
        await change.until(weights_pb2.UPDATE_PHASE_STALLED)
    await change.transfer()
    await change.commit()
    assert (await status(api, verify=True)).intact


@pytest.mark.parametrize("how", ["rollback", "untagged"])
async def test_a_commit_below_the_lowest_version_interrupts(api: Api, how: str) -> None:
    version = await next_version(api) + 10
    await (await update(api, 1, version)).publish()
    bound = Generation(api, request((1,), LONG, min_weight_version=version))
    await bound.some(3)
    lower = None if how == "untagged" else version - 5
    await (await update(api, 2, lower, rollback=True)).publish()
    output = await bound.all()
    assert output.reason == "INTERRUPTED"
    assert {tag.version for tag in output.tags} == {version}


async def test_no_commit_is_slipped_past(api: Api) -> None:
    """Requests that arrive while a commit is under way sample under nothing newer than asked."""
    for number in range(8):
        version = await next_version(api)
        await publish(api, await random_weights(api, number))
        change = Update(api, await random_weights(api, 50 + number), version + 1, term=next(TERMS))
        await change.stage()
        asked = [request((i,), 30, max_weight_version=version) for i in range(1, 60)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(change.commit())
            running = [tasks.create_task(_ended(api, message)) for message in asked]
        for task in running:
            output, reason = task.result()
            assert {tag.version for tag in output.tags} <= {version}
            assert reason in ("LENGTH", "INTERRUPTED", "WEIGHTS_TOO_NEW")


async def _ended(api: Api, message: rollout_pb2.GenerateRequest) -> tuple[Output, str]:
    generation = Generation(api, message)
    try:
        await generation.all()
    except grpc.aio.AioRpcError as error:
        return generation.output, reason_of(error)
    return generation.output, generation.output.reason


async def test_versions_are_remembered_across_an_untagged_update(api: Api) -> None:
    version = await next_version(api)
    await (await update(api, 1, version)).publish()
    await (await update(api, 2, None)).publish()
    assert await refusal((await update(api, 3, version - 1)).announce()) == "VERSION_NOT_NEWER"
    other = await update(api, 3, version)
    await other.stage()
    assert await refusal(other.commit()) == "VERSION_CONFLICT"
    back = await (await update(api, 1, version)).publish()
    assert not back.already_current
    assert back.weights.version == version


async def test_verifying_beside_commits_raises_no_false_alarm(api: Api) -> None:
    version = await next_version(api)
    done = asyncio.Event()

    async def look() -> int:
        looks = 0
        while not done.is_set():
            assert (await status(api, verify=True)).intact
            looks += 1
        return looks

    looking = asyncio.create_task(look())
    for i in range(4):
        await (await update(api, i % 2, version + i)).publish()
    done.set()
    assert await looking


async def test_an_update_id_is_used_once(api: Api) -> None:
    version = await next_version(api)
    first = await update(api, 1, version)
    await first.publish()
    again = await update(api, 2, version + 1, update_id=first.update_id)
    assert await refusal(again.announce()) == "BAD_REQUEST"
    staged = await update(api, 3, version + 1)
    await staged.stage()
    other = dataclasses.replace(staged, version=version + 2)
    assert await refusal(other.announce()) == "UPDATE_IN_PROGRESS"
    await staged.announce()
    await staged.discard()


@pytest.mark.parametrize("length", [300, 50_000])
async def test_names_that_are_too_long_are_refused_by_name(api: Api, length: int) -> None:
    name = "n" * length
    version = await next_version(api)
    for fields in ({"update_id": name}, {"publisher": name}):
        assert await refusal((await update(api, 1, version, **fields)).announce()) == "BAD_REQUEST"
    assert await refusal(api.pause(name)) == "BAD_REQUEST"
    assert await refusal(api.abort(name)) == "BAD_REQUEST"
    change = await update(api, 1, version)
    await change.announce()
    assert await refusal(change.prepare("e", backend=name)) == "BAD_REQUEST"
    await change.discard()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-45},
        {"temperature": 1e-39},
        {"temperature": 9.9e-7},
        {"min_new_tokens": 8, "stop_token_ids": range(512)},
    ],
)
async def test_sampling_that_has_no_meaning(api: Api, fields: dict[str, object]) -> None:
    assert await refusal(generate(api, request((1,), 16, **fields))) == "BAD_SAMPLING"  # type: ignore[arg-type]


async def test_the_least_temperature_is_what_float32_makes_of_it(api: Api) -> None:
    output = await generate(api, request((1,), 6, temperature=1e-6, ignore_eos=True))
    assert (output.reason, len(output.tokens)) == ("LENGTH", 6)


async def test_enums_beyond_their_range(api: Api) -> None:
    sleep = rollout_pb2.SleepRequest(weights=99)  # type: ignore[arg-type]
    assert await refusal(api.rollouts.Sleep(sleep, timeout=60)) == "BAD_REQUEST"
    change = await update(api, 1, await next_version(api))
    await change.stage()
    assert await refusal(change.commit(kv_policy=99)) == "BAD_REQUEST"
    contradiction = change.commit(common_pb2.KV_POLICY_RECOMPUTE, max_kv_lag=2)
    assert await refusal(contradiction) == "BAD_REQUEST"
    await change.discard()


@pytest.mark.parametrize("share", [-0.01, 1.01, float("nan")])
async def test_a_share_that_is_none(api: Api, share: float) -> None:
    announcement = weights_pb2.UpdateWeightsRequest(
        publisher=weights_pb2.Publisher(id="me", term=1 << 40), update_id="u", changed_share=share
    )
    assert await refusal(api.weights.UpdateWeights(announcement).read()) == "BAD_REQUEST"


async def test_a_sleep_whose_caller_goes_away_goes_through(api: Api) -> None:
    before = await generate(api, request((4, 5), 10, seed=1))
    running = Generation(api, request((1,), LONG))
    await running.some(1)
    keep = rollout_pb2.SleepRequest(weights=rollout_pb2.SLEEPING_WEIGHTS_KEEP)
    call = api.rollouts.Sleep(keep, timeout=60)
    await asyncio.sleep(0.003)
    call.cancel()
    assert (await running.all()).reason in ("INTERRUPTED", "ABORTED", "LENGTH")
    info = await api.info()
    if info.state != common_pb2.SERVER_STATE_SLEEPING:  # it was cancelled before it arrived
        await api.rollouts.Sleep(keep, timeout=60)
    await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
    await api.reaches(common_pb2.SERVER_STATE_SERVING)
    after = await generate(api, request((4, 5), 10, seed=1))
    assert after.tokens == before.tokens
