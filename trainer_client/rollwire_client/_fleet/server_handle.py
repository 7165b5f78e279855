"""One server of a fleet: whether it can serve, and how busy it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollwire.types import ServerState, WeightTag, version_text

from rollwire_client._errors import RollwireError, ServerNotReadyError, ServerUnreachableError
from rollwire_client._fleet.server_lifecycle import TRANSITIONS, Event, Life

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from rollwire.v1 import rollout_pb2

    from rollwire_client._data import ServerInfo
    from rollwire_client._fleet.committed_policy import Policy
    from rollwire_client._routing_replay import RoutingBuilder
    from rollwire_client._rpc.attempt import Attempt
    from rollwire_client._rpc.client import RolloutClient

logger = logging.getLogger(__name__)

_READY = {ServerState.SERVING, ServerState.PAUSED}
_WORKS = {Life.READY, Life.BEHIND}
_CURABLE = {ServerState.AWAITING_WEIGHTS, ServerState.QUARANTINED}  # by a full update


class ServerHandle:
    """A server of a fleet, asked every so often how it is.

    It takes sequences while ``problem`` is None. A failed sequence casts doubt on it: it gets
    nothing until it was asked again, and answered well.

    Attributes:
        client: Of the server.
        life: Where it is in its life.
        info: What it said last.
        problem: Why it takes no sequences.
        full_until: Its queue was full; when to try again, on the event loop's clock.
        answers: Whether it said how it is when it was asked last.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        changed: Callable[[], None],
        identified: Callable[[], None],
        policy: Policy,
        fresh_seconds: float,
    ) -> None:
        """``changed`` is called whenever it is ready, and when it says something new;
        ``identified`` when another process answers, or none; ``policy`` is what it should serve;
        what was heard of it counts for ``fresh_seconds``.
        """
        self.client = client
        self.life = Life.JOINING
        self.info: ServerInfo | None = None
        self.problem: RollwireError | None = self._not_ready("has not answered yet")
        self.full_until = 0.0
        self.answers = False
        self._changed = changed
        self._identified = identified
        self._policy = policy
        self._last_words = ""  # what it said when it gave up a sequence, since it was last ready
        self._beyond: tuple[WeightTag | None, int] | None = None  # see refused_as_too_old
        self._fresh_seconds = fresh_seconds
        self._clock = asyncio.get_running_loop().time
        self._asked_at = -math.inf  # inf while it is being asked
        self._starting_tokens = 0
        self._attempts = 0
        self._works: set[asyncio.Task[Any]] = set()
        self._poked = asyncio.Event()

    @property
    def address(self) -> str:
        """Of the server."""
        return self.client.address

    @property
    def server_id(self) -> str:
        """Of the process that answered last; "" before that."""
        return self.info.server_id if self.info is not None else ""

    @property
    def version(self) -> int | None:
        """Of the weights that it is known to serve."""
        return self.info.weights.version if self.info is not None else None

    @property
    def paused(self) -> bool:
        """Whether it said last that it is: what it has taken waits, also while it drains."""
        if self.info is None:
            return False
        drains = self.info.state is ServerState.DRAINING
        return self.info.state is ServerState.PAUSED or (drains and bool(self.info.pauses))

    def told_pause(self) -> str:
        """Who paused it, in a message's words."""
        pauses = self.info.pauses if self.info is not None else ()
        return "is paused" + (f" by {', '.join(map(str, pauses))}" if pauses else "")

    @property
    def attempts(self) -> int:
        """Sequences of this library that it has."""
        return self._attempts

    def is_ahead(self, most: int) -> bool:
        """Whether its weights are known to be newer than version ``most``."""
        if self._beyond is not None:
            known, refused = self._beyond
            if refused >= most and known == self._weights:
                return True
        return self.version is not None and self.version > most

    def may_serve(self, most: int) -> bool:
        """Whether it may still sample under version ``most`` or an older one, now or later: what it
        needs to serve again, or has missed, brings it to the policy of the others.
        """
        if self.info is None:
            return self.life is Life.JOINING
        if (policy := self._policy.current) is not None:
            return policy.version is None or policy.version <= most
        return not self.is_ahead(most) and self.info.state not in _CURABLE

    def least_version(self, after: WeightTag | None) -> int | None:
        """The oldest version under which a sequence may go on here that these weights sampled last:
        none that was committed before them. None: any.
        """
        if after is None or self._policy.current is not None:
            return self._policy.least_version(after) if after is not None else None
        if (info := self.info) is None or after.version is None:
            return after.version
        serves, highest = info.weights.version, info.highest_version
        if serves is None or highest is None or not serves < after.version <= highest:
            return after.version
        return serves  # it has rolled back from there

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that its sequences may still bring."""
        return self.client.outstanding_tokens + self._starting_tokens

    def attempt(
        self, request: rollout_pb2.GenerateRequest, routing: RoutingBuilder | None
    ) -> AbstractAsyncContextManager[Attempt]:
        """An attempt here, which counts as outstanding once it is entered; leaving it aborts it.

        Rows of routing go to ``routing`` as they come.

        Raises:
            RollwireError: When it is entered: it cannot be started.
        """
        return _Visit(self, request, routing)

    async def start(
        self, request: rollout_pb2.GenerateRequest, routing: RoutingBuilder | None
    ) -> Attempt:
        """Starts an attempt; beneath ``attempt``, which ends it.

        A server of which nothing was heard for a while is asked how it is, beside that.
        """
        if self._clock() - max(self._asked_at, self.client.heard_at) > self._fresh_seconds:
            self._poked.set()
        context = self.info.context_length if self.info is not None else 0
        tokens = request.sampling.max_new_tokens or context
        self._starting_tokens += tokens
        self._attempts += 1
        try:
            return await self.client.start(request, routing)
        except BaseException:
            self.end(None)
            raise
        finally:
            self._starting_tokens -= tokens

    def end(self, attempt: Attempt | None) -> None:
        """Ends an attempt that was started, or could not be."""
        if attempt is not None:
            attempt.close()
        self._attempts -= 1
        self._poke_if_unused()

    def suspect(self, error: RollwireError) -> None:
        """A sequence failed here: ask the server before it gets another."""
        if not (self._last_words or isinstance(error, ServerUnreachableError)):
            self._last_words = str(error).removeprefix(f"{self.address}: ")
        self._move(Event.FAILED, error)
        self._poked.set()

    def refused_as_too_old(self, most: int) -> None:
        """It refused a sequence of at most this version, as its weights are newer: they are others
        than those that it is known to serve, or will be.
        """
        self._beyond = (self._weights, most)

    def committed(self, weights: WeightTag) -> None:
        """The server has committed these weights."""
        if self.info is not None and self.info.server_id == weights.server_id:
            self.info = replace(self.info, weights=weights)
        else:
            self._poked.set()

    def policy_changed(self) -> None:
        """From now on it takes sequences only if it serves other weights than before."""
        if self.info is not None and self.life in _WORKS:
            self._move(*self._judge(self.info))
        self._poked.set()

    def rejoin(self) -> None:
        """Its address is in the fleet's list again."""
        self._move(Event.LISTED, self._not_ready("has not answered yet"))
        self._poked.set()

    def leave(self, works: Iterable[asyncio.Task[Any]]) -> None:
        """Its address is not in the list: it goes once its sequences and ``works`` have ended."""
        self._move(Event.UNLISTED, self._not_ready("left the fleet"))
        for work in works:
            self._works.add(work)
            work.add_done_callback(self._work_ended)
        self._poked.set()

    async def run(self, pause: Callable[[], float]) -> None:
        """Asks the server every ``pause()`` seconds, and whenever it is in doubt, until it has
        left; then its channel is closed.
        """
        while True:
            self._poked.clear()
            if self.life is not Life.LEAVING:
                await self.probe()
            elif not self._attempts and not self._works:
                self._move(Event.UNUSED, self._not_ready("left the fleet"))
                await self.client.close()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause()):
                    await self._poked.wait()

    async def probe(self) -> ServerInfo | None:
        """Asks the server how it is; None if it does not say."""
        self._poked.clear()
        self._asked_at = math.inf
        try:
            info = await self.client.info(timeout=self.client.timeouts.probe)
        except RollwireError as error:
            if self.answers:
                self.answers = False
                self._identified()
            self._move(Event.FAILED, error)
            return None
        finally:
            self._asked_at = self._clock()
        if self.info is not None and _is_later(self.info.weights, info.weights):
            info = replace(info, weights=self.info.weights)
        before, self.info = self.info, info
        if not self.answers or before is None or before.server_id != info.server_id:
            self.answers = True
            self._identified()
        self._policy.seen(info.weights)
        if before is None or (before.state, before.weights) != (info.state, info.weights):
            self._changed()
        if not self._poked.is_set():  # else it is asked again at once
            self._move(*self._judge(self.info))
        return info

    def is_behind(self, info: ServerInfo) -> bool:
        """Whether the fleet's policy is what a server that is so needs to serve it."""
        if self._policy.current is None or not info.accepts_updates:
            return False
        if info.state in _CURABLE:
            return True
        return info.state in _READY and not self._policy.accepts(info.weights)

    @property
    def _weights(self) -> WeightTag | None:
        return self.info.weights if self.info is not None else None

    def _work_ended(self, work: asyncio.Task[Any]) -> None:
        self._works.discard(work)
        self._poke_if_unused()

    def _poke_if_unused(self) -> None:
        if self.life is Life.LEAVING and not self._attempts and not self._works:
            self._poked.set()

    def _move(self, event: Event, problem: RollwireError | None) -> None:
        life = TRANSITIONS[self.life].get(event)
        if life is None:
            return
        if life is not self.life:
            # A server that is lost to rollouts is news, and so is the end of that.
            news = {life, self.life} == {Life.READY, Life.SUSPECT}
            logger.log(
                logging.WARNING if news else logging.INFO,
                "%s: %s, was %s%s",
                self.address, life.value, self.life.value, f": {problem}" if problem else "",
            )  # fmt: skip
        self.life = life
        if life in _WORKS:
            self._last_words = ""
        elif problem is not None and self._last_words not in str(problem):
            told = f"{problem}; it had said: {self._last_words}"
            problem = type(problem)(told, server=self.address)
        self.problem = problem
        if problem is None:
            self._changed()

    def _judge(self, info: ServerInfo) -> tuple[Event, RollwireError | None]:
        if info.state not in _READY:
            return Event.RESTS, self._not_ready(f"is {info.state.value}")
        policy = self._policy.current
        if policy is not None and not self._policy.accepts(info.weights):
            cure = "the next publish brings it up, or catch_up()"
            if self._policy.refuses_next(info.weights):
                cure = f"catch_up() brings it there, or a publish above version {self.version}"
            return Event.LAGS, self._not_ready(
                f"serves {_told_beside(info.weights, policy)}, which was published last here: "
                f"{cure}"
            )
        return Event.SERVES, None

    def _not_ready(self, why: str) -> ServerNotReadyError:
        return ServerNotReadyError(f"{self.address}: {why}", server=self.address)


class _Visit:
    """An attempt at a member. A class, as a rollout may be an abandoned generator: the event loop
    closes those in any order, and a context manager made of another one would not outlive that.
    """

    def __init__(
        self,
        member: ServerHandle,
        request: rollout_pb2.GenerateRequest,
        routing: RoutingBuilder | None,
    ) -> None:
        self._member = member
        self._request = request
        self._routing = routing
        self._attempt: Attempt | None = None

    async def __aenter__(self) -> Attempt:
        self._attempt = await self._member.start(self._request, self._routing)
        return self._attempt

    async def __aexit__(self, *_: object) -> None:
        self._member.end(self._attempt)


def _is_later(known: WeightTag, told: WeightTag) -> bool:
    """Whether a commit overtook an answer."""
    return known.server_id == told.server_id and known.revision > told.revision


def _told_beside(weights: WeightTag, policy: WeightTag) -> str:
    one, other = version_text(weights.version), version_text(policy.version)
    if one == other:
        one, other = (f"{one} of digest {tag.digest:016x}" for tag in (weights, policy))
    return f"{one}, not {other}"
