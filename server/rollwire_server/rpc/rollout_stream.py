"""StreamRollouts: any number of sequences over one stream, one message an engine step, or one each
delivery interval.

Rows are built straight from the sequences, with as little Python a token as can be: a server that
samples 256 sequences passes through here 256 times a step.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from rollwire.conversion import finish_to_proto, weight_tag_to_proto
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2

from rollwire_server.errors import ServiceError
from rollwire_server.logs import MOST_CHARACTERS
from rollwire_server.rpc import conversion
from rollwire_server.rpc.message_limits import check_parsed
from rollwire_server.rpc.validation import read_request
from rollwire_server.sequences.cursor import Outbox
from rollwire_server.state import Rpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire.types import WeightTag

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.cursor import Chunk, Reader
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.sequences.sequence import Run
    from rollwire_server.state import StateMachine

log = structlog.get_logger()

MESSAGE_BYTES = 1 << 20
TOKENS_A_CHUNK = 49_152
TOKEN_BYTES = 9  # the most that an id and a log-probability take
REFUSALS_A_MESSAGE = 200  # each has at most some 2 KB of message and facts
REFUSALS_PENDING = 1000
ROW_BYTES = 24  # handle, count, offset, oldest revision


class Columns:
    """One message under way: rows of sequences that were sampled under the same weights."""

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
        self.size = 0

    def add(self, handle: int, chunk: Chunk, event: rollout_pb2.SequenceEvent | None) -> None:
        """Adds what a sequence has; ``event`` is what is more than its tokens."""
        count = len(chunk.token_ids)
        if count and chunk.run is not None:
            self.handles.append(handle)
            self.counts.append(count)
            self.offsets.append(chunk.offset)
            self.oldest.append(chunk.run.oldest_kv_revision)
            self.token_ids += chunk.token_ids
            self.logprobs += chunk.logprobs
        if event is not None:
            self.events.append(event)

    def add_token(self, reader: Reader, run: Run) -> None:
        """Adds the token that a reader has just taken."""
        sequence, at = reader.sequence, reader.cursor - 1
        self.handles.append(reader.handle)
        self.counts.append(1)
        self.offsets.append(at)
        self.oldest.append(run.oldest_kv_revision)
        self.token_ids.append(sequence.tokens[at])
        self.logprobs.append(sequence.logprobs[at - sequence.prefix_length])

    def message(self) -> rollout_pb2.StreamRolloutsResponse:
        """All of it as a message."""
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


class RolloutStream:
    """One StreamRollouts call."""

    def __init__(
        self,
        engine: Engine,
        state: StateMachine,
        sequences: Sequences,
        counters: ServerCounters,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        self._engine = engine
        self._state = state
        self._sequences = sequences
        self._counters = counters
        self._context = context
        self._outbox = Outbox()
        self._readers: dict[int, Reader] = {}
        self._refused: list[rollout_pb2.SequenceEvent] = []
        self._told = asyncio.Event()  # what was refused

    async def run(self) -> None:
        """Serves the call until the client has half-closed and every sequence has ended."""
        reading = asyncio.create_task(self._read(), name="read StreamRollouts")
        reading.add_done_callback(lambda _: self._outbox.wake())
        try:
            while not (reading.done() and not self._readers and not self._refused):
                await self._outbox.wait()
                if reading.done():
                    reading.result()  # a command that makes no sense ends the call
                for message in self._messages():
                    await self._context.write(message)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._outbox.close()
            for reader in self._readers.values():
                self._sequences.detach(reader)

    # What the client says.

    async def _read(self) -> None:
        """Takes commands until the client half-closes."""
        while (command := await self._context.read()) is not grpc.aio.EOF:
            self._obey(command)
            while len(self._refused) >= REFUSALS_PENDING:  # until the client reads
                self._told.clear()
                await self._told.wait()

    def _obey(self, command: rollout_pb2.StreamRolloutsRequest) -> None:
        check_parsed(command)
        handle = command.handle
        match command.WhichOneof("command"):
            case "start":
                if handle in self._readers:
                    raise ServiceError(
                        Reason.BAD_REQUEST,
                        f"handle {handle} is in use on this stream: choose a new one for each",
                        field="handle",
                    )
                self._start(handle, command.start)
            case "abort":
                reader = self._readers.get(handle)
                if reader is not None and reader.sequence.reader is reader:  # not superseded
                    self._sequences.abort_now(reader.sequence)
            case _:
                raise ServiceError(
                    Reason.BAD_REQUEST, "a message without a command: set start or abort",
                    field="command",
                )  # fmt: skip

    def _start(self, handle: int, request: rollout_pb2.GenerateRequest) -> None:
        try:
            self._state.check_started(Rpc.GENERATE)
            _check_named(request)
            checked = read_request(request, self._engine.describe(), self._sequences.next_key())
            self._readers[handle] = self._sequences.start(checked, self._outbox, handle)
        except ServiceError as error:
            self._counters.refusals[error.reason.name.lower()] += 1
            log.debug(
                "refused", request_id=request.request_id[:MOST_CHARACTERS], attempt=request.attempt,
                reason=error.reason.name, message=error.message,
            )  # fmt: skip
            self._refused.append(
                rollout_pb2.SequenceEvent(handle=handle, error=conversion.sequence_error(error))
            )
            self._outbox.wake()

    # What the client is told.

    def _messages(self) -> Iterator[rollout_pb2.StreamRolloutsResponse]:
        """What is pending now, each sequence's parts in order, a handle once a message."""
        readers = self._outbox.take()
        if self._refused:
            refused, self._refused = self._refused, []
            self._told.set()
            for i in range(0, len(refused), REFUSALS_A_MESSAGE):
                part = refused[i : i + REFUSALS_A_MESSAGE]
                yield rollout_pb2.StreamRolloutsResponse(events=part)
        while readers:
            behind: list[Reader] = []
            for columns in self._round(readers, behind):
                yield columns.message()
            readers = behind

    def _round(self, readers: list[Reader], behind: list[Reader]) -> Iterator[Columns]:
        """One chunk of each reader, in as few messages as weights and size allow."""
        open_columns: dict[int, Columns] = {}  # by the identity of their weights
        for reader in readers:
            if (run := reader.next_token()) is not None:  # nearly always
                chunk, event, weights = None, None, run.weights
                size = ROW_BYTES + TOKEN_BYTES
            elif (chunk := reader.next_chunk(TOKENS_A_CHUNK)) is not None:
                weights = chunk.weights or self._sequences.tag
                event = _event(reader.handle, chunk) if chunk.has_event else None
                size = ROW_BYTES + TOKEN_BYTES * len(chunk.token_ids)
                size += event.ByteSize() if event is not None else 0
            else:
                continue
            columns = open_columns.get(id(weights))
            if columns is None or columns.size + size > MESSAGE_BYTES:
                if columns is not None:
                    yield columns
                columns = open_columns[id(weights)] = Columns(weights)
            columns.size += size
            if run is not None:
                columns.add_token(reader, run)
            elif chunk is not None:
                columns.add(reader.handle, chunk, event)
                if reader.done:
                    self._finished(reader)
                elif reader.behind:
                    behind.append(reader)
        yield from open_columns.values()

    def _finished(self, reader: Reader) -> None:
        if self._readers.get(reader.handle) is reader:
            del self._readers[reader.handle]
        self._sequences.detach(reader)


def _check_named(request: rollout_pb2.GenerateRequest) -> None:
    if not request.request_id:
        raise ServiceError(
            Reason.BAD_REQUEST,
            "StreamRollouts needs a request_id: a UUID for each sequence",
            field="request_id",
        )


def _event(handle: int, chunk: Chunk) -> rollout_pb2.SequenceEvent:
    end = chunk.end
    return rollout_pb2.SequenceEvent(
        handle=handle,
        finish=None if end is None or isinstance(end, ServiceError) else finish_to_proto(end),
        error=conversion.sequence_error(end) if isinstance(end, ServiceError) else None,
        top_logprobs=conversion.top_logprobs(chunk.tops),
        prompt_logprobs=conversion.prompt_logprobs(chunk.prompt_logprobs),
        routed_experts=conversion.routed_experts(chunk.routed_experts),
    )
