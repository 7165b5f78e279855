"""Runs an engine and keeps what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollwire.types import WeightTag
from rollwire_server.engines.base import (
    EndReason,
    Engine,
    SamplingParams,
    SequenceEnd,
    SequenceSpec,
    StagedUpdate,
    Step,
)
from rollwire_transport import Manifest, describe, tensor_digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from rollwire_server.engines.base import CommitStats, SequenceExtras
    from torch import Tensor

_keys = itertools.count(1)


def staged_update(tensors: Mapping[str, Tensor]) -> StagedUpdate:
    """Tensors as a commit takes them, verified."""
    return StagedUpdate(tensors, {n: tensor_digest(describe(n, t), t) for n, t in tensors.items()})


def spec(prompt: Sequence[int], max_new_tokens: int = 20, **more: Any) -> SequenceSpec:
    """A sequence with a key of its own; sampling parameters and the spec's own fields by name."""
    own = {
        name: more.pop(name)
        for name in (
            "prefix",
            "logprob_basis",
            "top_logprobs",
            "prompt_logprobs",
            "routed_experts",
        )
        if name in more
    }
    return SequenceSpec(next(_keys), tuple(prompt), SamplingParams(max_new_tokens, **more), **own)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts for a vocabulary of 512."""
    generator = random.Random(seed)
    return [[generator.randrange(512) for _ in range(length)] for length in lengths]


@dataclass
class Sampled:
    """All that was reported of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    revisions: list[int] = field(default_factory=list)
    oldest_kv_revisions: list[int] = field(default_factory=list)
    extras: list[tuple[SequenceExtras, int]] = field(default_factory=list)  # with their revision
    end: SequenceEnd | None = None

    @property
    def reason(self) -> EndReason | None:
        return self.end.reason if self.end is not None else None

    @property
    def prompt_logprobs(self) -> list[float]:
        told = [part for extras, _ in self.extras for part in extras.prompt_logprobs]
        position = 1
        for part in told:
            assert part.start_position == position
            position += len(part.logprobs)
        return [value for part in told for value in part.logprobs]

    @property
    def cached_prompt_tokens(self) -> int:
        told = [e.cached_prompt_tokens for e, _ in self.extras]
        (cached,) = [value for value in told if value is not None]
        return cached


class Recorder:
    """A Sink that checks what every step must keep to."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sampled] = {}
        self.steps: list[Step] = []
        self.failure: BaseException | None = None
        self._changed = asyncio.Event()

    def on_step(self, step: Step) -> None:
        assert len(step.keys) == len(step.token_ids) == len(step.logprobs)
        assert len(step.oldest_kv_revisions) in (0, len(step.keys))
        revision = step.weights.revision
        oldest = step.oldest_kv_revisions or [revision] * len(step.keys)
        for key, extras in step.extras.items():
            self._live(key).extras.append((extras, revision))
        for key, token, logprob, old in zip(
            step.keys, step.token_ids, step.logprobs, oldest, strict=True
        ):
            sequence = self._live(key)
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.revisions.append(revision)
            sequence.oldest_kv_revisions.append(old)
        for end in step.ends:
            self._live(end.key).end = end
        self.steps.append(step)
        self._changed.set()

    def on_failure(self, error: BaseException) -> None:
        self.failure = error
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _live(self, key: int) -> Sampled:
        sequence = self.sequences.setdefault(key, Sampled())
        assert sequence.end is None, f"{key} has ended"
        return sequence


class Driver:
    """One started engine."""

    def __init__(self, engine: Engine, recorder: Recorder, tag: WeightTag) -> None:
        self.engine = engine
        self.recorder = recorder
        self.tag = tag

    def submit(self, *specs: SequenceSpec) -> list[Sampled]:
        for one in specs:
            self.engine.submit(one)
        return [self.recorder.sequences.setdefault(s.key, Sampled()) for s in specs]

    async def sample(self, *specs: SequenceSpec) -> list[Sampled]:
        """Submits sequences and waits for their ends."""
        sampled = self.submit(*specs)
        await self.ended(*sampled)
        return sampled

    async def ended(self, *sampled: Sampled) -> None:
        await self.recorder.until(lambda: all(s.end is not None for s in sampled))

    async def tokens(self, number: int, *sampled: Sampled) -> None:
        """Waits until each has ``number`` tokens; fails if one ends before."""
        await self.recorder.until(
            lambda: all(len(s.token_ids) >= number or s.end is not None for s in sampled)
        )
        assert all(len(s.token_ids) >= number for s in sampled), "a sequence has ended too early"

    async def commit(
        self, tensors: Mapping[str, Tensor], max_kv_lag: int | None = None
    ) -> CommitStats:
        """Stages and commits tensors under the next revision; the engine is held meanwhile."""
        schema = [s for s in self.engine.schema() if s.name in tensors]
        staged = await self.engine.stage(Manifest(tuple(schema), (), partial=True))
        for name, tensor in staged.items():
            tensor.copy_(tensors[name])
        revision = self.tag.revision + 1
        tag = WeightTag(revision * 10, revision, self.tag.server_id, revision)
        await self.engine.hold()
        try:
            applied = await self.engine.commit(staged_update(staged), tag, max_kv_lag)
        finally:
            await self.engine.release()
        self.tag = tag
        return applied


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Driver]:
    """Starts an engine; when it is left, the engine must be idle, and is stopped."""
    recorder = Recorder()
    tag = await engine.start("server", recorder)
    try:
        yield Driver(engine, recorder, tag)
    finally:
        await engine.stop()
