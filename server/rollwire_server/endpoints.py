"""Where a server listens: the API, health on a port of its own, metrics, weight transfers."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import grpc
import rollwire_transport as transport
from google.rpc import error_details_pb2  # noqa: F401  reflection then shows error details
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rollwire.v1 import rollout_pb2, weights_pb2

from rollwire_server.health import Health
from rollwire_server.rpc.interceptor import CALLS_BESIDE_SEQUENCES, CallInterceptor
from rollwire_server.rpc.limits import LARGE_BYTES, SMALL_BYTES
from rollwire_server.scraping import MetricsPage
from rollwire_server.security import Authentication, server_credentials
from rollwire_server.settings import split_listening

if TYPE_CHECKING:
    from rollwire_server.counters import ServerCounters
    from rollwire_server.metrics import Metrics
    from rollwire_server.security import Access
    from rollwire_server.settings import ServerSettings

ROLLOUT_SERVICE: str = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
WEIGHT_SERVICE: str = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
PROBES_AT_ONCE = 1000  # of one client
FLUSH_SECONDS = 2.0  # for streams to deliver their last messages
CHANNEL_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server on it
    # gRPC measures a message once it has unpacked it: a few kilobytes would take gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none
    # Windows that grow with the speed of a link let in hundreds of megabytes unasked.
    ("grpc.http2.bdp_probe", 0),
    # Clients keep long silent streams alive; do not send them away for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class EndpointError(Exception):
    """An address that cannot be listened on; the message is for a person."""


class Endpoints:
    """The listening side of one server: bound when made, open from ``start`` to ``stop``.

    Attributes:
        api: Takes the services.
        addresses: HOST:PORT by the flag's name, ports chosen; "listen" is the API.

    Raises:
        EndpointError: An address cannot be listened on.
        SecurityError: TLS files are missing or wrong.
    """

    def __init__(self, settings: ServerSettings, access: Access, counters: ServerCounters) -> None:
        self._settings = settings
        self._page: MetricsPage | None = None
        self._answers = Health()
        most_calls = settings.max_running + settings.max_waiting + CALLS_BESIDE_SEQUENCES
        self.api = grpc.aio.server(
            interceptors=[Authentication(access, counters), CallInterceptor(most_calls, counters)],
            options=_options(most_calls, LARGE_BYTES),
        )
        self.addresses = {"listen": _bind(self.api, settings.listen, server_credentials(settings))}
        health_pb2_grpc.add_HealthServicer_to_server(self._answers, self.api)
        self._health: grpc.aio.Server | None = None
        if settings.health_listen is not None:
            self._health = grpc.aio.server(
                interceptors=[CallInterceptor(PROBES_AT_ONCE, counters)],
                options=_options(PROBES_AT_ONCE, SMALL_BYTES),
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._answers, self._health)
            self.addresses["health_listen"] = _bind(self._health, settings.health_listen, None)
        if settings.reflection:
            services = (ROLLOUT_SERVICE, WEIGHT_SERVICE, health.SERVICE_NAME)
            reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), self.api)

    async def start(self, metrics: Metrics) -> None:
        """Listens; raises EndpointError when metrics cannot."""
        if (address := self._settings.metrics_listen) is not None:
            self._page = MetricsPage(metrics.registry)
            try:
                self.addresses["metrics_listen"] = await self._page.open(address)
            except OSError as error:
                raise _cannot_listen(address) from error
        await self.api.start()
        if self._health is not None:
            await self._health.start()

    def ready(self, *, is_so: bool) -> None:
        """What the health service says of the rollout service; "" is alive in any case."""
        self._answers.tell(ROLLOUT_SERVICE, serving=is_so)

    async def stop(self) -> None:
        """Closes everything; streams have a moment to deliver their last messages."""
        await self.api.stop(FLUSH_SECONDS)
        if self._health is not None:
            await self._health.stop(None)
        if self._page is not None:
            await self._page.close()


def transfers_listen(settings: ServerSettings) -> transport.ListenOptions:
    """Where weight transfers listen, once they are under way.

    Raises:
        EndpointError: The address is not this machine's, or no backend can be kept to it.
    """
    if (told := settings.transport_listen) is None:
        return transport.ListenOptions()
    host, ports = split_listening(told)
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, 0), family=family).close()
        except OSError as error:
            raise EndpointError(
                f"--transport-listen is {told}: {host} is no address of this machine"
            ) from error
    listening = transport.ListenOptions(host, ports)
    backends = transport.available_backends(listening).values()
    if not any(backend.ok for backend in backends):
        reasons = "; ".join(backend.reason for backend in backends)
        raise EndpointError(f"--transport-listen is {told}, which none can be kept to: {reasons}")
    return listening


def _options(most_calls: int, most_bytes: int) -> list[tuple[str, int]]:
    return [
        *CHANNEL_OPTIONS,
        # Of one connection. Without it, calls that are given up as soon as they are made pile up.
        ("grpc.max_concurrent_streams", most_calls),
        ("grpc.max_receive_message_length", most_bytes),
    ]


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _cannot_listen(address) from error
    return f"{address.rpartition(':')[0]}:{port}"


def _cannot_listen(address: str) -> EndpointError:
    return EndpointError(
        f"cannot listen on {address}: the port is in use, or the address is not this machine's"
    )
