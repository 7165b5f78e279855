"""Channels to servers, and calls of one answer over them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from rollwire.deadlines import Timeout

from rollwire_client._affinity import LoopAffinity, check_grpc, use_grpc
from rollwire_client._errors import ClosedError, ServerUnreachableError
from rollwire_client._rpc.credentials import CredentialsError, TlsFiles, current_token
from rollwire_client._rpc.status import error_from_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._rpc.credentials import Credentials

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


def connect(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel to a server, to be closed by the caller; connects when it is used.

    Raises:
        CredentialsError: A file of theirs cannot be used, or the token would travel in the clear to
            another machine.
        NotOpenHereError: This process is a fork of one that has used gRPC.
    """
    check_grpc()
    if credentials.has_token and not credentials.secure and not _is_loopback(address):
        raise CredentialsError(f"the token would travel unencrypted to {address}: use TLS")
    return _ServerChannel(address, credentials)


@dataclass(eq=False, slots=True)
class _Connection:
    """A channel of gRPC, which keeps to the TLS files that it was made with, and its calls."""

    channel: grpc.aio.Channel
    calls: int = 0


class _ServerChannel(grpc.aio.Channel):
    """A channel that sends a token with every call, and connects with what the TLS files hold."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._token = current_token(credentials)
        self._files = TlsFiles(credentials) if credentials.secure else None
        self._affinity = LoopAffinity(f"client of {address}")
        self._connection = self._connect()
        self._replaced: set[_Connection] = set()  # each is closed with its last call
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
        """Where the next call goes. An established connection is kept, whatever became of the
        files.
        """
        before = self._connection
        if (
            self._files is not None
            and before.channel.get_state() is not grpc.ChannelConnectivity.READY
            and self._files.refresh()
        ):
            logger.info("%s: TLS files read again", self._address)
            self._connection = self._connect()
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
                self._address, self._files.channel_credentials(), options=options
            )
        use_grpc(channel)
        return _Connection(channel)

    def _ended(self, connection: _Connection) -> None:
        connection.calls -= 1
        self._close_if_unused(connection)

    def _close_if_unused(self, connection: _Connection) -> None:
        if connection in self._replaced and not connection.calls:
            self._replaced.discard(connection)
            task = asyncio.ensure_future(connection.channel.close())
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
    """Calls a method of a stub.

    Args:
        method: What is called.
        request: Its request.
        server: Address of the server.
        timeout: Seconds to wait for the answer.
        deadline: Seconds after which the server is to give up too, whether or not this process
            runs meanwhile.

    Raises:
        ServerUnreachableError: Nothing answers, or not within ``timeout`` seconds.
        ClosedError: The channel was closed meanwhile.
        RollwireError: What else the server answered with.
    """
    try:
        # gRPC's own deadline runs on while this process is stopped and receives nothing.
        async with Timeout(timeout):
            return await method(request, timeout=deadline)
    except TimeoutError as error:
        raise _no_answer(server, timeout) from error
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise _no_answer(server, timeout) from error
        raise error_from_call(error, server) from error
    except asyncio.CancelledError:
        # gRPC cancels whoever waits for a call of a channel that is closed.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ClosedError(f"{server}: the client was closed", server=server) from None


def _no_answer(server: str, timeout: float) -> ServerUnreachableError:
    return ServerUnreachableError(f"{server}: no answer within {timeout:g} s", server=server)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
