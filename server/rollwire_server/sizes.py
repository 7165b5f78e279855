"""How long a call's messages may be, before they are parsed.

gRPC's own limit is one for all calls, and has to let manifests through. Parsing takes the event
loop, and for a message that is nothing but small parts a second for a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from rollwire_server.errors import Reason, ServiceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]

LARGEST_BYTES = 32 << 20  # 10 MiB is the manifest of 100,000 tensors, or a prompt of 2 million
USUAL_BYTES = 4 << 20  # gRPC's default
LARGE = {"Generate", "StreamRollouts", "UpdateWeights"}


@dataclass(frozen=True, slots=True)
class TooLarge:
    """What a handler gets in place of a message that was not parsed."""

    bytes: int
    most: int


def check_size(request: object) -> None:
    """Raises ServiceError for a message that was not parsed."""
    if isinstance(request, TooLarge):
        raise ServiceError(
            Reason.BAD_REQUEST,
            f"the message has {request.bytes} bytes, this call takes {request.most} at most",
        )


class MessageSizes(grpc.aio.ServerInterceptor):
    """Gives handlers ``TooLarge`` in place of what is."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        service, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if handler is None or name in LARGE or not service.startswith("rollwire."):
            return handler
        parse = handler.request_deserializer

        def parse_usual(data: bytes) -> Any:
            if len(data) > USUAL_BYTES:
                return TooLarge(len(data), USUAL_BYTES)
            return data if parse is None else parse(data)

        return handler._replace(request_deserializer=parse_usual)  # type: ignore[attr-defined,no-any-return]
