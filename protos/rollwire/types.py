"""The API's data types, used by servers and clients alike."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LogprobBasis(enum.Enum):
    """The distribution that log-probabilities are taken from."""

    TEMPERATURE = "temperature"
    """log-softmax of logits / temperature, before truncation (at temperature 0: of the logits)."""
    MODEL = "model"
    """log-softmax of the logits."""
    SAMPLED = "sampled"
    """log of the probability in the distribution that the token was drawn from: after temperature,
    masks, top-k, top-p and min-p, renormalized (greedy: 0).
    """


class FinishReason(enum.Enum):
    """Why a sequence ended without an error."""

    STOP = "stop"
    """The last token is an end-of-sequence or stop token."""
    LENGTH = "length"
    """``max_new_tokens`` or the context length is reached."""
    ABORTED = "aborted"
    """A client aborted it."""
    SUPERSEDED = "superseded"
    """A newer attempt of the same request took over."""
    INTERRUPTED = "interrupted"
    """The server stopped sampling it. It can continue elsewhere; a ``Fleet`` continues it."""


class ServerState(enum.Enum):
    """What a server is doing."""

    STARTING = "starting"
    AWAITING_WEIGHTS = "awaiting_weights"
    """Serves nothing before its first committed update."""
    SERVING = "serving"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    QUARANTINED = "quarantined"
    """A commit failed half way; a full update cures it."""
    DRAINING = "draining"
    UNKNOWN = "unknown"
    """A state that this release does not know; only clients use it."""

    @property
    def ready(self) -> bool:
        """Whether the server accepts requests. While it is paused, they wait."""
        return self in (ServerState.SERVING, ServerState.PAUSED)


class KvPolicy(enum.Enum):
    """What a commit does with the keys and values of sequences that are under way."""

    KEEP = "keep"
    """Keeps them: ``oldest_kv_revision`` of later tokens is the revision that computed them."""
    RECOMPUTE = "recompute"
    """Computes them again: later tokens are sampled as if the new policy had read the prefix."""


class SleepingWeights(enum.Enum):
    """What happens to the weights while a server sleeps."""

    KEEP = "keep"
    """They stay on the device."""
    HOST_BACKUP = "host_backup"
    """They move to host memory, and back when the server wakes up."""
    DISCARD = "discard"
    """Their memory is freed: the server awaits an update afterwards, or reloads its checkpoint."""


class UpdatePhase(enum.Enum):
    """How far a server is with a weight update."""

    ANNOUNCED = "announced"
    """The server is about to check it."""
    READY = "ready"
    """The update was checked, and memory is reserved for it."""
    RECEIVING = "receiving"
    STALLED = "stalled"
    """The transport group failed; the update waits for the next group."""
    STAGED = "staged"
    """Received and verified: it can be committed."""


@dataclass(frozen=True, slots=True)
class WeightTag:
    """The weights that sampled a token, or that a server holds.

    Attributes:
        version: The trainer's step; None for the initial checkpoint and updates without a version.
        revision: Number of the commit on its server process; 0: the weights it started with.
        server_id: Id of the server process; revisions count per process.
        digest: 64-bit digest of the content: equal on all servers that hold the same weights.
    """

    version: int | None
    revision: int
    server_id: str
    digest: int

    def __repr__(self) -> str:
        """Shows the digest in hexadecimal, as ``rollwire info`` and the logs do."""
        return (
            f"WeightTag(version={self.version}, revision={self.revision}, "
            f"server_id={self.server_id!r}, digest=0x{self.digest:016x})"
        )


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """An update as it was sent to a server.

    Attributes:
        encoding: "full": the whole policy; "delta": what had changed.
        received_bytes: Bytes that the server received.
        changed_share: How much differs from what its publisher had published before, of 16-bit
            words; None if that did not compare.
    """

    encoding: str
    received_bytes: int
    changed_share: float | None

    def __str__(self) -> str:
        changed = "" if self.changed_share is None else f", {self.changed_share:.2%} changed"
        return f"{self.encoding}, {self.received_bytes / 1e6:.1f} MB{changed}"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    Attributes:
        reason: Why it ended.
        stop_token_id: With STOP: the token that ended it.
        message: Further information from the server, such as why it interrupted the sequence.
        prompt_tokens: Length of the prompt.
        output_tokens: Length of the output, including the tokens of earlier attempts.
        cached_prompt_tokens: Prompt tokens that the server did not have to prefill.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    message: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0


def version_text(version: int | None) -> str:
    """A version of weights, as messages name it."""
    return "weights without a version" if version is None else f"version {version}"


def weights_text(tag: WeightTag) -> str:
    """Weights of one server, as messages name them."""
    return f"{version_text(tag.version)}, revision {tag.revision}"
