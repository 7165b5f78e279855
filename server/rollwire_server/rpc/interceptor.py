"""What every call passes through: its token, the limits of its client, its message, its failure.

gRPC buffers a whole message once it is asked for, and keeps what has arrived of an incomplete one.
To bound memory, messages are read only after the caller's token was checked, and only a few of one
client at a time. gRPC also keeps a response until the client takes it, so a call with one response
keeps its turn until then. To decide itself when to read and write, the interceptor serves every
call as one with streams in both directions: on the wire they are the same.

gRPC has one limit of message size for all methods, which has to let manifests through. Parsing
blocks the event loop, and an empty message inside a message takes two bytes on the wire and some 80
in memory: thirty megabytes of them would take seconds and gigabytes.
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
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection
from rollwire.reasons import Reason

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, abort, from_engine_error
from rollwire_server.logs import bind, is_caller_fault
from rollwire_server.security import scope_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from rollwire_server.counters import ServerCounters
    from rollwire_server.security import TokenAuthorizer

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Respond = Callable[[Any, Context], Awaitable[None]]

MessageFields = dict[int, "MessageFields"]  # the fields that hold messages, by number

log = structlog.get_logger()

LARGE_BYTES = 32 << 20  # 10 MiB is the manifest of 100,000 tensors, or a prompt of 2 million
DEFAULT_BYTES = 4 << 20  # gRPC's default
SMALL_BYTES = 1 << 16  # of health and reflection, which take names
LARGE_METHODS = {"Generate", "StreamRollouts", "UpdateWeights"}

# Fields of the methods that take messages in any number. Their handlers check the number of each by
# its name; this bound is a little less strict, and limits the work until then.
MAX_FIELDS = {"Abort": 1 << 16, "UpdateWeights": 3 << 19}
UNCOUNTED_BYTES = 1 << 16  # fewer bytes cannot hold too many

CALLS_BESIDE_SEQUENCES = 1000  # of a method by one client, beyond those that sequences may have
MAX_REFLECTIONS = 16  # for people, and each may bring a large message
CONCURRENT_MESSAGES = (512 << 20) // LARGE_BYTES  # of one client: being read; turns at a method
MESSAGE_SECONDS = 30.0  # from the call to the end of its message
LOGGED_FIELDS = ("request_id", "attempt", "update_id", "version", "pause_id")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks tokens, limits the calls of each client, parses messages, answers with errors."""

    def __init__(
        self, max_calls: int, counters: ServerCounters, authorizer: TokenAuthorizer | None = None
    ) -> None:
        self._max_calls = max_calls  # of one method by one client at once
        self._counters = counters
        self._authorizer = authorizer
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
            parser = self._parsers[method] = MessageParser(service, name, deserialize)
        respond = _responder(handler)
        one_response = not handler.response_streaming

        async def serve(context: Context, admission: AsyncExitStack) -> None:
            if self._authorizer is not None:
                self._authorizer.authorize(scope_of(method), context.invocation_metadata() or ())
            client = client_of(context)
            admission.enter_context(self._counted(client, service, name))
            if handler.request_streaming:
                await respond(self._messages(parser, context), context)
                return
            if one_response:
                await admission.enter_async_context(self._turn(f"{client} {method}"))
            request = await self._read_message(client, name, parser, context)
            bind(**_logged_fields(request))
            await respond(request, context)

        async def serve_or_abort(_: Any, context: Context) -> None:
            # An error keeps the call's message until it is sent: the call counts until then.
            async with AsyncExitStack() as admission:
                try:
                    await serve(context, admission)
                except (ServiceError, EngineError) as raised:
                    error = from_engine_error(raised) if isinstance(raised, EngineError) else raised
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
        return make(serve_or_abort, response_serializer=handler.response_serializer)

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

    async def _messages(self, parser: MessageParser, context: Context) -> AsyncIterator[Any]:
        while (data := await context.read()) is not grpc.aio.EOF:
            message = await parser.parse(data, self._counting_fields)
            del data
            yield message
            del message  # a stream that waits for the next one keeps none: each may be large

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
            return await parser.parse(data, self._counting_fields)


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


def _logged_fields(request: Message) -> dict[str, Any]:
    descriptor = getattr(request, "DESCRIPTOR", None)
    known = {} if descriptor is None else descriptor.fields_by_name
    return {
        name: getattr(request, name)
        for name in LOGGED_FIELDS
        if name in known and (not known[name].has_presence or request.HasField(name))
    }


class MessageParser:
    """Parses the messages of one method, and refuses what is too large or no message. (What gRPC's
    own deserializers raise ends a call without a reason.)
    """

    def __init__(self, service: str, method: str, deserialize: Callable[[bytes], Any]) -> None:
        self._method = method
        self._deserialize = deserialize
        self._max_bytes = SMALL_BYTES
        if service.startswith("rollwire."):
            self._max_bytes = LARGE_BYTES if method in LARGE_METHODS else DEFAULT_BYTES
        self._max_fields = MAX_FIELDS.get(method, 0)
        self._fields: MessageFields = {}
        if self._max_fields:
            descriptor = descriptor_pool.Default().FindMethodByName(f"{service}.{method}")
            self._fields = message_fields(descriptor.input_type)

    async def parse(self, data: bytes, counting: asyncio.Lock) -> Any:
        """``counting`` is held while fields are counted, which takes a thread."""
        if len(data) > self._max_bytes:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"the message has {len(data)} bytes, the limit of {self._method} is "
                f"{self._max_bytes}",
            )
        if self._fields and len(data) > UNCOUNTED_BYTES:
            async with counting:
                few = await asyncio.to_thread(has_at_most, self._max_fields, data, self._fields)
            if not few:
                raise ServiceError(
                    Reason.BAD_REQUEST,
                    f"the message has more than {self._max_fields} parts, the limit of "
                    f"{self._method}, or it cannot be parsed",
                )
        try:
            return self._deserialize(data)
        except DecodeError as error:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"the message cannot be parsed: it is not a request of {self._method}",
            ) from error


def message_fields(descriptor: Descriptor) -> MessageFields:
    """Those of a message and of the messages inside. (The API has none that holds its own kind.)"""
    inner = {field.number: field.message_type for field in descriptor.fields}
    return {number: message_fields(kind) for number, kind in inner.items() if kind is not None}


def has_at_most(limit: int, data: bytes, fields: MessageFields) -> bool:
    """Whether a serialized message has at most ``limit`` fields, with those of messages inside that
    hold messages themselves. False for what cannot be read.
    """
    count = 0
    pending = [(0, len(data), fields)]
    try:
        while pending:
            at, end, fields = pending.pop()
            while at < end:
                count += 1
                if count > limit:
                    return False
                tag, at = _varint(data, at)
                wire_type = tag & 7
                if wire_type == 2:
                    size, at = _varint(data, at)
                    if inner := fields.get(tag >> 3):
                        pending.append((at, at + size, inner))
                    at += size
                elif wire_type == 0:
                    _, at = _varint(data, at)
                elif wire_type in (1, 5):
                    at += 8 if wire_type == 1 else 4
                else:  # groups, which nobody sends
                    return False
            if at != end:
                return False
    except IndexError:
        return False
    return True


def _varint(data: bytes, at: int) -> tuple[int, int]:
    if (byte := data[at]) < 128:  # nearly always
        return byte, at + 1
    value = shift = 0
    while byte >= 128 and shift < 70:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        byte = data[at]
    return value | byte << shift, at + 1
