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
    """Of what was really drawn from: after temperature, masks, top-k, top-p and min-p,
    renormalized (greedy: 0).
    """


class FinishReason(enum.Enum):
    """Why a sequence ended, when that is no error."""

    STOP = "stop"
    """The last token is an end-of-sequence or stop token."""
    LENGTH = "length"
    """``max_new_tokens`` or the context length is reached."""
    ABORTED = "aborted"
    """Somebody asked for it."""
    SUPERSEDED = "superseded"
    """A newer attempt of the same request took over."""
    INTERRUPTED = "interrupted"
    """The server gives it up; it can go on elsewhere. A ``Fleet`` does that by itself."""


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
    """A state that this release has no name for; only ever seen by a client."""

    @property
    def ready(self) -> bool:
        """Whether it takes requests. A paused server does: they wait until it goes on."""
        return self in (ServerState.SERVING, ServerState.PAUSED)


class KvPolicy(enum.Enum):
    """What a commit does with the keys and values of sequences that are under way."""

    RECOMPUTE = "recompute"
    """Prefilled again: later tokens are sampled as if the new policy had read the whole prefix."""
    KEEP = "keep"
    """They stay; later tokens say so in ``oldest_kv_revision``."""


class SleepingWeights(enum.Enum):
    """What becomes of the weights while a server sleeps."""

    KEEP = "keep"
    """They stay on the device."""
    HOST_BACKUP = "host_backup"
    """They go to host memory and come back when the server wakes up."""
    DISCARD = "discard"


class UpdatePhase(enum.Enum):
    """How far a server is with a weight update."""

    ANNOUNCED = "announced"
    """The server has not reported yet; only ever seen by a publisher."""
    READY = "ready"
    """Checked, and memory for it reserved."""
    RECEIVING = "receiving"
    STALLED = "stalled"
    """The transport group broke; it waits to join the next one."""
    STAGED = "staged"
    """Received and verified: it can be committed."""


@dataclass(frozen=True, slots=True)
class WeightTag:
    """Which weights sampled a token, or are held by a server.

    Attributes:
        version: The trainer's step; None for the initial checkpoint and for untagged updates.
        revision: Counts the commits of one server process, from 0.
        server_id: The server process, so that revisions of two of them are not confused.
        digest: 64-bit digest of the content: equal on all servers that hold the same weights.
    """

    version: int | None
    revision: int
    server_id: str
    digest: int

    def __repr__(self) -> str:
        """With the digest as ``rollwire info`` and the logs show it."""
        return (
            f"WeightTag(version={self.version}, revision={self.revision}, "
            f"server_id={self.server_id!r}, digest=0x{self.digest:016x})"
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    Attributes:
        reason: Why.
        stop_token_id: With STOP: the token that ended it.
        message: What else the server says, such as why it gave the sequence up.
        prompt_tokens: Length of the prompt.
        output_tokens: Length of the output, what earlier attempts sampled included.
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
