"""The metrics of one server, and the page that Prometheus reads them from."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from rollwire.conversion import SERVER_STATE_TO_PROTO
from rollwire.reasons import Reason
from rollwire.types import FinishReason, ServerState, UpdatePhase
from rollwire_transport import Encoding

from rollwire_server import __version__
from rollwire_server.counters import UpdateOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from rollwire_server.counters import CommitResult, ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.manager import UpdateManager

PAUSE_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STAGING_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
STAGING = "Time to receive and verify an update, while sampling continues."
COMMIT_HISTOGRAMS = (
    ("commit_paused", "Time for which a commit held sampling.", PAUSE_BUCKETS),
    ("commit_apply", "Time for which a commit put weights in place.", PAUSE_BUCKETS),
    ("update_staging", STAGING, STAGING_BUCKETS),
)

REFUSALS = [reason.name.lower() for reason in Reason]  # each of them can end a call
# Of the errors these alone can end a sequence that was taken.
ERROR_ENDS = (Reason.WEIGHTS_TOO_OLD, Reason.TIMED_OUT, Reason.NOT_FINITE, Reason.STEP_FAILED)
ENDS = [end.name.lower() for end in (*FinishReason, *ERROR_ENDS)]

# Of the page's clients, who may be slow, silent or many.
MAX_CONNECTIONS = 64
CONNECTION_SECONDS = 5.0
REQUEST_BYTES = 16 << 10
PATHS = {"/metrics", "/"}


@dataclass(eq=False)
class Metrics(Collector):
    """Collects all metrics when they are scraped, so that sampling pays nothing for them."""

    _counters: ServerCounters
    _engine: Engine
    _state: StateMachine
    _sequences: Sequences
    _updates: UpdateManager

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        paused, apply, staging = (
            Histogram(f"rollwire_{name}_seconds", what, buckets=buckets, registry=self.registry)
            for name, what, buckets in COMMIT_HISTOGRAMS
        )
        self.registry.register(self)

        def observe(commit: CommitResult) -> None:
            paused.observe(commit.paused_ns / 1e9)
            apply.observe(commit.apply_ns / 1e9)
            staging.observe(commit.receive_ns / 1e9)

        self._counters.on_commit.append(observe)

    def collect(self) -> Iterator[Metric]:
        counters, state = self._counters, self._state
        yield from _metrics(
            Counter,
            ("sampled_tokens", "Tokens sampled.", counters.sampled_tokens),
            ("update_received_bytes", "Bytes of updates received.", counters.received_bytes),
            (
                "update_forwarded_bytes",
                "Bytes of updates forwarded to other servers.",
                counters.forwarded_bytes,
            ),
            ("pauses", "Pauses that clients began.", state.pauses_started),
            (
                "held_seconds",
                "Time for which pauses and commits held sampling.",
                state.held_seconds,
            ),
        )
        ends = dict.fromkeys(ENDS, 0) | counters.ended_sequences
        refusals = dict.fromkeys(REFUSALS, 0) | counters.refusals
        outcomes = {outcome.value: counters.updates[outcome] for outcome in UpdateOutcome}
        states = {s.value: int(s is state.current) for s in SERVER_STATE_TO_PROTO}
        yield _labelled(Counter, "ended_sequences", "Ended sequences by reason.", "reason", ends)
        yield _labelled(Counter, "refusals", "Refused calls and sequences.", "reason", refusals)
        yield _labelled(Counter, "updates", "Weight updates by outcome.", "outcome", outcomes)
        encodings = {encoding.value: counters.committed[encoding] for encoding in Encoding}
        what = "Committed updates by encoding."
        yield _labelled(Counter, "committed_updates", what, "encoding", encodings)
        yield _labelled(Gauge, "state", "1 for the server's current state.", "state", states)
        if state.current is not ServerState.STARTING:
            yield from self._engine_metrics()
            yield from self._weight_metrics()

    def _engine_metrics(self) -> Iterator[Metric]:
        engine, load = self._engine.describe(), self._engine.load()
        yield InfoMetricFamily(
            "rollwire_server",
            "Version, engine and model of the server.",
            {"version": __version__, "engine": engine.engine, "model": engine.model},
        )
        live = self._sequences.by_activity()
        yield _labelled(Gauge, "sequences", "Live sequences by state.", "state", live)
        yield from _metrics(
            Gauge,
            ("kv_used_tokens", "KV-cache entries in use.", load.kv_tokens_used),
            ("kv_capacity_tokens", "All KV-cache entries.", load.kv_tokens_total),
        )

    def _weight_metrics(self) -> Iterator[Metric]:
        updates, weights = self._updates, self._updates.weights
        phase = updates.current.phase if updates.current is not None else None
        phases = {p.value: int(p is phase) for p in UpdatePhase if p is not UpdatePhase.ANNOUNCED}
        what = "1 for the phase of the update under way, if there is one."
        yield _labelled(Gauge, "update_phase", what, "phase", phases)
        yield from _metrics(
            Gauge,
            ("weights_version", "Version of the serving weights.", weights.current.version),
            (
                "weights_announced_version",
                "Version that was announced last: above weights_version until it is committed.",
                updates.announced_version,
            ),
            ("weights_revision", "Number of commits of this process.", weights.current.revision),
            (
                "weights_committed_timestamp_seconds",
                "When the serving weights were committed.",
                weights.committed_at,
            ),
        )


Family = type[Gauge] | type[Counter]


def _metrics(family: Family, *metrics: tuple[str, str, float | None]) -> Iterator[Metric]:
    """Those that have a value, by name and description."""
    for name, what, value in metrics:
        if value is not None:
            yield family(f"rollwire_{name}", what, value=value)


def _labelled(
    family: Family, name: str, what: str, label: str, values: Mapping[str, float]
) -> Metric:
    metric = family(f"rollwire_{name}", what, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


class MetricsServer:
    """As much of HTTP as Prometheus speaks, on the event loop, where the values change.

    A connection lasts a few seconds, and the oldest is closed when there are too many, so that a
    scrape comes through. (prometheus_client's own server starts a thread for each connection.)
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # oldest first

    async def open(self, address: str) -> str:
        """Listens on HOST:PORT; returns the address with the port that was chosen."""
        host, _, port = address.rpartition(":")
        name = host.removeprefix("[").removesuffix("]")
        family, _, _, _, bound = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
        both = family is socket.AF_INET6 and bound[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(bound[:2], family=family, dualstack_ipv6=both)
        self._server = await asyncio.start_server(
            self._on_connection, sock=listener, limit=REQUEST_BYTES
        )
        return f"{host}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            oldest.cancel()
            del self._connections[oldest]
        task = asyncio.create_task(self._answer(reader, writer), name="answer a scrape")
        self._connections[task] = None
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.transport.set_write_buffer_limits(0)  # ``drain`` waits until all is sent
            async with asyncio.timeout(CONNECTION_SECONDS):
                writer.write(self._response(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that does not ask or does not read gets no answer
        finally:
            writer.transport.abort()

    def _response(self, request: bytes) -> bytes:
        first, *lines = request.decode("latin-1").split("\r\n")
        method, _, target = first.partition(" ")
        if method != "GET":
            return _message(HTTPStatus.METHOD_NOT_ALLOWED)
        if target.split(" ")[0].partition("?")[0] not in PATHS:
            return _message(HTTPStatus.NOT_FOUND)
        headers = (line.partition(":") for line in lines)
        accepted = [value.strip() for name, _, value in headers if name.lower() == "accept"]
        encode, kind = choose_encoder(",".join(accepted))
        return _message(HTTPStatus.OK, encode(self._registry), kind)


def _message(status: HTTPStatus, body: bytes = b"", kind: str = "text/plain") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
