"""What every call passes through: the limits of its client, its message, and its failure.

gRPC buffers a message whole as soon as somebody asks for it, and keeps what it has of one whose
rest does not come. To bound memory, messages are read only after the caller's token was checked,
and only a few of one client at a time. gRPC also keeps a response for as long as nobody takes it,
so a call with one response has its turn until then. To read and write by itself, this serves every
call as one of streams: over the wire they are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import grpc
import structlog
from grpc_reflection.v1alpha import reflection
from rollwire.reasons import Reason

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, abort, from_engine_error
from rollwire_server.logs import bind, is_caller_fault
from rollwire_server.rpc.limits import LARGE_BYTES, MessageParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator

    from google.protobuf.message import Message

    from rollwire_server.counters import ServerCounters

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Respond = Callable[[Any, Context], Awaitable[None]]

log = structlog.get_logger()

CALLS_BESIDE_SEQUENCES = 1000  # of a method by one client, beyond those that sequences may have
MAX_REFLECTIONS = 16  # for people, and each may bring a large message
CONCURRENT_MESSAGES = (512 << 20) // LARGE_BYTES  # of one client: being read; turns at a method
MESSAGE_SECONDS = 30.0  # from the call to the end of its message
LOGGED_FIELDS = ("request_id", "attempt", "update_id", "version", "pause_id")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Limits the calls of each client, parses their messages, and answers with their errors.

    Args:
        max_calls: Of one method by one client at once.
        counters: Of refusals.
    """

    def __init__(self, max_calls: int, counters: ServerCounters) -> None:
        self._max_calls = max_calls
        self._counters = counters
        self._calls: Counter[tuple[str, str]] = Counter()  # under way, by client and method
        self._parsers: dict[str, MessageParser] = {}  # by method
        self._counting_fields = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        service, _, name = method.removeprefix("/").partition("/")
        if (parser := self._parsers.get(method)) is None:
            deserialize: Any = handler.request_deserializer
            parser = MessageParser(service, name, deserialize, self._counting_fields)
            self._parsers[method] = parser
        respond = _responder(handler)
        one_response = not handler.response_streaming

        async def serve(stream: Any, context: Context, admission: AsyncExitStack) -> None:
            client = client_of(context)
            admission.enter_context(self._counted(client, service, name))
            if handler.request_streaming:
                await respond(_raise_errors(stream), context)
                return
            if one_response:
                await admission.enter_async_context(self._turn(f"{client} {method}"))
            request = await self._read_message(client, name, parser, context)
            bind(**_logged_fields(request))
            await respond(request, context)

        async def serve_or_abort(stream: Any, context: Context) -> None:
            # An error keeps the call's message until it is sent: the call counts until then.
            async with AsyncExitStack() as admission:
                try:
                    await serve(stream, context, admission)
                except (ServiceError, EngineError) as raised:
                    error = (
                        raised if isinstance(raised, ServiceError) else from_engine_error(raised)
                    )
                    self._counters.refusals[error.reason.name.lower()] += 1
                    log.info("refused", rpc=name, reason=error.reason.name, message=error.message)
                    await abort(context, error)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    if not is_caller_fault(error):
                        log.exception("a bug: the call failed", rpc=name)
                    raise

        make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
        return make(
            serve_or_abort,
            request_deserializer=parser.parse_or_error if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )

    @contextlib.contextmanager
    def _counted(self, client: str, service: str, name: str) -> Iterator[None]:
        key = client, f"{service}/{name}"
        limit = MAX_REFLECTIONS if service == reflection.SERVICE_NAME else self._max_calls
        if self._calls[key] >= limit:
            raise ServiceError(
                Reason.TOO_MANY_CALLS,
                f"{self._calls[key]} calls of {name} by {client} are under way on this server, "
                "the limit: try again, or use another server",
            )
        self._calls[key] += 1
        try:
            yield
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]

    def _turn(self, name: str) -> asyncio.Semaphore:
        """Lets a few of that name through at once, and the rest one after the other."""
        return self._turns.setdefault(name, asyncio.Semaphore(CONCURRENT_MESSAGES))

    async def _read_message(
        self, client: str, name: str, parser: MessageParser, context: Context
    ) -> Any:
        async with self._turn(client):
            try:
                async with asyncio.timeout(MESSAGE_SECONDS):
                    data = await context.read()
            except TimeoutError as error:
                raise ServiceError(
                    Reason.TIMED_OUT,
                    f"the message of {name} did not arrive completely within {MESSAGE_SECONDS:g} s",
                ) from error
            if data is grpc.aio.EOF:
                raise ServiceError(Reason.BAD_REQUEST, f"no message arrived: {name} needs one")
            return await parser.parse(data)


def client_of(context: Context) -> str:
    """The address of the machine that calls."""
    return context.peer().rpartition(":")[0]


def _responder(handler: Handler) -> Respond:
    """What a handler does with a request (or a stream of them), its responses being written."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    behavior: Any = next(kind for kind in kinds if kind is not None)

    async def write_each(request: Any, context: Context) -> None:
        async for response in behavior(request, context):
            await context.write(response)

    async def write_one(request: Any, context: Context) -> None:
        # Returns when the client takes it.
        await context.write(await behavior(request, context))

    if inspect.isasyncgenfunction(behavior):
        return write_each
    # A coroutine of a method with a stream of responses writes them itself.
    return behavior if handler.response_streaming else write_one


async def _raise_errors(stream: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """The messages of a stream; raises the ServiceError in place of one that cannot be read."""
    async for message in stream:
        if isinstance(message, ServiceError):
            raise message
        yield message


def _logged_fields(request: Message) -> dict[str, Any]:
    descriptor = getattr(request, "DESCRIPTOR", None)
    known = {} if descriptor is None else descriptor.fields_by_name
    return {
        name: getattr(request, name)
        for name in LOGGED_FIELDS
        if name in known and (not known[name].has_presence or request.HasField(name))
    }
