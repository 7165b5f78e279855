"""One sequence from its first attempt to its end, on as many servers as it takes."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from rollwire_client import wire
from rollwire_client.data import Chunk, FinishReason
from rollwire_client.errors import (
    QueueFullError,
    RolloutFailedError,
    RollwireError,
    ServerNotReadyError,
    TimedOutError,
    UnavailableError,
    WeightVersionError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rollwire.v1 import rollout_pb2

    from rollwire_client.attempt import Attempt
    from rollwire_client.member import Member
    from rollwire_client.trajectory import Draft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retries:
    """When a fleet gives a sequence up. A new token starts both counts again.

    Attributes:
        attempts: So many in a row that failed without a new token.
        seconds: So long after the first of them, or without any server that is ready.
        first_delay: Seconds between the second and the third of them; each next wait is twice as
            long. (Between the first and the second there is none.)
        longest_delay: But not longer than this.
    """

    attempts: int = 8
    seconds: float = 120.0
    first_delay: float = 0.1
    longest_delay: float = 5.0


class Pick(Protocol):
    """Chooses a server that is ready."""

    async def __call__(self, request: rollout_pb2.GenerateRequest, *, timeout: float) -> Member:
        """Waits for a server, preferably one whose weights the request takes now.

        Raises:
            WeightVersionError: All have newer weights than the request takes.
            UnavailableError: None was ready within ``timeout`` seconds.
        """


class Rollout:
    """One sequence: the request, what came so far, and the failures since the last new token.

    It goes on from what ``draft`` has, and puts into it what comes.
    """

    def __init__(
        self, request: rollout_pb2.GenerateRequest, draft: Draft, *, pick: Pick, retries: Retries
    ) -> None:
        self._request = request
        self._draft = draft
        self._pick = pick
        self._retries = retries
        self._visited: tuple[Member, Attempt] | None = None
        self._failures: list[RollwireError] = []
        self._failing_since = 0.0
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

    async def chunks(self, *, whole: bool) -> AsyncGenerator[Chunk, None]:
        """The tokens as they come; with ``whole``, those of an attempt at its end.

        Raises:
            RollwireError: With what was sampled before it in ``.trajectory``.
        """
        try:
            while True:
                member = await self._choose()
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
            error.trajectory = self._draft.trajectory()
            raise
        finally:
            if whole:  # else the caller has what it read
                self.flush()
            self._visited = None

    async def _next(self, member: Member, attempt: Attempt, whole: bool) -> Chunk | None:  # noqa: FBT001
        """The next chunk; for weights that the server does not have it waits no longer than for a
        server.
        """
        give_up = self._failing_since + self._retries.seconds
        while self._may_await_weights(attempt):
            try:
                async with asyncio.timeout_at(give_up):
                    return await attempt.next(whole=whole)
            except TimeoutError as error:
                if self._is_behind(member):
                    raise self._given_up(self._never_came(member)) from error
                give_up = self._clock() + self._retries.seconds  # it waits for something else
        return await attempt.next(whole=whole)

    def _may_await_weights(self, attempt: Attempt) -> bool:
        """Whether no token came, perhaps for want of newer weights."""
        request = self._request
        begun = attempt.next_offset > len(request.output_token_ids)
        return request.HasField("min_weight_version") and not begun

    def _is_behind(self, member: Member) -> bool:
        """Whether the server's weights are, as far as is known, older than the request takes."""
        return member.version is None or member.version < self._request.min_weight_version

    def _never_came(self, member: Member) -> UnavailableError:
        least, seconds = self._request.min_weight_version, self._retries.seconds
        return UnavailableError(
            f"{member.address}: serves version {member.version}, and did not come to serve "
            f"version {least} within {seconds:g} s",
            server=member.address,
        )

    def _add(self, chunk: Chunk, member: Member) -> None:
        self._draft.add(chunk, member.address)
        if chunk.token_ids:
            self._failures.clear()

    async def _choose(self) -> Member:
        """Where to go on."""
        now = self._clock()
        if not self._failures:
            self._failing_since = now
        give_up = self._failing_since + self._retries.seconds
        try:
            return await self._pick(self._request, timeout=min(give_up, self._deadline) - now)
        except UnavailableError as error:
            if self._clock() >= self._deadline:
                raise self._timed_out() from error
            raise self._given_up(error) from error

    async def _recover(self, member: Member, failure: RollwireError) -> None:
        """Makes ready for the next attempt.

        Raises:
            RollwireError: There is none.
        """
        too_new = isinstance(failure, WeightVersionError) and failure.reason == "WEIGHTS_TOO_NEW"
        if not (failure.elsewhere or too_new):
            raise failure
        logger.info("%s: sequence %s goes on elsewhere", failure, self._request.request_id)
        if too_new:  # no failure either way: another server may serve an older version
            member.refused_as_too_old(self._request.max_weight_version)
        elif isinstance(failure, QueueFullError):
            member.full_until = self._clock() + (failure.retry_after or 1.0)
        else:
            member.doubt(failure)
            if not self._failures:
                self._failing_since = self._clock()
            self._failures.append(failure)
            if len(self._failures) >= self._retries.attempts:
                raise self._given_up(failure) from failure
            await asyncio.sleep(self._delay())
        if self._clock() >= self._deadline:
            raise self._timed_out() from failure
        self._make_next_attempt()

    def _make_next_attempt(self) -> None:
        request = self._request
        request.attempt += 1
        self._draft.begin_attempt()
        self._put_prefix()
        if request.HasField("timeout"):
            request.timeout.CopyFrom(wire.duration(self._deadline - self._clock()))

    def _put_prefix(self) -> None:
        request = self._request
        request.ClearField("output_token_ids")
        request.output_token_ids.extend(self._draft.token_ids)
        newest = self._draft.newest_version
        if newest is not None and not (
            request.HasField("min_weight_version") and request.min_weight_version > newest
        ):
            request.min_weight_version = newest

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

    def _given_up(self, last: RollwireError) -> RolloutFailedError:
        causes = self._failures if last in self._failures else [*self._failures, last]
        return RolloutFailedError(
            f"sequence {self._request.request_id} was given up after "
            f"{len(self._draft.token_ids)} tokens, in attempt {self._request.attempt}: {last}",
            causes,
        )
