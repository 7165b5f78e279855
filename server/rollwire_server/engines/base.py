"""The interface between the rollout server and an engine.

The server (gRPC services, sequences, weight state) and an engine know each other through this file
alone: the server never sees an engine's types, an engine never sees gRPC.

An engine runs one loop of its own (a thread, or processes). All its methods are called on the
server's event loop, and it calls its ``Sink`` there, in order: everything that was sampled before a
method's result was known has been reported before the method returns.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rollwire.types import LogprobBasis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from rollwire.types import KvPolicy, SleepingWeights, WeightTag
    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor


class EngineError(Exception):
    """The engine cannot do what was asked; it and its weights are as they were."""


class NoMemoryError(EngineError):
    """There is no memory for it."""


class ChangedWeightsError(EngineError):
    """The memory that serves does not hold what was last put in place."""


class TornWeightsError(EngineError):
    """A commit failed half way: the memory may hold a mixture of two policies."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one sequence; the server has checked every value and filled every default.

    Attributes:
        max_new_tokens: Counted from the end of the prompt, a given prefix included.
        temperature: 0 is greedy.
        top_p, top_k, min_p: Truncation; 1.0, 0 and 0.0 turn it off. Applied in the order top-k,
            top-p, min-p, all on the distribution after temperature.
        min_new_tokens: While there are fewer, stop tokens cannot be drawn. Counted as
            max_new_tokens.
        stop_token_ids: All tokens that end the sequence, the model's end-of-sequence tokens among
            them unless the caller ignores those.
        seed: The draw of a token depends on (seed, position after the prompt, token id) alone.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to sample.

    Attributes:
        key: Names it in the engine; never used twice in one engine's life.
        prompt: Token ids, at least one.
        prefix: Output tokens sampled earlier (here or elsewhere); sampling goes on right after
            them. The server never hands over a prefix that is complete already.
        sampling: How to sample.
        logprob_basis: Of ``Step.logprobs``, of the top and of the prompt log-probabilities.
        top_logprobs: How many likeliest tokens to report with each sampled one.
        prompt_logprobs: Report those of the prompt, once.
        routed_experts: Report the experts chosen for every input token.
    """

    key: int
    prompt: Sequence[int]
    sampling: SamplingParams
    prefix: Sequence[int] = ()
    logprob_basis: LogprobBasis = LogprobBasis.TEMPERATURE
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts: bool = False


class EndReason(enum.Enum):
    """Why an engine ends a sequence by itself."""

    STOP = "stop"
    LENGTH = "length"
    NOT_FINITE = "not_finite"
    """NaN or infinity in its logits: no token was sampled."""
    STEP_FAILED = "step_failed"
    """The engine's step raised for this sequence alone, while it computes others."""
    INTERRUPTED = "interrupted"
    """The engine's step raised whatever it computed; the sequence can go on elsewhere."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of one sequence; nothing comes for its key afterwards."""

    key: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """``k`` likeliest tokens for each token of a step, flattened [tokens, k], likeliest first."""

    k: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens ``start_position``, ``start_position`` + 1, …; token 0 has
    none. No key or value that they attended to is older than ``oldest_kv_revision``.
    """

    start_position: int
    logprobs: list[float]
    oldest_kv_revision: int


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Expert ids [num_tokens, num_layers, top_k], little-endian, row i being the input token
    ``start_position`` + i; chosen by ``weights`` (None: those of the step that tells it). No key or
    value that they attended to is older than ``oldest_kv_revision``; 0 where that is not known.
    """

    start_position: int
    num_tokens: int
    num_layers: int
    top_k: int
    experts: bytes
    bytes_per_expert: int
    weights: WeightTag | None = None
    oldest_kv_revision: int = 0


@dataclass(slots=True)
class Extras:
    """What a step says of one sequence beside its tokens."""

    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    cached_prompt_tokens: int | None = None


@dataclass(slots=True)
class Step:
    """What one engine step sampled, in columns; a key may stand in several rows (in order).

    Attributes:
        weights: Under which all of it was sampled.
        keys, token_ids, logprobs: One row a token.
        oldest_kv_revisions: One a row, or empty: all are ``weights.revision``.
        ends: Sequences that end after these tokens.
        extras: By key. Prompt log-probabilities and routing may come without tokens: of a chunked
            prefill, or late.
    """

    weights: WeightTag
    keys: list[int]
    token_ids: list[int]
    logprobs: list[float]
    oldest_kv_revisions: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    extras: dict[int, Extras] = field(default_factory=dict)


class Sink(Protocol):
    """Where an engine reports, on the server's event loop."""

    def on_step(self, step: Step) -> None:
        """Takes what a step sampled."""

    def on_failure(self, error: BaseException) -> None:
        """Learns that the engine is dead: it samples nothing more, and its sequences are gone."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is; fixed once it has started.

    Attributes:
        device: Where its weights are, so where links should receive.
        staging: Where an update waits for its commit: "device" or "host".
        staging_bytes: What a full update takes there.
        sampling_parameters: Fields of the API's SamplingParams that it keeps to. A request that
            sets another one to something else than its default is refused.
        scaled_prompt_logprobs: Those of the prompt can be of logits / temperature.
        unsupported_sleep: What cannot become of its weights while it sleeps, and what to do about
            that.
    """

    engine: str
    model: str
    device: torch.device
    staging: str
    staging_bytes: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    logprob_bases: frozenset[LogprobBasis]
    deterministic: bool
    max_running_sequences: int
    max_top_logprobs: int
    routed_experts: bool
    sampling_parameters: frozenset[str]
    scaled_prompt_logprobs: bool = True
    unsupported_sleep: Mapping[SleepingWeights, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is now; tokens are KV-cache entries."""

    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens_total: int


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """What a commit puts in place.

    Attributes:
        tensors: Of what ``stage`` gave, filled; empty to change only the tag.
        digests: The digest of each, as it was verified.
    """

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Applied:
    """What a commit took: the time to put weights in place, and the KV entries that are to be
    computed again.
    """

    apply_ns: int
    kv_tokens_to_recompute: int


class Engine(Protocol):
    """Samples sequences under one set of weights.

    Life: ``start`` → (``submit`` | ``abort`` | ``hold`` … ``release`` | ``stage`` … ``commit`` |
    ``sleep`` … ``wake``)* → ``stop``. Between ``hold`` and ``release`` it samples nothing, and
    still takes every call.
    """

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        """Loads the model and starts the loop.

        Returns the tag of the initial checkpoint (revision 0, no version). Raises EngineError with
        one clear line when the model cannot be loaded.
        """

    async def stop(self) -> None:
        """Stops the loop and frees everything. Idempotent, also before ``start``."""

    def describe(self) -> EngineInfo:
        """What it is; after ``start``."""

    def load(self) -> Load:
        """How busy it is now."""

    def submit(self, spec: SequenceSpec) -> None:
        """Queues a sequence; oldest first."""

    async def abort(self, keys: Sequence[int]) -> None:
        """Ends sequences, waiting, held or running; nothing comes for them after it returns.
        Unknown keys are ignored.
        """

    async def hold(self) -> None:
        """Stops sampling at the next step boundary; returns once no step is in flight.
        Idempotent.
        """

    async def release(self) -> None:
        """Goes on sampling. Idempotent."""

    def schema(self) -> list[TensorSpec]:
        """The tensors that an update brings, as the checkpoint has them, aliases included."""

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """Memory for an update beside the serving weights: one contiguous tensor for each that the
        manifest sends.

        The manifest has been compared with the schema. The memory may serve the next update once
        nobody holds a tensor of the mapping; there may be none for two, so that is asked for then.
        Raises NoMemoryError when there is none, EngineError when it fails in another way.
        """

    async def commit(self, staged: StagedUpdate, weights: WeightTag, policy: KvPolicy) -> Applied:
        """Puts staged weights in place while held; every later token carries ``weights``.

        Tensors that are not staged stay as they are; of nothing staged, only the tag changes.
        Prefix caches of older revisions are out of reach afterwards. Raises TornWeightsError when
        it failed after it had touched the serving weights, EngineError before.
        """

    async def digests(self) -> dict[str, int]:
        """The digest of each tensor that serves, aliases left out.

        Raises ChangedWeightsError when they are not those that were put in place, EngineError when
        they cannot be read: the memory was given back, or the engine fails.
        """

    async def sleep(self, weights: SleepingWeights) -> int:
        """Frees the KV cache, and the weights as asked; returns the bytes freed. No sequence is
        live, and what is asked is supported.

        Raises EngineError when that fails: nothing is freed then.
        """

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """Takes the memory back; see ``sleep``.

        Raises NoMemoryError when there is none, EngineError when the checkpoint cannot be read
        again or the engine fails: it sleeps on then.
        """
