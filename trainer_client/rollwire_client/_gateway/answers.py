"""How requests are answered over ASGI: one JSON, or server-sent events; and who has gone away."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from rollwire_client._concurrency import cancel_all, run_in_thread
from rollwire_client._gateway.errors import HttpError, bug, invalid
from rollwire_client._gateway.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, MutableMapping

    from starlette.requests import Request

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # as nginx logs it; nobody gets it
_BODY_SECONDS = 60.0  # for a request's body to arrive
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # of which two are a character, and one is no text
_LAST_SECONDS = 5.0  # for a client to take the error that ends its stream
_PARSED_IN_LOOP = 1 << 18  # bytes of JSON; more would stall the event loop
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
_HEARTBEAT = b": heartbeat\n\n"
_DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


async def read_fields(request: Request, most_bytes: int) -> Fields:
    """The JSON object in a request's body."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise HttpError(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"the body is larger than {most_bytes} bytes (--max-body-bytes)",
                    )
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {_BODY_SECONDS:g} s"
        ) from error
    try:
        if len(body) > _PARSED_IN_LOOP:
            return Fields(await run_in_thread(lambda: _parsed(body)))
        return Fields(_parsed(body))
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error


def _parsed(body: bytearray) -> Any:
    value = json.loads(body.decode(), parse_constant=_no_constant)
    if _SURROGATE.search(body) is not None:
        json.dumps(value, ensure_ascii=False).encode()  # raises if one has no partner
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


def json_answer(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


def error_answer(error: HttpError) -> Response:
    return JSONResponse(error.body(), int(error.status), headers=error.headers)


def number(value: float) -> float | None:
    """A log-probability as JSON has it: minus infinity is null."""
    return value if math.isfinite(value) else None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does ``work``, and cancels it if the client goes away; the body must have been read.

    Raises:
        ClientGoneError: It went away.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await cancel_all([working, watching])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventSender:
    """Server-sent events of one response. The 200 goes out with the first of them, so that what is
    refused before that has a status of its own.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()  # events of several sequences
        self._sent = 0
        self.started = False

    async def send(self, value: Any) -> None:
        await self._write(b"data: " + encoded(value) + b"\n\n")

    async def beat(self, seconds: float) -> None:
        """Sends a comment after so many seconds of silence, or proxies would cut the stream."""
        while True:
            before = self._sent
            await asyncio.sleep(seconds)
            if self._sent == before:
                await self._write(_HEARTBEAT)

    async def end(self) -> None:
        await self._write(_DONE, more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        async with self._lock:
            self._sent += 1
            if not self.started:
                self.started = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
                )
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


class EventAnswer:
    """An ASGI application that answers with what ``produce`` sends.

    A failure after the 200 is an event in the stream, before its ``[DONE]``.
    """

    def __init__(
        self, produce: Callable[[EventSender], Coroutine[Any, Any, None]], heartbeat: float
    ) -> None:
        self._produce = produce
        self._heartbeat = heartbeat

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        events = EventSender(send)
        try:
            await unless_gone(receive, self._produced(events))
        except HttpError as error:
            if not events.started:
                await error_answer(error)(scope, receive, send)
                return
            await self._end(events, error)
        except ClientGoneError:
            raise
        except Exception as error:
            if not events.started:
                raise
            logger.exception("a bug of the gateway ends a stream")
            await self._end(events, bug(error))
        else:
            await events.end()

    @staticmethod
    async def _end(events: EventSender, error: HttpError) -> None:
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await events.send(error.body())
                await events.end()
        except TimeoutError:
            raise ClientGoneError from error  # it does not read

    async def _produced(self, events: EventSender) -> None:
        beating = asyncio.create_task(events.beat(self._heartbeat))
        try:
            await self._produce(events)
        finally:
            await cancel_all([beating])
