"""Weight updates: transactions of one server, and sequences that go on across them."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid

import grpc
import pytest
import rollwire_transport as transport
import torch
from rollwire.v1 import common_pb2, weights_pb2
from rollwire_client._rpc import conversion
from support.calls import Api, Generation, Output, Stream, generate, reason_of, request
from support.publishing import (
    TERMS,
    Update,
    next_version,
    no_update,
    random_weights,
    status,
)

LONG = 3000


async def update(api: Api, seed: int, **fields: object) -> Update:
    """An update of a publisher that takes over from every earlier test's, above its version."""
    fields = {"term": next(TERMS), "version": await next_version(api), **fields}
    return Update(api, await random_weights(api, seed), **fields)  # type: ignore[arg-type]


async def refusal(step: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await step  # type: ignore[misc]
    return reason_of(caught.value)


async def scored(api: Api, prompt: tuple[int, ...], tokens: list[int]) -> list[float]:
    """What the weights that serve now say of ``tokens`` after ``prompt``, computed afresh."""
    whole = (*prompt, *tokens)
    output = await generate(api, request(whole, 1, prompt_logprobs=True))
    return output.prompt_logprobs[len(prompt) - 1 :]


async def crossing(api: Api, kv_policy: int) -> tuple[tuple[int, ...], Output, int]:
    """A sequence that a commit interrupts: its prompt, what it has some time after, and the tokens
    before.
    """
    change = await update(api, 100 + kv_policy)
    await change.stage()
    prompt = (5, 6, 7, 8)
    generation = Generation(api, request(prompt, LONG, seed=2))
    await generation.some(10)
    await change.commit(kv_policy)
    output = await generation.crosses()
    generation.call.cancel()
    before = output.revisions.index(output.revisions[-1])
    assert before >= 10
    return prompt, output, before


async def test_a_commit_is_told_everywhere(api: Api) -> None:
    before = (await api.info()).weights
    change = await update(api, 3)
    await change.stage()
    assert (await api.info()).weights == before
    answer = await change.commit()
    assert answer.weights.version == change.version
    assert answer.weights.revision == before.revision + 1
    assert answer.weights.digest == change.sender.digest
    assert answer.weights.server_id == before.server_id
    assert not answer.already_current
    assert (await api.info()).weights == answer.weights
    told = await status(api, verify=True)
    assert told.intact
    assert told.weights == told.history[0] == answer.weights
    assert told.history[1] == before
    assert told.committed_update_id == change.update_id
    output = await generate(api, request((1, 2), 4))
    assert all(tag == answer.weights for tag in output.tags)


async def test_an_update_may_lay_its_tensors_out_in_any_order(api: Api) -> None:
    weights = await random_weights(api, 4)
    prompt, digests, scores = (5, 6, 7, 8), [], []
    for names in ([*weights], [*weights][::-1]):
        change = Update(
            api,
            {name: weights[name] for name in names},
            term=next(TERMS),
            version=await next_version(api),
        )
        await change.stage()
        digests.append((await change.commit()).weights.digest)
        scores.append(await scored(api, prompt, [9, 10, 11]))
    assert digests[0] == digests[1]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


async def test_a_sequence_goes_on_under_the_new_policy_which_computes_all_anew(api: Api) -> None:
    prompt, output, before = await crossing(api, common_pb2.KV_POLICY_RECOMPUTE)
    assert output.revisions == sorted(output.revisions)
    assert output.oldest == output.revisions
    expected = await scored(api, prompt, output.tokens)
    assert output.logprobs[before:] == pytest.approx(expected[before:], abs=1e-4)
    assert output.logprobs[:before] != pytest.approx(expected[:before], abs=1e-2)


async def test_kept_keys_and_values_are_owned_up_to(api: Api) -> None:
    prompt, output, before = await crossing(api, common_pb2.KV_POLICY_KEEP)
    old, new = output.revisions[0], output.revisions[-1]
    assert output.oldest[:before] == [old] * before
    assert set(output.oldest[before:]) == {old}
    assert new == old + 1
    expected = await scored(api, prompt, output.tokens)
    assert output.logprobs[before:] != pytest.approx(expected[before:], abs=1e-4)


async def test_keys_and_values_are_kept_unless_the_trainer_says_otherwise(api: Api) -> None:
    _, output, before = await crossing(api, common_pb2.KV_POLICY_UNSPECIFIED)
    assert set(output.oldest) == {output.revisions[0]}
    assert before < len(output.revisions)


async def test_a_sequence_whose_keys_get_too_old_goes_on_as_under_the_new_policy(api: Api) -> None:
    prompt, old = (5, 6, 7, 8), (await api.info()).weights.revision
    generation = Generation(api, request(prompt, LONG, seed=2))
    output = await generation.some(10)
    for seed in (130, 131):
        change = await update(api, seed)
        await change.stage()
        committed = (await change.commit(max_kv_lag=1)).weights.revision
        while output.revisions.count(committed) < 20:
            await generation.some(len(output.tokens) + 1)
    generation.call.cancel()
    first, second = (output.revisions.index(old + step) for step in (1, 2))
    assert output.oldest[:second] == [old] * second
    assert output.oldest[second:] == output.revisions[second:]
    expected = await scored(api, prompt, output.tokens)
    assert output.logprobs[second:] == pytest.approx(expected[second:], abs=1e-4)
    assert output.logprobs[first:second] != pytest.approx(expected[first:second], abs=1e-2)


async def test_no_token_reads_older_keys_than_the_bound_and_commits_share_the_work(
    api: Api,
) -> None:
    stream = Stream(api)
    for handle in range(4):
        await stream.start(handle, request((handle + 1,), LONG, seed=handle))
    outputs, revisions = stream.outputs.values(), [(await api.info()).weights.revision]
    for seed in range(4):
        while not all(revisions[-1] in output.revisions for output in outputs):
            assert await stream.read()
        change = await update(api, 140 + seed)
        await change.stage()
        answer = await change.commit(max_kv_lag=1)
        assert answer.timing.kv_tokens_to_recompute > 0
        revisions.append(answer.weights.revision)
    while not all(revisions[-1] in output.revisions for output in outputs):
        assert await stream.read()
    for handle in stream.outputs:
        await stream.abort(handle)
    await stream.all()
    reads = [{*zip(output.revisions, output.oldest, strict=True)} for output in outputs]
    assert all(new - old in {0, 1} for read in reads for new, old in read)
    for revision in revisions[1:]:
        assert sum((revision, revision) in read for read in reads) == 2


async def test_equal_weights_interrupt_nothing(api: Api) -> None:
    base = await update(api, 5)
    await base.publish()
    again = await update(api, 5)
    await again.stage()
    generation = Generation(api, request((3, 3), LONG, seed=8))
    await generation.some(10)
    await again.commit()
    output = await generation.crosses()
    generation.call.cancel()
    whole = await generate(api, request((3, 3), len(output.tokens), seed=8))
    assert output.tokens == whole.tokens
    assert len(set(output.revisions)) == 2


async def test_columns_are_cut_at_a_commit(api: Api) -> None:
    change = await update(api, 6)
    await change.stage()
    stream = Stream(api)
    for handle in range(8):
        await stream.start(handle, request((handle + 1,), LONG, seed=handle))
    while not all(output.tokens for output in stream.outputs.values()):
        await stream.read()
    answer = await change.commit()
    assert answer.timing.held_sequences == 8
    assert answer.timing.paused_ns > 0
    while not all(len(set(output.revisions)) > 1 for output in stream.outputs.values()):
        assert await stream.read()
    for handle in stream.outputs:
        await stream.abort(handle)
    for output in (await stream.all()).values():
        assert len(set(output.revisions)) == 2
        assert output.revisions == sorted(output.revisions)


async def test_a_paused_server_commits_and_stays_paused(api: Api) -> None:
    await api.pause("p")
    late = Generation(api, request((1,), 5))
    await api.held(1)
    answer = await (await update(api, 7)).publish()
    assert (await api.info()).state == common_pb2.SERVER_STATE_PAUSED
    assert not late.output.tokens
    await api.resume("p")
    assert set((await late.all()).revisions) == {answer.weights.revision}


async def test_an_untagged_update_has_a_revision_and_no_version(api: Api) -> None:
    answer = await (await update(api, 8, version=None)).publish()
    assert not answer.weights.HasField("version")
    output = await generate(api, request((1,), 3))
    assert not output.tags[0].HasField("version")
    assert output.tags[0].revision == answer.weights.revision
    await (await update(api, 9, version=10_000)).publish()


async def test_a_partial_update_changes_what_it_names(api: Api) -> None:
    await (await update(api, 10)).publish()
    both = await random_weights(api, 10)
    name = sorted(both)[0]
    both[name] = both[name] * 3
    part = await update(api, 10, partial=True)
    part = Update(api, {name: both[name]}, part.version, partial=True, term=part.term)
    answer = await part.publish()
    whole = Update(api, both)
    assert answer.weights.digest == whole_digest(whole)
    assert (await status(api, verify=True)).intact


def whole_digest(change: Update) -> int:
    specs = {spec.name: spec for spec in change.manifest.tensors}
    return transport.sum_digests(
        transport.tensor_digest(specs[name], tensor) for name, tensor in change.tensors.items()
    )


async def test_versions_only_rise(api: Api) -> None:
    first = await update(api, 11)
    answer = await first.publish()
    lower = await update(api, 12, version=first.version - 1)
    assert await refusal(lower.announce()) == "VERSION_NOT_NEWER"
    conflict = await update(api, 12, version=first.version)
    await conflict.stage()
    assert await refusal(conflict.commit()) == "VERSION_CONFLICT"
    same = await update(api, 11, version=first.version)
    again = await same.publish()
    assert again.already_current
    assert again.weights == answer.weights
    back = await update(api, 12, version=first.version - 1, rollback=True)
    assert (await back.publish()).weights.version == first.version - 1


async def test_a_commit_is_idempotent_and_checks_the_digest(api: Api) -> None:
    change = await update(api, 13)
    await change.stage()
    assert await refusal(change.commit(digest=change.sender.digest ^ 1)) == "DIGEST_MISMATCH"
    first, second = await asyncio.gather(change.commit(), change.commit())
    assert first == second == await change.commit()


async def test_only_what_is_staged_is_committed(api: Api) -> None:
    before = (await api.info()).weights
    change = await update(api, 14)
    assert await refusal(change.commit(digest=0)) == "NOT_STAGED"
    await change.announce()
    assert await refusal(change.commit(digest=0)) == "NOT_STAGED"
    await change.transfer()
    assert (await change.discard()).weights == before
    assert (await change.discard()).weights == before
    assert await refusal(change.commit()) == "NOT_STAGED"
    assert (await status(api)).update_id == ""


async def test_a_staged_update_waits_for_its_lease_and_no_longer(api: Api) -> None:
    change = await update(api, 15, lease=1)
    await change.stage()
    await no_update(api)
    assert await refusal(change.commit()) == "NOT_STAGED"


async def test_ending_the_call_discards_the_update(api: Api) -> None:
    change = await update(api, 16)
    await change.announce()
    change.call.cancel()
    await no_update(api)


async def test_one_update_at_a_time_and_a_higher_term_takes_over(api: Api) -> None:
    first = await update(api, 17)
    await first.announce()
    second = await update(api, 18, term=first.term)
    assert await refusal(second.announce()) == "UPDATE_IN_PROGRESS"
    successor = await update(api, 19, publisher="successor")
    await successor.announce()
    assert await refusal(first.until(weights_pb2.UPDATE_PHASE_STAGED)) == "STALE_PUBLISHER"
    assert await refusal(second.announce()) == "STALE_PUBLISHER"
    assert await refusal(first.discard()) == "STALE_PUBLISHER"
    await successor.transfer()
    await successor.commit()


async def test_a_manifest_that_does_not_fit_names_every_tensor(api: Api) -> None:
    change = await update(api, 20)
    names = sorted(change.tensors)
    tensors = dict(change.tensors)
    tensors["model.surprise"] = torch.zeros(3)
    tensors[names[1]] = torch.zeros(1, 2, 3)
    del tensors[names[2]]
    wrong = dataclasses.replace(change, tensors=tensors)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wrong.announce()
    assert reason_of(caught.value) == "MANIFEST_MISMATCH"
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for name in ("model.surprise", names[1], names[2]):
        assert name in (caught.value.details() or "")
    assert (await status(api)).update_id == ""


async def test_nonsense_is_refused_and_the_server_serves_on(api: Api) -> None:
    change = await update(api, 21)
    good = conversion.manifest_to_proto(change.manifest)
    delta = weights_pb2.Manifest()
    delta.CopyFrom(good)
    delta.encoding = weights_pb2.ENCODING_DELTA
    takes_deltas = (await api.info()).accepts_deltas
    baseless = "MANIFEST_MISMATCH" if takes_deltas else "UNSUPPORTED_ENCODING"
    assert await refusal(change.announce(delta)) == baseless
    overlap = weights_pb2.Manifest()
    overlap.CopyFrom(good)
    overlap.buckets[0].spans[0].length = 2**60
    assert await refusal(change.announce(overlap)) == "MANIFEST_MISMATCH"
    assert await refusal(change.announce(weights_pb2.Manifest())) == "MANIFEST_MISMATCH"
    nameless = dataclasses.replace(change, update_id="")
    assert await refusal(nameless.announce()) == "BAD_REQUEST"
    good.ClearField("encoding")  # as FULL
    await change.announce(good)
    epoch = uuid.uuid4().hex
    for wrong in (
        {"backend": "carrier pigeon"},
        {"ranks": [0]},
        {"ranks": [2]},
        {"ranks": [1, 2]},
        {"epoch": ""},
        {"step": weights_pb2.JOIN_STEP_UNSPECIFIED},  # a trainer of another version
        {"step": weights_pb2.JOIN_STEP_CONNECT, "first_bucket": 1},
    ):
        step = change.prepare(**{"epoch": epoch, **wrong})  # type: ignore[arg-type]
        assert await refusal(step) == "BAD_REQUEST"
    connecting = change.join(weights_pb2.JOIN_STEP_CONNECT, epoch)
    assert await refusal(connecting) == "TRANSPORT_FAILED"
    await change.transfer()
    await change.commit()
    assert (await generate(api, request((1,), 3))).reason == "LENGTH"


async def test_a_request_waits_for_the_version_that_it_needs(api: Api) -> None:
    change = await update(api, 22)
    assert change.version is not None
    waiting = Generation(api, request((1,), 5, min_weight_version=change.version))
    late = generate(api, request((1,), 5, min_weight_version=10**9, timeout=0.1))
    assert await refusal(late) == "WEIGHTS_TOO_OLD"
    info = await api.info()
    assert (info.running_sequences, info.waiting_sequences) == (0, 1)
    answer = await change.publish()
    assert set((await waiting.all()).revisions) == {answer.weights.revision}


async def test_a_commit_beyond_the_highest_version_interrupts(api: Api) -> None:
    change = await update(api, 23)
    assert change.version is not None
    await change.stage()
    bound = Generation(api, request((1,), LONG, max_weight_version=change.version - 1))
    await bound.some(3)
    await change.commit()
    output = await bound.all()
    assert output.reason == "INTERRUPTED"
    assert len(set(output.revisions)) == 1
    too_new = generate(api, request((1,), 5, max_weight_version=change.version - 1))
    assert await refusal(too_new) == "WEIGHTS_TOO_NEW"
