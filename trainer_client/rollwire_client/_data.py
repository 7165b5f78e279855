"""Sampling parameters, the answers of servers and the reports of publishes, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from rollwire_client._arguments import all_seconds, servers_text, update_text
from rollwire_client._errors import FleetCallError, PublishIncompleteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire.types import (
        CommittedUpdate,
        LogprobBasis,
        ServerState,
        SleepingWeights,
        WeightTag,
    )

    from rollwire_client._errors import RollwireError

T = TypeVar("T")

Require: TypeAlias = 'Literal["all", "any"] | float'


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample a sequence.

    Attributes:
        temperature: 0 is greedy.
        top_p: Keeps the likeliest tokens whose probabilities add up to this; 1.0 keeps all.
        top_k: Keeps this many of the likeliest tokens; 0 or -1 keeps all.
        min_p: Keeps tokens at least this likely, relative to the likeliest; 0.0 keeps all.
        max_new_tokens: Most output tokens, counted from the end of the prompt, however often the
            sequence is resumed. None, or more than the context has room for: all of this room. The
            sequence then ends with ``FinishReason.LENGTH``.
        min_new_tokens: The sequence does not stop before it has so many output tokens.
        stop_token_ids: Tokens that end the sequence, besides the model's end-of-sequence tokens.
        ignore_eos: Whether to continue after the model's end-of-sequence tokens.
        seed: If set, the random draw of a token depends only on the seed and the token's position
            after the prompt.
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
        pause_id: Id of the pause, for ``resume``.
        lease_left: Seconds until its lease ends it; None: it has no lease.
    """

    pause_id: str
    lease_left: float | None

    def __str__(self) -> str:
        """As a line of the log has it: the same while it lasts."""
        return repr(self.pause_id) + (" (without a lease)" if self.lease_left is None else "")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's identity, weights, state and load.

    Attributes:
        address: Address at which it was asked.
        server_id: A random id of the process.
        state: Its state.
        weights: The weights that it serves.
        highest_version: The highest version that it has committed, whatever it serves now; None if
            it has committed none.
        engine, model, software_version: The software and the model that run there.
        vocab_size: Token ids are below it.
        context_length: Most tokens of prompt and output together.
        eos_token_ids: The model's end-of-sequence tokens.
        logprob_bases: The distributions whose log-probabilities it can report.
        deterministic: Whether seeded sequences are equal bit for bit under any batch.
        accepts_updates: False for a frozen server (a judge or reward model).
        accepts_deltas: Whether it takes updates as deltas too.
        transports: Backends over which it can receive weights.
        max_running_sequences: Most sequences sampled at the same time; more wait.
        running_sequences, waiting_sequences, held_sequences: Present numbers of sequences.
        kv_tokens_used, kv_tokens_total: Used and total size of the KV cache, in tokens.
        sampled_tokens: Tokens sampled since the process started.
        pauses: The pauses that hold it.
        last_update: The update that it committed last; None before the first.
        sleeping_weights: What became of its weights while it sleeps; None while it is awake.
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
    accepts_deltas: bool
    transports: tuple[str, ...]
    max_running_sequences: int
    running_sequences: int
    waiting_sequences: int
    held_sequences: int
    kv_tokens_used: int
    kv_tokens_total: int
    sampled_tokens: int
    pauses: tuple[ActivePause, ...] = ()
    last_update: CommittedUpdate | None = None
    sleeping_weights: SleepingWeights | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    """The result of an abort: how many sequences it ended, and the ids that were not live."""

    sequences: int
    not_found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a server, until ``resume(pause_id)`` or until its lease ends."""

    pause_id: str
    held_sequences: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of a resume: sampling continues once ``remaining_pauses`` is 0."""

    sequences: int
    remaining_pauses: int
    weights: WeightTag


@dataclass(frozen=True, slots=True)
class Asleep:
    """The result of a sleep.

    Attributes:
        weights: What became of the weights.
        freed_bytes: Device memory that was freed; 0 if the server was asleep already.
        already_asleep: Whether it was asleep already, with the same done to its weights.
    """

    weights: SleepingWeights
    freed_bytes: int
    already_asleep: bool = False


@dataclass(frozen=True, slots=True)
class FleetReport(Generic[T]):
    """What came of a call to all servers of a fleet. Each is in one of the two, by its address.

    Attributes:
        call: Name of the method, such as "sleep".
        answers: What servers answered that did as asked.
        errors: Why the others did not. A server that did not answer in time may still do it.
    """

    call: str
    answers: Mapping[str, T]
    errors: Mapping[str, RollwireError]

    def require(self, servers: Require) -> None:
        """Raises unless enough servers have done as asked.

        Args:
            servers: "all", "any", or at least this share of them: a number above 0, at most 1.

        Raises:
            FleetCallError: Fewer have.
            ValueError: ``servers`` is nothing of that.
        """
        total = len(self.answers) + len(self.errors)
        needed = _needed(servers, total)
        if not total or len(self.answers) >= needed:
            return
        done = f" ({', '.join(self.answers)})" if self.answers else ""
        problems = "; ".join(
            str(error) if address in str(error) else f"{address}: {error}"
            for address, error in self.errors.items()
        )
        raise FleetCallError(
            f"{self.call} succeeded on {len(self.answers)} of {servers_text(total)}{done}, and was "
            f"to succeed on {needed}: {problems}",
            self,
        )


@dataclass(frozen=True, slots=True)
class PublishTimeouts:
    """How long a publish waits, in seconds.

    Time in which the event loop did not run does not count for waits for servers and other ranks,
    because nothing can be received then.

    Attributes:
        call: For the answer to a short call, and for a server's first report on an update.
        ready: For a server to check an update and to reserve memory for it.
        silence: A server that reports nothing for this long is left out of the publish; servers
            report at least every half second.
        join: For a transport group to form.
        bucket: For one bucket to reach all servers.
        source: For the trainer to provide the tensors of one bucket, or one tensor before its turn.
            Servers by default wait 30 s for a bucket.
        staged: For the servers to verify the update, once everything is sent.
        commit: For a server to put an update in place.
        commit_silence: For the answer to a commit, before the server is probed.
        discard: For the answer to a discard; a server that does not answer discards the update when
            its lease ends.
        stage_lease: How long a server keeps an update (announced, stalled or staged) whose
            publisher is gone.

    Raises:
        TypeError, ValueError: A value is not a number of seconds.
    """

    call: float = 10.0
    ready: float = 30.0
    silence: float = 5.0
    join: float = 20.0
    bucket: float = 30.0
    source: float = 20.0
    staged: float = 30.0
    commit: float = 60.0
    commit_silence: float = 5.0
    discard: float = 5.0
    stage_lease: float = 120.0

    def __post_init__(self) -> None:
        all_seconds(self)


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The result of a publish on one server.

    Attributes:
        address: Address of the server.
        weights: The weights that it serves now; None if it did not commit.
        error: Why it did not commit.
        received_bytes: Bytes of the update that it received.
        staging_seconds: Time from the announcement until the update was received and verified.
        apply_seconds: Time spent on putting the weights in place.
        paused_seconds: Time without any sampling.
        held_sequences: Number of sequences that waited meanwhile.
        kv_tokens_to_recompute: KV-cache entries, in tokens, that the new policy computes again.
        already_current: Whether it held these weights before.
        encoding: What it was sent: "full", the whole policy; or "delta", what changed.
    """

    address: str
    weights: WeightTag | None
    error: RollwireError | None
    received_bytes: int
    staging_seconds: float
    apply_seconds: float = 0.0
    paused_seconds: float = 0.0
    held_sequences: int = 0
    kv_tokens_to_recompute: int = 0
    already_current: bool = False
    encoding: str = "full"


@dataclass(frozen=True, slots=True)
class DtypeCast:
    """Tensors of a publish that were cast, all from one dtype to one other.

    Attributes:
        source: Their dtype in the trainer, as "float32".
        target: Their dtype on the servers.
        tensors: How many they are.
    """

    source: str
    target: str
    tensors: int

    def __str__(self) -> str:
        noun = "tensor" if self.tensors == 1 else "tensors"
        return f"{self.tensors} {noun} cast from {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of a publish.

    Attributes:
        version: The version given to ``publish``.
        update_id: Id of the update on the servers.
        digest: Digest of the content that was sent.
        bytes: Bytes sent to each server. If some got the whole policy and others what changed, the
            sum of both.
        seconds: Time from ``publish`` to the last commit.
        servers: One entry per server, in the fleet's order; after ``catch_up``, of the servers that
            were behind.
        casts: The tensors whose dtype is another one on the servers.
        changed_share: How much differs from the last publish, of 16-bit words; None if it is not
            known, as after the first publish, or without deltas.
        find_seconds: Time spent on reading the tensors, and finding what differs; 0 without deltas.
    """

    version: int | None
    update_id: str
    digest: int
    bytes: int
    seconds: float
    servers: tuple[ServerReport, ...]
    casts: tuple[DtypeCast, ...] = ()
    changed_share: float | None = None
    find_seconds: float = 0.0

    @property
    def encodings(self) -> tuple[str, ...]:
        """What the servers were sent: "full", "delta", or both."""
        return tuple(sorted({server.encoding for server in self.servers}))

    @property
    def failed(self) -> tuple[ServerReport, ...]:
        """Servers that did not commit; they get no sequences until the next publish or ``catch_up``
        updates them.
        """
        return tuple(server for server in self.servers if server.weights is None)

    def require(self, servers: Require) -> None:
        """Raises unless enough servers have committed.

        Args:
            servers: "all" of ``servers``, "any" of them, or at least this share of them: a number
                above 0, at most 1.

        Raises:
            PublishIncompleteError: Fewer have committed.
            ValueError: ``servers`` is nothing of that.
        """
        total, committed = len(self.servers), len(self.servers) - len(self.failed)
        needed = _needed(servers, total)
        if not total or committed >= needed:
            return
        problems = "; ".join(str(server.error) for server in self.failed)
        raise PublishIncompleteError(
            f"{update_text(self.version)} is on {committed} of {servers_text(total)}, and was to "
            f"be on {needed}: {problems}; the servers without it get no sequences until the next "
            "publish or `catch_up`",
            self,
        )


def _needed(servers: Require, total: int) -> int:
    return max(math.ceil(checked_share(servers) * total - 1e-9), 1)


def checked_share(servers: Require) -> float:
    """The share of the servers that is meant; "any" is the smallest one."""
    if isinstance(servers, str):
        if servers in _SHARES:
            return _SHARES[servers]
    elif not isinstance(servers, bool) and 0 < servers <= 1:
        return servers
    raise ValueError(f"require is {servers!r}, not 'all', 'any' or a share above 0, at most 1")


_SHARES = {"all": 1.0, "any": 0.0}
