"""Calls of one answer: their errors are the library's, and none waits without a deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import grpc
from rollwire.deadlines import Timeout

from rollwire_client._errors import ClosedError, ServerUnreachableError
from rollwire_client._rpc.status import error_from_call

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Response = TypeVar("Response")


async def unary(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    server: str,
    timeout: float,
    deadline: float | None = None,
) -> Response:
    """Calls ``method`` of the server at the address ``server``.

    Args:
        method: Of a stub.
        request: For it.
        server: Its address.
        timeout: Seconds to wait for the answer.
        deadline: Seconds after which the server is to give up too, whether or not this process
            listens to it.

    Raises:
        ServerUnreachableError: Nothing answers, or not within ``timeout`` seconds.
        ClosedError: The channel was closed meanwhile.
        RollwireError: What else the server answered with.
    """
    try:
        # A deadline of gRPC's goes on while this process hears nobody.
        async with Timeout(timeout):
            return await method(request, timeout=deadline)
    except TimeoutError as error:
        raise _no_answer(server, timeout) from error
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise _no_answer(server, timeout) from error
        raise error_from_call(error, server) from error
    except asyncio.CancelledError:
        # gRPC cancels whoever waits for a call of a channel that is closed.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ClosedError(f"{server}: the client was closed", server=server) from None


def _no_answer(server: str, timeout: float) -> ServerUnreachableError:
    return ServerUnreachableError(f"{server}: no answer within {timeout:g} s", server=server)
