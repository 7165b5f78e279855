"""Another rank's part in a publish of a sharded trainer: it does what rank 0 says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from typing import TYPE_CHECKING, NoReturn

from rollwire.deadlines import Timeout

from rollwire_client._concurrency.threads import run_in_thread
from rollwire_client._errors import PublishError, SourceError, TensorsChangedError
from rollwire_client._publishing.sharded.connection import Line, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from rollwire_client._publishing.change_detector import Changes
    from rollwire_client._publishing.schema import Given, Source


class Follower:
    """Iterates and gathers in step with rank 0 for one publish, beside the event loop.

    Args:
        line: To rank 0.
        tensors: What this rank has, as rank 0 has it.
        timeout: Seconds that rank 0 may be silent, and that a gather may take once it is over.
    """

    def __init__(self, line: Line, tensors: Mapping[str, Tensor] | Source, timeout: float) -> None:
        self._line = line
        self._tensors = tensors
        self._timeout = timeout
        self._commands: queue.SimpleQueue[tuple[Word, str] | None] = queue.SimpleQueue()
        self._items: Iterator[tuple[str, Given]] = iter(())
        self._name = ""  # of what was taken last
        self._given: Given | None = None
        self._failed = ""  # what rank 0 was told
        self._changes: Changes | None = None

    async def follow(self, call: str) -> None:
        """Returns when the tensors may change again.

        Raises:
            SchemaMismatchError: What this rank has is no mapping of tensors, and not callable.
            SourceError: This rank could not do its part, or rank 0 is gone or silent.
            PublishError: Rank 0 could not publish.
        """
        with contextlib.suppress(ConnectionError):  # it may have said why
            self._line.tell(Word.HERE, call)
        working = run_in_thread(self._beginning())
        try:
            verdict, why = await self._obey()
        except BaseException:
            self._line.close()  # what rank 0 says later is of the past
            raise
        finally:
            self._drop_commands()
            self._commands.put(None)
        await asyncio.wait([working], timeout=self._timeout)
        if not working.done():
            working.cancel()
            self._line.close()
            raise SourceError(
                f"this rank has not ended what rank 0 asked for within {self._timeout:g} s: its "
                f"thread is left to itself{f'; rank 0: {why}' if why else ''}"
            )
        failure = working.exception()
        # Rank 0 repeats what ended the publish; others fail in its consequence.
        if failure is not None and (verdict is not Word.OVER or self._failed in why):
            raise failure
        if verdict is Word.OVER:
            raise PublishError(f"rank 0 did not publish: {why}") from failure

    def _beginning(self) -> Callable[[], None]:
        """What the thread does; rank 0, which knows that this rank is here, hears if it fails."""
        from rollwire_transport import on_side_stream

        from rollwire_client._publishing.change_detector import Changes
        from rollwire_client._publishing.schema import device_of, require_tensors

        try:
            require_tensors(self._tensors)
            self._changes = Changes()
            if callable(self._tensors):
                self._tensors = self._changes.noting(self._tensors)
            else:
                for name, tensor in self._tensors.items():
                    self._changes.note(name, tensor)
            return on_side_stream(device_of(self._tensors), self._work)
        except Exception as error:
            return functools.partial(self._fail, error)

    async def _obey(self) -> tuple[Word, str]:
        """Passes on what rank 0 says, until it lets go."""
        try:
            while True:
                async with Timeout(self._timeout):
                    word, text = await self._line.hear()
                if word in {Word.RELEASED, Word.OVER}:
                    return word, text
                if word is not Word.ALIVE:
                    self._commands.put((word, text))
        except TimeoutError as error:
            raise SourceError(
                f"rank 0 has said nothing for {self._timeout:g} s: these ranks cannot publish any "
                "more"
            ) from error
        except ConnectionError as error:
            raise SourceError(
                f"rank 0 of the trainer is gone ({error}): these ranks cannot publish any more"
            ) from error

    def _drop_commands(self) -> None:
        """What rank 0 does not wait for need not be done: all after its last gather."""
        commands: list[tuple[Word, str] | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        while commands and (commands[-1] is None or commands[-1][0] is not Word.GATHER):
            commands.pop()
        for command in commands:
            self._commands.put(command)

    def _work(self) -> None:
        from rollwire_transport import close_source

        assert self._changes is not None  # noqa: S101 - made before this begins
        try:
            with self._changes:
                while (command := self._commands.get()) is not None:
                    self._do(*command)
        except Exception as error:
            self._fail(error)
        finally:
            self._given = None
            close_source(self._items)

    def _fail(self, error: Exception) -> NoReturn:
        changed = isinstance(error, TensorsChangedError)
        self._failed = str(error) if changed else f"{type(error).__name__}: {error}"
        self._tell(Word.CHANGED if changed else Word.FAILED, self._failed)
        if isinstance(error, PublishError):
            raise error
        raise SourceError(f"the source of this rank raised {self._failed}") from error

    def _tell(self, word: Word, text: str = "") -> None:
        with contextlib.suppress(ConnectionError):  # told by who listens
            self._line.tell(word, text)

    def _do(self, word: Word, text: str) -> None:
        if word is Word.GATHER:
            self._gather(text)
            return
        if word is Word.CONFIRM and self._changes is not None:
            self._changes.check()
            self._tell(Word.UNCHANGED)
            return
        if callable(self._tensors):
            self._given = None
            if word is Word.AGAIN:
                self._items, self._name = iter(self._tensors()), ""
            else:
                self._in_step(text)
                self._name, self._given = next(self._items, ("", None))

    def _gather(self, name: str) -> None:

        if callable(self._tensors):
            self._in_step(name)
            given = self._given
        else:
            given = self._tensors.get(name)
        if given is None:
            raise SourceError(f"rank 0 gathers {name}, which this rank does not have")
        if not (callable(given) or hasattr(given, "full_tensor")):
            raise SourceError(f"rank 0 gathers {name}, which is no DTensor here")
        from rollwire_transport import materialize

        materialize(given)

    def _in_step(self, name: str) -> None:
        if name != self._name:
            raise SourceError(
                "the ranks iterate differently: rank 0 is at "
                f"{name or 'the beginning'}, this one at {self._name or 'the beginning or end'}"
            )
