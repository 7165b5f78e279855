from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollwire.types import WeightTag
from rollwire_server.engines.base import EngineError, TornWeightsError
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_transport import Manifest, TensorSpec, sum_digests, tensor_digest
from support import reference
from support.engines import prompts, running, spec, staged_update
from support.examples import examples

if TYPE_CHECKING:
    from support.engines import Driver
    from transformers import PreTrainedModel

LENGTHS = (3, 20, 70, 7, 33, 11)
LONG = 2400  # tokens of a prompt: computed in as many steps as a commit may come late
TOKENS = 300  # so many that none ends before the commit that is to interrupt it


def close(got: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(got), expected, atol=1e-5, rtol=0)


async def test_recompute_makes_every_later_token_one_of_the_new_policy(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    tensors = reference.changed(tiny)
    new = reference.with_tensors(tiny, tensors)
    asked = [spec(p, TOKENS, seed=i) for i, p in enumerate(prompts(*LENGTHS))]
    sampled = driver.submit(*asked)
    await driver.tokens(9, sampled[1])
    applied = await driver.commit(tensors, max_kv_lag=0)
    await driver.ended(*sampled)

    assert applied.kv_tokens_to_recompute > 20 + 9
    assert 0 in sampled[0].revisions
    for one, got in zip(asked, sampled, strict=True):
        before = got.revisions.count(0)
        assert got.revisions == [0] * before + [1] * (TOKENS - before)
        assert got.oldest_kv_revisions == got.revisions
        old = reference.logprobs(tiny, one.prompt, got.token_ids)
        close(got.logprobs[:before], old[:before])
        close(got.logprobs[before:], reference.logprobs(new, one.prompt, got.token_ids)[before:])


async def test_keep_attends_to_old_keys_and_says_so(driver: Driver, tiny: PreTrainedModel) -> None:
    tensors = reference.changed(tiny)
    new = reference.with_tensors(tiny, tensors)
    asked = [spec(p, TOKENS, seed=i) for i, p in enumerate(prompts(*LENGTHS))]
    sampled = driver.submit(*asked)
    await driver.tokens(9, sampled[1])
    applied = await driver.commit(tensors)
    await driver.ended(*sampled)

    assert applied.kv_tokens_to_recompute == 0
    kinds = set()
    for one, got in zip(asked, sampled, strict=True):
        before = got.revisions.count(0)
        kinds.add((before > 0, got.oldest_kv_revisions[-1]))
        if before == 0 and got.oldest_kv_revisions[-1] == 1:  # it had not begun
            close(got.logprobs, reference.logprobs(new, one.prompt, got.token_ids))
        elif before:
            assert set(got.oldest_kv_revisions) == {0}
            tokens = [*one.prompt, *got.token_ids]
            # The last token sampled before the commit had not been an input yet.
            first = len(one.prompt) + before
            expected = reference.logprobs_over_old_keys(tiny, new, tokens, first - 1, first)
            close(got.logprobs[before:], expected)
    assert {(True, 0), (False, 1)} <= kinds


async def test_keep_of_half_a_prompt(driver: Driver, tiny: PreTrainedModel) -> None:
    """The entries of a prompt whose prefill a commit cut in two are of both revisions."""
    tensors = reference.changed(tiny)
    new = reference.with_tensors(tiny, tensors)
    first, second = prompts(6, LONG)
    (pace,) = driver.submit(spec(first, TOKENS))
    await driver.tokens(3, pace)
    (got,) = driver.submit(one := spec(second, 10, seed=1, prompt_logprobs=True))
    await driver.tokens(8, pace)
    await driver.engine.hold()
    entries = driver.engine.load().kv_tokens_used - len(first) - len(pace.token_ids) + 1
    await driver.commit(tensors)
    await driver.ended(got, pace)

    assert 0 < entries < LONG
    assert (set(got.revisions), set(got.oldest_kv_revisions)) == ({1}, {0})
    tokens = [*one.prompt, *got.token_ids]
    close(got.logprobs, reference.logprobs_over_old_keys(tiny, new, tokens, entries, LONG))
    # Of the prompt, too: what the new weights computed attended to keys of the old ones.
    parts = [(revision, p) for extras, revision in got.extras for p in extras.prompt_logprobs]
    assert {(revision, part.oldest_kv_revision) for revision, part in parts} == {(0, 0), (1, 0)}
    expected = reference.logprobs_over_old_keys(tiny, new, tokens, entries, entries + 1)
    close(got.prompt_logprobs[entries:], expected[: LONG - entries - 1])


@pytest.mark.parametrize("last", [0, 1])
async def test_routing_and_prompt_logprobs_say_which_keys_they_attended_to(last: int) -> None:
    """Of a prompt that a commit cut in two, and another began again."""
    config = EmbeddedConfig("builtin:tiny-moe", device="cpu", prefill_tokens=16)
    async with running(EmbeddedEngine(config)) as driver:
        (prompt,) = prompts(LONG)
        (got,) = driver.submit(spec(prompt, 10, routed_experts=True, prompt_logprobs=True))
        for revision, max_kv_lag in enumerate((None, last)):
            await driver.recorder.until(lambda r=revision: r in {at for _, at in got.extras})
            await driver.commit({}, max_kv_lag)
        await driver.ended(got)
        told = {
            (revision, part.oldest_kv_revision)
            for extras, revision in got.extras
            for part in (*extras.routed_experts, *extras.prompt_logprobs)
        }
        assert told == {(0, 0), (1, 0), (2, 2)}


async def test_recompute_after_keep_forgets_the_old_keys(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    (prompt,) = prompts(20)
    (got,) = driver.submit(spec(prompt, TOKENS, seed=1))
    for after, seed, max_kv_lag in ((5, 1, None), (15, 2, 0)):
        await driver.tokens(after, got)
        tensors = reference.changed(tiny, seed=seed)
        await driver.commit(tensors, max_kv_lag)
    await driver.ended(got)
    assert set(zip(got.revisions, got.oldest_kv_revisions, strict=True)) == {(0, 0), (1, 0), (2, 2)}
    last = got.revisions.count(2)
    expected = reference.logprobs(reference.with_tensors(tiny, tensors), prompt, got.token_ids)
    close(got.logprobs[-last:], expected[-last:])


async def test_a_sequence_beyond_the_bound_goes_on_as_if_the_new_policy_had_read_all_of_it(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    (prompt,) = prompts(20)
    (got,) = driver.submit(spec(prompt, TOKENS, seed=1))
    models, recomputed = [tiny], []
    for after, seed in ((5, 1), (15, 2)):
        await driver.tokens(after, got)
        tensors = reference.changed(tiny, seed=seed)
        models.append(reference.with_tensors(tiny, tensors))
        applied = await driver.commit(tensors, max_kv_lag=1)
        recomputed.append(applied.kv_tokens_to_recompute)
    await driver.ended(got)
    first, second = (got.revisions.count(r) for r in (0, 1))
    assert recomputed == [0, 20 + first + second - 1]  # the last token had not been an input
    assert got.oldest_kv_revisions == [0] * (first + second) + [2] * (TOKENS - first - second)
    tokens, at = [*prompt, *got.token_ids], 20 + first
    over_old = reference.logprobs_over_old_keys(*models[:2], tokens, at - 1, at)
    close(got.logprobs[first : first + second], over_old[:second])
    expected = reference.logprobs(models[2], prompt, got.token_ids)
    close(got.logprobs[first + second :], expected[first + second :])


async def test_a_batch_is_computed_again_in_parts_and_the_rest_decodes_on(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    lengths = (400, 30, 300, 50)
    sampled = driver.submit(*(spec(p, 200, seed=1) for p in prompts(*lengths)))
    await driver.tokens(3, *sampled)
    tensors = reference.changed(tiny)
    applied = await driver.commit(tensors, max_kv_lag=1)
    assert 80 < applied.kv_tokens_to_recompute < 80 + 2 * 200
    await driver.recorder.until(lambda: all(1 in s.revisions for s in sampled))
    applied = await driver.commit(tensors, max_kv_lag=1)
    assert 700 < applied.kv_tokens_to_recompute < 700 + 2 * 200
    second = len(driver.recorder.steps)
    await driver.ended(*sampled)
    assert [sorted(set(s.oldest_kv_revisions)) for s in sampled] == [[0, 2], [0, 1], [0, 2], [0, 1]]
    # 700 tokens and more, 48 a step: meanwhile the two that were computed before sample on.
    kept = {key for key, s in driver.recorder.sequences.items() if s in (sampled[1], sampled[3])}
    for step in driver.recorder.steps[second : second + 14]:
        assert kept <= set(step.keys)


COMMITS = st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(1, 12)), max_size=6)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commits=COMMITS, lengths=st.lists(st.integers(1, 90), min_size=1, max_size=7))
async def test_no_token_attends_to_older_keys_than_its_commit_allows(
    driver: Driver, commits: list[tuple[int | None, int]], lengths: list[int]
) -> None:
    start = driver.tag.revision
    sampled = driver.submit(*(spec(p, 60, seed=i) for i, p in enumerate(prompts(*lengths))))
    for max_kv_lag, steps in commits:
        at = len(driver.recorder.steps) + steps
        await driver.recorder.until(
            lambda at=at: len(driver.recorder.steps) >= at or all(s.end for s in sampled)
        )
        await driver.commit({}, max_kv_lag)
    await driver.ended(*sampled)
    bounds = [None, *(max_kv_lag for max_kv_lag, _ in commits)]
    for one in sampled:
        for revision, oldest in zip(one.revisions, one.oldest_kv_revisions, strict=True):
            assert start <= oldest <= revision
            bound = bounds[revision - start]
            assert bound is None or revision - oldest <= bound


@pytest.mark.parametrize("max_kv_lag", [None, 0, 1])
async def test_prefixes_of_older_revisions_are_out_of_reach(
    driver: Driver, tiny: PreTrainedModel, max_kv_lag: int | None
) -> None:
    (prompt,) = prompts(60)
    (live,) = driver.submit(spec(prompt, 300))
    await driver.tokens(3, live)
    tensors = reference.changed(tiny)
    await driver.commit(tensors, max_kv_lag)
    first, second = driver.submit(spec(prompt, 3, seed=1), spec(prompt, 3, seed=2))
    await driver.ended(first, second)
    expected = reference.logprobs(reference.with_tensors(tiny, tensors), prompt, first.token_ids)
    close(first.logprobs, expected)
    assert first.oldest_kv_revisions == second.oldest_kv_revisions == [1, 1, 1]
    if max_kv_lag is None:
        assert first.cached_prompt_tokens == 0
    assert second.cached_prompt_tokens == 59
    await driver.ended(live)


async def test_a_partial_update_leaves_the_rest(driver: Driver, tiny: PreTrainedModel) -> None:
    before = await driver.engine.digests()
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {name: reference.changed(tiny)[name]}
    await driver.commit(changed)
    after = await driver.engine.digests()
    assert {n for n in before if before[n] != after[n]} == {name}
    (prompt,) = prompts(9)
    (got,) = await driver.sample(spec(prompt))
    model = reference.with_tensors(tiny, changed)
    close(got.logprobs, reference.logprobs(model, prompt, got.token_ids))


async def test_the_schema_is_that_of_the_checkpoint(driver: Driver, tiny: PreTrainedModel) -> None:
    schema = {s.name: s for s in driver.engine.schema()}
    assert list(schema) == list(tiny.state_dict())
    for name, tensor in tiny.state_dict().items():
        alias = "model.embed_tokens.weight" if name == "lm_head.weight" else None
        assert schema[name] == TensorSpec(name, "float32", tuple(tensor.shape), alias)
    digests = await driver.engine.digests()
    own = {n: tensor_digest(schema[n], t) for n, t in tiny.state_dict().items() if n in digests}
    assert digests == own
    assert set(schema) - set(digests) == {"lm_head.weight"}
    assert driver.tag == WeightTag(None, 0, "server", sum_digests(digests.values()))


async def test_what_does_not_fit_touches_nothing(driver: Driver, tiny: PreTrainedModel) -> None:
    engine, tag = driver.engine, WeightTag(1, 1, "server", 1)
    before = await engine.digests()
    tensors = reference.changed(tiny)
    name = "model.norm.weight"
    await engine.hold()
    for wrong, message in (
        ({name: torch.zeros(3)}, "is staged as"),
        ({name: torch.zeros(64, dtype=torch.bfloat16)}, "is staged as"),
        ({"lm_head.weight": tensors["model.embed_tokens.weight"]}, "alias"),
        ({"nonsense": torch.zeros(3)}, "not a tensor of this model"),
    ):
        with pytest.raises(EngineError, match=message):
            await engine.commit(staged_update({**tensors, **wrong}), tag, max_kv_lag=None)
    with pytest.raises(EngineError, match="not a tensor"):
        await engine.stage(Manifest((TensorSpec("nonsense", "float32", (3,)),), ()))
    await engine.release()
    with pytest.raises(EngineError, match="while sampling is held"):
        await engine.commit(staged_update(tensors), tag, max_kv_lag=None)
    assert await engine.digests() == before
    (got,) = await driver.sample(spec(prompts(4)[0], 3))
    assert got.revisions == [0, 0, 0]


async def test_staging_is_apart_from_what_serves(driver: Driver) -> None:
    before = await driver.engine.digests()
    staged = await driver.engine.stage(Manifest(tuple(driver.engine.schema()), ()))
    assert staged.keys() == before.keys()
    for tensor in staged.values():
        assert tensor.is_contiguous()
        tensor.fill_(1.0)
    assert await driver.engine.digests() == before


async def test_a_copy_that_fails_half_way_is_told_as_torn(
    driver: Driver, tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(targets: list[torch.Tensor], sources: list[torch.Tensor], **_: bool) -> None:
        targets[0].copy_(sources[0])
        raise RuntimeError("no more")

    (prompt,) = prompts(40)
    (before,) = await driver.sample(spec(prompt, 5, temperature=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(TornWeightsError, match="no more"):
            await driver.commit(reference.changed(tiny))
    (after,) = driver.submit(spec(prompt, 5, temperature=0.0))
    with pytest.raises(EngineError, match="send a full one"):
        await driver.commit({})
    assert driver.engine.load().waiting == 1, "nothing is sampled from a mixture"
    await driver.commit(dict(tiny.state_dict()))
    await driver.ended(after)
    assert after.token_ids == before.token_ids
    assert after.logprobs == before.logprobs


async def test_bfloat16_weights_are_served_as_they_are(tiny: PreTrainedModel) -> None:
    config = EmbeddedConfig("builtin:tiny", device="cpu", dtype="bfloat16", prefill_tokens=32)
    async with running(EmbeddedEngine(config)) as driver:
        assert {s.dtype for s in driver.engine.schema()} == {"bfloat16"}
        assert not driver.engine.describe().deterministic
        asked = [spec(p, 10, seed=i) for i, p in enumerate(prompts(*LENGTHS))]
        for one, got in zip(asked, await driver.sample(*asked), strict=True):
            expected = reference.logprobs(tiny, one.prompt, got.token_ids)
            torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=0.1, rtol=0)
