"""Rank 0's part in a publish of a sharded trainer: it directs the other ranks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from typing import TYPE_CHECKING, TypeVar

from rollwire.deadlines import Timeout

from rollwire_client._concurrency import cancel_all
from rollwire_client._errors import SourceError, TensorsChangedError
from rollwire_client._publishing.sharded.connection import Connection, Message

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from typing import Any

    from torch import Tensor

    from rollwire_client._publishing.tensor_source import TensorOrFunction, TensorSource

T = TypeVar("T")

logger = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0


class Coordinator:
    """Directs the other ranks in one publish, until it releases or aborts them.

    Args:
        connections: With the other ranks.
        timeout: Seconds that another rank may take to make the same call, and that rank 0 may be
            silent.

    Attributes:
        ended: Whether the other ranks were released, or told that the publish failed.
    """

    def __init__(self, connections: Mapping[int, Connection], timeout: float) -> None:
        self._connections = connections
        self._timeout = timeout
        self._heartbeat_seconds = min(_HEARTBEAT_SECONDS, timeout / 4)
        self._sending = threading.Lock()
        self._unchanged: dict[int, asyncio.Event] = {rank: asyncio.Event() for rank in connections}
        self.ended = False

    async def wait_for_ranks(self, call: str) -> None:
        """Returns once all other ranks have made the same ``call``.

        Raises:
            SourceError: One has not, or made another, or is gone.
        """
        calls = [
            asyncio.create_task(self._wait_for_call(rank, connection, call))
            for rank, connection in self._connections.items()
        ]
        try:
            waiting: set[asyncio.Task[None]] = set(calls)
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=self._heartbeat_seconds)
                for connection in self._connections.values():
                    with contextlib.suppress(ConnectionError):  # its ``_wait_for_call`` raises it
                        connection.send(Message.HEARTBEAT)
            for task in calls:
                task.result()
        finally:
            await cancel_all(calls)

    async def _wait_for_call(self, rank: int, connection: Connection, call: str) -> None:
        try:
            async with Timeout(self._timeout):
                message, text = await connection.receive()
                while message is not Message.CALLED:  # left from a publish that is over
                    message, text = await connection.receive()
        except TimeoutError as error:
            late = SourceError(
                f"rank {rank} has not called within {self._timeout:g} s, rank 0 {call}: these "
                "ranks cannot publish any more"
            )
            connection.abort(str(late))  # it reads that when it calls, after which it is late
            raise late from error
        except ConnectionError as error:
            raise _rank_is_gone(rank, error) from error
        if text != call:
            raise SourceError(f"the ranks differ: rank {rank} {text}, rank 0 {call}")

    def iterate(self, source: TensorSource) -> TensorSource:
        """Wraps ``source``: the other ranks iterate over theirs in step."""

        def items() -> Iterator[tuple[str, TensorOrFunction]]:
            self._send(Message.RESTART)
            iterator = iter(source())
            name = ""
            while True:
                self._send(Message.NEXT, name)
                item = next(iterator, None)
                if item is None:
                    return
                name, value = item
                del item  # the generator must not keep a tensor that its reader has dropped
                yield name, self.gather(name, value)
                del value

        return items

    def gather(self, name: str, value: TensorOrFunction) -> TensorOrFunction:
        """A function that gathers a DTensor, or calls a function, on all ranks; any other tensor
        as it is.
        """
        if callable(value) or hasattr(value, "full_tensor"):
            return functools.partial(self._gather_on_all, name, value)
        return value

    def _gather_on_all(self, name: str, value: TensorOrFunction) -> Tensor:
        from rollwire_transport import materialize

        self._send(Message.GATHER, name)
        return materialize(value)

    async def run(self, publish: Coroutine[Any, Any, T], released: asyncio.Event) -> T:
        """Runs a publish, and releases the other ranks once the tensors are ``released``.

        Raises:
            SourceError: A rank failed, or is gone.
        """
        publishing = asyncio.create_task(publish)
        supervising = asyncio.create_task(self._supervise(released))
        either: list[asyncio.Task[Any]] = [publishing, supervising]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()
            return await publishing
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            await cancel_all(either)

    async def _supervise(self, released: asyncio.Event) -> None:
        """Sends heartbeats and listens to the other ranks until the tensors are released."""
        waiting = asyncio.create_task(released.wait())
        listening = [
            asyncio.create_task(self._listen(rank, connection))
            for rank, connection in self._connections.items()
        ]
        try:
            while not waiting.done():
                self._send(Message.HEARTBEAT)
                done, _ = await asyncio.wait(
                    [waiting, *listening],
                    timeout=self._heartbeat_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done - {waiting}:
                    task.result()
            self.release()
        finally:
            await cancel_all([waiting, *listening])

    async def _listen(self, rank: int, connection: Connection) -> None:
        while True:
            try:
                message, text = await connection.receive()
            except ConnectionError as error:
                raise _rank_is_gone(rank, error) from error
            if message is Message.CHANGED:
                raise TensorsChangedError(f"rank {rank}: {text}")
            if message is not Message.UNCHANGED:
                raise SourceError(f"rank {rank} failed: {text}")
            self._unchanged[rank].set()

    async def confirm_unchanged(self) -> None:
        """Asks the other ranks whether their tensors changed; a change ends ``run``.

        Raises:
            SourceError: One does not answer in time.
        """
        self._send(Message.CONFIRM)
        for rank, unchanged in self._unchanged.items():
            try:
                async with Timeout(self._timeout):
                    await unchanged.wait()
            except TimeoutError as error:
                raise SourceError(
                    f"rank {rank} has not confirmed within {self._timeout:g} s that its tensors "
                    "are unchanged; nothing was committed, the servers keep what they serve"
                ) from error

    def release(self) -> None:
        """Tells the other ranks that their tensors may change again."""
        self._end(Message.RELEASED, "")

    def abort(self, error: BaseException) -> None:
        """Tells the other ranks that the publish failed, unless it has ended before."""
        self._end(Message.ABORTED, str(error) or f"the publish ended with {type(error).__name__}")

    def _send(self, message: Message, text: str = "") -> None:
        with self._sending:
            if self.ended:  # nobody would take part any more
                raise SourceError("the publish is over")
            for rank, connection in self._connections.items():
                try:
                    connection.send(message, text)
                except ConnectionError as error:
                    raise _rank_is_gone(rank, error) from error

    def _end(self, message: Message, text: str) -> None:
        with self._sending:
            if self.ended:
                return
            self.ended = True
            for rank, connection in self._connections.items():
                try:
                    connection.send(message, text)
                except ConnectionError as error:
                    logger.warning("%s", _rank_is_gone(rank, error))


def _rank_is_gone(rank: int, error: ConnectionError) -> SourceError:
    return SourceError(
        f"rank {rank} of the trainer is gone ({error}): these ranks cannot publish any more"
    )
