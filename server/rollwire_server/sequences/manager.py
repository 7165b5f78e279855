"""Every sequence of the server; Generate and StreamRollouts are views of what is here."""

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
from rollwire_server.sequences.registry import SequenceRegistry, check_pick_up
from rollwire_server.sequences.sequence import Cursor, Sequence
from rollwire_server.state import Rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollwire.types import Finish, WeightTag

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine, SequenceEnd, Step
    from rollwire_server.sequences.sequence import ReadyQueue, Request
    from rollwire_server.state import StateMachine

log = structlog.get_logger()


class Sequences:
    """Every sequence of one server; the engine's Sink."""

    weights: WeightTag  # that sample the next token; from the engine's start on

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
        self._max_waiting = max_waiting  # beyond those that run at once
        self._max_sequence_seconds = max_sequence_seconds  # from the arrival to the last token
        self._engine_died = engine_died
        self._keys = itertools.count(1)
        self._registry = SequenceRegistry()
        self._sampling: dict[int, Sequence] = {}  # in the engine, by key
        self._awaiting_version: dict[Sequence, None] = {}
        self._to_abort: list[int] = []  # keys of ended sequences that are still in the engine
        self._abort_requested = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._sampling) + len(self._awaiting_version)

    def by_activity(self) -> dict[str, int]:
        live = self.live
        if self._state.held:
            return {"running": 0, "waiting": 0, "held": live}
        running = min(self._engine.load().running, live)
        return {"running": running, "waiting": live - running, "held": 0}

    # For the gRPC services.

    def next_key(self) -> int:
        return next(self._keys)

    def start(self, request: Request, queue: ReadyQueue, handle: int = 0) -> Cursor:
        """Starts a sequence, or picks up the live or kept one of the same id and attempt; returns
        the stream's cursor. When it raises ServiceError, nothing has changed.
        """
        if request.detach_grace > (limit := self._max_sequence_seconds):
            request = dataclasses.replace(request, detach_grace=limit)
        known = self._registry.find(request)
        if known is not None and known.request.attempt == request.attempt:
            return self._pick_up(known, request, queue, handle)
        self._state.check(Rpc.GENERATE)
        self._check_unread()
        sequence = Sequence(request)
        complete = sequence.finish_reason_of_prefix()
        if complete is None:
            self._check_not_too_new(request)
            if known is None or known.end is not None:  # else it takes the place of that
                self._check_queue()
        if known is not None:
            self._finish(known, FinishReason.SUPERSEDED, "a newer attempt took over")
            self._registry.forget(known)
        self._registry.add(sequence)
        prompt, given = len(request.spec.prompt), len(request.spec.prefix)
        _log("sequence begun", request, prompt_tokens=prompt, given_tokens=given)
        cursor = self._attach(sequence, queue, handle, sequence.prefix_length)
        if complete is not None:
            self._finish(sequence, complete)
            return cursor
        if request.needs_newer(self.weights.version):
            self._awaiting_version[sequence] = None
            self._idle.clear()
        else:
            self._submit(sequence)
        timeout = limit if request.timeout is None else min(request.timeout, limit)
        sequence.start_timer("timeout", timeout, self._on_timeout, timeout)
        return cursor

    def detach(self, cursor: Cursor) -> None:
        """The cursor's stream is gone: the sequence is kept for its grace, or ends at once."""
        sequence = cursor.sequence
        if sequence.cursor is not cursor:
            return  # superseded
        sequence.cursor = None
        self._registry.unread.discard(sequence)
        if sequence not in self._registry:
            return  # it has ended, and was forgotten
        if (grace := sequence.request.detach_grace) > 0:
            sequence.start_timer("grace", grace, self._on_grace_over)
        else:
            self._on_grace_over(sequence)

    async def abort(self, keys: Iterable[tuple[str, int | None]]) -> tuple[int, list[str]]:
        """Ends sequences by request id and attempt; returns how many, and the ids not live."""
        aborted = 0
        not_found = []
        for request_id, attempt in keys:
            sequence = self._registry.get(request_id)
            if (
                sequence is not None
                and sequence.end is None
                and attempt in (None, sequence.request.attempt)
            ):
                self.abort_soon(sequence)
                aborted += 1
            else:
                not_found.append(request_id)
        await self._abort_in_engine()
        return aborted, not_found

    def abort_soon(self, sequence: Sequence) -> None:
        """Ends one sequence now; the engine learns of it in a moment."""
        self._finish(sequence, FinishReason.ABORTED, "aborted by a caller")

    async def abort_all(self) -> int:
        return await self._finish_all(FinishReason.ABORTED, "aborted by a caller")

    async def interrupt_all(self, message: str) -> int:
        """Interrupts every live sequence, so that it can continue elsewhere; returns how many."""
        return await self._finish_all(FinishReason.INTERRUPTED, message)

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
        """Aborts ended sequences in the engine, until it is cancelled."""
        while True:
            await self._abort_requested.wait()
            await self._abort_in_engine()

    # For commits.

    async def interrupt_out_of_bounds(self, version: int | None) -> None:
        """Called while held, before a commit, and after it for what came meanwhile."""
        for sequence in list(self._sampling.values()):
            self._interrupt_if_out_of_bounds(sequence, version)
        await self._abort_in_engine()

    def weights_committed(self, weights: WeightTag) -> None:
        """Sets the weights of every later token; starts the sequences that waited for them."""
        self.weights = weights
        for sequence in list(self._awaiting_version):
            if sequence.request.needs_newer(weights.version):
                continue
            del self._awaiting_version[sequence]
            if not self._interrupt_if_out_of_bounds(sequence, weights.version):
                self._submit(sequence)

    # For the engine (Sink).

    def on_step(self, step: Step) -> None:
        """Appends what a step sampled, and puts the cursors into their queues.

        A step whose columns differ in length ends the server: from then on nobody could say which
        token belongs to which sequence.
        """
        if (error := _check_columns(step)) is not None:
            self.on_failure(error)
            return
        sampling, weights, rows = self._sampling, step.weights, len(step.keys)
        self._counters.sampled_tokens += rows
        oldest = step.oldest_kv_revisions or itertools.repeat(weights.revision, rows)
        for key, extras in step.extras.items():
            if (sequence := sampling.get(key)) is not None:
                sequence.add_extras(extras, weights)
                _notify(sequence)
        for key, token, logprob, revision in zip(
            step.keys, step.token_ids, step.logprobs, oldest, strict=True
        ):
            sequence = sampling.get(key)
            if sequence is None:  # ended by the server while the step ran
                continue
            sequence.append(token, logprob, weights, revision)
            if (cursor := sequence.cursor) is not None:
                cursor.queue.put(cursor)
        for end in step.ends:
            if (sequence := sampling.pop(end.key, None)) is not None:
                self._end(sequence, _end_of(sequence, end))

    def on_failure(self, error: BaseException) -> None:
        """The engine is dead: its sequences can continue elsewhere, the server stops."""
        for sequence in self._registry.live():
            self._finish(sequence, FinishReason.INTERRUPTED, f"the engine died: {error}")
        self._engine_died(error)

    # Admission.

    def _check_queue(self) -> None:
        limit = self._engine.describe().max_running_sequences + self._max_waiting
        if self.live >= limit:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{self.live} sequences run or wait, the limit is {limit}: use another server, "
                "or try again",
            )

    def _check_unread(self) -> None:
        if self._registry.unread.full:
            raise ServiceError(
                Reason.QUEUE_FULL,
                "ended sequences that were not read use all the memory allowed for them: read the "
                "open streams, or use another server",
            )

    def _check_not_too_new(self, request: Request) -> None:
        version = self.weights.version
        if request.needs_older(version):
            raise ServiceError(
                Reason.WEIGHTS_TOO_NEW,
                f"the server serves {version_text(version)}, newer than max_weight_version "
                f"{request.max_weight_version}: use a server with that version or an older one",
                metadata={"version": str(version)},
            )

    # The life of one sequence.

    def _pick_up(
        self, sequence: Sequence, request: Request, queue: ReadyQueue, handle: int
    ) -> Cursor:
        position = check_pick_up(sequence, request)
        _log("sequence picked up", request, given_tokens=position)
        if sequence.cursor is not None:
            sequence.cursor.supersede()
        sequence.request = dataclasses.replace(
            sequence.request,
            detach_grace=request.detach_grace,
            delivery_interval=request.delivery_interval,
        )
        sequence.cancel_timer("grace")
        if sequence.end is not None:
            sequence.start_timer("grace", request.detach_grace, self._registry.forget)
        return self._attach(sequence, queue, handle, position)

    def _attach(self, sequence: Sequence, queue: ReadyQueue, handle: int, position: int) -> Cursor:
        sequence.cursor = Cursor(sequence, queue, handle, position)
        if sequence.end is not None:
            self._registry.unread.add(sequence)
        _notify(sequence)
        return sequence.cursor

    def _submit(self, sequence: Sequence) -> None:
        spec = sequence.request.spec
        self._sampling[spec.key] = sequence
        self._idle.clear()
        self._engine.submit(spec)

    def _interrupt_if_out_of_bounds(self, sequence: Sequence, version: int | None) -> bool:
        bound = sequence.request.violated_bound(version)
        if bound:
            message = f"{version_text(version)} came, {bound}"
            self._finish(sequence, FinishReason.INTERRUPTED, message)
        return bool(bound)

    async def _finish_all(self, reason: FinishReason, message: str) -> int:
        live = self._registry.live()
        for sequence in live:
            self._finish(sequence, reason, message)
        await self._abort_in_engine()
        return len(live)

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        self._end(sequence, sequence.finish(reason, message))

    def _end(self, sequence: Sequence, end: Finish | ServiceError) -> None:
        """Ends a sequence once and for all; what it sampled stays for its stream."""
        if sequence.end is not None:
            return
        sequence.end = end
        request = sequence.request
        if self._sampling.pop(request.spec.key, None) is not None:  # still in the engine
            self._to_abort.append(request.spec.key)
            self._abort_requested.set()
        self._awaiting_version.pop(sequence, None)
        sequence.cancel_timer("timeout")
        self._counters.ended_sequences[end.reason.name.lower()] += 1
        tokens = len(sequence.tokens)
        _log("sequence ended", request, reason=end.reason.name, output_tokens=tokens)
        if not self.live:
            self._idle.set()
        _notify(sequence)
        if sequence.cursor is not None:
            self._registry.unread.add(sequence)
        if request.detach_grace <= 0:
            self._registry.forget(sequence)
            return
        self._registry.keep(sequence)
        if sequence in self._registry and "grace" not in sequence.timers:
            sequence.start_timer("grace", request.detach_grace, self._registry.forget)

    async def _abort_in_engine(self) -> None:
        self._abort_requested.clear()
        keys, self._to_abort = self._to_abort, []
        await self._engine.abort(keys)

    def _on_grace_over(self, sequence: Sequence) -> None:
        self._finish(sequence, FinishReason.ABORTED, "its stream was lost")
        self._registry.forget(sequence)

    def _on_timeout(self, sequence: Sequence, seconds: float) -> None:
        if sequence in self._awaiting_version:
            error = ServiceError(
                Reason.WEIGHTS_TOO_OLD,
                f"the server serves {version_text(self.weights.version)} and got no version "
                f"{sequence.request.min_weight_version} within {seconds:g} s",
            )
        else:
            error = ServiceError(
                Reason.TIMED_OUT,
                f"not finished within its timeout of {seconds:g} s; "
                f"{len(sequence.tokens)} output tokens were sampled",
            )
        self._end(sequence, error)


def _log(event: str, request: Request, **more: object) -> None:
    log.debug(event, request_id=request.request_id, attempt=request.attempt, **more)


def _notify(sequence: Sequence) -> None:
    if (cursor := sequence.cursor) is not None:
        cursor.queue.put(cursor)


def _check_columns(step: Step) -> EngineError | None:
    keys, tokens, logprobs = len(step.keys), len(step.token_ids), len(step.logprobs)
    revisions = len(step.oldest_kv_revisions)
    if keys == tokens == logprobs and revisions in (0, keys):
        return None
    return EngineError(
        f"one step has {keys} keys of sequences, {tokens} tokens, {logprobs} log-probabilities and "
        f"{revisions} KV revisions: a bug of the engine"
    )


def _end_of(sequence: Sequence, end: SequenceEnd) -> Finish | ServiceError:
    match end.reason:
        case EndReason.STEP_FAILED:
            return ServiceError(
                Reason.STEP_FAILED,
                f"the engine failed at this sequence after {len(sequence.tokens)} output tokens: "
                f"{end.message}; other sequences continue: try another server once or twice, then "
                "give the sequence up",
            )
        case EndReason.NOT_FINITE:
            return ServiceError(
                Reason.NOT_FINITE,
                f"the logits after {len(sequence.tokens)} output tokens are NaN or infinite: the "
                "weights may be broken; other sequences continue",
            )
        case EndReason.STOP | EndReason.LENGTH | EndReason.INTERRUPTED:
            return sequence.finish(FinishReason[end.reason.name], end.message)
