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

    Attributes:
        sampled_tokens: By the engine's steps.
        ended_sequences: By finish or error reason in lower case.
        refusals: Calls and sequences that were refused, by reason in lower case.
        updates: By outcome.
        received_bytes: Of verified buckets.
        forwarded_bytes: Of buckets that were passed on to other servers.
        on_commit: Called with each commit that put weights in place.
    """

    sampled_tokens: int = 0
    ended_sequences: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    updates: Counter[UpdateOutcome] = field(default_factory=Counter)
    received_bytes: int = 0
    forwarded_bytes: int = 0
    on_commit: list[Callable[[CommitResult], None]] = field(default_factory=list)
