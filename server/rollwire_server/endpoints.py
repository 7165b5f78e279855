"""Where a server listens: the API, health, metrics, weight transfers."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import grpc
import rollwire_transport as transport
from google.rpc import error_details_pb2  # noqa: F401  reflection then shows error details
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rollwire.v1 import rollout_pb2, weights_pb2

from rollwire_server.metrics import MetricsServer
from rollwire_server.rpc.interceptor import (
    CALLS_BESIDE_SEQUENCES,
    LARGE_BYTES,
    SMALL_BYTES,
    CallInterceptor,
)
from rollwire_server.security import server_credentials
from rollwire_server.settings import StartError, parse_listen_range

if TYPE_CHECKING:
    from rollwire_server.counters import ServerCounters
    from rollwire_server.metrics import Metrics
    from rollwire_server.security import TokenAuthorizer
    from rollwire_server.settings import ServerSettings

ROLLOUT_SERVICE: str = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
WEIGHT_SERVICE: str = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
MAX_HEALTH_CALLS = 1000  # of one client
FLUSH_SECONDS = 2.0  # for streams to deliver their last messages

HealthStatus = health_pb2.HealthCheckResponse
CHANNEL_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server on it
    # No compression: gRPC measures a message after it has unpacked it, so that a few kilobytes
    # would take gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Windows that grow with the speed of a link let in hundreds of megabytes before anybody reads.
    ("grpc.http2.bdp_probe", 0),
    # Clients ping to keep long silent streams alive; do not disconnect them for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """grpc.health.v1; "" is the process, which serves as long as it answers. (The servicer of
    grpcio-health-checking forgets its watchers when one of them goes.)
    """

    def __init__(self) -> None:
        self._serving = {"": True}
        self._change = asyncio.Event()  # set and replaced at every change

    def set_serving(self, service: str, *, serving: bool) -> None:
        self._serving[service] = serving
        self._change.set()
        self._change = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return HealthStatus(status=self._status(request.service))

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802
        sent = None
        while True:
            change = self._change
            if (status := self._status(request.service)) != sent:
                await context.write(HealthStatus(status=status))
                sent = status
            else:
                await change.wait()

    def _status(self, service: str) -> int:
        if service not in self._serving:
            return int(HealthStatus.SERVICE_UNKNOWN)
        serving = self._serving[service]
        return int(HealthStatus.SERVING if serving else HealthStatus.NOT_SERVING)


class Endpoints:
    """The listening side of one server: bound when constructed, open from ``start`` to ``stop``.

    Raises StartError when an address cannot be listened on, or TLS files are missing or wrong.

    Attributes:
        api: Takes the services.
        addresses: HOST:PORT by the flag's name, with the ports that were chosen.
    """

    def __init__(
        self, settings: ServerSettings, authorizer: TokenAuthorizer, counters: ServerCounters
    ) -> None:
        self._settings = settings
        self._metrics_server: MetricsServer | None = None
        self._health_service = HealthService()
        max_calls = settings.max_running + settings.max_waiting + CALLS_BESIDE_SEQUENCES
        self.api = grpc.aio.server(
            interceptors=[CallInterceptor(max_calls, counters, authorizer)],
            options=_options(max_calls, LARGE_BYTES),
        )
        self.addresses = {"listen": _bind(self.api, settings.listen, server_credentials(settings))}
        health_pb2_grpc.add_HealthServicer_to_server(self._health_service, self.api)
        self._health: grpc.aio.Server | None = None
        if settings.health_listen is not None:
            self._health = grpc.aio.server(
                interceptors=[CallInterceptor(MAX_HEALTH_CALLS, counters)],
                options=_options(MAX_HEALTH_CALLS, SMALL_BYTES),
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health_service, self._health)
            self.addresses["health_listen"] = _bind(self._health, settings.health_listen, None)
        if settings.reflection:
            services = (ROLLOUT_SERVICE, WEIGHT_SERVICE, health.SERVICE_NAME)
            reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), self.api)

    async def start(self, metrics: Metrics) -> None:
        if (address := self._settings.metrics_listen) is not None:
            self._metrics_server = MetricsServer(metrics.registry)
            try:
                self.addresses["metrics_listen"] = await self._metrics_server.open(address)
            except OSError as error:
                raise _cannot_listen(address) from error
        await self.api.start()
        if self._health is not None:
            await self._health.start()

    def set_ready(self, *, ready: bool) -> None:
        self._health_service.set_serving(ROLLOUT_SERVICE, serving=ready)

    async def stop(self) -> None:
        await self.api.stop(FLUSH_SECONDS)
        if self._health is not None:
            await self._health.stop(None)
        if self._metrics_server is not None:
            await self._metrics_server.close()


def transport_listen_options(settings: ServerSettings) -> transport.ListenOptions:
    """Where weight transfers listen while they are under way."""
    if (address := settings.transport_listen) is None:
        return transport.ListenOptions()
    host, ports = parse_listen_range(address)
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, 0), family=family).close()
        except OSError as error:
            raise StartError(
                f"--transport-listen is {address}: {host} is not an address of this machine"
            ) from error
    listening = transport.ListenOptions(host, ports)
    backends = transport.available_backends(listening).values()
    if not any(backend.ok for backend in backends):
        reasons = "; ".join(backend.reason for backend in backends)
        raise StartError(
            f"--transport-listen is {address}, and no backend can be limited to it: {reasons}"
        )
    return listening


def _options(max_calls: int, max_bytes: int) -> list[tuple[str, int]]:
    return [
        *CHANNEL_OPTIONS,
        # Of one connection. Without it, calls that are cancelled as soon as they are made pile up.
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.max_receive_message_length", max_bytes),
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


def _cannot_listen(address: str) -> StartError:
    return StartError(
        f"cannot listen on {address}: the port is in use, or the address is not this machine's"
    )
