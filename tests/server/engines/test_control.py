from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollwire.types import WeightTag
from rollwire_server.engines.base import EndReason, EngineError, EngineLoad
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_server.engines.embedded.checkpoint import build
from rollwire_server.engines.embedded.model import PackedModel
from rollwire_server.engines.embedded.runner import MAX_FAILED_STEPS, ModelRunner
from support.engines import Recorder, prompts, running, spec, staged_update
from support.examples import examples

if TYPE_CHECKING:
    from support.engines import Driver, Sampled

CONFIG = EmbeddedConfig("builtin:tiny", device="cpu", max_running_sequences=4, prefill_tokens=48)


async def test_nothing_is_sampled_while_held(driver: Driver) -> None:
    (live,) = driver.submit(spec(prompts(5)[0], 100))
    await driver.tokens(3, live)
    await driver.engine.hold()
    await driver.engine.hold()
    steps = len(driver.recorder.steps)
    (later,) = driver.submit(spec(prompts(5, seed=1)[0], 3))
    await driver.engine.digests()  # commands are taken while held
    await asyncio.sleep(0.05)
    assert len(driver.recorder.steps) == steps
    assert driver.engine.load().waiting + driver.engine.load().running == 2
    await driver.engine.release()
    await driver.engine.release()
    await driver.ended(live, later)
    assert len(live.token_ids) == 100


async def test_nothing_comes_after_an_abort(driver: Driver) -> None:
    asked = [spec(p, 500) for p in prompts(*[5] * 6, 900)]
    sampled = driver.submit(*asked)
    await driver.tokens(2, *sampled[:3])
    prefilling, running_now, waiting = asked[3], asked[0], asked[6]
    keys = [running_now.key, waiting.key, prefilling.key, 10**9]
    await driver.engine.abort(keys)
    before = [len(s.token_ids) for s in sampled]
    await driver.engine.abort(keys)
    await driver.tokens(before[1] + 5, sampled[1])
    for aborted in (0, 3, 6):
        assert len(sampled[aborted].token_ids) == before[aborted]
        assert sampled[aborted].end is None
    await driver.engine.hold()
    await driver.engine.abort([one.key for one in asked])
    await driver.engine.release()


COMMITS = {"recompute": 0, "keep": None, "keep for a while": 1}
COMMANDS = st.one_of(
    st.sampled_from(["hold", "release", *COMMITS, "steps"]),
    st.integers(0, 6),  # aborts this sequence
)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commands=st.lists(COMMANDS, max_size=12))
async def test_commands_in_any_order_lose_and_repeat_nothing(
    driver: Driver, commands: list[str | int]
) -> None:
    """Whatever is not aborted gets every token that it would have got alone."""
    kinds = prompts(3, 60, 60, 9, 20, 1, 48)
    alone = [s.token_ids for s in await driver.sample(*(spec(p, 12, seed=3) for p in kinds))]
    tried = [spec(p, 12, seed=3) for p in kinds]
    sampled = driver.submit(*tried)
    for command in commands:
        if command == "hold":
            await driver.engine.hold()
        elif command == "release":
            await driver.engine.release()
        elif command in COMMITS:
            await driver.commit({}, max_kv_lag=COMMITS[command])
        elif command == "steps":
            await asyncio.sleep(0.004)
        else:
            await driver.engine.abort([tried[int(command)].key])
    await driver.engine.release()
    await driver.ended(*(s for i, s in enumerate(sampled) if i not in commands))
    for i, (got, expected) in enumerate(zip(sampled, alone, strict=True)):
        complete = got.token_ids == expected
        assert complete or (i in commands and got.token_ids == expected[: len(got.token_ids)])
        assert (got.end is not None) == complete


async def test_nan_ends_its_own_sequence_alone() -> None:
    """One token's embedding is NaN: whoever reads it ends, and leaves nothing behind."""
    healthy, late, ill = prompts(20, 60, 100, seed=3)
    config = EmbeddedConfig(
        "builtin:tiny-moe", device="cpu", max_running_sequences=3, prefill_tokens=48
    )
    async with running(EmbeddedEngine(config)) as driver:
        expected = await driver.sample(spec(healthy, seed=1), spec(late, seed=2))
        read = {*healthy, *late, *ill}.union(*(s.token_ids for s in expected))
        bad = next(token for token in range(512) if token not in read)
        weights = build("builtin:tiny-moe").state_dict()["model.embed_tokens.weight"]
        weights[bad] = math.nan
        await driver.commit({"model.embed_tokens.weight": weights})
        for at in (0, 47, 60, 99):  # in the first chunk of its prefill, …, in the last one
            prompt = [*ill[:at], bad, *ill[at + 1 :]]
            wanted = {"prompt_logprobs": True, "routed_experts": True}
            asked = [spec(healthy, seed=1), spec(prompt, **wanted), spec(late, seed=2)]
            fine, broken, other = await driver.sample(*asked)
            assert (broken.reason, broken.token_ids) == (EndReason.NOT_FINITE, [])
            assert broken.end is not None
            assert "NaN or infinity" in broken.end.message
            assert [s.token_ids for s in (fine, other)] == [s.token_ids for s in expected]
            assert all(map(math.isfinite, broken.prompt_logprobs))


class Breaking:
    """Makes the model raise where a batch holds one of ``tokens``, or whatever it computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
        self.tokens = tokens
        self.always = False
        self.once = False
        self._whole = PackedModel.logits
        monkeypatch.setattr(PackedModel, "logits", lambda *arguments: self.logits(*arguments))

    def logits(self, model: PackedModel, batch: Any, rows: Any) -> Any:
        once, self.once = self.once, False
        if once or self.always or np.isin(batch.input_ids.numpy(), self.tokens).any():
            raise RuntimeError("out of luck")
        return self._whole(model, batch, rows)


def all_of(sampled: Sampled) -> tuple[object, ...]:
    extras = [told for told, _ in sampled.extras]
    tops = [told.top_logprobs for told in extras if told.top_logprobs is not None]
    experts = b"".join(rows.experts for told in extras for rows in told.routed_experts)
    return sampled.token_ids, sampled.logprobs, sampled.prompt_logprobs, tops, experts


async def test_a_sequence_whose_step_raises_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its poison lies: all others get every token, and leave nothing out."""
    healthy, late, ill = prompts(20, 60, 100, seed=3)
    wanted = {"prompt_logprobs": True, "routed_experts": True, "top_logprobs": 2}
    config = EmbeddedConfig(
        "builtin:tiny-moe", device="cpu", max_running_sequences=4, prefill_tokens=200
    )
    async with running(EmbeddedEngine(config)) as driver:
        fine = [spec(healthy, seed=1), spec(late, seed=2, **wanted)]
        expected = await driver.sample(*fine)
        read = {*healthy, *late, *ill}.union(*(s.token_ids for s in expected))
        bad = next(token for token in range(1, 512) if token not in read)
        breaking = Breaking(monkeypatch, bad)
        for at in (0, 60, 99):
            prompt = [*ill[:at], bad, *ill[at + 1 :]]
            asked = [spec(prompt), spec(healthy, seed=1), spec(prompt, **wanted)]
            *broken, other = await driver.sample(*asked, spec(late, seed=2, **wanted))
            assert broken.pop(1).token_ids == expected[0].token_ids
            for one in broken:
                assert (one.reason, one.token_ids) == (EndReason.STEP_FAILED, [])
                assert one.end.message == "RuntimeError: out of luck"
            assert all_of(other) == all_of(expected[1])
        breaking.once = True  # as when memory is short for a moment
        again = await driver.sample(spec(healthy, seed=1), spec(late, seed=2, **wanted))
        assert [s.token_ids for s in again] == [s.token_ids for s in expected]
        assert driver.engine.load().kv_tokens_used == 0


async def test_poison_ends_no_engine(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it comes, and though nothing else runs."""
    Breaking(monkeypatch, 9)
    for _ in range(2 * MAX_FAILED_STEPS):
        (failed,) = await driver.sample(spec((8, 9)))
        assert failed.reason is EndReason.STEP_FAILED
    assert driver.recorder.failure is None


async def test_an_engine_whose_every_step_fails_is_dead(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts(20)
    breaking = Breaking(monkeypatch)
    with structlog.testing.capture_logs() as logs:
        for fails in (True, False, True):
            breaking.always = fails
            for _ in range(MAX_FAILED_STEPS - 1):
                (told,) = await driver.sample(spec(prompt, 2))
                assert told.reason is (EndReason.INTERRUPTED if fails else EndReason.LENGTH)
        driver.submit(spec(prompt))
        await driver.recorder.until(lambda: driver.recorder.failure is not None)
    assert str(driver.recorder.failure) == (
        f"{MAX_FAILED_STEPS} steps failed in a row, the last with RuntimeError: out of luck"
    )
    told = [line for line in logs if line["event"].startswith("a step failed")]
    assert 1 <= len(told) < MAX_FAILED_STEPS, "not once for each"
    assert isinstance(told[0]["exc_info"], RuntimeError)


async def test_a_dead_loop_is_told_and_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(EmbeddedEngine(CONFIG)) as driver:

        def die(self: ModelRunner) -> None:
            raise MemoryError("the end")

        monkeypatch.setattr(ModelRunner, "step", die)
        driver.submit(spec(prompts(5)[0]))
        waiting = asyncio.ensure_future(driver.engine.digests())
        await driver.recorder.until(lambda: driver.recorder.failure is not None)
        assert isinstance(driver.recorder.failure, MemoryError)
        with contextlib.suppress(EngineError):
            await waiting
        with pytest.raises(EngineError, match=r"is dead: MemoryError: the end"):
            await driver.engine.digests()
        with pytest.raises(EngineError, match="is dead"):
            driver.engine.submit(spec(prompts(5)[0]))
        await driver.engine.hold()
        await driver.engine.abort([1])
        assert driver.engine.load() == EngineLoad(0, 0, 0, 0)


async def test_stop_leaves_no_thread_and_no_model() -> None:
    def engine_threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "rollwire-engine"]

    engine = EmbeddedEngine(CONFIG)
    await engine.stop()  # before it has started
    await engine.start("server", Recorder())
    runner = weakref.ref(engine._runner)
    for prompt in prompts(*[30] * 10):
        engine.submit(spec(prompt, 500))
    await asyncio.sleep(0.01)
    assert len(engine_threads()) == 1
    await asyncio.gather(engine.stop(), engine.stop())
    await engine.stop()
    assert engine_threads() == []
    gc.collect()
    assert runner() is None, "the model and its cache are gone"
    assert engine.load() == EngineLoad(0, 0, 0, 0)
    with pytest.raises(EngineError, match="has stopped"):
        await engine.digests()
    with pytest.raises(EngineError, match="make a new one"):
        await engine.start("server", Recorder())


async def test_a_caller_that_gives_up_does_no_harm(driver: Driver) -> None:
    (live,) = driver.submit(spec(prompts(5)[0], 50))
    for _ in range(5):
        task = asyncio.create_task(driver.engine.digests())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await driver.ended(live)


async def test_results_come_before_the_answers_of_later_calls(driver: Driver) -> None:
    """What was sampled before a commit is reported before the commit returns."""
    (live,) = driver.submit(spec(prompts(5)[0], 200))
    await driver.tokens(1, live)
    while live.end is None:
        revision = driver.tag.revision
        await driver.engine.hold()
        told = len(live.token_ids)
        tag = WeightTag(None, revision + 1, "server", 0)
        await driver.engine.commit(staged_update({}), tag, max_kv_lag=None)
        driver.tag = tag
        assert len(live.token_ids) == told
        await driver.engine.release()
        await asyncio.sleep(0.01)
    assert live.revisions == sorted(live.revisions)


async def test_load_counts_what_is_there(driver: Driver) -> None:
    await driver.engine.hold()
    sampled = driver.submit(*(spec(p, 300) for p in prompts(*[16] * 6)))
    assert driver.engine.load() == EngineLoad(0, 6, 0, 4 * 4096)
    await driver.engine.release()
    await driver.tokens(1, *sampled[:3])
    await driver.engine.hold()
    load = driver.engine.load()
    assert (load.running, load.waiting) == (4, 2)
    assert load.kv_tokens_used == sum(16 + len(s.token_ids) - 1 for s in sampled if s.token_ids)
    await driver.engine.release()
    await driver.engine.abort(list(driver.recorder.sequences))
