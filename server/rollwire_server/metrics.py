"""What one server tells Prometheus; ``scraping`` is how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from rollwire.conversion import SERVER_STATE_TO_PROTO, UPDATE_PHASE_TO_PROTO
from rollwire.reasons import Reason
from rollwire.types import FinishReason, ServerState

from rollwire_server import __version__
from rollwire_server.weights.types import UpdateOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.manager import UpdateManager
    from rollwire_server.weights.types import CommitResult

PAUSE_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STAGING_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)

REFUSALS = [reason.name.lower() for reason in Reason]  # each of them can end a call
# Of the errors these alone can end a sequence that was taken.
ERROR_ENDS = (Reason.WEIGHTS_TOO_OLD, Reason.TIMED_OUT, Reason.NOT_FINITE, Reason.STEP_FAILED)
ENDS = [end.name.lower() for end in (*FinishReason, *ERROR_ENDS)]


class Metrics(Collector):
    """What a server tells; read when it is asked, so that sampling pays nothing.

    To be read on the server's event loop: elsewhere it would change under who reads.
    """

    def __init__(
        self,
        counters: ServerCounters,
        engine: Engine,
        state: StateMachine,
        sequences: Sequences,
        updates: UpdateManager,
    ) -> None:
        self._counters = counters
        self._engine = engine
        self._state = state
        self._sequences = sequences
        self._updates = updates
        self.registry = CollectorRegistry()
        self._paused = self._histogram("commit_paused", "Sampling held by a commit.", PAUSE_BUCKETS)
        self._apply = self._histogram(
            "commit_apply", "Putting staged weights in place, of that.", PAUSE_BUCKETS
        )
        self._staging = self._histogram(
            "update_staging", "Receiving and verifying an update, beside sampling.", STAGING_BUCKETS
        )
        self.registry.register(self)
        counters.on_commit.append(self._on_commit)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rollwire_{name}_seconds", what, buckets=buckets, registry=self.registry)

    def _on_commit(self, commit: CommitResult) -> None:
        self._paused.observe(commit.paused_ns / 1e9)
        self._apply.observe(commit.apply_ns / 1e9)
        self._staging.observe(commit.receive_ns / 1e9)

    def collect(self) -> Iterator[Metric]:
        """As things are now."""
        counters, state = self._counters, self._state.current
        yield _gauges(
            "state", "1 for the state that the server is in.", "state",
            {s.value: int(s is state) for s in SERVER_STATE_TO_PROTO},
        )  # fmt: skip
        yield _counter("sampled_tokens", "Tokens sampled.", counters.sampled_tokens)
        yield _counters(
            "ended_sequences", "Sequences by how they ended.", "reason",
            dict.fromkeys(ENDS, 0) | counters.ended_sequences,
        )  # fmt: skip
        yield _counters(
            "refusals", "Refused calls and sequences.", "reason",
            dict.fromkeys(REFUSALS, 0) | counters.refusals,
        )  # fmt: skip
        yield _counters(
            "updates", "Weight updates by outcome.", "outcome",
            {outcome.value: counters.updates[outcome] for outcome in UpdateOutcome},
        )  # fmt: skip
        yield _counter("update_received_bytes", "Bytes of updates.", counters.received_bytes)
        yield _counter(
            "update_forwarded_bytes", "Of those, passed on to other servers.",
            counters.forwarded_bytes,
        )  # fmt: skip
        yield _counter("pauses", "Pauses that callers began.", self._state.pauses_started)
        yield _counter("held_seconds", "Sampling held, by pauses and commits.",
                       self._state.held_seconds)  # fmt: skip
        if state is not ServerState.STARTING:
            yield from self._engine_metrics()

    def _engine_metrics(self) -> Iterator[Metric]:
        engine, load, live = self._engine.describe(), self._engine.load(), self._sequences.live
        held = self._state.held
        running = 0 if held else min(load.running, live)
        waiting = 0 if held else live - running
        yield InfoMetricFamily(
            "rollwire_server", "What the server is.",
            {"version": __version__, "engine": engine.engine, "model": engine.model},
        )  # fmt: skip
        yield _gauges(
            "sequences", "Live sequences by what they do.", "state",
            {"running": running, "waiting": waiting, "held": live if held else 0},
        )  # fmt: skip
        yield _gauge("kv_used_tokens", "KV-cache entries in use.", load.kv_tokens_used)
        yield _gauge("kv_capacity_tokens", "KV-cache entries there are.", load.kv_tokens_total)
        yield from self._weight_metrics()

    def _weight_metrics(self) -> Iterator[Metric]:
        updates = self._updates
        update, weights = updates.current, updates.weights.current
        committed_at = updates.weights.committed_at
        yield _gauges(
            "update_phase", "1 for how far the update under way is, if there is one.", "phase",
            {p.value: int(update is not None and update.phase is p) for p in UPDATE_PHASE_TO_PROTO},
        )  # fmt: skip
        if weights.version is not None:
            yield _gauge("weights_version", "The trainer's step.", weights.version)
        if updates.announced_version is not None:
            yield _gauge(
                "weights_announced_version",
                "What the trainer last said that it would send: above weights_version until it is "
                "committed.",
                updates.announced_version,
            )
        yield _gauge("weights_revision", "Commits of this process.", weights.revision)
        if committed_at is not None:
            yield _gauge(
                "weights_committed_timestamp_seconds", "When they were committed.", committed_at
            )


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rollwire_{name}", what, value)


def _gauges(name: str, what: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"rollwire_{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"rollwire_{name}", what, value)


def _counters(name: str, what: str, label: str, values: dict[str, int]) -> Metric:
    """Every key from the start, so that a rate is known from the first event on."""
    family = CounterMetricFamily(f"rollwire_{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
