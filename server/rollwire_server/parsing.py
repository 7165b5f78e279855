"""What becomes of a message before its handler sees it: too long, or none, it is refused by name.

gRPC's own limit of length is one for all calls, and has to let manifests through. Parsing takes the
event loop, and for a message that is nothing but small parts a second for a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from rollwire_server.errors import Reason, ServiceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]

LARGEST_BYTES = 32 << 20  # 10 MiB is the manifest of 100,000 tensors, or a prompt of 2 million
USUAL_BYTES = 4 << 20  # gRPC's default
LARGE = {"Generate", "StreamRollouts", "UpdateWeights"}


@dataclass(frozen=True, slots=True)
class Unparsed:
    """What a handler gets in place of a message: why."""

    why: str


def check_parsed(request: object) -> None:
    """Raises ServiceError for what is no message."""
    if isinstance(request, Unparsed):
        raise ServiceError(Reason.BAD_REQUEST, request.why)


class Parsing(grpc.aio.ServerInterceptor):
    """Gives handlers of this API ``Unparsed`` in place of what they cannot take."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        service, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if handler is None or not service.startswith("rollwire."):
            return handler
        parse: Callable[[bytes], Any] = handler.request_deserializer  # type: ignore[assignment]
        most = LARGEST_BYTES if name in LARGE else USUAL_BYTES

        def parse_or_tell(data: bytes) -> Any:
            if len(data) > most:
                return Unparsed(f"the message has {len(data)} bytes, {name} takes {most} at most")
            try:
                return parse(data)
            except DecodeError:
                return Unparsed(f"the message cannot be read: it is not what {name} takes")

        return handler._replace(request_deserializer=parse_or_tell)  # type: ignore[attr-defined,no-any-return]
