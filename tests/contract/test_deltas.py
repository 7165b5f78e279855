"""Deltas: a publish of what changed is a full one of the same tensors, or is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
import rollwire_transport as transport
import torch
from rollwire.v1 import common_pb2, weights_pb2
from rollwire_client._rpc import conversion
from support.calls import Api, Generation, generate, reason_of, request
from support.publishing import (
    TERMS,
    DeltaUpdate,
    Update,
    changed,
    next_version,
    publish,
    random_weights,
    status,
)
from support.servers import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.servers import ServerProcess
    from torch import Tensor

LONG = 3000
PUBLISHES = 30
GROWTH_BYTES = 24 << 20  # of a server, by what its allocators keep


async def full(api: Api, tensors: Mapping[str, Tensor], **fields: object) -> Update:
    fields = {"term": next(TERMS), "version": await next_version(api), **fields}
    return Update(api, tensors, **fields)  # type: ignore[arg-type]


async def delta(
    api: Api, base: Mapping[str, Tensor], tensors: Mapping[str, Tensor], **fields: object
) -> DeltaUpdate:
    fields = {"term": next(TERMS), "version": await next_version(api), **fields}
    return DeltaUpdate(api, tensors, base=base, **fields)  # type: ignore[arg-type]


async def refusal(step: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await step  # type: ignore[misc]
    return reason_of(caught.value)


async def holds(api: Api, tensors: Mapping[str, Tensor]) -> None:
    """The server holds these tensors bit for bit, and no others."""
    serves = (await api.info()).weights
    assert serves.digest == digest_of(tensors)
    assert (await status(api, verify=True)).intact


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    return transport.sum_digests(
        transport.tensor_digest(transport.describe(name, tensor), tensor)
        for name, tensor in tensors.items()
    )


async def other_weights(api: Api) -> dict[str, Tensor]:
    """Weights that the server does not serve yet, aliases left out."""
    return await random_weights(api, next(TERMS))


@pytest_asyncio.fixture
async def base(api: Api) -> dict[str, Tensor]:
    """What the server serves."""
    tensors = await other_weights(api)
    await publish(api, tensors)
    if not (await api.info()).accepts_deltas:
        pytest.skip("this engine takes no deltas")
    return tensors


async def test_an_engine_that_takes_none_says_so_before_anything_is_touched(api: Api) -> None:
    if (await api.info()).accepts_deltas:
        pytest.skip("this engine takes deltas")
    base = await other_weights(api)
    serves = (await publish(api, base)).weights
    change = await delta(api, base, changed(base, 1))
    assert await refusal(change.announce()) == "UNSUPPORTED_ENCODING"
    assert (await status(api)).update_id == ""
    assert (await api.info()).weights == serves


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
async def test_base_and_delta_are_the_new_weights(
    api: Api, base: dict[str, Tensor], share: float
) -> None:
    new = changed(base, 1, share)
    change = await delta(api, base, new)
    answer = await change.publish()
    assert answer.weights.digest == digest_of(new)
    assert answer.weights.version == change.version
    assert change.last.received_bytes == sum(
        bucket.size for bucket in transport.delta_layout(change.manifest).buckets
    )
    assert change.last.received_bytes <= change.full_bytes * min(1.0, 0.05 + 4 * share)
    await holds(api, new)
    whole = await full(api, new, version=change.version)
    assert (await whole.publish()).already_current


async def test_delta_after_delta(api: Api, base: dict[str, Tensor]) -> None:
    for seed in range(3):
        new = changed(base, seed, 0.02)
        await (await delta(api, base, new, bucket_bytes=1024)).publish()
        await holds(api, new)
        base = new


@pytest.mark.parametrize(
    "policy", [common_pb2.KV_POLICY_RECOMPUTE, common_pb2.KV_POLICY_KEEP]
)  # fmt: skip
async def test_a_sequence_goes_on_under_the_new_tag(
    api: Api, base: dict[str, Tensor], policy: int
) -> None:
    change = await delta(api, base, changed(base, 2, 0.5))
    await change.stage()
    generation = Generation(api, request((5, 6, 7), LONG, seed=2))
    await generation.some(10)
    serves = (await api.info()).weights
    answer = await change.commit(policy)
    output = await generation.crosses()
    generation.call.cancel()
    tags = list(dict.fromkeys((t.version, t.revision, t.digest) for t in output.tags))
    assert tags == [
        (serves.version, serves.revision, serves.digest),
        (change.version, serves.revision + 1, answer.weights.digest),
    ]
    kept = policy == common_pb2.KV_POLICY_KEEP
    assert output.oldest[-1] == serves.revision + (not kept)


async def test_what_follows_is_sampled_as_after_a_full_update(
    api: Api, base: dict[str, Tensor]
) -> None:
    new = changed(base, 3, 0.5)
    await (await delta(api, base, new)).publish()
    after = await generate(api, request((1, 2, 3), 20, seed=4))
    await publish(api, base)
    await publish(api, new)
    again = await generate(api, request((1, 2, 3), 20, seed=4))
    assert after.tokens == again.tokens
    assert after.logprobs == pytest.approx(again.logprobs, abs=1e-4)


async def test_a_delta_of_another_base_is_refused_before_anything_is_touched(
    api: Api, base: dict[str, Tensor]
) -> None:
    other = changed(base, 4)
    change = await delta(api, other, changed(other, 5))
    assert await refusal(change.announce()) == "BASE_MISMATCH"
    assert (await status(api)).update_id == ""
    await holds(api, base)
    await (await full(api, change.tensors)).publish()
    await holds(api, change.tensors)


async def test_a_delta_that_leads_elsewhere_is_noticed_before_the_commit(
    api: Api, base: dict[str, Tensor]
) -> None:
    """Its base_digest is right, and its base was not."""
    other = changed(base, 6)
    change = await delta(api, other, changed(other, 7))
    change.manifest = dataclasses.replace(change.manifest, base_digest=digest_of(base))
    await change.announce()
    link = await change.form()
    await change.send(link)
    await change.until(weights_pb2.UPDATE_PHASE_STAGED)
    await asyncio.to_thread(link.close)
    assert change.last.digest != change.digest
    assert await refusal(change.commit()) == "DIGEST_MISMATCH"
    await change.discard()
    await holds(api, base)


async def corrupted(change: DeltaUpdate, random: random.Random) -> str:
    """How an update ends in which a byte of a delta is another one, but not on its way."""
    number = random.choice(list(change.sent))
    tensor = change.sent[number]
    data = (tensor if isinstance(tensor, torch.Tensor) else tensor()).clone()
    data[random.randrange(min(data.numel(), random.choice((16, 10**9))))] ^= random.randrange(
        1, 256
    )
    change.sent = {**change.sent, number: data}
    await change.announce()
    link = await change.form()
    try:
        await change.send(link)
        await change.until(weights_pb2.UPDATE_PHASE_STAGED)
    finally:
        await asyncio.to_thread(link.close)
    assert change.last.digest != change.digest
    await change.commit()
    return "COMMITTED"


@pytest.mark.slow
async def test_whatever_a_delta_consists_of_it_changes_nothing_unless_it_is_right(
    api: Api, base: dict[str, Tensor]
) -> None:
    ends = []
    for seed in range(25):
        change = await delta(api, base, changed(base, seed, 0.002), bucket_bytes=4096)
        try:
            ends.append(await corrupted(change, random.Random(seed)))
        except grpc.aio.AioRpcError as error:
            ends.append(reason_of(error))
            await change.discard()
        serves = (await api.info()).weights
        assert serves.digest == digest_of(base)
    assert set(ends) == {"MANIFEST_MISMATCH", "DIGEST_MISMATCH"}
    assert (await status(api, verify=True)).intact
    new = changed(base, 99)
    await (await delta(api, base, new)).publish()
    await holds(api, new)


@pytest.mark.parametrize("size", [0, 1 << 40])
async def test_an_absurd_size_is_refused_when_it_is_announced(
    api: Api, base: dict[str, Tensor], size: int
) -> None:
    change = await delta(api, base, changed(base, 7))
    manifest = conversion.manifest_to_proto(change.manifest)
    manifest.buckets[0].size = size
    assert await refusal(change.announce(manifest)) == "MANIFEST_MISMATCH"
    await holds(api, base)


@pytest.mark.parametrize("size", [1, 15, 17])
async def test_a_size_that_no_delta_has_is_refused_when_it_has_come(
    api: Api, base: dict[str, Tensor], size: int
) -> None:
    change = await delta(api, base, changed(base, 7))
    first, *others = change.manifest.buckets
    buckets = (dataclasses.replace(first, size=size), *others)
    change.manifest = dataclasses.replace(change.manifest, buckets=buckets)
    change.sender = transport.Sender(transport.delta_layout(change.manifest))
    change.sent = {**change.sent, "0": torch.zeros(size, dtype=torch.uint8)}
    assert await refusal(change.stage()) == "MANIFEST_MISMATCH"
    await holds(api, base)


async def test_a_delta_of_some_tensors_leaves_the_others(api: Api, base: dict[str, Tensor]) -> None:
    names = sorted(base)[: max(1, len(base) // 3)]
    new = {**base, **changed({name: base[name] for name in names}, 8)}
    part = await delta(
        api, {n: base[n] for n in names}, {n: new[n] for n in names}, partial=True
    )  # fmt: skip
    assert part.manifest.base_digest == digest_of({n: base[n] for n in names})
    assert (await part.publish()).weights.digest == digest_of(new)
    await holds(api, new)


async def test_aliases_are_named_and_not_sent(api: Api, base: dict[str, Tensor]) -> None:
    schema = await api.weights.GetWeightSchema(weights_pb2.GetWeightSchemaRequest(), timeout=60)
    aliases = {spec.name: spec.alias_of for spec in schema.tensors if spec.alias_of}
    new = changed(base, 9)
    old, tied = (
        {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}
        for tensors in (base, new)
    )
    change = await delta(api, old, tied)
    assert sum(spec.alias_of is not None for spec in change.manifest.tensors) == len(aliases)
    await change.publish()
    await holds(api, new)


async def test_a_delta_that_is_discarded_half_way_can_come_again(
    api: Api, base: dict[str, Tensor]
) -> None:
    new = changed(base, 10)
    announced = await delta(api, base, new)
    await announced.announce()
    await announced.discard()
    staged = await delta(api, base, new)
    await staged.stage()
    await staged.discard()
    assert await refusal(staged.commit()) == "NOT_STAGED"
    hung_up = await delta(api, base, new)
    await hung_up.announce()
    hung_up.call.cancel()
    await holds(api, base)
    again = await delta(api, base, new)
    await again.stage()
    first, second = await asyncio.gather(again.commit(), again.commit())
    assert first == second == await again.commit()
    await holds(api, new)


async def test_an_update_of_the_same_delta_builds_on_what_is_gone(
    api: Api, base: dict[str, Tensor]
) -> None:
    new = changed(base, 11)
    await (await delta(api, base, new)).publish()
    again = await delta(api, base, new)
    assert await refusal(again.announce()) == "BASE_MISMATCH"
    await holds(api, new)


async def test_a_delta_goes_back_to_an_older_version(api: Api, base: dict[str, Tensor]) -> None:
    version = (await api.info()).weights.version
    new = changed(base, 12)
    await (await delta(api, base, new)).publish()
    lower = await delta(api, new, base, version=version)
    assert await refusal(lower.announce()) == "VERSION_NOT_NEWER"
    back = await delta(api, new, base, version=version, rollback=True)
    assert (await back.publish()).weights.version == version
    await holds(api, base)


async def test_a_delta_may_have_no_version(api: Api, base: dict[str, Tensor]) -> None:
    new = changed(base, 13)
    answer = await (await delta(api, base, new, version=None)).publish()
    assert not answer.weights.HasField("version")
    await holds(api, new)


async def test_a_group_that_moved_a_full_update_moves_a_delta(
    api: Api, base: dict[str, Tensor]
) -> None:
    term = next(TERMS)
    first = await full(api, base, term=term)
    await first.announce()
    link = await first.form()
    try:
        await first.send(link)
        await first.until(weights_pb2.UPDATE_PHASE_STAGED)
        await first.commit()
        epoch, transfers = first.last.epoch, link.transfers
        new = changed(base, 14)
        change = await delta(api, base, new, term=term, kept=(epoch, transfers))
        await change.announce()
        while change.last.phase == weights_pb2.UPDATE_PHASE_READY:
            assert await change.read()
        assert change.last.phase == weights_pb2.UPDATE_PHASE_RECEIVING
        await change.send(link)
        await change.until(weights_pb2.UPDATE_PHASE_STAGED)
        await change.commit()
    finally:
        await asyncio.to_thread(link.close)
    await holds(api, new)


@pytest.mark.slow
async def test_many_deltas_leave_no_memory(
    api: Api, server: ServerProcess, base: dict[str, Tensor]
) -> None:
    sizes = []
    for seed in range(PUBLISHES):
        new = changed(base, seed)
        await (await delta(api, base, new)).publish()
        base = new
        sizes.append(resident_bytes(server.process.pid))
    assert max(sizes) - sizes[PUBLISHES // 3] <= GROWTH_BYTES
    await holds(api, base)
