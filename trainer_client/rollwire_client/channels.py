"""Channels to servers: TLS, tokens, and how connections are kept."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OPTIONS = (
    # Rollwire servers take a ping every 5 s; more often than a server allows means GOAWAY.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A server that comes back is found within a second, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    # Weight schemas and manifests of 100,000 tensors take 10 MiB.
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
)


class CredentialsError(ValueError):
    """Credentials that cannot be used, or would be given away."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a client gets to servers: what it shows them, and how it knows them.

    Attributes:
        token: Bearer token sent with every call, or a function that gives the one that counts now.
            Publishing needs the servers' control token.
        tls: Connect by TLS; so does each of the fields that follow.
        ca: File of the authorities (PEM) that sign servers. Default: the system's.
        certificate, key: Files of this client's own certificate (PEM), for mutual TLS.
        server_name: What the servers' certificate must say, in place of the address's host.
        use_proxy: Connect through the HTTP proxy that the environment names (``grpc_proxy``,
            ``https_proxy``, ``http_proxy``; ``no_proxy``). Default: straight to the servers,
            whatever it names.

    Raises:
        CredentialsError: ``certificate`` or ``key`` alone.
    """

    token: str | Callable[[], str] | None = field(default=None, repr=False)
    tls: bool = False
    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None
    use_proxy: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise CredentialsError("certificate and key belong together")

    @property
    def secure(self) -> bool:
        """Whether it is TLS."""
        return self.tls or bool(self.ca or self.certificate or self.server_name)


def connect(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel to a server, to be closed by the caller; connects when it is used.

    Raises:
        CredentialsError: A file of theirs cannot be read, or the token would travel in the clear to
            another machine.
    """
    options = (*_OPTIONS, ("grpc.enable_http_proxy", int(credentials.use_proxy)))
    if not credentials.secure:
        if credentials.token is not None and not _is_loopback(address):
            raise CredentialsError(f"the token would travel in the clear to {address}: use TLS")
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        name = credentials.server_name
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(
                root_certificates=_content(credentials.ca),
                private_key=_content(credentials.key),
                certificate_chain=_content(credentials.certificate),
            ),
            options=(*options, *([("grpc.ssl_target_name_override", name)] if name else [])),
        )
    return channel if credentials.token is None else _AuthorizedChannel(channel, credentials.token)


class _AuthorizedChannel(grpc.aio.Channel):
    """A channel that sends a token with every call."""

    def __init__(self, channel: grpc.aio.Channel, token: str | Callable[[], str]) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **named: Any) -> Any:
        return self._authorized(self._channel.unary_unary(*args, **named))

    def unary_stream(self, *args: Any, **named: Any) -> Any:
        return self._authorized(self._channel.unary_stream(*args, **named))

    def stream_unary(self, *args: Any, **named: Any) -> Any:
        return self._authorized(self._channel.stream_unary(*args, **named))

    def stream_stream(self, *args: Any, **named: Any) -> Any:
        return self._authorized(self._channel.stream_stream(*args, **named))

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def _authorized(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **named: Any
        ) -> Any:
            token = self._token() if callable(self._token) else self._token
            authorization = ("authorization", f"Bearer {token.strip()}")
            return method(*args, metadata=(*(metadata or ()), authorization), **named)

        return call


def _content(file: Path | str | None) -> bytes | None:
    try:
        return Path(file).read_bytes() if file is not None else None
    except OSError as error:
        raise CredentialsError(f"cannot read {file}: {error.strerror}") from error


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
