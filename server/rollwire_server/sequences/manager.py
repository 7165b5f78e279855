"""The engine room: every sequence of the server, between the streams and the engine.

Both ways in (Generate, StreamRollouts) are views of what is here. One record a request id: live, or
kept for its grace to be picked up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import TYPE_CHECKING

import structlog
from rollwire.reasons import Reason
from rollwire.types import FinishReason, version_text

from rollwire_server.engines.base import EndReason, EngineError
from rollwire_server.errors import ServiceError
from rollwire_server.sequences.cursor import Reader
from rollwire_server.sequences.registry import Records, check_pick_up
from rollwire_server.sequences.sequence import Sequence, new_sequence
from rollwire_server.state import Rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollwire.types import Finish, WeightTag

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import End, Engine, Step
    from rollwire_server.sequences.cursor import Outbox
    from rollwire_server.sequences.sequence import Request
    from rollwire_server.state import StateMachine

log = structlog.get_logger()


class Sequences:
    """Every sequence of one server; the engine's Sink.

    Args:
        engine: Samples.
        state: Is asked before a sequence starts.
        max_waiting: Sequences beyond those that run at once; more are refused (QUEUE_FULL).
        counters: Are kept up to date.
        max_sequence_seconds: From a sequence's arrival to its last token, at most.
        engine_died: Called when the engine is dead.
    """

    def __init__(
        self,
        engine: Engine,
        state: StateMachine,
        counters: ServerCounters,
        *,
        max_waiting: int,
        max_sequence_seconds: float,
        engine_died: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._state = state
        self._counters = counters
        self._max_waiting = max_waiting
        self._max_sequence_seconds = max_sequence_seconds
        self._engine_died = engine_died
        self._keys = itertools.count(1)
        self._records = Records()
        self._sampling: dict[int, Sequence] = {}
        self._awaiting_version: dict[Sequence, None] = {}
        self._dropped: list[int] = []
        self._drops = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._weights: WeightTag | None = None

    @property
    def tag(self) -> WeightTag:
        """The weights that the next token is sampled under; known once the engine has started."""
        if self._weights is None:
            raise RuntimeError("asked for the weights before the engine has started")
        return self._weights

    # What streams and services do.

    def next_key(self) -> int:
        """A key for the engine, never given before."""
        return next(self._keys)

    @property
    def live(self) -> int:
        """Sequences that have not ended: sampling, waiting or held."""
        return len(self._sampling) + len(self._awaiting_version)

    def start(self, request: Request, outbox: Outbox, handle: int = 0) -> Reader:
        """Starts a sequence, or picks up the live or kept one of the same id and attempt.

        Returns the stream's reader, which begins right after the given prefix. Raises ServiceError,
        and then nothing has changed.
        """
        if request.detach_grace > (most := self._max_sequence_seconds):
            request = dataclasses.replace(request, detach_grace=most)
        record = self._records.find(request)
        if record is not None and record.request.attempt == request.attempt:
            return self._pick_up(record, request, outbox, handle)
        self._state.check(Rpc.GENERATE)
        self._refuse_unread()
        sequence = new_sequence(request)
        complete = sequence.complete()
        if complete is None:
            self._refuse_weights(request)
            if record is None or record.end is not None:  # else it takes the place of that
                self._refuse_full()
        if record is not None:
            self._end(record, record.finish(FinishReason.SUPERSEDED, "a newer attempt took over"))
            self._records.forget(record)
        self._records.add(sequence)
        log.debug(
            "sequence begun", request_id=request.request_id, attempt=request.attempt,
            prompt_tokens=len(request.spec.prompt), given_tokens=len(request.spec.prefix),
        )  # fmt: skip
        reader = self._attach(sequence, outbox, handle)
        if complete is not None:
            self._end(sequence, sequence.finish(complete))
        elif request.wants_newer(self._version):
            self._awaiting_version[sequence] = None
            self._idle.clear()
            self._arm_timeout(sequence)
        else:
            self._submit(sequence)
            self._arm_timeout(sequence)
        return reader

    def detach(self, reader: Reader) -> None:
        """The reader's stream is gone: the sequence is kept for its grace, or ends at once."""
        sequence = reader.sequence
        if sequence.reader is not reader:
            return
        sequence.reader = None
        self._records.unread.discard(sequence)
        grace = sequence.request.detach_grace
        if sequence not in self._records:
            return  # it has ended, and was forgotten
        if grace > 0:
            sequence.arm("grace", grace, self._grace_over)
        else:
            self._grace_over(sequence)

    async def abort(self, keys: Iterable[tuple[str, int | None]]) -> tuple[int, list[str]]:
        """Ends sequences by exact id (and attempt): how many, and the ids that are not live."""
        ended = 0
        not_found = []
        for request_id, attempt in keys:
            record = self._records.get(request_id)
            live = record is not None and record.end is None
            if live and record is not None and attempt in (None, record.request.attempt):
                self.abort_now(record)
                ended += 1
            else:
                not_found.append(request_id)
        await self._drop()
        return ended, not_found

    def abort_now(self, sequence: Sequence) -> None:
        """Ends one sequence; the engine is told in a moment."""
        self._end(sequence, sequence.finish(FinishReason.ABORTED, "aborted by a caller"))

    async def abort_all(self) -> int:
        """Ends every live sequence."""
        live = [(record.request.request_id, None) for record in self._records.live()]
        return (await self.abort(live))[0]

    async def interrupt_all(self, message: str) -> int:
        """Gives every live sequence up: they go on elsewhere."""
        live = self._records.live()
        for record in live:
            self._end(record, record.finish(FinishReason.INTERRUPTED, message))
        await self._drop()
        return len(live)

    async def idle(self) -> None:
        """Returns when no sequence is live."""
        await self._idle.wait()

    # What commits do.

    async def keep_bounds(self, version: int | None) -> None:
        """Interrupts what must not go on under ``version``; called while held, before a commit,
        and after it for what came meanwhile.
        """
        for record in list(self._sampling.values()):
            request = record.request
            if request.wants_older(version):
                bound = f"beyond max_weight_version {request.max_weight_version}"
            elif request.wants_newer(version):
                bound = f"below min_weight_version {request.min_weight_version}"
            else:
                continue
            message = f"{version_text(version)} came, {bound}"
            self._end(record, record.finish(FinishReason.INTERRUPTED, message))
        await self._drop()

    def committed(self, weights: WeightTag) -> None:
        """Learns the weights of every later token; starts the sequences that waited for them."""
        self._weights = weights
        for sequence in list(self._awaiting_version):
            request = sequence.request
            if request.wants_newer(weights.version):
                continue
            del self._awaiting_version[sequence]
            if request.wants_older(weights.version):
                bound = f"beyond max_weight_version {request.max_weight_version}"
                message = f"{version_text(weights.version)} came, {bound}"
                self._end(sequence, sequence.finish(FinishReason.INTERRUPTED, message))
            else:
                self._submit(sequence)

    async def run(self) -> None:
        """Takes sequences whose streams are gone out of the engine; runs until it is cancelled."""
        while True:
            await self._drops.wait()
            await self._drop()

    # What the engine tells (Sink).

    def on_step(self, step: Step) -> None:
        """Appends what a step sampled, and lets the readers know.

        A step whose columns differ in length ends the server: from then on nobody could say which
        token is whose.
        """
        if (ragged := _ragged(step)) is not None:
            self.on_failure(ragged)
            return
        sampling, weights, rows = self._sampling, step.weights, len(step.keys)
        self._counters.sampled_tokens += rows
        oldest = step.oldest_kv_revisions or itertools.repeat(weights.revision, rows)
        for key, extras in step.extras.items():
            if (sequence := sampling.get(key)) is not None:
                sequence.extend(extras, weights)
                self._tell(sequence)
        for key, token, logprob, revision in zip(
            step.keys, step.token_ids, step.logprobs, oldest, strict=True
        ):
            sequence = sampling.get(key)
            if sequence is None:  # ended by the server while the step ran
                continue
            sequence.append(token, logprob, weights, revision)
            if (reader := sequence.reader) is not None:
                reader.outbox.put(reader)
        for end in step.ends:
            if (sequence := sampling.pop(end.key, None)) is not None:
                self._end(sequence, _end_of(sequence, end))

    def on_failure(self, error: BaseException) -> None:
        """The engine is dead: its sequences go on elsewhere, the server goes down."""
        message = f"the engine died: {error}"
        for record in self._records.live():
            self._end(record, record.finish(FinishReason.INTERRUPTED, message))
        self._engine_died(error)

    # Refusals.

    def _refuse_full(self) -> None:
        limit = self._engine.describe().max_running_sequences + self._max_waiting
        if self.live >= limit:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{self.live} sequences run or wait, the limit is {limit}: use another server, "
                "or try again",
            )

    def _refuse_unread(self) -> None:
        if self._records.unread.full:
            raise ServiceError(
                Reason.QUEUE_FULL,
                "what has ended and was not read yet takes all the memory that it may: read the "
                "streams that are open, or use another server",
            )

    def _refuse_weights(self, request: Request) -> None:
        if request.wants_older(self._version):
            raise ServiceError(
                Reason.WEIGHTS_TOO_NEW,
                f"the server serves {version_text(self._version)}, newer than max_weight_version "
                f"{request.max_weight_version}: use a server that holds it",
                metadata={"version": str(self._version)},
            )

    @property
    def _version(self) -> int | None:
        return self._weights.version if self._weights is not None else None

    # The life of one record.

    def _pick_up(self, record: Sequence, request: Request, outbox: Outbox, handle: int) -> Reader:
        offset = check_pick_up(record, request)
        log.debug(
            "sequence picked up", request_id=request.request_id, attempt=request.attempt,
            given_tokens=offset,
        )  # fmt: skip
        if record.reader is not None:
            record.reader.supersede()
        record.request = dataclasses.replace(
            record.request,
            detach_grace=request.detach_grace,
            delivery_interval=request.delivery_interval,
        )
        record.disarm("grace")
        if record.end is not None:
            record.arm("grace", request.detach_grace, self._records.forget)
        return self._attach(record, outbox, handle, offset)

    def _attach(
        self, sequence: Sequence, outbox: Outbox, handle: int, offset: int | None = None
    ) -> Reader:
        at = sequence.prefix_length if offset is None else offset
        sequence.reader = Reader(sequence, outbox, handle, at)
        if sequence.end is not None:
            self._records.unread.add(sequence)
        outbox.put(sequence.reader)
        return sequence.reader

    def _submit(self, sequence: Sequence) -> None:
        spec = sequence.request.spec
        self._sampling[spec.key] = sequence
        self._idle.clear()
        self._engine.submit(spec)

    async def _drop(self) -> None:
        """Takes what the server has ended out of the engine."""
        self._drops.clear()
        keys, self._dropped = self._dropped, []
        await self._engine.abort(keys)

    def _end(self, sequence: Sequence, end: Finish | ServiceError) -> None:
        """Ends a sequence once and for all; what it sampled stays for its reader."""
        if sequence.end is not None:
            return
        sequence.end = end
        key = sequence.request.spec.key
        if self._sampling.pop(key, None) is not None:  # the engine does not know yet
            self._dropped.append(key)
            self._drops.set()
        self._awaiting_version.pop(sequence, None)
        sequence.disarm("timeout")
        self._counters.ended_sequences[end.reason.name.lower()] += 1
        request = sequence.request
        log.debug(
            "sequence ended", request_id=request.request_id, attempt=request.attempt,
            reason=end.reason.name, output_tokens=len(sequence.tokens),
        )  # fmt: skip
        if not self.live:
            self._idle.set()
        self._tell(sequence)
        if sequence.reader is not None:
            self._records.unread.add(sequence)
        grace = request.detach_grace
        if grace <= 0:
            self._records.forget(sequence)
            return
        self._records.keep(sequence)
        if sequence in self._records and "grace" not in sequence.timers:
            sequence.arm("grace", grace, self._records.forget)

    def _grace_over(self, sequence: Sequence) -> None:
        if sequence.end is None:
            self._end(sequence, sequence.finish(FinishReason.ABORTED, "its stream was lost"))
        self._records.forget(sequence)

    def _timed_out(self, sequence: Sequence, seconds: float) -> None:
        if sequence.end is not None:
            return
        request = sequence.request
        if sequence in self._awaiting_version:
            error = ServiceError(
                Reason.WEIGHTS_TOO_OLD,
                f"the server serves {version_text(self._version)} and got no version "
                f"{request.min_weight_version} within {seconds:g} s",
            )
        else:
            error = ServiceError(
                Reason.TIMED_OUT,
                f"not finished within its timeout of {seconds:g} s; "
                f"{len(sequence.tokens)} output tokens were sampled",
            )
        self._end(sequence, error)

    def _tell(self, sequence: Sequence) -> None:
        if sequence.reader is not None:
            sequence.reader.outbox.put(sequence.reader)

    def _arm_timeout(self, sequence: Sequence) -> None:
        timeout, most = sequence.request.timeout, self._max_sequence_seconds
        seconds = most if timeout is None else min(timeout, most)
        sequence.arm("timeout", seconds, self._timed_out, seconds)


def _ragged(step: Step) -> EngineError | None:
    """What is wrong with a step whose columns differ in length."""
    keys, tokens, logprobs = len(step.keys), len(step.token_ids), len(step.logprobs)
    revisions = len(step.oldest_kv_revisions)
    if keys == tokens == logprobs and revisions in (0, keys):
        return None
    return EngineError(
        f"one step has {keys} keys of sequences, {tokens} tokens, {logprobs} log-probabilities and "
        f"{revisions} KV revisions: a bug of the engine"
    )


def _end_of(sequence: Sequence, end: End) -> Finish | ServiceError:
    match end.reason:
        case EndReason.STOP:
            return sequence.finish(FinishReason.STOP)
        case EndReason.LENGTH:
            return sequence.finish(FinishReason.LENGTH)
        case EndReason.INTERRUPTED:
            return sequence.finish(FinishReason.INTERRUPTED, end.message)
        case EndReason.STEP_FAILED:
            return ServiceError(
                Reason.STEP_FAILED,
                f"the engine failed at this sequence after {len(sequence.tokens)} output tokens: "
                f"{end.message}; the server serves others: try another one once or twice, then "
                "give the sequence up",
            )
        case EndReason.NOT_FINITE:
            return ServiceError(
                Reason.NOT_FINITE,
                f"the logits after {len(sequence.tokens)} output tokens are NaN or infinite: the "
                "weights may be broken; other sequences go on",
            )
