"""Rank 0's part in a publish of a sharded trainer: it leads, the other ranks follow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from typing import TYPE_CHECKING, TypeVar

from rollwire.deadlines import Timeout

from rollwire_client._concurrency.tasks import cancel_all
from rollwire_client._errors import SourceError, TensorsChangedError
from rollwire_client._publishing.sharded.connection import Line, Word

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from typing import Any

    from torch import Tensor

    from rollwire_client._publishing.schema import Given, Source

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ALIVE_SECONDS = 1.0


class Lead:
    """Tells the other ranks what to do in one publish, until they are let go of.

    Args:
        lines: To the other ranks.
        timeout: Seconds that another rank may take to call, and that rank 0 may be silent.

    Attributes:
        over: Whether they were let go of.
    """

    def __init__(self, lines: Mapping[int, Line], timeout: float) -> None:
        self._lines = lines
        self._timeout = timeout
        self._alive_seconds = min(_ALIVE_SECONDS, timeout / 4)
        self._telling = threading.Lock()
        self._unchanged: dict[int, asyncio.Event] = {rank: asyncio.Event() for rank in lines}
        self.over = False

    async def assemble(self, call: str) -> None:
        """Waits until the other ranks have made the same call.

        Args:
            call: What is called, and with what.

        Raises:
            SourceError: One has not, or made another, or is gone.
        """
        calling = [
            asyncio.create_task(self._called(rank, line, call))
            for rank, line in self._lines.items()
        ]
        try:
            waiting: set[asyncio.Task[None]] = set(calling)
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=self._alive_seconds)
                for line in self._lines.values():  # those that are here wait for the others
                    with contextlib.suppress(ConnectionError):  # told by who listens to it
                        line.tell(Word.ALIVE)
            for task in calling:
                task.result()
        finally:
            await cancel_all(calling)

    async def _called(self, rank: int, line: Line, call: str) -> None:
        try:
            async with Timeout(self._timeout):
                word, text = await line.hear()
                while word is not Word.HERE:  # of a publish that was over already
                    word, text = await line.hear()
        except TimeoutError as error:
            late = SourceError(
                f"rank {rank} has not called within {self._timeout:g} s, rank 0 {call}: these "
                "ranks cannot publish any more"
            )
            line.dismiss(str(late))  # it learns when it calls, which is then of the past
            raise late from error
        except ConnectionError as error:
            raise _gone(rank, error) from error
        if (word, text) != (Word.HERE, call):
            raise SourceError(f"the ranks differ: rank {rank} {text}, rank 0 {call}")

    def iterated(self, source: Source) -> Source:
        """``source``, with the other ranks iterating over theirs in step."""

        def led() -> Iterator[tuple[str, Given]]:
            self._tell(Word.AGAIN)
            items = iter(source())
            name = ""
            while True:
                self._tell(Word.NEXT, name)
                item = next(items, None)
                if item is None:
                    return
                name, given = item
                del item
                yield name, self.gathered(name, given)
                del given

        return led

    def gathered(self, name: str, given: Given) -> Given:
        """A function that gathers a DTensor, or calls a function, with the other ranks; any other
        tensor as it is.
        """
        if callable(given) or hasattr(given, "full_tensor"):
            return functools.partial(self._gather, name, given)
        return given

    async def run(self, work: Coroutine[Any, Any, T], released: asyncio.Event) -> T:
        """Runs a publish, and lets go of the other ranks when it has released the tensors.

        Raises:
            SourceError: One of them failed, or is gone.
        """
        working = asyncio.create_task(work)
        attending = asyncio.create_task(self._attend(released))
        either: list[asyncio.Task[Any]] = [working, attending]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if attending.done():
                attending.result()
            return await working
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            await cancel_all(either)

    async def confirm(self) -> None:
        """Waits until the other ranks have said that their tensors did not change.

        Raises:
            SourceError: One does not say so in time; that they did change ends ``run``.
        """
        self._tell(Word.CONFIRM)
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
        """Lets go of the other ranks: their tensors may change again."""
        self._let_go(Word.RELEASED, "")

    def fail(self, error: BaseException) -> None:
        """Lets go of the other ranks with an error, if that was not done before."""
        self._let_go(Word.OVER, str(error) or f"the publish ended with {type(error).__name__}")

    async def _attend(self, released: asyncio.Event) -> None:
        """Listens to the other ranks until the tensors are released; raises what goes wrong."""
        waiting = asyncio.create_task(released.wait())
        listening = [asyncio.create_task(self._listen(r, line)) for r, line in self._lines.items()]
        try:
            while not waiting.done():
                self._tell(Word.ALIVE)
                done, _ = await asyncio.wait(
                    [waiting, *listening],
                    timeout=self._alive_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done - {waiting}:
                    task.result()
            self.release()
        finally:
            await cancel_all([waiting, *listening])

    async def _listen(self, rank: int, line: Line) -> None:
        while True:
            try:
                word, text = await line.hear()
            except ConnectionError as error:
                raise _gone(rank, error) from error
            if word is Word.CHANGED:
                raise TensorsChangedError(f"rank {rank}: {text}")
            if word is not Word.UNCHANGED:
                raise SourceError(f"rank {rank} failed: {text}")
            self._unchanged[rank].set()

    def _gather(self, name: str, given: Given) -> Tensor:

        self._tell(Word.GATHER, name)
        from rollwire_transport import materialize

        return materialize(given)

    def _tell(self, word: Word, text: str = "") -> None:
        with self._telling:
            if self.over:  # nobody would take part in what follows
                raise SourceError("the publish is over")
            for rank, line in self._lines.items():
                try:
                    line.tell(word, text)
                except ConnectionError as error:
                    raise _gone(rank, error) from error

    def _let_go(self, word: Word, text: str) -> None:
        with self._telling:
            if self.over:
                return
            self.over = True
            for rank, line in self._lines.items():
                try:
                    line.tell(word, text)
                except ConnectionError as error:
                    logger.warning("%s", _gone(rank, error))


def _gone(rank: int, error: ConnectionError) -> SourceError:
    return SourceError(
        f"rank {rank} of the trainer is gone ({error}): these ranks cannot publish any more"
    )
