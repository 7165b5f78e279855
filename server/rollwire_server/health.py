"""grpc.health.v1 of one server. (That of grpcio forgets its watchers when one of them goes.)"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Whether services serve; "" is the process, which does as long as it answers."""

    def __init__(self) -> None:
        self._serving = {"": True}
        self._changed = asyncio.Event()  # set, and replaced, at every change

    def tell(self, service: str, *, serving: bool) -> None:
        """Says so of a service, now and to who watches."""
        self._serving[service] = serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        """How it is now."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802
        """How it is now, and after every change."""
        told = None
        while True:
            changed = self._changed
            if (status := self._status(request.service)) != told:
                await context.write(Status(status=status))
                told = status
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._serving:
            return int(Status.SERVICE_UNKNOWN)
        return int(Status.SERVING if self._serving[service] else Status.NOT_SERVING)
