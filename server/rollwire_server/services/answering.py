"""What every RPC does with errors: a ServiceError becomes its status, a bug is logged."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog

from rollwire_server.errors import ServiceError, answer

log = structlog.get_logger()

Response = TypeVar("Response")
Handler = Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Response]]


def answering(handler: Handler[Response]) -> Handler[Response]:
    """Wraps a handler ``(self, request, context)``, unary or one that writes its stream itself.

    Refusals are counted in ``self.counts``.
    """

    @functools.wraps(handler)
    async def wrapped(
        self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Response:
        try:
            return await handler(self, request, context)
        except ServiceError as error:
            self.counts.refusals[error.reason.name.lower()] += 1
            log.info(
                "refused", rpc=handler.__name__, reason=error.reason.name, message=error.message
            )
            await answer(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("a bug: the call failed", rpc=handler.__name__)
            raise

    return wrapped
