"""One sequence from its first attempt to its end, on as many servers as it takes.

a message ─▶ Stream ─▶ Attempt ─▶ TrajectoryBuilder      what a server sampled is appended
Rollout ─▶ Router.route ─▶ ServerHandle.start            an attempt begins
Rollout ◀─ Attempt.next ◀─ TrajectoryBuilder.chunk       and is read, to its end or a failure
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollwire.conversion import duration_to_proto
from rollwire.reasons import ErrorScope
from rollwire.types import FinishReason, version_text

from rollwire_client._arguments import integer, seconds
from rollwire_client._errors import (
    QueueFullError,
    RolloutFailedError,
    RollwireError,
    ServerNotReadyError,
    StepFailedError,
    TimedOutError,
    UnavailableError,
    WeightVersionError,
)
from rollwire_client._fleet.router import Patience, WaitReason
from rollwire_client._rpc.conversion import deliver_rarely

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from rollwire.types import Finish
    from rollwire.v1 import rollout_pb2

    from rollwire_client._fleet.router import Router
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._rpc.rollout_stream import Attempt
    from rollwire_client._trajectory import Chunk, TrajectoryBuilder

logger = logging.getLogger(__name__)

# Seconds between two rollouts of a sequence that no queue has room for.
QUEUE_FULL_DELAY = 0.1
_WEIGHTS_POLL = 0.5  # seconds between two looks whether weights that are waited for will still come


@dataclass(frozen=True, slots=True)
class Retries:
    """When a fleet gives a sequence up. A new token resets both limits. A sequence that a paused
    server has accepted is not given up: it waits, and the log says so. The same holds while the
    fleet's servers sleep because of ``Fleet.sleep``.

    Attributes:
        attempts: Give up after this many failures in a row without a new token.
        seconds: Give up after waiting this long in total, for a server that is ready, has room in
            its queue and serves a version in range, and between attempts.
        first_delay: Seconds between the second attempt and the third; each further delay is twice
            as long. The second attempt follows the first without a delay.
        longest_delay: The longest of these delays, in seconds.

    Raises:
        TypeError, ValueError: A value is of the wrong type or out of range.
    """

    attempts: int = 8
    seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0

    def __post_init__(self) -> None:
        integer("Retries.attempts", self.attempts, minimum=1)
        for name in ("seconds", "first_delay", "longest_delay"):
            seconds(f"Retries.{name}", getattr(self, name))


class Rollout:
    """One sequence: the request, what came so far, and the failures since the last new token.

    It continues from what ``output`` has, and appends what comes. Weights that were committed
    before those of its last token sample none after it.
    """

    def __init__(
        self,
        request: rollout_pb2.GenerateRequest,
        output: TrajectoryBuilder,
        router: Router,
        retries: Retries,
    ) -> None:
        self.output = output
        self._request = request
        self._router = router
        self._retries = retries
        self._min_version = (
            request.min_weight_version if request.HasField("min_weight_version") else None
        )
        self._server: ServerHandle | None = None
        self._attempt: Attempt | None = None
        self._read = self._counted = len(output.token_ids)
        self._failures: list[RollwireError] = []  # since the last new token, as the next one
        self._patience = Patience(retries.seconds)
        self._step_failed_at: ServerHandle | None = None
        self._clock = asyncio.get_running_loop().time
        self._deadline = float("inf")
        if request.HasField("timeout"):
            self._deadline = self._clock() + request.timeout.ToTimedelta().total_seconds()
        self._put_prefix()

    def lower_min_version(self, version: int | None) -> None:
        """From now on ``version`` and newer ones may sample it too; None: any."""
        if self._min_version is not None and (version is None or version < self._min_version):
            self._min_version = version

    def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The tokens as they come; the last chunk has the finish. Left before that, the output
        has what was read. A RollwireError has what was sampled before it in ``.trajectory``.
        """
        return self._sample(whole=False)

    async def run(self) -> None:
        """Samples it to its end; errors as ``chunks``. Cancelled before that, the output has what
        was sampled.
        """
        deliver_rarely(self._request, self.output)
        async for _ in self._sample(whole=self.output.text is None):  # else tokens are looked at
            pass

    # One generator, which closes its attempt itself: one that is abandoned is closed by the event
    # loop, and that closes nested generators in any order.
    async def _sample(self, *, whole: bool) -> AsyncGenerator[Chunk, None]:
        try:
            while True:
                server = await self._route()
                if (bound := self._bound(server)) is not None:
                    self._request.min_weight_version = bound
                try:
                    attempt = await server.start(self._request, self.output)
                    self._server, self._attempt = server, attempt
                    try:
                        while (chunk := await self._next(server, attempt, whole)) is not None:
                            self._read += len(chunk.token_ids)
                            if chunk.finish and chunk.finish.reason is FinishReason.INTERRUPTED:
                                chunk = replace(chunk, finish=None)
                            if self.output.text is not None:
                                chunk = self.output.with_text(chunk)
                                if self.output.text.stop_string is not None:
                                    stopped = self._stopped(chunk)
                                    break
                            self.output.finish = chunk.finish
                            if chunk.token_ids or chunk.finish:
                                yield self.output.with_routing(chunk)
                        else:
                            self._end(server, attempt.finish)
                            return
                    finally:
                        server.end(attempt)
                except RollwireError as failure:
                    if not whole:
                        self._drop_unread()
                    await self._recover(server, failure)
                else:  # the server has been told: its reader may take its time
                    yield stopped
                    return
        except RollwireError as error:
            if whole:
                await self._take_rest()
            error.trajectory = self.output.trajectory()
            raise
        finally:
            if whole:
                await self._take_rest()
            else:
                self._drop_unread()

    def _end(self, server: ServerHandle, finish: Finish | None) -> None:
        if finish is not None and finish.reason is FinishReason.INTERRUPTED:
            raise ServerNotReadyError(
                f"{server.address}: interrupted the sequence: {finish.message}",
                server=server.address,
            )
        self.output.finish = finish

    def _stopped(self, chunk: Chunk) -> Chunk:
        """The last chunk, which has a stop string; what came after it is dropped."""
        self._read = chunk.offset + len(chunk.token_ids)
        self._drop_unread()
        self.output.finish = chunk.finish
        return self.output.with_routing(chunk)

    async def _take_rest(self) -> None:
        """Takes what an aborted attempt's server had sampled and not sent yet."""
        if self._server is None or (attempt := self._attempt) is None:
            return
        try:
            with contextlib.suppress(TimeoutError, RollwireError):
                async with asyncio.timeout(self._server.client.timeouts.close):
                    await attempt.wait_end()
        finally:
            self._detach()
            finish = attempt.finish
            # Its own end is of interest, not that it was aborted.
            if finish is not None and finish.reason in {FinishReason.STOP, FinishReason.LENGTH}:
                self.output.finish = finish

    def _drop_unread(self) -> None:
        """Drops what came and its reader has not got: the next attempt samples it again."""
        self._detach()
        self.output.cut(self._read)

    def _detach(self) -> None:
        if self._attempt is not None:
            self._attempt.detach()
            self._attempt = None

    async def _route(self) -> ServerHandle:
        try:
            return await self._router.route(
                self._request,
                self.output,
                patience=self._patience,
                deadline=self._deadline,
                avoid=self._step_failed_at,
                serves_now=lambda server: not _is_below(server, self._bound(server)),
            )
        except UnavailableError as error:
            if self._clock() >= self._deadline:
                raise self._timed_out() from error
            raise self._given_up(error, ErrorScope.SERVER) from error

    async def _recover(self, server: ServerHandle, failure: RollwireError) -> None:
        """The rule of failover: whether and when a sequence continues elsewhere after a failure;
        raises if it does not.
        """
        if len(self.output.token_ids) > self._counted:
            self._counted = len(self.output.token_ids)
            self._failures.clear()
            self._patience.renew()
        too_new = isinstance(failure, WeightVersionError) and failure.reason == "WEIGHTS_TOO_NEW"
        step_failed = isinstance(failure, StepFailedError) and self._step_failed_at is None
        given_up = isinstance(failure, RolloutFailedError)
        if given_up or not (failure.elsewhere or too_new or step_failed):
            raise failure
        self._detach()
        logger.info("%s: sequence %s continues elsewhere", failure, self._request.request_id)
        if too_new:  # no failure either way: another server may serve an older version
            server.refused_as_too_new(self._request.max_weight_version)
        elif step_failed:  # of the sequence, most likely: one other server may show that it is not
            self._step_failed_at = server
        elif isinstance(failure, QueueFullError):
            server.full_until = self._clock() + (failure.retry_after or 1.0)
        elif isinstance(failure, ServerNotReadyError) and server.asleep:
            pass  # no failure: this fleet put it to sleep
        else:
            server.suspect(failure)
            self._failures.append(failure)
            if len(self._failures) >= self._retries.attempts:
                raise self._given_up(failure) from failure
            delay = self._delay()
            self._patience.spend(delay)
            await asyncio.sleep(delay)
        if self._clock() >= self._deadline:
            raise self._timed_out() from failure
        request = self._request
        request.attempt += 1
        self.output.begin_attempt()
        self._put_prefix()
        if request.HasField("timeout"):
            request.timeout.CopyFrom(duration_to_proto(self._deadline - self._clock()))

    def _put_prefix(self) -> None:
        request = self._request
        request.ClearField("output_token_ids")
        request.output_token_ids.extend(self.output.token_ids)
        if self._min_version is None:
            request.ClearField("min_weight_version")
        else:
            request.min_weight_version = self._min_version

    def _bound(self, server: ServerHandle) -> int | None:
        """The oldest version under which the sequence may continue at a server."""
        bounds = (self._min_version, server.min_version(self.output.newest))
        return max((bound for bound in bounds if bound is not None), default=None)

    async def _next(self, server: ServerHandle, attempt: Attempt, whole: bool) -> Chunk | None:  # noqa: FBT001
        """The next chunk, or with ``whole`` the end. A server whose weights are too old is waited
        for no longer than one that is not ready.
        """
        read: Callable[[], Awaitable[Chunk | None]] = attempt.wait_end if whole else attempt.next
        request, given = self._request, len(self._request.output_token_ids)
        try:
            # No token came, perhaps for want of newer weights.
            while request.HasField("min_weight_version") and attempt.next_offset <= given:
                began = self._clock()
                timeout = _WEIGHTS_POLL
                if behind := _is_below(server, request.min_weight_version):
                    timeout = min(timeout, self._patience.left)
                try:
                    async with asyncio.timeout(timeout):
                        return await read()
                except TimeoutError as error:
                    self._await_weights(server, error)
                finally:
                    if behind:
                        self._patience.spend(self._clock() - began)
        finally:
            self._router.wait_log.end(self.output)
        return await read()

    def _await_weights(self, server: ServerHandle, cause: Exception) -> None:
        """Raises RollwireError if a server whose weights are too old is not to be waited for."""
        bound, serves = self._request.min_weight_version, version_text(server.version)
        if not _is_below(server, bound):
            return
        allowed = self._bound(server)
        if allowed is None or allowed < bound:
            raise ServerNotReadyError(
                f"{server.address}: serves {serves}, to which the policy was rolled back while a "
                f"sequence waited for version {bound}",
                server=server.address,
            ) from cause
        if self._patience.left <= 0:
            never_came = UnavailableError(
                f"{server.address}: serves {serves}, and did not reach version {bound} "
                f"within {self._retries.seconds:g} s",
                server=server.address,
            )
            raise self._given_up(never_came, ErrorScope.SERVER) from cause
        self._router.wait_log.begin(
            self.output,
            WaitReason.WEIGHTS,
            give_up=self._clock() + self._patience.left,
            describe=lambda: f"{server.address}: serves {serves}, and version {bound} is asked for",
        )

    def _delay(self) -> float:
        doublings = len(self._failures) - 2
        if doublings < 0:
            return 0.0
        longest = min(self._retries.first_delay * 2**doublings, self._retries.longest_delay)
        return random.uniform(longest / 2, longest)  # noqa: S311 - spreads retries, is no secret

    def _timed_out(self) -> TimedOutError:
        return TimedOutError(
            f"sequence {self._request.request_id}: timed out after "
            f"{len(self.output.token_ids)} tokens"
        )

    def _given_up(
        self, last: RollwireError, scope: ErrorScope = ErrorScope.SEQUENCE
    ) -> RolloutFailedError:
        causes = self._failures if last in self._failures else [*self._failures, last]
        return RolloutFailedError(
            f"sequence {self._request.request_id} was given up after "
            f"{len(self.output.token_ids)} tokens, in attempt {self._request.attempt}: {last}",
            causes,
            scope=scope,
        )


def _is_below(server: ServerHandle, bound: int | None) -> bool:
    return bound is not None and (server.version is None or server.version < bound)


def queue_was_full(error: RollwireError) -> bool:
    """Whether a rollout was given up only because servers are busy or paused."""
    causes = error.causes if isinstance(error, RolloutFailedError) else ()
    return bool(causes) and isinstance(causes[-1], QueueFullError)
