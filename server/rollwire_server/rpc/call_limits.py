"""How calls come in: of one client so many at once, and their messages a few at a time.

gRPC takes in a message whole as soon as somebody asks for it, and keeps what it has of one whose
rest does not come. So messages are asked for late: when the caller's token has been looked at, and
when not many others of that client are on their way. It keeps answers too, for as long as nobody
takes them, so a call with one answer has its turn until then. For all that, every call is served as
one of streams: over the wire they are the same.
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
from rollwire.reasons import Reason

from rollwire_server.errors import ServiceError, abort
from rollwire_server.rpc.message_limits import LARGEST_BYTES, Parser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from rollwire_server.counters import ServerCounters

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

log = structlog.get_logger()

BESIDE_SEQUENCES = 1000  # calls of a method by one client, beyond those that sequences may have
MOST_REFLECTIONS = 16  # for people, and each may bring a large message
AT_ONCE = (512 << 20) // LARGEST_BYTES  # of one client: messages on their way; turns at a method
NO_TURN = contextlib.nullcontext()
MESSAGE_SECONDS = 30.0  # from the call to the end of its message


class Reception(grpc.aio.ServerInterceptor):
    """Lets calls in, and gives their handlers parsed messages.

    Args:
        most_calls: Of one method by one client at once.
        counters: Of refusals.
    """

    def __init__(self, most_calls: int, counters: ServerCounters) -> None:
        self._most_calls = most_calls
        self._counters = counters
        self._calls: Counter[tuple[str, str]] = Counter()  # under way, by client and method
        self._parsers: dict[str, Parser] = {}  # by method
        self._counting = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

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

        one_answer = not handler.response_streaming

        async def serve(request: Any, context: Context) -> None:
            response = await respond(request, context)
            if one_answer:
                await context.write(response)  # returns when the client takes it

        async def receive(stream: Any, context: Context) -> None:
            client = client_of(context)
            try:
                with self._counted(client, service, name):
                    if handler.request_streaming:
                        await serve(stream, context)
                        return
                    turn = self._turn(f"{client} {method}") if one_answer else NO_TURN
                    async with turn:
                        await serve(await self._message(client, name, parser, context), context)
            except ServiceError as error:  # handlers answer theirs
                self._counters.refusals[error.reason.name.lower()] += 1
                log.info("refused", rpc=name, reason=error.reason.name, message=error.message)
                await abort(context, error)

        make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
        return make(
            receive,
            request_deserializer=parser.read_or_tell if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )

    @contextlib.contextmanager
    def _counted(self, client: str, service: str, name: str) -> Iterator[None]:
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

    def _turn(self, whose: str) -> asyncio.Semaphore:
        """Of those with this name some have it at once, and the rest one after the other."""
        return self._turns.setdefault(whose, asyncio.Semaphore(AT_ONCE))

    async def _message(self, client: str, name: str, parser: Parser, context: Context) -> Any:
        async with self._turn(client):
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
