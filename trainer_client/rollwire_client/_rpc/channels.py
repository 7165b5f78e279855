"""Channels to servers: TLS, tokens, and how connections are kept."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from rollwire_client._concurrency.affinity import LoopAffinity, check_grpc, use_grpc
from rollwire_client._rpc.watched_files import WatchedFiles, check_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

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

    Files are read again when they change: a token's with the next call, those of TLS with the next
    connection, as after a server's restart. While they cannot be used (empty, half written, a key
    of another certificate) the last good ones count, and the log warns.

    Attributes:
        token: Bearer token sent with every call, or a function that gives the one that counts now.
            Publishing needs the servers' control token.
        token_file: File that holds the token, in place of ``token``.
        tls: Connect by TLS; so does each of the fields that follow, but the last.
        ca: File of the authorities (PEM) that sign servers. Default: the system's.
        certificate, key: Files of this client's own certificate (PEM), for mutual TLS.
        server_name: What the servers' certificate must say, in place of the address's host.
        use_proxy: Connect through the HTTP proxy that the environment names (``grpc_proxy``,
            ``https_proxy``, ``http_proxy``; ``no_proxy``). Default: straight to the servers,
            whatever it names.

    Raises:
        CredentialsError: ``certificate`` or ``key`` alone; ``token`` and ``token_file``.
    """

    token: str | Callable[[], str] | None = field(default=None, repr=False)
    tls: bool = False
    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None
    use_proxy: bool = False
    token_file: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise CredentialsError("certificate and key belong together")
        if self.token is not None and self.token_file is not None:
            raise CredentialsError("give token or token_file, not both")

    @property
    def secure(self) -> bool:
        """Whether it is TLS."""
        return self.tls or bool(self.ca or self.certificate or self.server_name)


def connect(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel to a server, to be closed by the caller; connects when it is used.

    Raises:
        CredentialsError: A file of theirs cannot be used, or the token would travel in the clear to
            another machine.
        NotOpenHereError: This process is a fork of one that has used gRPC.
    """
    check_grpc()
    has_token = credentials.token is not None or credentials.token_file is not None
    if has_token and not credentials.secure and not _is_loopback(address):
        raise CredentialsError(f"the token would travel in the clear to {address}: use TLS")
    return _ServerChannel(address, credentials)


@dataclass(eq=False, slots=True)
class _Connection:
    """A channel of gRPC, whose TLS files stay those that it was made with.

    Attributes:
        calls: Under way.
        replaced: No call begins on it any more; it is closed with its last one.
    """

    channel: grpc.aio.Channel
    calls: int = 0
    replaced: bool = False


class _ServerChannel(grpc.aio.Channel):
    """A channel that sends a token with every call, and connects with what the TLS files hold."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._token = _token(credentials)
        self._files = _tls_files(credentials) if credentials.secure else None
        self._affinity = LoopAffinity(f"client of {address}")
        self._connection = self._connect()
        self._closing: set[asyncio.Task[None]] = set()
        self._replaced: set[_Connection] = set()

    def unary_unary(self, *args: Any, **named: Any) -> Any:
        return self._method("unary_unary", args, named)

    def unary_stream(self, *args: Any, **named: Any) -> Any:
        return self._method("unary_stream", args, named)

    def stream_unary(self, *args: Any, **named: Any) -> Any:
        return self._method("stream_unary", args, named)

    def stream_stream(self, *args: Any, **named: Any) -> Any:
        return self._method("stream_stream", args, named)

    async def __aenter__(self) -> _ServerChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        replaced, self._replaced = self._replaced, set()
        for connection in (*replaced, self._connection):
            await connection.channel.close(grace)
        if self._closing:
            await asyncio.wait(self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        return self._connection.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._connection.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._connection.channel.channel_ready()

    def _method(self, kind: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        of: _Connection | None = None
        method: Any = None

        def call(
            *request: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any
        ) -> Any:
            nonlocal of, method
            self._affinity.check()
            connection = self._current()
            if connection is not of:
                of, method = connection, getattr(connection.channel, kind)(*args, **named)
            if self._token is not None:
                metadata = (
                    *(metadata or ()),
                    ("authorization", f"Bearer {self._token().strip()}"),
                )
            made = method(*request, metadata=metadata, **options)
            use_grpc(made)
            connection.calls += 1
            made.add_done_callback(lambda _: self._ended(connection))
            return made

        return call

    def _current(self) -> _Connection:
        """Where the next call goes. One that stands is kept, whatever became of the files."""
        before = self._connection
        if (
            self._files is not None
            and before.channel.get_state() is not grpc.ChannelConnectivity.READY
            and self._files.refresh()
        ):
            logger.info("%s: TLS files read again", self._address)
            self._connection = self._connect()
            before.replaced = True
            self._replaced.add(before)
            self._close_if_unused(before)
        return self._connection

    def _connect(self) -> _Connection:
        name = self._credentials.server_name
        options = (
            *_OPTIONS,
            ("grpc.enable_http_proxy", int(self._credentials.use_proxy)),
            *([("grpc.ssl_target_name_override", name)] if name else []),
        )
        if self._files is None:
            channel = grpc.aio.insecure_channel(self._address, options=options)
        else:
            channel = grpc.aio.secure_channel(
                self._address, _channel_credentials(self._credentials, self._files), options=options
            )
        use_grpc(channel)
        return _Connection(channel)

    def _ended(self, connection: _Connection) -> None:
        connection.calls -= 1
        self._close_if_unused(connection)

    def _close_if_unused(self, connection: _Connection) -> None:
        if connection.replaced and not connection.calls and connection in self._replaced:
            self._replaced.discard(connection)
            task = asyncio.ensure_future(connection.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _tls_paths(credentials: Credentials) -> list[Path | None]:
    files = (credentials.ca, credentials.certificate, credentials.key)
    return [None if file is None else Path(file) for file in files]


def _tls_files(credentials: Credentials) -> WatchedFiles:
    ca, certificate, key = _tls_paths(credentials)
    return _watched(
        [path for path in (ca, certificate, key) if path is not None],
        lambda: check_tls(ca, certificate, key),
    )


def _channel_credentials(credentials: Credentials, files: WatchedFiles) -> grpc.ChannelCredentials:
    contents = iter(files.contents)
    ca, certificate, key = (
        None if path is None else next(contents) for path in _tls_paths(credentials)
    )
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=certificate
    )


def _token(credentials: Credentials) -> Callable[[], str] | None:
    """What gives the token that counts now; None without one."""
    if credentials.token_file is not None:
        file = _watched([Path(credentials.token_file)], lambda: None)

        def read() -> str:
            file.refresh()
            return file.contents[0].decode()

        return read
    token = credentials.token
    if token is None or callable(token):
        return token
    return lambda: token


def _watched(paths: list[Path], check: Callable[[], None]) -> WatchedFiles:
    try:
        return WatchedFiles(paths, check)
    except OSError as error:
        raise CredentialsError(f"cannot read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise CredentialsError(str(error)) from error


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
