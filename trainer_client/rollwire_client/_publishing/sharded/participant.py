"""Another rank's part in a publish of a sharded trainer: it does what rank 0 asks for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from typing import TYPE_CHECKING, NoReturn

from rollwire.deadlines import Timeout

from rollwire_client._concurrency import run_in_thread
from rollwire_client._errors import PublishError, SourceError, TensorsChangedError
from rollwire_client._publishing.sharded.connection import Connection, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from rollwire_client._publishing.change_detector import ChangeDetector
    from rollwire_client._publishing.tensor_source import TensorOrFunction, TensorSource


class Participant:
    """Iterates and gathers in step with rank 0 for one publish.

    The event loop receives rank 0's commands, and a thread carries them out: a gather blocks until
    all ranks take part.

    Args:
        connection: With rank 0.
        tensors: Of this rank, of the same names as rank 0's.
        timeout: Seconds that rank 0 may be silent, and that a gather may take once the publish is
            over.
    """

    def __init__(
        self, connection: Connection, tensors: Mapping[str, Tensor] | TensorSource, timeout: float
    ) -> None:
        self._connection = connection
        self._tensors = tensors
        self._timeout = timeout
        self._commands: queue.SimpleQueue[tuple[Message, str] | None] = queue.SimpleQueue()
        self._items: Iterator[tuple[str, TensorOrFunction]] = iter(())
        self._name = ""  # of the item taken last
        self._value: TensorOrFunction | None = None
        self._failure = ""  # as reported to rank 0
        self._detector: ChangeDetector | None = None

    async def run(self, call: str) -> None:
        """Returns when the tensors may change again.

        Args:
            call: What the caller called, in the words that all ranks must agree on.

        Raises:
            SchemaMismatchError: ``tensors`` is neither a mapping of tensors nor callable.
            SourceError: This rank could not do its part, or rank 0 is gone or silent.
            PublishError: Rank 0 could not publish.
        """
        with contextlib.suppress(ConnectionError):  # rank 0 may have sent why before
            self._connection.send(Message.CALLED, call)
        working = run_in_thread(self._prepare())
        try:
            outcome, why = await self._receive_commands()
        except BaseException:
            self._connection.close()  # it must not be read by a later publish
            raise
        finally:
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

        from rollwire_client._publishing.change_detector import ChangeDetector
        from rollwire_client._publishing.tensor_source import check_tensors, device_of

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
        except Exception as error:
            self._fail(error)
        finally:
            self._value = None
            close_source(self._items)

    def _execute(self, message: Message, text: str, detector: ChangeDetector) -> None:
        if message is Message.GATHER:
            self._gather(text)
        elif message is Message.CONFIRM:
            detector.check()
            self._report(Message.UNCHANGED)
        elif callable(self._tensors):
            self._value = None
            if message is Message.RESTART:
                self._items, self._name = iter(self._tensors()), ""
            else:
                self._check_in_step(text)
                self._name, self._value = next(self._items, ("", None))

    def _gather(self, name: str) -> None:
        from rollwire_transport import materialize

        if callable(self._tensors):
            self._check_in_step(name)
            value = self._value
        else:
            value = self._tensors.get(name)
        if value is None:
            raise SourceError(f"rank 0 gathers {name}, which this rank does not have")
        if not (callable(value) or hasattr(value, "full_tensor")):
            raise SourceError(f"rank 0 gathers {name}, which is not a DTensor here")
        materialize(value)

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
