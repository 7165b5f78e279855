"""The gateway's metrics, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class GatewayMetrics:
    """What the gateway counts; names and labels are part of its interface."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rollwire_gateway_requests",
            "Requests by path and status; status 499: the client went away.",
            ("path", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "rollwire_gateway_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ("path",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.retried = Counter(
            "rollwire_gateway_retried_requests",
            "Requests that a client has sent before, as its x-stainless-retry-count says.",
            registry=self.registry,
        )
        self.sequences = Gauge(
            "rollwire_gateway_sequences", "Sequences under way.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "rollwire_gateway_prompt_tokens", "Tokens of prompts.", registry=self.registry
        )
        self.output_tokens = Counter(
            "rollwire_gateway_output_tokens",
            "Tokens that were sampled, those of aborted sequences included.",
            registry=self.registry,
        )
        self.updates = Counter(
            "rollwire_gateway_weight_updates",
            "Updates from a checkpoint folder by outcome.",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in ("committed", "incomplete", "failed"):
            self.updates.labels(outcome)
