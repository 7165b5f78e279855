"""One sequence from its first attempt to its end, on as many servers as it takes."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

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
from rollwire_client._fleet.waiting import Want
from rollwire_client._rpc.request import deliver_rarely

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rollwire.types import WeightTag
    from rollwire.v1 import rollout_pb2

    from rollwire_client._data import Chunk
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.waiting import Waits
    from rollwire_client._rpc.attempt import Attempt
    from rollwire_client._trajectory import TrajectoryBuilder

logger = logging.getLogger(__name__)

_LOOK = 0.5  # seconds between two looks whether weights that are waited for will still come


@dataclass(frozen=True, slots=True)
class Retries:
    """When a fleet gives a sequence up. A new token starts both counts again, and one that a server
    has taken is not given up while that is paused: it waits, and the log says so.

    Attributes:
        attempts: So many in a row that failed without a new token.
        seconds: So long without a place on a server, in sum: until one is ready, has room in its
            queue, or comes to serve the weights that are asked for, and between attempts.
        first_delay: Seconds between the second and the third of them; each next wait is twice as
            long. (Between the first and the second there is none.)
        longest_delay: But not longer than this.

    Raises:
        TypeError, ValueError: One of them is none of these.
    """

    attempts: int = 8
    seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        integer("Retries.attempts", self.attempts, least=1)
        for name in ("seconds", "first_delay", "longest_delay"):
            seconds(f"Retries.{name}", getattr(self, name))


class Pick(Protocol):
    """Chooses a server that is ready."""

    async def __call__(
        self,
        request: rollout_pb2.GenerateRequest,
        after: WeightTag | None,
        *,
        timeout: float,
        other_than: ServerHandle | None,
        waiter: object,
    ) -> ServerHandle:
        """Waits for a server, preferably one whose weights the sequence takes now.

        Args:
            request: What it is to sample.
            after: The weights that sampled the token before; None for the first.
            timeout: Seconds.
            other_than: This one only if no other is ready.
            waiter: Stands for the sequence where the log says what waits.

        Raises:
            WeightVersionError: All have newer weights than the request takes.
            QueueFullError: None had room for it within ``timeout`` seconds.
            UnavailableError: None was ready.
        """


class Rollout:
    """One sequence: the request, what came so far, and the failures since the last new token.

    It goes on from what ``draft`` has, and puts into it what comes. What was committed before the
    weights of its last token samples none after it.
    """

    def __init__(
        self,
        request: rollout_pb2.GenerateRequest,
        draft: TrajectoryBuilder,
        *,
        pick: Pick,
        retries: Retries,
        waits: Waits,
        after: WeightTag | None = None,
        waiter: object | None = None,
    ) -> None:
        """``after`` sampled the last token of what stands before the draft; ``waits`` is told when
        it waits for weights. ``waiter`` stands for it where the log says what waits, and for the
        rollouts before and after it that try the same: default: itself.
        """
        self._request = request
        self._draft = draft
        self._given_after = after
        self._least = request.min_weight_version if request.HasField("min_weight_version") else None
        self._pick = pick
        self._retries = retries
        self._waits = waits
        self._waiter = self if waiter is None else waiter
        self._visited: tuple[ServerHandle, Attempt] | None = None
        self._failures: list[RollwireError] = []
        self._unplaced = 0.0  # seconds since the last new token
        self._step_failed_at: ServerHandle | None = None
        self._clock = asyncio.get_running_loop().time
        self._deadline = float("inf")
        if request.HasField("timeout"):
            self._deadline = self._clock() + request.timeout.ToTimedelta().total_seconds()
        self._put_prefix()

    def flush(self) -> None:
        """Puts into the draft what came so far of an attempt that is read as a whole."""
        if self._visited is not None:
            member, attempt = self._visited
            for chunk in attempt.pending():
                self._add(chunk, member)

    def allow(self, least: int | None) -> None:
        """From now on it may be sampled under version ``least`` too, and newer ones."""
        if self._least is not None and (least is None or least < self._least):
            self._least = least

    async def chunks(self, *, whole: bool) -> AsyncGenerator[Chunk, None]:
        """The tokens as they come; with ``whole``, those of an attempt at its end.

        Left before the end of a ``whole`` sequence, it puts into the draft what was sampled of it;
        else the caller has what it read.

        Raises:
            RollwireError: With what was sampled before it in ``.trajectory``.
        """
        if whole:
            deliver_rarely(self._request)
        try:
            while True:
                member = await self._choose()
                self._put_bound(member)
                failure: RollwireError | None = None
                try:
                    async with member.attempt(self._request, self._draft.routing) as attempt:
                        self._visited = member, attempt
                        while (chunk := await self._next(member, attempt, whole)) is not None:
                            finish = chunk.finish
                            if finish and finish.reason is FinishReason.INTERRUPTED:
                                failure = ServerNotReadyError(
                                    f"{member.address}: gave the sequence up: {finish.message}",
                                    server=member.address,
                                )
                                chunk = replace(chunk, finish=None)
                            self._add(chunk, member)
                            if chunk.token_ids or chunk.finish:
                                yield chunk if whole else self._draft.with_rows(chunk)
                except RollwireError as error:
                    failure = error
                if failure is None:
                    return
                await self._recover(member, failure)
        except RollwireError as error:
            if whole:
                await self._take_rest()
            error.trajectory = self._draft.trajectory()
            raise
        finally:
            if whole:
                await self._take_rest()
            self._visited = None

    async def _take_rest(self) -> None:
        """Puts into the draft what an aborted attempt's server had sampled and not sent yet."""
        if self._visited is None:
            return
        member, attempt = self._visited
        try:
            await attempt.wait_end(member.client.timeouts.close)
        finally:
            for chunk in attempt.rest():
                self._add(chunk, member)

    async def _next(self, member: ServerHandle, attempt: Attempt, whole: bool) -> Chunk | None:  # noqa: FBT001
        """The next chunk; for weights that the server does not have it waits no longer than for a
        server.
        """
        try:
            while self._may_await_weights(attempt):
                began = self._clock()
                look = _LOOK
                if behind := self._is_behind(member):
                    look = min(look, self._patience)
                try:
                    async with asyncio.timeout(look):
                        return await attempt.next(whole=whole)
                except TimeoutError as error:
                    self._await_weights(member, error)
                finally:
                    if behind:
                        self._unplaced += self._clock() - began
        finally:
            self._waits.end(self._waiter)
        return await attempt.next(whole=whole)

    def _await_weights(self, member: ServerHandle, cause: Exception) -> None:
        """A server was looked at that has not the weights yet.

        Raises:
            RollwireError: It is not to be waited for any more.
        """
        if not self._is_behind(member):
            return
        least, serves = self._request.min_weight_version, version_text(member.version)
        if self._may_go_back(member):
            raise ServerNotReadyError(
                f"{member.address}: serves {serves}, to which the policy was rolled back while a "
                f"sequence waited for version {least}",
                server=member.address,
            ) from cause
        if self._patience <= 0:
            raise self._given_up(self._never_came(member), ErrorScope.SERVER) from cause
        self._waits.begin(
            self._waiter,
            Want.WEIGHTS,
            give_up=self._clock() + self._patience,
            why=lambda: f"{member.address}: serves {serves}, and version {least} is asked for",
        )

    @property
    def _patience(self) -> float:
        """Seconds that the sequence still waits for a place."""
        return max(self._retries.seconds - self._unplaced, 0.0)

    def _may_await_weights(self, attempt: Attempt) -> bool:
        """Whether no token came, perhaps for want of newer weights."""
        request = self._request
        begun = attempt.next_offset > len(request.output_token_ids)
        return request.HasField("min_weight_version") and not begun

    def _is_behind(self, member: ServerHandle) -> bool:
        """Whether the server's weights are, as far as is known, older than the request takes."""
        return member.version is None or member.version < self._request.min_weight_version

    def _may_go_back(self, member: ServerHandle) -> bool:
        """Whether the sequence takes older weights by now than the attempt was told."""
        bound = self._bound(member)
        return bound is None or bound < self._request.min_weight_version

    def _never_came(self, member: ServerHandle) -> UnavailableError:
        least, seconds = self._request.min_weight_version, self._retries.seconds
        return UnavailableError(
            f"{member.address}: serves {version_text(member.version)}, and did not come to serve "
            f"version {least} within {seconds:g} s",
            server=member.address,
        )

    def _add(self, chunk: Chunk, member: ServerHandle) -> None:
        self._draft.add(chunk, member.address)
        if chunk.token_ids:
            self._failures.clear()
            self._unplaced = 0.0

    async def _choose(self) -> ServerHandle:
        """Where to go on."""
        began = self._clock()
        try:
            return await self._pick(
                self._request,
                self._after,
                timeout=min(self._patience, self._deadline - began),
                other_than=self._step_failed_at,
                waiter=self._waiter,
            )
        except UnavailableError as error:
            if self._clock() >= self._deadline:
                raise self._timed_out() from error
            raise self._given_up(error, ErrorScope.SERVER) from error
        finally:
            self._unplaced += self._clock() - began

    async def _recover(self, member: ServerHandle, failure: RollwireError) -> None:
        """Makes ready for the next attempt.

        Raises:
            RollwireError: There is none.
        """
        too_new = isinstance(failure, WeightVersionError) and failure.reason == "WEIGHTS_TOO_NEW"
        step_failed = isinstance(failure, StepFailedError) and self._step_failed_at is None
        given_up = isinstance(failure, RolloutFailedError)
        if given_up or not (failure.elsewhere or too_new or step_failed):
            raise failure
        logger.info("%s: sequence %s goes on elsewhere", failure, self._request.request_id)
        if too_new:  # no failure either way: another server may serve an older version
            member.refused_as_too_old(self._request.max_weight_version)
        elif step_failed:  # of the sequence, most likely: one other server may show that it is not
            self._step_failed_at = member
        elif isinstance(failure, QueueFullError):
            member.full_until = self._clock() + (failure.retry_after or 1.0)
        else:
            member.suspect(failure)
            self._failures.append(failure)
            if len(self._failures) >= self._retries.attempts:
                raise self._given_up(failure) from failure
            delay = self._delay()
            self._unplaced += delay
            await asyncio.sleep(delay)
        if self._clock() >= self._deadline:
            raise self._timed_out() from failure
        self._make_next_attempt()

    def _make_next_attempt(self) -> None:
        request = self._request
        request.attempt += 1
        self._draft.begin_attempt()
        self._put_prefix()
        if request.HasField("timeout"):
            request.timeout.CopyFrom(duration_to_proto(self._deadline - self._clock()))

    def _put_prefix(self) -> None:
        request = self._request
        request.ClearField("output_token_ids")
        request.output_token_ids.extend(self._draft.token_ids)
        if self._least is None:
            request.ClearField("min_weight_version")
        else:
            request.min_weight_version = self._least

    @property
    def _after(self) -> WeightTag | None:
        """What sampled the token before the next one."""
        return self._draft.newest or self._given_after

    def _bound(self, member: ServerHandle) -> int | None:
        """The oldest version under which the sequence may go on at a server."""
        bounds = (self._least, member.least_version(self._after))
        return max((bound for bound in bounds if bound is not None), default=None)

    def _put_bound(self, member: ServerHandle) -> None:
        if (bound := self._bound(member)) is not None:
            self._request.min_weight_version = bound

    def _delay(self) -> float:
        doublings = len(self._failures) - 2
        if doublings < 0:
            return 0.0
        longest = min(self._retries.first_delay * 2**doublings, self._retries.longest_delay)
        return random.uniform(longest / 2, longest)  # noqa: S311 - spreads retries, is no secret

    def _timed_out(self) -> TimedOutError:
        return TimedOutError(
            f"sequence {self._request.request_id}: its time is up after "
            f"{len(self._draft.token_ids)} tokens"
        )

    def _given_up(
        self, last: RollwireError, scope: ErrorScope = ErrorScope.SEQUENCE
    ) -> RolloutFailedError:
        causes = self._failures if last in self._failures else [*self._failures, last]
        return RolloutFailedError(
            f"sequence {self._request.request_id} was given up after "
            f"{len(self._draft.token_ids)} tokens, in attempt {self._request.attempt}: {last}",
            causes,
            scope=scope,
        )
