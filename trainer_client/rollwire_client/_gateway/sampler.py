"""Samples the sequences of a request on the fleet, and ends them when they are not wanted."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import defaultdict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from rollwire_client._errors import RollwireError
from rollwire_client._gateway.errors import HttpError, http_error, invalid
from rollwire_client._rpc.conversion import RolloutOptions, checked_token_ids
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from rollwire.types import LogprobBasis

    from rollwire_client._detokenizer import Detokenizer
    from rollwire_client._fleet.fleet import Fleet
    from rollwire_client._gateway.metrics import GatewayMetrics
    from rollwire_client._gateway.sampling import SampleOptions
    from rollwire_client._trajectory import Chunk, Trajectory


class Listener(Protocol):
    """Gets the sequences of a request while they are sampled; each waits for it."""

    async def on_chunk(self, number: int, chunk: Chunk) -> None:
        """A chunk of sequence ``number``."""

    async def on_end(self, number: int, trajectory: Trajectory) -> None:
        """The sequence has ended; one that was aborted has no finish."""


_END_SECONDS = 10.0  # for the requests that are ended at last


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What a request wants sampled.

    Attributes:
        prompts: Token ids of each prompt.
        options: How each of them is sampled, ``options.n`` times.
        session: Id of the conversation or group, whose sequences go to the same server; "": none.
        name: The client's id of the request, for aborts.
        detokenizer: Makes text of the output; None: none is wanted before the end.
    """

    prompts: Sequence[Sequence[int]]
    options: SampleOptions
    session: str = ""
    name: str = ""
    detokenizer: Detokenizer | None = None


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """How much a sampler takes.

    Attributes:
        sequences: Most sequences at the same time; requests beyond are refused.
        seconds: Longest time from a sequence's arrival to its last token.
        stream_interval: Seconds for which a server may collect tokens of a streamed sequence.
    """

    sequences: int = 4096
    seconds: float = 3600.0
    stream_interval: float = 0.05


@dataclass(eq=False, slots=True)
class _RunningSequence:
    number: int  # in its request
    output: TrajectoryBuilder
    session: str
    task: asyncio.Task[None] | None = None
    aborted: bool = False
    delivering: bool = False  # a chunk, which its reader gets whole

    def abort(self) -> None:
        if not self.aborted and self.task is not None and not self.task.done():
            self.aborted = True
            if not self.delivering:
                self.task.cancel()


class Sampler:
    """Runs requests side by side, up to a number of sequences, until it is closed."""

    def __init__(
        self, fleet: Fleet, limits: SamplerLimits, basis: LogprobBasis, metrics: GatewayMetrics
    ) -> None:
        self._pool = fleet._pool  # noqa: SLF001 - the library's own
        self._limits = limits
        self._basis = basis
        self._metrics = metrics
        self._running: dict[str, set[_RunningSequence]] = defaultdict(set)  # by the clients' names
        self._requests: set[asyncio.Task[object]] = set()
        self._ending: set[asyncio.Task[object]] = set()  # that are cancelled by ``close``
        self._closed = False

    async def run(
        self, request: SampleRequest, listener: Listener | None = None
    ) -> list[Trajectory]:
        """The samples of the first prompt, then those of the next. An aborted one has no finish.
        An error of one sequence ends the others.

        Raises:
            HttpError: The request was refused or failed.
        """
        try:
            sequences = self._sequences(request)
        except RollwireError as error:
            raise http_error(error) from error
        with self._admitted(sequences, request.name):
            try:
                async with asyncio.TaskGroup() as group:
                    for sequence in sequences:
                        sequence.task = group.create_task(self._sample(sequence, request, listener))
            except ExceptionGroup as errors:
                raise _to_raise(errors) from errors
        return [sequence.output.trajectory() for sequence in sequences]

    def abort(self, name: str | None) -> int:
        """Ends the sequences of the requests of this name, or all; returns how many. Their requests
        are answered with what was sampled.
        """
        names = list(self._running) if name is None else [name]
        aborted = [s for name in names for s in self._running.get(name, ()) if not s.aborted]
        for sequence in aborted:
            sequence.abort()
        return len(aborted)

    async def close(self, seconds: float) -> None:
        """Takes no more requests, waits so long for those under way, and ends the rest with an
        error that says so.
        """
        self._closed = True
        if self._requests:
            await asyncio.wait(self._requests, timeout=seconds)
        left = set(self._requests)
        self._ending |= left
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_END_SECONDS)

    def _sequences(self, request: SampleRequest) -> list[_RunningSequence]:
        count = len(request.prompts) * request.options.n
        if self._closed:
            raise HttpError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the gateway shuts down", code="draining"
            )
        if count > self._limits.sequences:
            raise invalid(
                f"{count} sequences are more than the {self._limits.sequences} that may run at the "
                "same time (--max-sequences): split the request",
                code="too_many_sequences",
            )
        running = sum(map(len, self._running.values()))
        if running + count > self._limits.sequences:
            raise HttpError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{count} sequences are too many: {running} run, and at most "
                f"{self._limits.sequences} may (--max-sequences)",
                code="too_many_sequences",
            )
        self._check_lengths(request.prompts)
        n, prompts = request.options.n, list(map(checked_token_ids, request.prompts))
        # The samples of a prompt share its prefix.
        own = uuid.uuid4().hex if n > 1 and not request.session else ""
        return [
            _RunningSequence(
                number,
                TrajectoryBuilder(prompts[number // n]),
                f"{own}-{number // n}" if own else request.session,
            )
            for number in range(count)
        ]

    def _check_lengths(self, prompts: Sequence[Sequence[int]]) -> None:
        """Servers refuse what is too long; but a prompt may be larger than a message to them."""
        infos = [server.info for server in self._pool.servers]
        longest = max((info.context_length for info in infos if info is not None), default=0)
        length = max(map(len, prompts), default=0)
        if None not in infos and length > longest:
            raise invalid(
                f"a prompt has {length} tokens, and the maximum context length is {longest}",
                code="context_length_exceeded",
            )

    @contextlib.contextmanager
    def _admitted(self, sequences: list[_RunningSequence], name: str) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        named = self._running[name]
        named.update(sequences)
        self._requests.add(task)
        self._metrics.sequences.inc(len(sequences))
        self._metrics.prompt_tokens.inc(sum(len(s.output.prompt_ids) for s in sequences))
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ending or task.uncancel():
                raise
            raise HttpError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the gateway shut down before the sequence ended",
                code="draining",
            ) from None
        finally:
            self._requests.discard(task)
            named.difference_update(sequences)
            if not named and self._running.get(name) is named:
                del self._running[name]
            self._metrics.sequences.dec(len(sequences))
            self._metrics.output_tokens.inc(sum(len(s.output.token_ids) for s in sequences))

    async def _sample(
        self, sequence: _RunningSequence, request: SampleRequest, listener: Listener | None
    ) -> None:
        sampling = request.options.seeded(sequence.number)
        options = self._options(request, sequence, streamed=listener is not None)
        rollout = self._pool.rollout(sequence.output, sampling, options)
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        try:
            if listener is None:
                await rollout.run()
                return
            async with contextlib.aclosing(rollout.chunks()) as chunks:
                async for chunk in chunks:
                    sequence.delivering = True
                    async with self._reading(deadline):
                        await listener.on_chunk(sequence.number, chunk)
                    sequence.delivering = False
                    if sequence.aborted:
                        break
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not sequence.aborted or task is None or task.uncancel():
                raise
            sequence.output.finish = None
        if listener is not None:
            async with self._reading(deadline):
                await listener.on_end(sequence.number, sequence.output.trajectory())

    @contextlib.asynccontextmanager
    async def _reading(self, deadline: float) -> AsyncIterator[None]:
        """A client that has stopped to read holds its sequence no longer than others may last."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            raise HttpError(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"the answer was not read within {self._limits.seconds:g} s "
                "(--max-sequence-seconds)",
                code="not_read",
            ) from error

    def _options(
        self, request: SampleRequest, sequence: _RunningSequence, *, streamed: bool
    ) -> RolloutOptions:
        options = request.options
        made: RolloutOptions = {
            "logprob_basis": options.logprob_basis or self._basis,
            "min_weight_version": options.min_weight_version,
            "max_weight_version": options.max_weight_version,
            "timeout": self._limits.seconds,
            "session_id": sequence.session,
        }
        if request.detokenizer is not None:
            made["detokenizer"] = request.detokenizer
        if streamed or request.detokenizer is not None:
            made["delivery_interval"] = self._limits.stream_interval
        return made


def _to_raise(errors: ExceptionGroup[Exception]) -> Exception:
    """The first error of several sequences, as it is answered; a bug before all others."""
    leaves = list(_leaves(errors))
    known = [error for error in leaves if isinstance(error, RollwireError | HttpError)]
    if len(known) < len(leaves):
        return next(error for error in leaves if error not in known)
    return http_error(known[0]) if isinstance(known[0], RollwireError) else known[0]


def _leaves(errors: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in errors.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
