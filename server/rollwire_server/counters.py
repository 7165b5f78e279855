"""What one server has counted since it started, for its metrics and GetServerInfo."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire.types import WeightTag
    from rollwire_transport import Encoding


class UpdateOutcome(enum.Enum):
    COMMITTED = "committed"
    ALREADY_CURRENT = "already_current"
    DISCARDED = "discarded"  # before its commit began
    FAILED = "failed"  # in its commit


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What CommitWeights answers, a repeated one too."""

    weights: WeightTag
    receive_ns: int = 0
    apply_ns: int = 0
    paused_ns: int = 0
    held_sequences: int = 0
    kv_tokens_to_recompute: int = 0
    already_current: bool = False


@dataclass(slots=True)
class ServerCounters:
    """Counters that only rise. (Plain numbers, because prometheus_client's own counters take a lock
    at each step and add a ``_created`` series each.)
    """

    sampled_tokens: int = 0
    ended_sequences: Counter[str] = field(default_factory=Counter)  # by reason in lower case
    refusals: Counter[str] = field(default_factory=Counter)  # calls and sequences, by reason
    updates: Counter[UpdateOutcome] = field(default_factory=Counter)
    committed: Counter[Encoding] = field(default_factory=Counter)
    received_bytes: int = 0  # of verified buckets
    forwarded_bytes: int = 0  # of buckets passed on to other servers
    on_commit: list[Callable[[CommitResult], None]] = field(default_factory=list)
