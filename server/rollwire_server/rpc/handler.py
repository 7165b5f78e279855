"""What every RPC does: its lines of the log say what it is about; a ServiceError or EngineError
becomes its status, a bug is logged.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import structlog

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, abort, from_engine_error
from rollwire_server.logs import bind, is_callers_fault
from rollwire_server.rpc.message_limits import check_parsed

if TYPE_CHECKING:
    from google.protobuf.message import Message

log = structlog.get_logger()

NAMES = ("request_id", "attempt", "update_id", "version", "pause_id")

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
        bind(**_names(request))
        try:
            check_parsed(request)
            return await handler(self, request, context)
        except (ServiceError, EngineError) as raised:
            error = raised if isinstance(raised, ServiceError) else from_engine_error(raised)
            self.counters.refusals[error.reason.name.lower()] += 1
            log.info(
                "refused", rpc=handler.__name__, reason=error.reason.name, message=error.message
            )
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if not is_callers_fault(error):
                log.exception("a bug: the call failed", rpc=handler.__name__)
            raise

    return wrapped


def _names(request: Message | Any) -> dict[str, Any]:
    """What a request is about; nothing of a stream of requests."""
    descriptor = getattr(request, "DESCRIPTOR", None)
    if descriptor is None:
        return {}
    fields = [
        descriptor.fields_by_name[name] for name in NAMES if name in descriptor.fields_by_name
    ]
    return {
        field.name: getattr(request, field.name)
        for field in fields
        if not field.has_presence or request.HasField(field.name)
    }
