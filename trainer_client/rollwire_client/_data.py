"""How to sample, and what servers answer: plain data, so that protobuf messages stay inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.types import LogprobBasis, ServerState, WeightTag


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample a sequence.

    Attributes:
        temperature: 0 is greedy.
        top_p: Keeps the likeliest tokens that make up this much probability; 1.0 keeps all.
        top_k: Keeps this many of the likeliest tokens; 0 keeps all.
        min_p: Keeps tokens at least this likely, relative to the likeliest; 0.0 keeps all.
        max_new_tokens: Counted from the end of the prompt, however often the sequence is resumed.
            None: what the context has room for; more than that is cut to it, without an error, and
            the sequence ends with ``FinishReason.LENGTH``.
        min_new_tokens: Until then the sequence does not stop; counted in the same way.
        stop_token_ids: Tokens that end the sequence beside the model's end-of-sequence tokens.
        ignore_eos: The model's end-of-sequence tokens do not end it.
        seed: With one, a draw depends on the seed and the token's position after the prompt alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ActivePause:
    """A pause that holds a server.

    Attributes:
        pause_id: Names it; ``resume`` takes it.
        lease_left: Seconds until it lifts by itself; None: never.
    """

    pause_id: str
    lease_left: float | None

    def __str__(self) -> str:
        """As a line of the log has it: the same while it lasts."""
        return repr(self.pause_id) + (" (without a lease)" if self.lease_left is None else "")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is, holds and is doing.

    Attributes:
        address: Where it was asked.
        server_id: A random id of the process.
        state: What it is doing.
        weights: What it serves.
        highest_version: The highest that it has committed, whatever it serves now; None if it has
            committed none.
        engine, model, software_version: What runs there.
        vocab_size: Token ids are below it.
        context_length: Prompt and output together are at most this long.
        eos_token_ids: The model's end-of-sequence tokens.
        logprob_bases: Which log-probabilities it can give.
        deterministic: Seeded sequences are equal bit for bit under any batch.
        accepts_updates: False for a frozen server (a judge or reward model).
        transports: Backends by which weights reach it.
        max_running_sequences: More than these wait.
        running_sequences, waiting_sequences, held_sequences: How many there are now.
        kv_tokens_used, kv_tokens_total: Fill of the KV cache, in tokens.
        sampled_tokens: Since the process started.
        pauses: That hold it.
    """

    address: str
    server_id: str
    state: ServerState
    weights: WeightTag
    highest_version: int | None
    engine: str
    model: str
    software_version: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    logprob_bases: frozenset[LogprobBasis]
    deterministic: bool
    accepts_updates: bool
    transports: tuple[str, ...]
    max_running_sequences: int
    running_sequences: int
    waiting_sequences: int
    held_sequences: int
    kv_tokens_used: int
    kv_tokens_total: int
    sampled_tokens: int
    pauses: tuple[ActivePause, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """What an abort found: how many sequences it ended, and the ids that were not live."""

    sequences: int
    not_found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause that holds a server, until ``resume(pause_id)`` or until its lease runs out."""

    pause_id: str
    held_sequences: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume left: sampling goes on once ``remaining_pauses`` is 0."""

    sequences: int
    remaining_pauses: int
    weights: WeightTag
