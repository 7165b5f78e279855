"""What one server has counted since it started, for its metrics and GetServerInfo."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_server.weights.types import CommitResult, UpdateOutcome


@dataclass(slots=True)
class ServerCounters:
    """Counters that only rise. (Plain numbers, because prometheus_client's own counters take a lock
    at each step and add a ``_created`` series each.)
    """

    sampled_tokens: int = 0
    ended_sequences: Counter[str] = field(default_factory=Counter)  # by reason in lower case
    refusals: Counter[str] = field(default_factory=Counter)  # calls and sequences, by reason
    updates: Counter[UpdateOutcome] = field(default_factory=Counter)
    received_bytes: int = 0  # of verified buckets
    forwarded_bytes: int = 0  # of buckets passed on to other servers
    on_commit: list[Callable[[CommitResult], None]] = field(default_factory=list)
