"""One StreamRollouts call: any number of attempts at sequences, multiplexed in columns.

The tokens are kept once, in the ``TrajectoryBuilder`` of the sequence. An attempt is a place in it:
how far the server has come, and how far the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import grpc
from rollwire.conversion import finish_from_proto, weight_tag_from_proto
from rollwire.deadlines import elapsed
from rollwire.types import Finish, FinishReason, WeightTag
from rollwire.v1 import common_pb2, rollout_pb2

from rollwire_client._concurrency import cancel_all
from rollwire_client._errors import (
    ClosedError,
    ProtocolError,
    RollwireError,
    ServerUnreachableError,
)
from rollwire_client._rpc import conversion
from rollwire_client._rpc.status import error_from_call, error_from_sequence
from rollwire_client._trajectory import Chunk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client._routing_replay import Rows
    from rollwire_client._trajectory import TrajectoryBuilder

    Call = grpc.aio.StreamStreamCall[
        rollout_pb2.StreamRolloutsRequest, rollout_pb2.StreamRolloutsResponse
    ]

E = TypeVar("E", bound=Exception)

logger = logging.getLogger(__name__)

# Waking a reader costs several times what a token does, so readers are not woken more often than
# this (seconds). Where steps take longer, each step wakes them at once; the end of a sequence
# always does.
_WAKE_INTERVAL = 0.02


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a sequence on one server: read it with ``next``, then ``close`` it."""

    _stream: Stream
    handle: int  # its number on the stream
    budget: int  # the most output tokens that the sequence may come to
    _output: TrajectoryBuilder | None
    # Output tokens that came, and that the reader has: those before this attempt included.
    next_offset: int
    _read: int
    awaits_tokens: bool = False
    ended: bool = False
    finish: Finish | None = None
    _finish_weights: WeightTag | None = None  # until the reader has the finish
    _error: RollwireError | None = None
    _waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk | None:
        """The next tokens of equal weights, as many as came; None after the last chunk, which has
        the finish. Raises what the attempt failed with, after all that came before.
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
        """Returns when it has ended, or raises what it failed with: a reader who wants it whole is
        woken once, not every step.
        """
        while not self.ended:
            await self._wait(awaits_tokens=False)
        self._raise_error()

    def close(self) -> None:
        self._stream.abort(self)

    def detach(self) -> None:
        """What still comes is not added to the sequence, which may continue elsewhere."""
        self._output = None

    def append(
        self,
        offset: int,
        token_ids: list[int],
        logprobs: list[float],
        weights: WeightTag,
        oldest_kv_revision: int,
    ) -> int:
        """Appends the tokens of a message; returns how many of them are new."""
        if offset != self.next_offset:
            known = self.next_offset - offset
            if known < 0:
                raise self._stream.protocol_error(
                    f"tokens {self.next_offset} to {offset - 1} of the sequence never came: the "
                    "server skipped them"
                )
            token_ids, logprobs = token_ids[known:], logprobs[known:]
        output = self._output
        if output is not None and token_ids:  # in line: this is done for every token
            if weights is not output.run_weights or oldest_kv_revision != output.run_oldest:
                output.begin_run(weights, oldest_kv_revision, self._stream.address)
            output.token_ids += token_ids
            output.logprobs += logprobs
        count = len(token_ids)
        self.next_offset += count
        return count

    def add_rows(self, rows: Rows) -> None:
        """Raises ValueError if they contradict what came before."""
        if self._output is None or (routing := self._output.routing) is None:
            return
        prompt, output = routing.prompt_length, self.budget
        if rows.end > prompt + output:
            raise ValueError(
                f"the routing of token {rows.end - 1} came, but the prompt has {prompt} tokens "
                f"and the output at most {output}"
            )
        routing.add(rows)

    def end(self, finish: Finish, weights: WeightTag) -> None:
        """The server says that it has ended, while it served ``weights``."""
        if (
            finish.output_tokens > self.next_offset
            and finish.reason is not FinishReason.SUPERSEDED  # the newer stream has the rest
        ):
            self.fail(
                self._stream.protocol_error(
                    f"the sequence ended with {finish.output_tokens} tokens, of which "
                    f"{self.next_offset} came"
                )
            )
            return
        self.finish, self._finish_weights = finish, weights
        self.ended = True
        self.wake()

    def fail(self, error: RollwireError) -> None:
        self._error = error
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
        if self._error is not None:
            raise self._error


class Stream:
    """An open StreamRollouts call, which reads, writes, and watches for silence."""

    def __init__(
        self, call: Call, address: str, *, probe: Callable[[], Awaitable[object]], silence: float
    ) -> None:
        """Takes over ``call``. ``probe`` is called whenever nothing came for ``silence`` seconds;
        it raises if the server is gone.
        """
        self.address = address
        self.lost: RollwireError | None = None  # the error that ended it, and each of its attempts
        self.outstanding_tokens = 0  # that its attempts may still bring
        self.last_message_at = 0.0  # on the event loop's clock
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._probe = probe
        self._silence = silence
        self._attempts: dict[int, Attempt] = {}
        self._handles = 0
        self._to_wake: set[Attempt] = set()  # their readers wait for tokens that came
        self._waking: asyncio.TimerHandle | None = None
        self._woke = 0.0
        self._tag: tuple[common_pb2.WeightTag, WeightTag] | None = None
        self._outgoing: asyncio.Queue[rollout_pb2.StreamRolloutsRequest | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve(), name=f"rollwire stream to {address}")

    def start(
        self, request: rollout_pb2.GenerateRequest, output: TrajectoryBuilder, budget: int
    ) -> Attempt:
        """Sends a request; what comes is appended to ``output``, to at most ``budget`` tokens."""
        if self.lost is not None:
            raise copy.copy(self.lost)
        self._handles += 1
        length = len(output.token_ids)
        attempt = Attempt(self, self._handles, budget, output, length, length)
        self._attempts[attempt.handle] = attempt
        self.outstanding_tokens += budget - attempt.next_offset
        self._outgoing.put_nowait(
            rollout_pb2.StreamRolloutsRequest(handle=attempt.handle, start=request)
        )
        return attempt

    def abort(self, attempt: Attempt) -> None:
        """Tells the server to end an attempt that has not ended; its last chunk says so."""
        if attempt.handle in self._attempts:
            self._outgoing.put_nowait(
                rollout_pb2.StreamRolloutsRequest(
                    handle=attempt.handle, abort=rollout_pb2.AbortSequence()
                )
            )

    def protocol_error(self, problem: str) -> ProtocolError:
        return ProtocolError(f"{self.address}: {problem}", server=self.address)

    async def close(self, timeout: float) -> None:
        """Aborts what is under way, and lets the server end it for up to ``timeout`` seconds."""
        for attempt in list(self._attempts.values()):
            self.abort(attempt)
        self._outgoing.put_nowait(None)
        try:
            await asyncio.wait([self._task], timeout=timeout)
        finally:
            await cancel_all([self._task])

    async def _serve(self) -> None:
        """Runs the call until it ends; what goes wrong ends the attempts, not this task."""
        error: RollwireError = ServerUnreachableError(
            f"{self.address}: the server ended the stream", server=self.address
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._write()), tasks.create_task(self._watch())]
                await self._read()
                for task in beside:
                    task.cancel()
        except* grpc.aio.AioRpcError as group:
            error = error_from_call(_first(group), self.address)
        except* RollwireError as group:
            error = _first(group)
        except* asyncio.CancelledError:
            error = ClosedError(f"{self.address}: the client was closed", server=self.address)
        finally:
            self._call.cancel()
            self._lose(error)

    async def _read(self) -> None:
        clock = self._loop.time
        self.last_message_at = clock()
        async for message in self._call:
            self.last_message_at = clock()
            self._deliver(message)

    async def _write(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # it has ended; the reader knows why
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()

    async def _watch(self) -> None:
        clock = self._loop.time
        while True:
            await asyncio.sleep(self._silence / 2)
            silent_since = time.monotonic() - (clock() - self.last_message_at)
            if self._attempts and elapsed(silent_since) > self._silence:
                await self._probe()
                self.last_message_at = clock()

    def _deliver(self, message: rollout_pb2.StreamRolloutsResponse) -> None:
        weights = self._weights(message.weights)
        handles, counts = message.handles, message.counts
        token_ids, logprobs = message.token_ids[:], message.logprobs[:]
        oldest = message.oldest_kv_revisions or [weights.revision] * len(handles)
        if not (
            len(handles) == len(counts) == len(message.offsets) == len(oldest)
            and sum(counts) == len(token_ids) == len(logprobs)
        ):
            raise self.protocol_error(
                f"the columns of a message differ in length: {len(handles)} handles, "
                f"{len(token_ids)} token ids, {len(logprobs)} log-probabilities"
            )
        attempts, to_wake = self._attempts, self._to_wake
        start = new = 0
        for handle, count, offset, revision in zip(
            handles, counts, message.offsets, oldest, strict=True
        ):
            end = start + count
            if (attempt := attempts.get(handle)) is not None:
                try:
                    new += attempt.append(
                        offset, token_ids[start:end], logprobs[start:end], weights, revision
                    )
                except ProtocolError as error:
                    self._abandon(attempt, error)
                if attempt.awaits_tokens:
                    to_wake.add(attempt)
            start = end
        self.outstanding_tokens -= new
        for event in message.events:
            self._on_event(event, weights)
        if self._to_wake and self._waking is None:
            self._waking = self._loop.call_at(self._woke + _WAKE_INTERVAL, self._wake_readers)

    def _wake_readers(self) -> None:
        self._waking = None
        self._woke = self._loop.time()
        attempts, self._to_wake = self._to_wake, set()
        for attempt in attempts:
            attempt.wake()

    def _on_event(self, event: rollout_pb2.SequenceEvent, weights: WeightTag) -> None:
        attempt = self._attempts.get(event.handle)
        if attempt is None:
            return
        try:
            for rows in event.routed_experts:
                attempt.add_rows(conversion.rows_from_proto(rows, self._weights(rows.weights)))
        except ValueError as mismatch:
            self._abandon(attempt, self.protocol_error(str(mismatch)))
            return
        if event.HasField("finish"):
            self._forget(attempt)
            if (finish := finish_from_proto(event.finish)) is not None:
                attempt.end(finish, weights)
            else:
                problem = f"a sequence ended for no known reason: {event.finish}"
                attempt.fail(self.protocol_error(problem))
        elif event.HasField("error"):
            self._forget(attempt)
            attempt.fail(error_from_sequence(event.error, self.address))

    def _weights(self, message: common_pb2.WeightTag) -> WeightTag:
        # One object for equal tags, so that appending can compare them by identity.
        if self._tag is None or self._tag[0] != message:
            self._tag = (message, weight_tag_from_proto(message))
        return self._tag[1]

    def _abandon(self, attempt: Attempt, error: RollwireError) -> None:
        self.abort(attempt)
        self._forget(attempt)
        attempt.fail(error)

    def _forget(self, attempt: Attempt) -> None:
        del self._attempts[attempt.handle]
        self.outstanding_tokens -= attempt.budget - attempt.next_offset

    def _lose(self, error: RollwireError) -> None:
        self.lost = error
        if self._waking is not None:
            self._waking.cancel()
        attempts = list(self._attempts.values())
        if attempts:
            logger.info("%s; %d sequences were under way", error, len(attempts))
        for attempt in attempts:
            self._forget(attempt)
            attempt.fail(copy.copy(error))  # each gets a trajectory of its own


def _first(group: BaseExceptionGroup[E]) -> E:
    """The first error in a group that may be nested."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
