"""The protocol of a sharded trainer's processes: rank 0 directs, the other ranks follow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rollwire.deadlines import Timeout

from rollwire_client._concurrency import as_exception, cancel_all, run_in_thread
from rollwire_client._errors import PublishError, SourceError, TensorsChangedError
from rollwire_client._publishing.sharded.connection import Connection, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from rollwire_transport import Gathered
    from torch import Tensor

    from rollwire_client._publishing.tensors import ChangeDetector, TensorOrFunction, TensorSource

T = TypeVar("T")

logger = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0


class Coordinator:
    """Rank 0's part: directs the other ranks in one publish, until it releases or aborts them."""

    def __init__(self, connections: Mapping[int, Connection], timeout: float) -> None:
        self._connections = connections
        self._timeout = timeout
        self._heartbeat_seconds = min(_HEARTBEAT_SECONDS, timeout / 4)
        self._sending = threading.Lock()
        self._unchanged: dict[int, asyncio.Event] = {rank: asyncio.Event() for rank in connections}
        self.ended = False  # the other ranks were released, or told that the publish failed

    async def wait_for_ranks(self, call: str) -> None:
        """Returns once all other ranks have made the same ``call``."""
        calls = [
            asyncio.create_task(self._wait_for_call(rank, connection, call))
            for rank, connection in self._connections.items()
        ]
        try:
            # For all, whatever one says: a call that is read later would be taken for the next.
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
        """Wraps ``source``: the other ranks iterate over theirs in step. What it gives is still to
        be passed to ``gather``.
        """
        from rollwire_transport import close_source

        def items() -> Iterator[tuple[str, TensorOrFunction]]:
            self._send(Message.RESTART)
            iterator = iter(source())
            name = ""
            try:
                while True:
                    self._send(Message.NEXT, name)
                    item = next(iterator, None)
                    if item is None:
                        return
                    name = item[0]
                    yield item
                    del item  # the generator must not keep a tensor that its reader has dropped
            finally:
                close_source(iterator)

        return items

    def check_unchanged(self) -> None:
        """Has the other ranks check their tensors; a change ends ``run``."""
        self._send(Message.CHECK)

    def gather(self, name: str, value: TensorOrFunction, dtype: str | None) -> TensorOrFunction:
        """A function that gathers a DTensor, or calls a function, on all ranks; any other tensor
        as it is. Where that is less to gather, each rank casts its shard to ``dtype`` first.
        """
        if callable(value) or hasattr(value, "full_tensor"):
            return functools.partial(self._gather_on_all, name, value, dtype or "")
        return value

    def _gather_on_all(self, name: str, value: TensorOrFunction, dtype: str) -> Gathered:
        self._send(Message.GATHER, f"{dtype} {name}")
        return _gather(value, dtype)

    async def run(self, publish: Coroutine[Any, Any, T], released: asyncio.Event) -> T:
        """Runs a publish, and releases the other ranks once the tensors are ``released``."""
        publishing = asyncio.create_task(publish)
        waiting = asyncio.create_task(released.wait())
        supervising = [
            asyncio.create_task(self._send_heartbeats()),
            *(asyncio.create_task(self._listen(*other)) for other in self._connections.items()),
        ]
        tasks: list[asyncio.Task[Any]] = [publishing, waiting, *supervising]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in supervising:
                if task.done():
                    task.result()
            if released.is_set():
                self.release()
                await cancel_all(supervising)  # what comes now is of the next publish
            return await publishing
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            await cancel_all(tasks)

    async def _send_heartbeats(self) -> None:
        while True:
            self._send(Message.HEARTBEAT)
            await asyncio.sleep(self._heartbeat_seconds)

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
        """Asks the other ranks whether their tensors changed; a change ends ``run``."""
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


class Participant:
    """Another rank's part: iterates and gathers in step with rank 0 for one publish.

    The event loop receives rank 0's commands, and a thread carries them out: a gather blocks until
    all ranks take part.
    """

    def __init__(
        self, connection: Connection, tensors: Mapping[str, Tensor] | TensorSource, timeout: float
    ) -> None:
        self._connection = connection
        self._tensors = tensors
        self._timeout = timeout  # for rank 0's silence, and for a gather once the publish is over
        self._commands: queue.SimpleQueue[tuple[Message, str] | None] = queue.SimpleQueue()
        self._items: Iterator[tuple[str, TensorOrFunction]] = iter(())
        self._name = ""  # of the item taken last
        self._value: TensorOrFunction | None = None
        self._failure = ""  # as reported to rank 0

    async def run(self, call: str) -> None:
        """Returns when the tensors may change again. All ranks must give the same ``call``."""
        with contextlib.suppress(ConnectionError):  # rank 0 may have sent why before
            self._connection.send(Message.CALLED, call)
        working = run_in_thread(self._prepare())
        outcome = Message.ABORTED
        try:
            outcome, why = await self._receive_commands()
        except BaseException:
            self._connection.close()  # it must not be read by a later publish
            raise
        finally:
            if outcome is Message.ABORTED:  # else a source is run to its end
                self._drop_useless_commands()
            self._commands.put(None)
        await asyncio.wait([working], timeout=self._timeout)
        if not working.done():
            working.cancel()
            self._connection.close()
            raise SourceError(
                f"this rank has not finished rank 0's request within {self._timeout:g} s: its "
                f"thread stays behind{f'; rank 0: {why}' if why else ''}"
            )
        error = working.exception()
        # If this rank's error ended the publish, rank 0 repeats it. Any other one is a consequence.
        if error is not None and (outcome is not Message.ABORTED or self._failure in why):
            raise error
        if outcome is Message.ABORTED:
            raise PublishError(f"rank 0 did not publish: {why}") from error

    def _prepare(self) -> Callable[[], None]:
        """The work of the thread; an error here is reported from there, as any other."""
        from rollwire_transport import on_side_stream

        from rollwire_client._publishing.tensors import ChangeDetector, check_tensors, device_of

        try:
            check_tensors(self._tensors)
            detector = ChangeDetector()
            if callable(self._tensors):
                self._tensors = detector.watch_source(self._tensors)
            else:
                for name, tensor in self._tensors.items():
                    detector.watch(name, tensor)
            return on_side_stream(device_of(self._tensors), functools.partial(self._work, detector))
        except Exception as error:
            return functools.partial(self._fail, error)

    async def _receive_commands(self) -> tuple[Message, str]:
        """Queues rank 0's commands for the thread; returns how the publish ended."""
        try:
            while True:
                async with Timeout(self._timeout):
                    message, text = await self._connection.receive()
                if message in {Message.RELEASED, Message.ABORTED}:
                    return message, text
                if message is not Message.HEARTBEAT:
                    self._commands.put((message, text))
        except TimeoutError as error:
            raise SourceError(
                f"rank 0 has been silent for {self._timeout:g} s: these ranks cannot publish any "
                "more"
            ) from error
        except ConnectionError as error:
            raise SourceError(
                f"rank 0 of the trainer is gone ({error}): these ranks cannot publish any more"
            ) from error

    def _drop_useless_commands(self) -> None:
        """Drops the commands after the last gather: only for gathers do other ranks wait."""
        commands: list[tuple[Message, str] | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        while commands and (commands[-1] is None or commands[-1][0] is not Message.GATHER):
            commands.pop()
        for command in commands:
            self._commands.put(command)

    # What follows runs in the thread.

    def _work(self, detector: ChangeDetector) -> None:
        from rollwire_transport import close_source

        try:
            with detector:
                while (command := self._commands.get()) is not None:
                    self._execute(*command, detector)
        except BaseException as error:
            self._fail(as_exception(error))
        finally:
            self._value = None
            close_source(self._items)

    def _execute(self, message: Message, text: str, detector: ChangeDetector) -> None:
        from rollwire_transport import close_source

        if message is Message.GATHER:
            dtype, _, name = text.partition(" ")
            self._gather(name, dtype)
        elif message is Message.CHECK:
            detector.check()
        elif message is Message.CONFIRM:
            detector.check()
            self._report(Message.UNCHANGED)
        elif callable(self._tensors):
            self._value = None
            if message is Message.RESTART:
                close_source(self._items)
                self._items, self._name = iter(self._tensors()), ""
            else:
                self._check_in_step(text)
                self._name, self._value = next(self._items, ("", None))

    def _gather(self, name: str, dtype: str) -> None:
        if callable(self._tensors):
            self._check_in_step(name)
            value = self._value
        else:
            value = self._tensors.get(name)
        if value is None:
            raise SourceError(f"rank 0 gathers {name}, which this rank does not have")
        if not (callable(value) or hasattr(value, "full_tensor")):
            raise SourceError(f"rank 0 gathers {name}, which is not a DTensor here")
        _gather(value, dtype)

    def _check_in_step(self, name: str) -> None:
        if name != self._name:
            raise SourceError(
                "the ranks iterate differently: rank 0 is at "
                f"{name or 'the beginning'}, this one at {self._name or 'the beginning or end'}"
            )

    def _fail(self, error: Exception) -> NoReturn:
        changed = isinstance(error, TensorsChangedError)
        self._failure = str(error) if changed else f"{type(error).__name__}: {error}"
        self._report(Message.CHANGED if changed else Message.FAILED, self._failure)
        if isinstance(error, PublishError):
            raise error
        raise SourceError(f"the source of this rank raised {self._failure}") from error

    def _report(self, message: Message, text: str = "") -> None:
        with contextlib.suppress(ConnectionError):  # ``_receive_commands`` raises it
            self._connection.send(message, text)


def _gather(value: TensorOrFunction, dtype: str) -> Gathered:
    import torch
    from rollwire_transport import materialize

    return materialize(value, getattr(torch, dtype) if dtype else None)


def _rank_is_gone(rank: int, error: ConnectionError) -> SourceError:
    return SourceError(
        f"rank {rank} of the trainer is gone ({error}): these ranks cannot publish any more"
    )
