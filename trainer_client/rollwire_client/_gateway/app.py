"""The gateway's ASGI application: its paths, who may use them, and how errors are answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwire_client._errors import RollwireError
from rollwire_client._gateway import openai_api, sglang_api, vllm_api
from rollwire_client._gateway.answers import (
    CLIENT_GONE,
    ClientGoneError,
    error_answer,
    json_answer,
    read_fields,
    unless_gone,
)
from rollwire_client._gateway.errors import HttpError, bug, http_error
from rollwire_client._gateway.fields import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client._gateway.answers import Message, Receive, Send
    from rollwire_client._gateway.fields import Fields
    from rollwire_client._gateway.gateway import Gateway
    from rollwire_client._gateway.metrics import GatewayMetrics
    from rollwire_client._gateway.security import BearerTokens

logger = logging.getLogger(__name__)

_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
_MAX_SESSION = 256  # characters


@dataclass(frozen=True, slots=True)
class _Post:
    """An endpoint that reads a JSON object.

    Attributes:
        handle: Answers.
        session: Whether it samples, and wants to know the session.
        control: Whether it needs the control token.
        control_field: It needs that token also if this switch is on.
    """

    handle: Callable[..., Awaitable[Any]]
    session: bool = True
    control: bool = False
    control_field: str | None = None


_POSTS = {
    "/v1/completions": _Post(openai_api.completions),
    "/v1/chat/completions": _Post(openai_api.chat_completions),
    "/inference/v1/generate": _Post(vllm_api.generate),
    "/generate": _Post(sglang_api.generate),
    "/abort_request": _Post(sglang_api.abort_request, session=False, control_field="abort_all"),
    "/update_weights_from_disk": _Post(sglang_api.update_from_disk, session=False, control=True),
}
_GETS = {
    "/v1/models": openai_api.models,
    "/server_info": sglang_api.server_info,
    "/get_server_info": sglang_api.server_info,
    "/model_info": sglang_api.model_info,
    "/get_model_info": sglang_api.model_info,
}


def create_app(gateway: Gateway, tokens: BearerTokens) -> Any:
    """The API, for an ASGI server."""

    async def health(_: Request) -> Response:
        if (reason := gateway.unready_reason()) is not None:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, reason, code="not_ready")
        return json_answer({"status": "ok"})

    async def ping(_: Request) -> Response:  # the process lives, whatever the fleet does
        return json_answer({"status": "ok"})

    def get(handle: Callable[[Gateway], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            tokens.authorize(request.headers, control=False)
            return await handle(gateway)

        return endpoint

    handlers: dict[Any, Any] = {
        HttpError: lambda _, error: error_answer(error),
        RollwireError: lambda _, error: error_answer(http_error(error)),
        HTTPException: _http_exception,
        Exception: _bug,
    }
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ping", ping),
            *(Route(path, get(handle)) for path, handle in _GETS.items()),
            *(
                Route(path, _Endpoint(path, post, gateway, tokens), methods=["POST"])
                for path, post in _POSTS.items()
            ),
        ],
        exception_handlers=handlers,
    )


def create_metrics_app(metrics: GatewayMetrics) -> Any:
    async def page(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Starlette(routes=[Route("/metrics", page), Route("/", page)])


class _Endpoint:
    """One path as an ASGI application: a request that waits for its answer ends with its client."""

    def __init__(self, path: str, post: _Post, gateway: Gateway, tokens: BearerTokens) -> None:
        self._path = path
        self._post = post
        self._gateway = gateway
        self._tokens = tokens

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        metrics, began = self._gateway.metrics, time.monotonic()
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(Request(scope, receive), receive, sending)
        except ClientGoneError:
            status = CLIENT_GONE
        except HttpError as error:
            await error_answer(error)(scope, receive, sending)
        except RollwireError as error:
            await error_answer(http_error(error))(scope, receive, sending)
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            metrics.requests.labels(self._path, str(status)).inc()
            metrics.seconds.labels(self._path).observe(time.monotonic() - began)

    async def _answer(self, request: Request, receive: Receive, send: Send) -> None:
        self._tokens.authorize(request.headers, control=self._post.control)
        if _integer_or_zero(request.headers.get("x-stainless-retry-count")):
            self._gateway.metrics.retried.inc()
            logger.warning("%s: a client sends a request again that it sent before", self._path)
        fields = await read_fields(request, self._gateway.body_bytes)
        if (switch := self._post.control_field) is not None and fields.get(switch):
            self._tokens.authorize(request.headers, control=True)
        answer = await unless_gone(receive, self._handle(request, fields))
        await answer(request.scope, receive, send)

    async def _handle(self, request: Request, fields: Fields) -> Any:
        if not self._post.session:
            return await self._post.handle(self._gateway, fields)
        return await self._post.handle(self._gateway, fields, _session(request))


def _session(request: Request) -> str:
    """The id by which the requests of a conversation go to the same server; "" if there is none."""
    for name in _SESSION_HEADERS:
        if value := request.headers.get(name, ""):
            return str(value[:_MAX_SESSION])
    return ""


def _integer_or_zero(text: str | None) -> int:
    with contextlib.suppress(ValueError):
        return int(text or "0")
    return 0


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """What Starlette refuses: an unknown path, or a wrong method."""
    called = f"{request.method} {shown(request.url.path)}"
    text = f"{called}: {error.detail}. The gateway has {', '.join([*_POSTS, *_GETS])}"
    return error_answer(HttpError(HTTPStatus(error.status_code), text))


async def _bug(_: Request, error: Exception) -> Response:
    return error_answer(bug(error))
