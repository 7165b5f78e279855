"""How a client gets to servers: credentials, channels, and calls of one answer over them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from rollwire.credentials import WatchedFiles, is_loopback
from rollwire.deadlines import Timeout

from rollwire_client._concurrency import LoopAffinity, check_grpc, use_grpc
from rollwire_client._errors import ClosedError, ServerUnreachableError
from rollwire_client._rpc.status import error_from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

Request = TypeVar("Request")
Response = TypeVar("Response")

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
    """How a client authenticates to servers, verifies them, and connects to them.

    Files are read again when they change: the token file for the next call, TLS files for the next
    connection. While a file cannot be used (empty, half written, a key of another certificate) the
    last good content stays in effect, and the log warns.

    Attributes:
        token: Bearer token sent with every call, or a function that returns the current one.
            Publishing needs the servers' control token.
        token_file: File that holds the token, instead of ``token``.
        tls: Whether to connect by TLS. ``ca``, ``certificate``, ``key`` and ``server_name`` also
            turn it on.
        ca: File of the authorities (PEM) that sign servers. Default: the system's.
        certificate, key: Files of this client's own certificate (PEM), for mutual TLS.
        server_name: Name in the servers' certificate, if it is not the address's host.
        use_proxy: Connect through the HTTP proxy that the environment names (``grpc_proxy``,
            ``https_proxy``, ``http_proxy``; ``no_proxy``). Default: connect directly.

    Raises:
        CredentialsError: ``certificate`` or ``key`` alone, or both ``token`` and ``token_file``.
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

    @property
    def has_token(self) -> bool:
        """Whether it has a token."""
        return self.token is not None or self.token_file is not None


def _watch(*paths: Path | str | None, check: Callable[..., None] = lambda *_: None) -> WatchedFiles:
    try:
        return WatchedFiles(*paths, check=check)
    except OSError as error:
        raise CredentialsError(f"cannot read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise CredentialsError(str(error)) from error


def _refresh(files: WatchedFiles) -> bool:
    try:
        return files.refresh()
    except (OSError, ValueError) as error:
        logger.warning("files cannot be used, their last good content stays in effect: %s", error)
        return False


def _check_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # what is strong enough, gRPC decides
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key, password=lambda: "")  # asks no terminal
    except ssl.SSLError as error:
        named = ", ".join(str(path) for path in (ca, certificate, key) if path is not None)
        raise ValueError(f"no PEM files that belong together: {named}: {error}") from error


def connect(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel to a server, to be closed by the caller; connects when it is used."""
    check_grpc()
    if credentials.has_token and not credentials.secure and not is_loopback(address):
        raise CredentialsError(f"the token would travel unencrypted to {address}: use TLS")
    return _ServerChannel(address, credentials)


class _ServerChannel(grpc.aio.Channel):
    """A channel that sends a token with every call, and connects with what the TLS files hold."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        file = credentials.token_file
        self._token_file = _watch(file) if file is not None else None
        self._files: WatchedFiles | None = None
        if credentials.secure:
            files = credentials.ca, credentials.certificate, credentials.key
            self._files = _watch(*files, check=_check_tls)
        self._affinity = LoopAffinity(f"client of {address}")
        # A channel of gRPC keeps to the TLS files that it was made with.
        self._channel = self._connect()
        self._calls: Counter[grpc.aio.Channel] = Counter()  # under way
        self._replaced: set[grpc.aio.Channel] = set()  # each is closed with its last call
        self._closing: set[asyncio.Task[None]] = set()

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
        for channel in (*replaced, self._channel):
            await channel.close(grace)
        if self._closing:
            await asyncio.wait(self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def _method(self, kind: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        of: grpc.aio.Channel | None = None
        method: Any = None

        def call(
            *request: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any
        ) -> Any:
            nonlocal of, method
            self._affinity.check()
            channel = self._current()
            if channel is not of:
                of, method = channel, getattr(channel, kind)(*args, **named)
            if (token := self._token()) is not None:
                metadata = (*(metadata or ()), ("authorization", f"Bearer {token.strip()}"))
            made = method(*request, metadata=metadata, **options)
            use_grpc(made)
            self._calls[channel] += 1
            made.add_done_callback(lambda _: self._ended(channel))
            return made

        return call

    def _token(self) -> str | None:
        if self._token_file is not None:
            _refresh(self._token_file)
            return self._token_file.contents[0].decode()
        token = self._credentials.token
        return token() if callable(token) else token

    def _current(self) -> grpc.aio.Channel:
        """Where the next call goes. An established connection is kept, whatever became of the
        files.
        """
        before = self._channel
        if (
            self._files is not None
            and before.get_state() is not grpc.ChannelConnectivity.READY
            and _refresh(self._files)
        ):
            logger.info("%s: TLS files read again", self._address)
            self._channel = self._connect()
            self._replaced.add(before)
            self._close_if_unused(before)
        return self._channel

    def _connect(self) -> grpc.aio.Channel:
        name = self._credentials.server_name
        options = (
            *_OPTIONS,
            ("grpc.enable_http_proxy", int(self._credentials.use_proxy)),
            *([("grpc.ssl_target_name_override", name)] if name else []),
        )
        if self._files is None:
            channel = grpc.aio.insecure_channel(self._address, options=options)
        else:
            ca, certificate, key = (content or None for content in self._files.contents)
            tls = grpc.ssl_channel_credentials(ca, key, certificate)
            channel = grpc.aio.secure_channel(self._address, tls, options=options)
        use_grpc(channel)
        return channel

    def _ended(self, channel: grpc.aio.Channel) -> None:
        self._calls[channel] -= 1
        self._close_if_unused(channel)

    def _close_if_unused(self, channel: grpc.aio.Channel) -> None:
        if channel in self._replaced and not self._calls[channel]:
            self._replaced.discard(channel)
            del self._calls[channel]
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def unary(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    server: str,
    timeout: float,
    deadline: float | None = None,
) -> Response:
    """Calls a method of a stub. The server gives up after ``deadline`` seconds, whether or not this
    process runs meanwhile.

    Raises:
        ServerUnreachableError: Nothing answers, or not within ``timeout`` seconds.
        ClosedError: The channel was closed meanwhile.
        RollwireError: What else the server answered with.
    """
    try:
        # gRPC's own deadline runs on while this process is stopped and receives nothing.
        async with Timeout(timeout):
            return await method(request, timeout=deadline)
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        if (
            isinstance(error, grpc.aio.AioRpcError)
            and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        ):
            raise error_from_call(error, server) from error
        raise ServerUnreachableError(
            f"{server}: no answer within {timeout:g} s", server=server
        ) from error
    except asyncio.CancelledError:
        # gRPC cancels whoever waits for a call of a channel that is closed.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ClosedError(f"{server}: the client was closed", server=server) from None


def local_address(servers: Iterable[str]) -> str:
    """The local address of the route to the servers (HOST:PORT each): one that is not loopback, if
    there is any, as remote servers cannot reach that. Blocks while names are resolved; raises
    OSError if there is no route to any of them.
    """
    found: list[str] = []
    problem: OSError | None = None
    for server in servers:
        host, _, port = server.rpartition(":")
        try:
            address = _route(host.strip("[]"), int(port))
        except OSError as error:
            problem = error
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
        found.append(address)
    if not found:
        raise problem or OSError("there are no servers")
    return found[0]


def _route(host: str, port: int) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: this looks up the route and sends nothing
        address: str = probe.getsockname()[0]
        return address
