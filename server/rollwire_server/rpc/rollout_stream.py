"""StreamRollouts: any number of sequences over one stream, one message an engine step or interval.

Rows are built straight from the sequences, with as little Python for each token as possible: a
server that samples 256 sequences comes through here 256 times a step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from rollwire.conversion import duration_to_proto, finish_to_proto, weight_tag_to_proto
from rollwire.v1 import rollout_pb2

from rollwire_server.engines.base import PromptLogprobs, RoutedExperts
from rollwire_server.errors import ServiceError, bad_request
from rollwire_server.logs import MAX_CHARACTERS
from rollwire_server.rpc.validation import read_request
from rollwire_server.sequences.sequence import ReadyQueue
from rollwire_server.state import Rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Iterator

    import grpc
    from rollwire.types import WeightTag

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.sequences.sequence import (
        Cursor,
        Extra,
        Request,
        SequenceOutput,
        TokenSegment,
        TopTokens,
    )
    from rollwire_server.state import StateMachine

log = structlog.get_logger()

MESSAGE_BYTES = 1 << 20
TOKENS_AN_OUTPUT = 49_152
TOKEN_BYTES = 9  # the most that an id and a log-probability take
ROW_BYTES = 24  # handle, count, offset, oldest revision
TOKEN_ROW_BYTES = ROW_BYTES + TOKEN_BYTES
REFUSALS_A_MESSAGE = 200  # each has at most some 2 KB of message and facts
MAX_PENDING_REFUSALS = 1000


class Columns:
    """A message under construction: rows of sequences that were sampled under the same weights."""

    __slots__ = ("counts", "events", "handles", "logprobs", "offsets", "oldest", "size",
                 "token_ids", "weights")  # fmt: skip

    def __init__(self, weights: WeightTag) -> None:
        self.weights = weights
        self.handles: list[int] = []
        self.counts: list[int] = []
        self.offsets: list[int] = []
        self.oldest: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.events: list[rollout_pb2.SequenceEvent] = []
        self.size = 0  # in bytes, at most

    def add_token(self, cursor: Cursor, segment: TokenSegment) -> None:
        """For the token that the cursor has just taken."""
        sequence, at = cursor.sequence, cursor.position - 1
        self.handles.append(cursor.handle)
        self.counts.append(1)
        self.offsets.append(at)
        self.oldest.append(segment.oldest_kv_revision)
        self.token_ids.append(sequence.tokens[at])
        self.logprobs.append(sequence.logprobs[at - sequence.prefix_length])

    def add_tokens(self, handle: int, output: SequenceOutput) -> None:
        if output.segment is None:
            return
        self.handles.append(handle)
        self.counts.append(len(output.token_ids))
        self.offsets.append(output.offset)
        self.oldest.append(output.segment.oldest_kv_revision)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs

    def message(self) -> rollout_pb2.StreamRolloutsResponse:
        all_current = self.oldest.count(self.weights.revision) == len(self.oldest)
        return rollout_pb2.StreamRolloutsResponse(
            weights=weight_tag_to_proto(self.weights),
            handles=self.handles,
            counts=self.counts,
            offsets=self.offsets,
            oldest_kv_revisions=() if all_current else self.oldest,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            events=self.events,
        )


@dataclass(eq=False)
class RolloutStream:
    _engine: Engine
    _state: StateMachine
    _sequences: Sequences
    _counters: ServerCounters
    _commands: AsyncIterable[rollout_pb2.StreamRolloutsRequest]
    _context: grpc.aio.ServicerContext[Any, Any]
    _queue: ReadyQueue = field(default_factory=ReadyQueue)
    _cursors: dict[int, Cursor] = field(default_factory=dict)  # by handle; have not ended
    _refusals: list[rollout_pb2.SequenceEvent] = field(default_factory=list)
    _refusals_sent: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Serves the call until the client has half-closed and every sequence has ended."""
        reading = asyncio.create_task(self._read_commands(), name="read StreamRollouts")
        reading.add_done_callback(lambda _: self._queue.wake())
        try:
            while not (reading.done() and not self._cursors and not self._refusals):
                await self._queue.wait()
                if reading.done():
                    reading.result()  # a command that makes no sense ends the call
                for message in self._pending_messages():
                    await self._context.write(message)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._queue.close()
            for cursor in self._cursors.values():
                self._sequences.detach(cursor)

    # Commands of the client.

    async def _read_commands(self) -> None:
        async for command in self._commands:
            self._handle(command)
            del command  # which may be large, while the next one does not come
            while len(self._refusals) >= MAX_PENDING_REFUSALS:  # until the client reads
                self._refusals_sent.clear()
                await self._refusals_sent.wait()

    def _handle(self, command: rollout_pb2.StreamRolloutsRequest) -> None:
        handle = command.handle
        match command.WhichOneof("command"):
            case "start":
                if handle in self._cursors:
                    raise bad_request(
                        "handle",
                        f"handle {handle} is in use on this stream: choose a new one for each",
                    )
                self._start(handle, command.start)
            case "abort":
                cursor = self._cursors.get(handle)
                if cursor is not None and cursor.sequence.cursor is cursor:  # not superseded
                    self._sequences.abort_soon(cursor.sequence)
            case _:
                raise bad_request("command", "a message without a command: set start or abort")

    def _start(self, handle: int, message: rollout_pb2.GenerateRequest) -> None:
        try:
            request = self._read_start(message)
            self._cursors[handle] = self._sequences.start(request, self._queue, handle)
        except ServiceError as error:
            self._counters.refusals[error.reason.name.lower()] += 1
            log.debug(
                "refused",
                request_id=message.request_id[:MAX_CHARACTERS],
                attempt=message.attempt,
                reason=error.reason.name,
                message=error.message,
            )
            self._refusals.append(
                rollout_pb2.SequenceEvent(handle=handle, error=_error_to_proto(error))
            )
            self._queue.wake()

    def _read_start(self, message: rollout_pb2.GenerateRequest) -> Request:
        self._state.check_started(Rpc.GENERATE)
        if not message.request_id:
            raise bad_request(
                "request_id", "StreamRollouts needs a request_id: a UUID for each sequence"
            )
        return read_request(message, self._engine.describe(), self._sequences.next_key())

    # Messages to the client.

    def _pending_messages(self) -> Iterator[rollout_pb2.StreamRolloutsResponse]:
        """All that is pending: the parts of a sequence in order, each handle once a message."""
        cursors = self._queue.pop_all()
        if self._refusals:
            refusals, self._refusals = self._refusals, []
            self._refusals_sent.set()
            for i in range(0, len(refusals), REFUSALS_A_MESSAGE):
                part = refusals[i : i + REFUSALS_A_MESSAGE]
                yield rollout_pb2.StreamRolloutsResponse(events=part)
        while cursors:
            behind: list[Cursor] = []
            for columns in self._collect(cursors, behind):
                yield columns.message()
            cursors = behind

    def _collect(self, cursors: list[Cursor], behind: list[Cursor]) -> Iterator[Columns]:
        """One output of each cursor, in as few messages as weights and size allow; those that have
        more are added to ``behind``.
        """
        open_columns: dict[int, Columns] = {}  # by the identity of their weights
        for cursor in cursors:
            if (segment := cursor.next_token()) is not None:  # nearly always
                weights, size = segment.weights, TOKEN_ROW_BYTES
            elif (output := cursor.next_output(TOKENS_AN_OUTPUT)) is not None:
                weights = output.weights or self._sequences.weights
                size = ROW_BYTES + TOKEN_BYTES * len(output.token_ids)
                event = None
                if output.end is not None or output.extra_bytes:
                    event = _event(cursor.handle, output)
                    size += event.ByteSize()
            else:
                continue
            columns = open_columns.get(id(weights))
            if columns is None or columns.size + size > MESSAGE_BYTES:
                if columns is not None:
                    yield columns
                columns = open_columns[id(weights)] = Columns(weights)
            columns.size += size
            if segment is not None:
                columns.add_token(cursor, segment)
            elif output is not None:
                columns.add_tokens(cursor.handle, output)
                if event is not None:
                    columns.events.append(event)
                if cursor.done:
                    self._remove(cursor)
                elif cursor.behind:
                    behind.append(cursor)
        yield from open_columns.values()

    def _remove(self, cursor: Cursor) -> None:
        if self._cursors.get(cursor.handle) is cursor:
            del self._cursors[cursor.handle]
        self._sequences.detach(cursor)


def _error_to_proto(error: ServiceError) -> rollout_pb2.SequenceError:
    retry_after = error.reason.retry_after
    return rollout_pb2.SequenceError(
        code=error.reason.code.value[0],
        reason=error.reason.name,
        message=error.message,
        metadata=error.metadata,
        retry_delay=None if retry_after is None else duration_to_proto(retry_after),
        field=error.field or "",
    )


def top_logprobs_to_proto(tops: list[TopTokens]) -> rollout_pb2.TopLogprobs | None:
    if not tops:
        return None
    message = rollout_pb2.TopLogprobs(k=len(tops[0][0]))
    for token_ids, logprobs in tops:
        message.token_ids.extend(token_ids)
        message.logprobs.extend(logprobs)
    return message


def prompt_logprobs_to_proto(extras: Iterable[Extra]) -> list[rollout_pb2.PromptLogprobs]:
    return [
        rollout_pb2.PromptLogprobs(
            start_position=part.start_position,
            logprobs=part.logprobs,
            oldest_kv_revision=part.oldest_kv_revision,
        )
        for extra in extras
        if isinstance(part := extra.value, PromptLogprobs)
    ]


def routed_experts_to_proto(extras: Iterable[Extra]) -> list[rollout_pb2.RoutedExperts]:
    return [
        rollout_pb2.RoutedExperts(
            start_position=rows.start_position,
            num_tokens=rows.num_tokens,
            num_layers=rows.num_layers,
            top_k=rows.top_k,
            experts=rows.experts,
            bytes_per_expert=rows.bytes_per_expert,
            weights=weight_tag_to_proto(extra.weights),
            oldest_kv_revision=rows.oldest_kv_revision,
        )
        for extra in extras
        if isinstance(rows := extra.value, RoutedExperts)
    ]


def _event(handle: int, output: SequenceOutput) -> rollout_pb2.SequenceEvent:
    end = output.end
    return rollout_pb2.SequenceEvent(
        handle=handle,
        finish=None if end is None or isinstance(end, ServiceError) else finish_to_proto(end),
        error=_error_to_proto(end) if isinstance(end, ServiceError) else None,
        top_logprobs=top_logprobs_to_proto(output.tops),
        prompt_logprobs=prompt_logprobs_to_proto(output.extras),
        routed_experts=routed_experts_to_proto(output.extras),
    )
