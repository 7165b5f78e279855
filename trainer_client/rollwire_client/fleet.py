"""Many rollout servers as one: sequences go to the least busy, and go on elsewhere if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from rollwire_client.client import RolloutClient, Timeouts
from rollwire_client.data import ServerInfo, ServerState
from rollwire_client.errors import (
    ClosedError,
    RollwireError,
    UnavailableError,
)
from rollwire_client.member import Member
from rollwire_client.request import DEFAULT_SAMPLING, RolloutOptions, generate_request
from rollwire_client.rollout import Retries, Rollout
from rollwire_client.tasks import end
from rollwire_client.trajectory import Draft, Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence

    from rollwire_client.data import Chunk, Sampling, WeightTag


T = TypeVar("T")

logger = logging.getLogger(__name__)

_START_POLL = 0.25  # seconds


class Fleet:
    """Rollout servers that serve the same policy; an async context manager.

    A sequence goes to the server with the fewest outstanding tokens among those that are ready. If
    that one gives it up, dies, or is cut off, it goes on at another from the tokens that came, and
    under weights no older than those. Leaving a rollout aborts it, closing the fleet aborts all.

    Args:
        addresses: HOST:PORT of each server, at least one.
        retries: When to give a sequence up.
        timeouts: How long to wait for a server.
        probe_interval: Seconds between two questions to each server how it is.

    Attributes:
        members: The servers, in the order of ``addresses``.
        policy: What was published last, as one of them serves it.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        retries: Retries | None = None,
        timeouts: Timeouts | None = None,
        probe_interval: float = 1.0,
    ) -> None:
        if isinstance(addresses, str):
            raise TypeError(f"addresses is the text {addresses!r}: give a list of HOST:PORT")
        self.members = tuple(
            Member(RolloutClient(address, timeouts=timeouts), changed=self._on_change)
            for address in dict.fromkeys(addresses)
        )
        if not self.members:
            raise ValueError("a fleet needs at least one server address")
        self._retries = retries or Retries()
        self._timeouts = timeouts or Timeouts()
        self._probe_interval = probe_interval
        self.policy: WeightTag | None = None
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = True

    async def __aenter__(self) -> Self:
        """Opens the channels, and waits until one of the servers has loaded its model.

        Raises:
            UnavailableError: None has within ``timeouts.start`` seconds; the message names each.
        """
        async with contextlib.AsyncExitStack() as stack:
            for member in self.members:
                await stack.enter_async_context(member.client)
            await self._find_a_server()
            stack.pop_all()
        self._closed = False
        for member in self.members:
            self.own(member.watch(self._probe_interval))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Aborts what is under way and closes the channels. Idempotent."""
        self._closed = True
        self._on_change()
        await end(self._tasks)
        await asyncio.gather(*(member.client.close() for member in self.members))

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        **options: Unpack[RolloutOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Samples one sequence and yields its tokens as they come, each once and in order.

        The last chunk has ``finish``. Leaving the iteration aborts the sequence.

        Args:
            prompt_ids: Token ids, at least one: any sequence of integers, arrays and tensors of one
                dimension included.
            sampling: How to sample.
            **options: Those of ``RolloutOptions``, and no others.

        Raises:
            TypeError: There is no such option.
            InvalidRequestError: A value does not fit; ``violations`` names the field.
            RefusedError: A server refused it; another would too.
            RolloutFailedError: It was given up, see ``Retries``.
            RollwireError: Any of these has what was sampled in ``.trajectory``.
        """
        return self._rollout(prompt_ids, sampling, options)[1].chunks(whole=False)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        **options: Unpack[RolloutOptions],
    ) -> Trajectory:
        """Samples one sequence to its end; see ``stream``."""
        draft, rollout = self._rollout(prompt_ids, sampling, options)
        async for _ in rollout.chunks(whole=True):
            pass
        return draft.trajectory()

    async def info(self) -> dict[str, ServerInfo | RollwireError]:
        """What each server is and does, or why it does not say so, by address.

        Raises:
            ClosedError: The fleet is not open.
        """
        self._check_open()

        async def ask(member: Member) -> ServerInfo | RollwireError:
            try:
                return await member.client.info()
            except RollwireError as error:
                return error

        answers = await asyncio.gather(*(ask(member) for member in self.members))
        return {member.address: a for member, a in zip(self.members, answers, strict=True)}

    async def newest_version(self) -> int | None:
        """The newest version that a server serves now, of those that answer; None if there is none.

        Where a trainer that starts again goes on: its next version must be above this one.

        Raises:
            UnavailableError: No server answers.
            ClosedError: The fleet is not open.
        """
        answers = (await self.info()).values()
        infos = [answer for answer in answers if isinstance(answer, ServerInfo)]
        if not infos:
            raise UnavailableError(f"no server answers: {'; '.join(map(str, answers))}")
        versions = [info.weights.version for info in infos if info.weights.version is not None]
        return max(versions, default=None)

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

    def _rollout(
        self, prompt_ids: Sequence[int], sampling: Sampling, options: RolloutOptions
    ) -> tuple[Draft, Rollout]:
        request = generate_request(prompt_ids, sampling, options)
        draft = Draft(request.request_id, request.prompt_token_ids)
        return draft, Rollout(request, draft, pick=self._pick, retries=self._retries)

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
