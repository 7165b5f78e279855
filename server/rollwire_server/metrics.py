"""The metrics of one server; ``metrics_server`` serves them to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Collects all metrics when they are scraped, so that sampling pays nothing for them.

    To be collected on the server's event loop, where the values change.
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
        self._paused = self._histogram(
            "commit_paused", "Time for which a commit held sampling.", PAUSE_BUCKETS
        )
        self._apply = self._histogram(
            "commit_apply", "Part of that in which weights were put in place.", PAUSE_BUCKETS
        )
        self._staging = self._histogram(
            "update_staging",
            "Time to receive and verify an update, while sampling continues.",
            STAGING_BUCKETS,
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
        counters, state = self._counters, self._state.current
        yield _gauge(
            "state",
            "1 for the server's current state.",
            {s.value: int(s is state) for s in SERVER_STATE_TO_PROTO},
            "state",
        )
        yield _counter("sampled_tokens", "Tokens sampled.", counters.sampled_tokens)
        yield _counter(
            "ended_sequences",
            "Ended sequences by reason.",
            dict.fromkeys(ENDS, 0) | counters.ended_sequences,
            "reason",
        )
        yield _counter(
            "refusals",
            "Refused calls and sequences.",
            dict.fromkeys(REFUSALS, 0) | counters.refusals,
            "reason",
        )
        yield _counter(
            "updates",
            "Weight updates by outcome.",
            {outcome.value: counters.updates[outcome] for outcome in UpdateOutcome},
            "outcome",
        )
        yield _counter(
            "update_received_bytes", "Bytes of updates received.", counters.received_bytes
        )
        yield _counter(
            "update_forwarded_bytes",
            "Bytes of updates forwarded to other servers.",
            counters.forwarded_bytes,
        )
        yield _counter("pauses", "Pauses that clients began.", self._state.pauses_started)
        yield _counter(
            "held_seconds",
            "Time for which pauses and commits held sampling.",
            self._state.held_seconds,
        )
        if state is not ServerState.STARTING:
            yield from self._engine_metrics()
            yield from self._weight_metrics()

    def _engine_metrics(self) -> Iterator[Metric]:
        engine, load = self._engine.describe(), self._engine.load()
        yield InfoMetricFamily(
            "rollwire_server",
            "Version, engine and model of the server.",
            {"version": __version__, "engine": engine.engine, "model": engine.model},
        )
        yield _gauge(
            "sequences", "Live sequences by state.", self._sequences.by_activity(), "state"
        )
        yield _gauge("kv_used_tokens", "KV-cache entries in use.", load.kv_tokens_used)
        yield _gauge("kv_capacity_tokens", "All KV-cache entries.", load.kv_tokens_total)

    def _weight_metrics(self) -> Iterator[Metric]:
        update, announced = self._updates.current, self._updates.announced_version
        weights, committed_at = self._updates.weights.current, self._updates.weights.committed_at
        yield _gauge(
            "update_phase",
            "1 for the phase of the update under way, if there is one.",
            {p.value: int(update is not None and update.phase is p) for p in UPDATE_PHASE_TO_PROTO},
            "phase",
        )
        if weights.version is not None:
            yield _gauge("weights_version", "Version of the serving weights.", weights.version)
        if announced is not None:
            yield _gauge(
                "weights_announced_version",
                "Version that was announced last: above weights_version until it is committed.",
                announced,
            )
        yield _gauge("weights_revision", "Number of commits of this process.", weights.revision)
        if committed_at is not None:
            yield _gauge(
                "weights_committed_timestamp_seconds",
                "When the serving weights were committed.",
                committed_at,
            )


Values = float | Mapping[str, float]  # one, or one for each value of a label


def _gauge(name: str, what: str, values: Values, label: str | None = None) -> Metric:
    return _filled(
        GaugeMetricFamily(f"rollwire_{name}", what, labels=[label] if label else None), values
    )


def _counter(name: str, what: str, values: Values, label: str | None = None) -> Metric:
    return _filled(
        CounterMetricFamily(f"rollwire_{name}", what, labels=[label] if label else None), values
    )


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        for key, value in values.items():
            family.add_metric([key], value)
    else:
        family.add_metric([], values)
    return family
