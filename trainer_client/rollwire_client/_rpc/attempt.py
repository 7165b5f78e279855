"""One attempt at a sequence on one server, as it comes over a link.

It keeps what it got in pieces of equal weights, so that a slow reader finds few large chunks
instead of many small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire.types import Finish, FinishReason, WeightTag

from rollwire_client._data import Chunk
from rollwire_client._errors import ProtocolError, RollwireError

if TYPE_CHECKING:
    from rollwire_client._routing_replay import RoutingBuilder, Rows
    from rollwire_client._rpc.rollout_stream import Stream


@dataclass(slots=True)
class _Piece:
    """Tokens that were sampled under the same weights and are not read yet."""

    offset: int
    token_ids: list[int]
    logprobs: list[float]
    weights: WeightTag
    oldest_kv_revision: int

    def chunk(self, finish: Finish | None) -> Chunk:
        return Chunk(
            self.offset,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.weights,
            self.oldest_kv_revision,
            finish,
        )


class Attempt:
    """One attempt at a sequence on one server: read it with ``next``, then ``close`` it."""

    __slots__ = (
        "_error",
        "_finish",
        "_link",
        "_pieces",
        "_routing",
        "_waiter",
        "_whole",
        "budget",
        "ended",
        "handle",
        "next_offset",
    )

    def __init__(
        self, link: Stream, handle: int, offset: int, budget: int, routing: RoutingBuilder | None
    ) -> None:
        self.handle = handle
        self.next_offset = offset
        self.budget = budget
        self.ended = False
        self._link = link
        self._routing = routing
        self._pieces: deque[_Piece] = deque()
        self._finish: Finish | None = None
        self._error: RollwireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False

    async def next(self, *, whole: bool = False) -> Chunk | None:
        """The next chunk; None after the last one.

        Args:
            whole: Wait for the end of the attempt first: a reader that wants it as a whole is
                woken once, not by every step.

        Raises:
            RollwireError: What the attempt failed with, after the last chunk before it.
        """
        while not self.ended and (whole or not self._pieces):
            await self._wait(whole=whole)
        if self._pieces:
            piece = self._pieces.popleft()
            return piece.chunk(None if self._pieces else self._finish)
        if self._error is not None:
            raise self._error
        return None

    def pending(self) -> list[Chunk]:
        """What came and was not read yet, of an attempt that goes on; no later chunk has it."""
        if self.ended:
            return []
        pieces, self._pieces = self._pieces, deque()
        return [piece.chunk(None) for piece in pieces]

    def close(self) -> None:
        """Ends it on the server if it has not ended yet."""
        if not self.ended:
            self._link.abort(self)

    async def wait_end(self, timeout: float) -> None:
        """Waits for the last tokens of an attempt that was closed, at most ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.ended:
                    await self._wait(whole=True)

    def rest(self) -> list[Chunk]:
        """What came and was not read, of an attempt that nobody reads any more.

        Its end is told only if it is the sequence's own, not that it was aborted.
        """
        pieces, self._pieces = self._pieces, deque()
        finish = self._finish
        if finish is not None and finish.reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            finish = None
        return [piece.chunk(finish if piece is pieces[-1] else None) for piece in pieces]

    async def _wait(self, *, whole: bool) -> None:
        """Returns when something came, or only at the end."""
        self._whole = whole
        self._waiter = self._link.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(
        self,
        offset: int,
        token_ids: list[int],
        logprobs: list[float],
        weights: WeightTag,
        oldest_kv_revision: int,
    ) -> int:
        """Appends what a message brings and says how many of its tokens are new.

        Raises:
            ProtocolError: There is a gap before ``offset``.
        """
        if offset != self.next_offset:
            known = self.next_offset - offset
            if known < 0:
                raise ProtocolError(
                    f"{self._link.address}: tokens {self.next_offset} to {offset - 1} of the "
                    f"sequence never came: the server skipped them",
                    server=self._link.address,
                )
            token_ids, logprobs = token_ids[known:], logprobs[known:]
        if not token_ids:
            return 0
        if (
            self._pieces
            and (last := self._pieces[-1]).weights is weights
            and last.oldest_kv_revision == oldest_kv_revision
        ):
            last.token_ids += token_ids
            last.logprobs += logprobs
        else:
            self._pieces.append(
                _Piece(self.next_offset, token_ids, logprobs, weights, oldest_kv_revision)
            )
        self.next_offset += len(token_ids)
        if self._waiter is not None and not self._whole:
            self._link.to_wake.add(self)
        return len(token_ids)

    def take_rows(self, rows: Rows) -> None:
        """Merges routing into that of the sequence.

        Raises:
            ValueError: It does not go with what came before.
        """
        if (routing := self._routing) is None:
            return
        if rows.end > routing.prompt + self.budget:
            raise ValueError(
                f"the routing of token {rows.end - 1} came, of {routing.prompt} of the prompt and "
                f"at most {self.budget} of the output"
            )
        routing.add(rows)

    def finish(self, finish: Finish, weights: WeightTag) -> None:
        """Ends it as the server says.

        Raises:
            ProtocolError: The server sampled more tokens than it sent.
        """
        if (
            finish.output_tokens > self.next_offset
            and finish.reason is not FinishReason.SUPERSEDED  # the newer stream has the rest
        ):
            raise ProtocolError(
                f"{self._link.address}: the sequence ended with {finish.output_tokens} tokens, of "
                f"which {self.next_offset} came",
                server=self._link.address,
            )
        if not self._pieces:
            self._pieces.append(_Piece(self.next_offset, [], [], weights, weights.revision))
        self._finish = finish
        self.end(None)

    def end(self, error: RollwireError | None) -> None:
        """Ends it: no more comes from the server."""
        self.ended = True
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Lets the reader go on, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
