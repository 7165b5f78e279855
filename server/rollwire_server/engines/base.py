"""The interface between the rollout server and an engine: the contract that an engine implements.

The server and an engine know each other through this file alone: the server never sees an engine's
types, an engine never sees gRPC. ``tests/contract`` runs the same cases against every engine.

An engine samples in a loop of its own: a task, a thread or processes. The server calls all methods
on its event loop. The engine calls its ``Sink`` there too, in order: when a method returns, every
token that was sampled before it took effect has been reported.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollwire.types import LogprobBasis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from rollwire.types import SleepingWeights, WeightTag
    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor


SAMPLING_PARAMETERS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "seed",
    }
)
"""Fields of the API's SamplingParams that every engine here implements. An engine adds to them in
``EngineInfo.sampling_parameters`` what it implements besides."""


class EngineError(Exception):
    """The engine cannot do what was asked. The engine and its weights are unchanged.

    The message is one line for the caller, without a full stop: the server appends the weights that
    it serves.
    """


class NoMemoryError(EngineError):
    """There is not enough memory for what was asked."""


class ChangedWeightsError(EngineError):
    """The serving memory does not hold the weights that were committed last."""


class TornWeightsError(EngineError):
    """A commit failed half way: the memory may hold a mixture of two policies.

    The server then samples nothing until a full update is committed.
    """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one sequence. The server has checked every value and filled every default.

    Attributes:
        max_new_tokens: Most output tokens, including those of a given prefix.
        temperature: 0 is greedy.
        top_p, top_k, min_p: Truncation; 1.0, 0 and 0.0 turn it off. Applied in the order top-k,
            top-p, min-p, all on the distribution after temperature.
        min_new_tokens: Stop tokens are not drawn while there are fewer output tokens, counted like
            ``max_new_tokens``.
        stop_token_ids: All tokens that end the sequence, including the model's end-of-sequence
            tokens unless the caller ignores those.
        seed: The noise of a draw depends only on (seed, position after the prompt, token id).
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
        key: Identifies the sequence in the engine. No key is used twice in an engine's life.
        prompt: Token ids, at least one.
        sampling: How to sample.
        prefix: Output tokens that were sampled earlier, here or elsewhere. Sampling continues after
            them. The prefix never ends the sequence already.
        logprob_basis: Distribution of all log-probabilities: of sampled, top and prompt tokens.
        top_logprobs: How many of the likeliest tokens to report with each sampled token.
        prompt_logprobs: Whether to report the log-probabilities of the prompt, once.
        routed_experts: Whether to report the experts that were chosen for every input token.
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
    """NaN or infinity in its logits; no token was sampled from them."""
    STEP_FAILED = "step_failed"
    """The engine's step raised for this sequence alone; other sequences are computed."""
    INTERRUPTED = "interrupted"
    """The engine's step raised, not because of this sequence; it can continue elsewhere."""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The end of one sequence. Nothing is reported for its key afterwards."""

    key: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The ``k`` likeliest tokens at each position, flattened [tokens, k], likeliest first."""

    k: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens ``start_position``, ``start_position`` + 1, …

    Token 0 has none. No key or value that they attended to is older than ``oldest_kv_revision``.
    """

    start_position: int
    logprobs: list[float]
    oldest_kv_revision: int


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that were chosen for input tokens ``start_position``, ``start_position`` + 1, …

    Attributes:
        experts: Expert ids [num_tokens, num_layers, top_k], little-endian.
        weights: The weights that chose them; None: those of the step that reports them.
        oldest_kv_revision: No key or value that these tokens attended to is older; 0 if that is
            not known.
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
class SequenceExtras:
    """What a step reports about one sequence besides its tokens."""

    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    cached_prompt_tokens: int | None = None


@dataclass(slots=True)
class Step:
    """What one engine step sampled, in columns. A key may have several rows, in order.

    Attributes:
        weights: The weights that sampled all of these tokens.
        keys, token_ids, logprobs: One entry per token.
        oldest_kv_revisions: One entry per token: the oldest revision whose keys or values it
            attended to. Empty: all are ``weights.revision``.
        ends: Sequences that end after these tokens.
        extras: By key. A key may have extras without tokens, as during a chunked prefill, or when
            they are reported late.
    """

    weights: WeightTag
    keys: list[int]
    token_ids: list[int]
    logprobs: list[float]
    oldest_kv_revisions: list[int] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)
    extras: dict[int, SequenceExtras] = field(default_factory=dict)


class Sink(Protocol):
    """Receives an engine's reports. The engine calls it on the server's event loop."""

    def on_step(self, step: Step) -> None:
        """Receives what one step sampled."""

    def on_failure(self, error: BaseException) -> None:
        """Receives the error that killed the engine. The engine's sequences are lost.

        Called at most once. The message of an EngineError explains the failure; any other error
        counts as a bug.
        """


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and supports; fixed once it has started.

    Attributes:
        engine: The engine's name, a value of ``--engine``.
        model: Path or name of the loaded model.
        device: Device of the weights, on which links should receive.
        staging: Where an update waits for its commit: "device" or "host".
        staging_bytes: Bytes that a full update needs there.
        vocab_size: Token ids are 0 to ``vocab_size`` - 1.
        context_length: Most prompt and output tokens of one sequence.
        eos_token_ids: The model's end-of-sequence tokens, ascending.
        logprob_bases: The bases that sequences may ask for.
        deterministic: Whether an interrupted sequence that is seeded or greedy gets the same tokens
            as one that was not interrupted, here or on another such engine.
        max_running_sequences: Most sequences sampled at the same time; more wait.
        max_top_logprobs: The largest ``SequenceSpec.top_logprobs``.
        routed_experts: Whether the engine can report the experts of tokens.
        sampling_parameters: Fields of the API's SamplingParams that this engine implements. A
            request that sets another field to a value other than its default is refused.
        scaled_prompt_logprobs: Whether the engine can compute log-probabilities of the prompt from
            logits / temperature.
        unsupported_sleep: Sleep modes that this engine does not support, each with advice for the
            caller.
        deltas: Whether the engine takes deltas: manifests in DELTA encoding.
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
    deltas: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is: sequences, and KV-cache entries in tokens."""

    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens_total: int


@dataclass(frozen=True, slots=True)
class PreparedDelta:
    """A delta that is ready to be put in place.

    Attributes:
        digests: The digest that each tensor of the manifest will have, without aliases.
        changes: What the engine's ``commit`` needs; the server only holds it. Its memory is free
            for the next update once the server has dropped it.
    """

    digests: Mapping[str, int]
    changes: object


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """What a commit puts in place.

    Attributes:
        tensors: Tensors that ``stage`` returned, filled. Empty: only the tag changes.
        digests: The verified digest of each tensor; after a delta the one that it will have.
        delta: What ``prepare_delta`` returned, if this is a delta.
    """

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]
    delta: PreparedDelta | None = None


@dataclass(frozen=True, slots=True)
class CommitStats:
    """What a commit cost: the time to put weights in place, and the KV entries to recompute."""

    apply_ns: int
    kv_tokens_to_recompute: int


class Engine(Protocol):
    """Samples sequences under one set of weights.

    Life: ``start`` → (``submit`` | ``abort`` | ``hold`` … ``release`` | ``stage`` …
    [``prepare_delta``] … ``commit`` | ``sleep`` … ``wake``)* → ``stop``. While held, an engine
    samples nothing but accepts every call. Calls may overlap; the server never overlaps two of
    ``prepare_delta``, ``commit``, ``sleep`` and ``wake``.

    On a dead engine ``hold`` and ``abort`` do nothing, since nothing is sampled; calls that need
    the model raise EngineError.
    """

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        """Loads the model and starts sampling what is submitted.

        Returns the tag of the initial checkpoint: revision 0, no version. Raises EngineError with
        a one-line message when the model cannot be loaded.
        """

    async def stop(self) -> None:
        """Stops sampling and frees everything. Idempotent; may be called before ``start``."""

    def describe(self) -> EngineInfo:
        """What the engine is and supports. Called only after ``start``."""

    def load(self) -> EngineLoad:
        """How busy the engine is now; no sequences before ``start`` and after ``stop``."""

    def submit(self, spec: SequenceSpec) -> None:
        """Queues a sequence. Waiting sequences start in the order of their submission."""

    async def abort(self, keys: Sequence[int]) -> None:
        """Ends sequences, waiting or running. Unknown keys are ignored.

        Once this has returned, nothing more is reported for them. It works while held, too.
        """

    async def hold(self) -> None:
        """Stops sampling at the next step boundary. Idempotent.

        Returns once no step is in flight. Sequences stay, with their keys and values.
        """

    async def release(self) -> None:
        """Continues sampling. Idempotent."""

    def schema(self) -> list[TensorSpec]:
        """The tensors of an update, with the checkpoint's names and shapes, including aliases."""

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """Allocates memory beside the serving weights, while sampling continues.

        Returns one contiguous, uninitialized tensor for each tensor of the manifest, without
        aliases; for a manifest in DELTA encoding one for each tensor of its
        ``transport.delta_layout``, the deltas of its buckets. The manifest has been compared with
        ``schema``. The server stages the next update only when no tensor of the last one is in
        use, so an engine may keep the memory of one update and return it again.

        Raises NoMemoryError if there is no memory, EngineError if it fails for another reason.
        """

    async def prepare_delta(
        self, manifest: Manifest, staged: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> PreparedDelta:
        """Makes a received delta ready for its commit, while sampling continues.

        The digests that it leads to follow from the changed words alone. Their old bits are read
        where they lie, so that a delta of other weights leads to other digests than its sender
        expects. Called once, after ``stage``, and only if ``EngineInfo.deltas``.

        Args:
            manifest: In DELTA encoding.
            staged: What ``stage`` returned for it, filled.
            before: The digest of each serving tensor, without aliases.

        Raises ManifestError if what was received is not a delta of this manifest, NoMemoryError if
        there is no memory, EngineError if it fails for another reason.
        """

    async def commit(
        self, staged: StagedUpdate, weights: WeightTag, max_kv_lag: int | None
    ) -> CommitStats:
        """Puts staged weights in place while held. Every later token carries ``weights``.

        Tensors that are not staged stay as they are; aliases follow the tensors that they name.
        A delta is refused if the weights have changed since it was prepared.
        Later sequences must not use prefix caches of older revisions. Running sequences keep their
        keys and values, and ``Step.oldest_kv_revisions`` has their revision; those that
        ``sequences_to_recompute`` chooses are computed again under the new weights, interleaved
        with the decoding of the others. With a ``max_kv_lag`` of 0 these are all; with None, none.

        Raises EngineError if it fails before it touches the serving weights, and TornWeightsError
        if it fails after that.
        """

    async def digests(self) -> dict[str, int]:
        """The digest of each serving tensor, computed from the memory, without aliases.

        Raises EngineError if the memory cannot be read. An engine that cannot compute the digest of
        a tensor raises ChangedWeightsError if the memory does not hold what was committed last.
        """

    async def sleep(self, weights: SleepingWeights) -> int:
        """Frees the KV cache, and the weights if ``weights`` says so; returns the bytes freed.

        The server calls it only if no sequence is live and ``unsupported_sleep`` does not list
        ``weights``. Raises EngineError if it fails; nothing is freed then.
        """

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """Allocates the memory again that ``sleep`` freed; does nothing when awake.

        With ``reload_checkpoint`` it also loads discarded weights from the checkpoint. Otherwise
        the next full update brings them, and nothing is sampled until then. If there is no memory
        it raises NoMemoryError; if the checkpoint cannot be read or the engine fails, EngineError.
        In both cases the engine still sleeps.
        """


def end_token_ids(config: Any, generation_config: Any, vocab_size: int) -> tuple[int, ...]:
    """All end-of-sequence tokens that a checkpoint names, ascending, for ``EngineInfo``.

    ``config`` and ``generation_config`` are transformers' configurations of the model.
    """
    # They are in config.json, for the model or for its text part, and in generation_config.json, as
    # a number or a list. The files often disagree: a chat model's turn may end with a token that
    # only one of them names. So this is the union, without what is beyond the vocabulary.
    named: set[int] = set()
    for part in (config, config.get_text_config(), generation_config):
        ids = getattr(part, "eos_token_id", None)
        named.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(token for token in named if 0 <= token < vocab_size))
