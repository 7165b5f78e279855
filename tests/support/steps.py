"""Where a test steps in: between the calls that a publish makes.

gRPC's own interceptors, on the channels that the library opens. So a test acts at an exact step of
a publish, and everything that runs is real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

Act = Callable[[str, Any], Awaitable[None]]  # of the server's address and the request


class Steps:
    """What happens before and after calls, by their names: ``steps.before["JoinTransport"]``.

    A call waits for what happens before it, and its answer for what happens after it.
    """

    def __init__(self) -> None:
        self.before: dict[str, Act] = {}
        self.after: dict[str, Act] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Channels that are opened meanwhile are watched."""
        original = grpc.aio.insecure_channel

        def insecure_channel(target: str, **options: Any) -> grpc.aio.Channel:
            return original(target, interceptors=[_Watch(target, self)], **options)

        grpc.aio.insecure_channel = insecure_channel
        try:
            yield
        finally:
            grpc.aio.insecure_channel = original


class _Watch(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, address: str, steps: Steps) -> None:
        self._address = address
        self._steps = steps

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        method = client_call_details.method
        name = (method.decode() if isinstance(method, bytes) else method).rpartition("/")[2]
        if before := self._steps.before.get(name):
            await before(self._address, request)
        call = await continuation(client_call_details, request)
        if (after := self._steps.after.get(name)) and await call.code() is grpc.StatusCode.OK:
            await after(self._address, request)
        return call
