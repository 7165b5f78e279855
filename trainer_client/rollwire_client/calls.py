"""Calls of one answer: their errors are the library's, and none waits without a deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import grpc

from rollwire_client import errors
from rollwire_client.errors import ClosedError, ServerUnreachableError

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Response = TypeVar("Response")


async def unary(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    server: str,
    timeout: float,
) -> Response:
    """Calls ``method`` of the server at the address ``server``.

    Raises:
        ServerUnreachableError: Nothing answers, or not within ``timeout`` seconds.
        ClosedError: The channel was closed meanwhile.
        RollwireError: What else the server answered with.
    """
    try:
        return await method(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ServerUnreachableError(
                f"{server}: no answer within {timeout:g} s", server=server
            ) from error
        raise errors.from_rpc(error, server) from error
    except asyncio.CancelledError:
        # gRPC cancels whoever waits for a call of a channel that is closed.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ClosedError(f"{server}: the client was closed", server=server) from None
