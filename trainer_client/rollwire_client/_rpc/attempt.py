"""One attempt at a sequence on one server: a stream appends what comes, a reader takes it.

The tokens are kept once, in the ``TrajectoryBuilder`` of the sequence. An attempt is a place in it:
how far the server has come, and how far the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire.types import Finish, FinishReason, WeightTag

from rollwire_client._errors import ProtocolError, RollwireError
from rollwire_client._trajectory import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_client._routing_replay import Rows
    from rollwire_client._trajectory import TrajectoryBuilder


class Attempt:
    """One attempt at a sequence on one server: read it with ``next``, then ``close`` it.

    Attributes:
        handle: Its number on the stream.
        budget: The most output tokens that the sequence may come to.
        next_offset: Output tokens that came, those before this attempt included.
        awaits_tokens: Its reader waits for the next token.
        ended: No more comes from the server.
        finish: How it ended, unless that was an error.
        error: The error that ended it.
    """

    __slots__ = (
        "_abort",
        "_finish_weights",
        "_output",
        "_read",
        "_server",
        "_waiter",
        "awaits_tokens",
        "budget",
        "ended",
        "error",
        "finish",
        "handle",
        "next_offset",
    )

    def __init__(
        self,
        handle: int,
        output: TrajectoryBuilder,
        budget: int,
        server: str,
        abort: Callable[[Attempt], None],
    ) -> None:
        self.handle = handle
        self.budget = budget
        self.next_offset = self._read = len(output.token_ids)
        self.awaits_tokens = False
        self.ended = False
        self.finish: Finish | None = None
        self._finish_weights: WeightTag | None = None  # until the reader has the finish
        self.error: RollwireError | None = None
        self._output: TrajectoryBuilder | None = output
        self._server = server
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk | None:
        """The next tokens of equal weights, as many as came; None after the last chunk, which has
        the finish.

        Raises:
            RollwireError: What the attempt failed with, after all that came before.
        """
        while not self.ended and self._read == self.next_offset:
            await self._wait(awaits_tokens=True)
        weights = self._finish_weights
        if self._read < self.next_offset and self._output is not None:
            chunk = self._output.chunk(self._read)
            self._read += len(chunk.token_ids)
        elif weights is not None:
            chunk = Chunk(self._read, (), (), weights, weights.revision)
        else:
            self._raise_error()
            return None
        if self.finish is not None and self._read == self.next_offset:
            self._finish_weights = None
            return replace(chunk, finish=self.finish)
        return chunk

    async def wait_end(self) -> None:
        """Returns when it has ended: a reader who wants it whole is woken once, not every step.

        Raises:
            RollwireError: What it failed with.
        """
        while not self.ended:
            await self._wait(awaits_tokens=False)
        self._raise_error()

    async def wait_rest(self, timeout: float) -> None:
        """After ``close``: waits for what the server had sampled and not sent yet."""
        with contextlib.suppress(TimeoutError, RollwireError):
            async with asyncio.timeout(timeout):
                await self.wait_end()

    def close(self) -> None:
        if not self.ended:
            self._abort(self)

    def detach(self) -> None:
        """What still comes is not added to the sequence, which may go on elsewhere."""
        self._output = None

    def append(
        self,
        offset: int,
        token_ids: list[int],
        logprobs: list[float],
        weights: WeightTag,
        oldest_kv_revision: int,
    ) -> int:
        """Appends the tokens of a message, and returns how many of them are new.

        Raises:
            ProtocolError: There is a gap before ``offset``.
        """
        if offset != self.next_offset:
            known = self.next_offset - offset
            if known < 0:
                raise ProtocolError(
                    f"{self._server}: tokens {self.next_offset} to {offset - 1} of the "
                    f"sequence never came: the server skipped them",
                    server=self._server,
                )
            token_ids, logprobs = token_ids[known:], logprobs[known:]
        output = self._output
        if output is not None and token_ids:  # in line: this is done for every token
            if weights is not output.run_weights or oldest_kv_revision != output.run_oldest:
                output.begin_run(weights, oldest_kv_revision, self._server)
            output.token_ids += token_ids
            output.logprobs += logprobs
        count = len(token_ids)
        self.next_offset += count
        return count

    def add_rows(self, rows: Rows) -> None:
        """Merges routing into that of the sequence.

        Raises:
            ValueError: It contradicts what came before.
        """
        if self._output is None or (routing := self._output.routing) is None:
            return
        prompt, output = routing.prompt_length, self.budget
        if rows.end > prompt + output:
            raise ValueError(
                f"the routing of token {rows.end - 1} came, of {prompt} of the prompt and at most "
                f"{output} of the output"
            )
        routing.add(rows)

    def end(self, finish: Finish, weights: WeightTag) -> None:
        """The server says that it has ended, while it served ``weights``."""
        if (
            finish.output_tokens > self.next_offset
            and finish.reason is not FinishReason.SUPERSEDED  # the newer stream has the rest
        ):
            self.fail(
                ProtocolError(
                    f"{self._server}: the sequence ended with {finish.output_tokens} tokens, of "
                    f"which {self.next_offset} came",
                    server=self._server,
                )
            )
            return
        self.finish, self._finish_weights = finish, weights
        self.ended = True
        self.wake()

    def fail(self, error: RollwireError) -> None:
        self.error = error
        self.ended = True
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, *, awaits_tokens: bool) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self.awaits_tokens = awaits_tokens
        try:
            await self._waiter
        finally:
            self._waiter = None
            self.awaits_tokens = False

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error
