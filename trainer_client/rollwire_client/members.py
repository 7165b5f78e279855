"""The servers of a fleet: how each is, and which gets the next sequence."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from rollwire_client.client import RolloutClient, Timeouts
from rollwire_client.data import ServerState
from rollwire_client.errors import ClosedError, UnavailableError
from rollwire_client.member import Member
from rollwire_client.tasks import end

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from rollwire_client.channels import Credentials
    from rollwire_client.data import WeightTag

T = TypeVar("T")

logger = logging.getLogger(__name__)

_START_POLL = 0.25  # seconds


class Members:
    """What rollouts and publishes share of a fleet; its methods are the library's own.

    Args:
        addresses: HOST:PORT of each server, at least one.
        timeouts: How long to wait for a server.
        credentials: TLS and token, for all of them.
        probe_interval: Seconds between two questions to each server how it is.

    Attributes:
        members: The servers, in the order of ``addresses``.
        policy: What was published last, as one of them serves it.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        timeouts: Timeouts | None,
        credentials: Credentials | None,
        probe_interval: float,
    ) -> None:
        if isinstance(addresses, str):
            raise TypeError(f"addresses is the text {addresses!r}: give a list of HOST:PORT")
        self.members = tuple(
            Member(
                RolloutClient(address, timeouts=timeouts, credentials=credentials),
                changed=self._on_change,
            )
            for address in dict.fromkeys(addresses)
        )
        if not self.members:
            raise ValueError("a fleet needs at least one server address")
        self.policy: WeightTag | None = None
        self._timeouts = timeouts or Timeouts()
        self._probe_interval = probe_interval
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = True

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs ``work`` as a task that ends with the fleet at the latest.

        Raises:
            ClosedError: The fleet is not open.
        """
        try:
            self._check_open()
        except ClosedError:
            work.close()
            raise
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def learn(self, address: str, weights: WeightTag) -> None:
        """The server at ``address`` has committed these weights."""
        for member in self.members:
            if member.address == address:
                member.learn(weights)

    def expect(self, policy: WeightTag) -> None:
        """From now on servers that serve less than this policy get no sequences."""
        self.policy = policy
        for member in self.members:
            member.expect(policy)

    async def behind(self) -> list[Member]:
        """Asks all servers; those that could serve the policy published last, and do not."""
        infos = await asyncio.gather(*(member.probe() for member in self.members))
        return [
            member
            for member, info in zip(self.members, infos, strict=True)
            if info is not None and member.is_behind(info)
        ]

    async def _open(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for member in self.members:
                await stack.enter_async_context(member.client)
            await self._find_a_server()
            stack.pop_all()
        self._closed = False
        for member in self.members:
            self.own(member.watch(self._probe_interval))

    async def _close(self) -> None:
        self._closed = True
        self._on_change()
        await end(self._tasks)
        await asyncio.gather(*(member.client.close() for member in self.members))

    async def _pick(self, version: int | None, *, timeout: float) -> Member:
        """The least busy of the servers that are ready, as ``rollout.Pick`` has it."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + timeout
        while True:
            self._check_open()
            now = clock()
            ready = [m for m in self.members if m.problem is None]
            free = [m for m in ready if m.full_until <= now]
            current = [m for m in free if m.has(version)]
            if chosen := current or free:  # one that is behind makes the sequence wait
                return min(chosen, key=lambda m: m.outstanding_tokens)
            if now >= give_up:
                raise UnavailableError(f"no server is ready: {self._problems()}")
            until = min([give_up, *(m.full_until for m in ready)])
            change = self._change
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until - now):
                    await change.wait()

    async def _find_a_server(self) -> None:
        """Asks all of them until one is up."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._timeouts.start
        told = False
        while True:
            infos = await asyncio.gather(*(member.probe() for member in self.members))
            if any(info is not None and info.state is not ServerState.STARTING for info in infos):
                return
            if clock() >= give_up:
                raise UnavailableError(f"no server is up: {self._problems()}")
            if not told:
                told = True
                seconds = self._timeouts.start
                logger.warning("waiting %g s for a server: %s", seconds, self._problems())
            await asyncio.sleep(min(_START_POLL, max(give_up - clock(), 0)))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the fleet is not open: use it within `async with`")

    def _on_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _problems(self) -> str:
        return "; ".join(
            str(member.problem or f"{member.address}: its queue is full") for member in self.members
        )
