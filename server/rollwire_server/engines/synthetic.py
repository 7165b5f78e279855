"""The synthetic engine: emits tokens at a set rate, of a model whose logits are all equal."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Annotated

import pydantic.dataclasses
import torch
from pydantic import Field
from rollwire.types import LogprobBasis, SleepingWeights, WeightTag
from rollwire_transport import TensorSpec, packed_nbytes, packed_views, tensor_digest

from rollwire_server.engines import deltas
from rollwire_server.engines.base import (
    SAMPLING_PARAMETERS,
    CommitStats,
    EndReason,
    EngineError,
    EngineInfo,
    EngineLoad,
    PromptLogprobs,
    SequenceEnd,
    SequenceExtras,
    SequenceSpec,
    Step,
    TopLogprobs,
)
from rollwire_server.engines.kv_lag import sequences_to_recompute
from rollwire_server.engines.memory import allocating

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire_transport import Manifest
    from torch import Tensor

    from rollwire_server.engines.base import PreparedDelta, Sink, StagedUpdate

MAX_TOP_LOGPROBS = 64
IDLE_SECONDS = 0.0005
"""Between two steps that take no time, so that the event loop does other work too."""


@pydantic.dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """How to start a ``SyntheticEngine``. All but the first three fields are ``--engine-arg``s."""

    model: str
    max_running_sequences: int = 64
    context_length: int = 4096
    # Of each sequence; 0: as fast as the machine allows.
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 100.0
    vocab_size: Annotated[int, Field(ge=2)] = 512
    weight_bytes: Annotated[int, Field(ge=4, multiple_of=4)] = 4096  # of its one float32 tensor


@dataclass(slots=True)
class _SyntheticSequence:
    spec: SequenceSpec
    length: int  # output tokens, with the prefix
    kv_revision: int  # of its oldest key or value
    prompt_reported: bool = False

    @property
    def tokens(self) -> int:
        return len(self.spec.prompt) + self.length


@dataclass(slots=True)
class _State:
    """What a started engine holds."""

    sink: Sink
    tag: WeightTag
    weight: Tensor
    running: dict[int, _SyntheticSequence] = field(default_factory=dict)
    waiting: deque[SequenceSpec] = field(default_factory=deque)
    held: bool = False
    asleep: bool = False
    consistent: bool = True  # False while the weights are discarded
    generation: int = 0  # of the weights; a delta was prepared for one


class SyntheticEngine:
    """Implements ``Engine`` as a task of the server's event loop, for load tests.

    The seed, the position and the weights determine the token. Truncation and temperature have no
    effect.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self._config = config
        self._state: _State | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._logprob = -math.log(config.vocab_size)

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        weight = torch.zeros(self._config.weight_bytes // 4)
        tag = WeightTag(None, 0, server_id, tensor_digest(self._spec, weight))
        self._state = _State(sink, tag, weight)
        self._task = asyncio.create_task(self._run(self._state), name="synthetic engine")
        return tag

    async def stop(self) -> None:
        self._state = None
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def describe(self) -> EngineInfo:
        config = self._config
        return EngineInfo(
            engine="synthetic",
            model=config.model,
            device=torch.device("cpu"),
            staging="host",
            staging_bytes=config.weight_bytes,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            eos_token_ids=(),
            logprob_bases=frozenset({LogprobBasis.TEMPERATURE, LogprobBasis.MODEL}),
            deterministic=True,
            max_running_sequences=config.max_running_sequences,
            max_top_logprobs=min(MAX_TOP_LOGPROBS, config.vocab_size),
            routed_experts=False,
            # It has no distribution to shape: temperature (but 0) and truncation are taken, so that
            # a load test sends what a trainer sends, and change nothing.
            sampling_parameters=SAMPLING_PARAMETERS | {"min_new_tokens"},
            deltas=True,
        )

    def load(self) -> EngineLoad:
        config, state = self._config, self._state
        total = config.max_running_sequences * config.context_length
        if state is None:
            return EngineLoad(0, 0, 0, total)
        used = sum(sequence.tokens for sequence in state.running.values())
        return EngineLoad(len(state.running), len(state.waiting), used, total)

    def submit(self, spec: SequenceSpec) -> None:
        self._running_state().waiting.append(spec)
        self._changed.set()

    async def abort(self, keys: Sequence[int]) -> None:
        if (state := self._state) is None:
            return
        for key in keys:
            state.running.pop(key, None)
        aborted = set(keys)
        if any(spec.key in aborted for spec in state.waiting):
            state.waiting = deque(spec for spec in state.waiting if spec.key not in aborted)

    async def hold(self) -> None:
        # No step is in flight: each runs from start to end on the event loop.
        if self._state is not None:
            self._state.held = True

    async def release(self) -> None:
        self._running_state().held = False
        self._changed.set()

    def schema(self) -> list[TensorSpec]:
        self._running_state()
        return [self._spec]

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        self._awake_state()
        what = f"an update of {self._config.weight_bytes >> 20} MiB cannot be staged"
        specs = deltas.staged_specs(manifest)
        with allocating(what, "give the server more memory"):
            return packed_views(specs, torch.empty(packed_nbytes(specs), dtype=torch.uint8))

    async def prepare_delta(
        self, manifest: Manifest, staged: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> PreparedDelta:
        state = self._awake_state()
        serving = {self._spec.name: state.weight}
        return deltas.prepare(manifest, staged, serving, before, state.generation)

    async def commit(
        self, staged: StagedUpdate, weights: WeightTag, max_kv_lag: int | None
    ) -> CommitStats:
        state = self._awake_state()
        if not state.held:
            raise EngineError("weights are committed only while sampling is held")
        if not state.consistent and not staged.tensors:
            raise EngineError("the weights are discarded: send a full update")
        began = time.perf_counter_ns()
        if staged.delta is not None:
            deltas.prepared(staged.delta, state.generation).apply()
        elif staged.tensors:
            state.weight.copy_(staged.tensors[self._spec.name])
        state.generation += 1
        state.consistent = True
        state.tag = weights
        running = list(state.running.values())
        chosen = sequences_to_recompute(
            [s.kv_revision for s in running],
            [s.tokens for s in running],
            weights.revision,
            max_kv_lag,
        )
        entries = 0
        for sequence in (running[i] for i in chosen):
            entries += sequence.tokens
            sequence.kv_revision = weights.revision
        self._changed.set()
        return CommitStats(time.perf_counter_ns() - began, entries)

    async def digests(self) -> dict[str, int]:
        return {self._spec.name: tensor_digest(self._spec, self._awake_state().weight)}

    async def sleep(self, weights: SleepingWeights) -> int:
        state = self._running_state()
        if state.running or state.waiting:
            raise EngineError("sequences are live: end them before the engine goes to sleep")
        state.asleep = True
        if weights is SleepingWeights.DISCARD:
            state.consistent = False
            state.weight.zero_()
            state.generation += 1
            return self._config.weight_bytes
        return 0

    async def wake(self, *, reload_checkpoint: bool) -> None:
        state = self._running_state()
        state.asleep = False
        if reload_checkpoint:
            state.weight.zero_()  # as it started
            state.generation += 1
            state.consistent = True
        self._changed.set()

    @property
    def _spec(self) -> TensorSpec:
        return TensorSpec("weight", "float32", (self._config.weight_bytes // 4,))

    def _running_state(self) -> _State:
        if self._state is None:
            raise EngineError("the engine is not running")
        return self._state

    def _awake_state(self) -> _State:
        state = self._running_state()
        if state.asleep:
            raise EngineError("the weights' memory is freed: wake the engine up first")
        return state

    async def _run(self, state: _State) -> None:
        """Steps at the configured rate while there is something to sample."""
        rate = self._config.tokens_per_second
        now = asyncio.get_running_loop().time
        due = now()
        try:
            while True:
                self._changed.clear()
                step = self._step(state)
                if step is None:
                    await self._changed.wait()
                    due = now()
                    continue
                state.sink.on_step(step)
                due = max(due + 1 / rate, now()) if rate else now() + IDLE_SECONDS
                await asyncio.sleep(due - now())
        except Exception as error:
            self._state = None
            state.sink.on_failure(error)

    def _step(self, state: _State) -> Step | None:
        """Samples a token of every sequence; None if there is none."""
        if state.held or state.asleep or not state.consistent:
            return None
        while state.waiting and len(state.running) < self._config.max_running_sequences:
            spec = state.waiting.popleft()
            state.running[spec.key] = _SyntheticSequence(spec, len(spec.prefix), state.tag.revision)
        sampled = list(state.running.values())
        if not sampled:
            return None
        step = Step(
            state.tag,
            keys=[s.spec.key for s in sampled],
            token_ids=[self._draw(s, state.tag.digest) for s in sampled],
            logprobs=[self._logprob] * len(sampled),
            oldest_kv_revisions=[s.kv_revision for s in sampled],
        )
        for sequence, token in zip(sampled, step.token_ids, strict=True):
            self._add_extras(sequence, step)
            sequence.length += 1
            if (reason := self._end_reason(sequence, token)) is not None:
                del state.running[sequence.spec.key]
                step.ends.append(SequenceEnd(sequence.spec.key, reason))
        return step

    def _draw(self, sequence: _SyntheticSequence, weights: int) -> int:
        sampling = sequence.spec.sampling
        banned = sampling.stop_token_ids if sequence.length < sampling.min_new_tokens else ()
        seed = sampling.seed if sampling.temperature else 0
        for attempt in count():
            text = struct.pack("<QQQI", seed, sequence.length, weights, attempt)
            drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            token = drawn % self._config.vocab_size
            if token not in banned or len(banned) >= self._config.vocab_size:
                return token
        raise AssertionError

    def _add_extras(self, sequence: _SyntheticSequence, step: Step) -> None:
        spec, extras = sequence.spec, SequenceExtras()
        if spec.top_logprobs:
            k = spec.top_logprobs
            extras.top_logprobs = TopLogprobs(k, list(range(k)), [self._logprob] * k)
        if not sequence.prompt_reported:
            sequence.prompt_reported = True
            extras.cached_prompt_tokens = 0
            if spec.prompt_logprobs and len(spec.prompt) > 1:
                logprobs = [self._logprob] * (len(spec.prompt) - 1)
                extras.prompt_logprobs.append(PromptLogprobs(1, logprobs, sequence.kv_revision))
        if extras != SequenceExtras():
            step.extras[spec.key] = extras

    def _end_reason(self, sequence: _SyntheticSequence, token: int) -> EndReason | None:
        sampling = sequence.spec.sampling
        if token in sampling.stop_token_ids:
            return EndReason.STOP
        full = sequence.tokens >= self._config.context_length
        return EndReason.LENGTH if full or sequence.length >= sampling.max_new_tokens else None
