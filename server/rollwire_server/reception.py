"""How calls come in: of one client so many at once, and their messages a few at a time.

gRPC takes in a message whole as soon as somebody asks for it, and keeps what it has of one whose
rest does not come. So messages are asked for late: when the caller's token has been looked at, and
when not many others of that client are on their way. Over the wire every call is one of streams, so
that this can be done for those that take one message too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import grpc
import structlog
from grpc_reflection.v1alpha import reflection

from rollwire_server.errors import Reason, ServiceError, answer
from rollwire_server.parsing import LARGEST_BYTES, Parser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from rollwire_server.counts import Counts

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

log = structlog.get_logger()

BESIDE_SEQUENCES = 1000  # calls of a method by one client, beyond those that sequences may have
MOST_REFLECTIONS = 16  # for people, and each may bring a large message
MESSAGES_AT_ONCE = (512 << 20) // LARGEST_BYTES  # on their way from one client
MESSAGE_SECONDS = 30.0  # from the call to the end of its message


class Reception(grpc.aio.ServerInterceptor):
    """Lets calls in, and gives their handlers parsed messages.

    Args:
        most_calls: Of one method by one client at once.
        counts: Of refusals.
    """

    def __init__(self, most_calls: int, counts: Counts) -> None:
        self._most_calls = most_calls
        self._counts = counts
        self._calls: Counter[tuple[str, str]] = Counter()  # under way, by client and method
        self._parsers: dict[str, Parser] = {}  # by method
        self._counting = asyncio.Lock()
        self._arriving: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        service, _, name = method.removeprefix("/").partition("/")
        if (parser := self._parsers.get(method)) is None:
            parse: Any = handler.request_deserializer
            parser = self._parsers[method] = Parser(service, name, parse, self._counting)
        respond = _behaviour(handler)

        async def receive(stream: Any, context: Context) -> Any:
            try:
                with self._counted(service, name, client_of(context)):
                    if handler.request_streaming:
                        request = stream
                    else:
                        request = await self._message(name, parser, context)
                    return await respond(request, context)
            except ServiceError as error:  # handlers answer theirs
                self._counts.refusals[error.reason.name.lower()] += 1
                log.info("refused", rpc=name, reason=error.reason.name, message=error.message)
                await answer(context, error)

        make: Callable[..., Handler] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(
            receive,
            request_deserializer=parser.read_or_tell if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )

    @contextlib.contextmanager
    def _counted(self, service: str, name: str, client: str) -> Iterator[None]:
        key = client, f"{service}/{name}"
        most = MOST_REFLECTIONS if service == reflection.SERVICE_NAME else self._most_calls
        if self._calls[key] >= most:
            raise ServiceError(
                Reason.TOO_MANY_CALLS,
                f"{self._calls[key]} calls of {name} by {client} are under way on this server, "
                "the most there may be: try again, or use another server",
            )
        self._calls[key] += 1
        try:
            yield
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]

    async def _message(self, name: str, parser: Parser, context: Context) -> Any:
        client = client_of(context)
        arriving = self._arriving.setdefault(client, asyncio.Semaphore(MESSAGES_AT_ONCE))
        async with arriving:  # of this client: nobody waits for another's
            try:
                async with asyncio.timeout(MESSAGE_SECONDS):
                    data = await context.read()
            except TimeoutError as error:
                raise ServiceError(
                    Reason.TIMED_OUT,
                    f"the message of {name} did not come whole within {MESSAGE_SECONDS:g} s",
                ) from error
            if data is grpc.aio.EOF:
                raise ServiceError(Reason.BAD_REQUEST, f"no message came: {name} takes one")
            return await parser.read(data)


def client_of(context: Context) -> str:
    """The address of the machine that calls."""
    return context.peer().rpartition(":")[0]


def _behaviour(handler: Handler) -> Callable[[Any, Context], Awaitable[Any]]:
    """What a handler does, as a coroutine of a request, or of a stream of them, and a context."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    (behaviour,) = (cast("Any", kind) for kind in kinds if kind is not None)
    if not inspect.isasyncgenfunction(behaviour):
        return cast("Callable[[Any, Context], Awaitable[Any]]", behaviour)

    async def write_each(request: Any, context: Context) -> None:
        async for response in behaviour(request, context):
            await context.write(response)

    return write_each
