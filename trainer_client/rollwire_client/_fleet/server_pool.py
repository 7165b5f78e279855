"""The servers of a fleet: who they are, how each is, and which gets the next sequence."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rollwire.types import ServerState

from rollwire_client._arguments import seconds
from rollwire_client._concurrency.affinity import LoopAffinity
from rollwire_client._concurrency.tasks import cancel_all
from rollwire_client._errors import (
    ClosedError,
    QueueFullError,
    UnavailableError,
    WeightVersionError,
)
from rollwire_client._fleet import addresses as sources
from rollwire_client._fleet.committed_policy import Policy
from rollwire_client._fleet.rollout import Retries, Rollout
from rollwire_client._fleet.router import Router
from rollwire_client._fleet.server_handle import ServerHandle
from rollwire_client._fleet.server_lifecycle import Life
from rollwire_client._fleet.waiting import LOOK, Waits, Want
from rollwire_client._rpc.channels import Credentials, CredentialsError
from rollwire_client._rpc.client import RolloutClient, Timeouts
from rollwire_client._rpc.request import generate_request
from rollwire_client._trajectory import TrajectoryBuilder
from rollwire_client._wording import servers_text

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from rollwire.types import WeightTag
    from rollwire.v1 import rollout_pb2

    from rollwire_client._data import Sampling
    from rollwire_client._fleet.addresses import Addresses
    from rollwire_client._rpc.request import RolloutOptions
    from rollwire_client._trajectory import Trajectory

T = TypeVar("T")

logger = logging.getLogger(__name__)

_START_POLL = 0.25  # seconds
_SHORTEST = 0.001  # seconds between two questions

# A question costs the client half a millisecond or more, so no more servers than these are asked
# within a probe interval: of those that are ready, and of all others, which change soon, and for
# which rollouts may wait. What changes of a ready server shows when a sequence starts there.
_READY_PROBES = 20
_OTHER_PROBES = 200


class ServerPool:
    """What rollouts and publishes share of a fleet; its methods are the library's own.

    Args:
        addresses: Of the servers, see ``Fleet``.
        retries: When to give a sequence up.
        timeouts: How long to wait for a server.
        credentials: TLS and token, for all of them.
        probe_interval: Seconds between two questions to each server how it is, see ``Fleet``.
        resolve_interval: Seconds between two questions where the servers are.
    """

    def __init__(
        self,
        addresses: Addresses,
        *,
        retries: Retries | None,
        timeouts: Timeouts | None,
        credentials: Credentials | None,
        probe_interval: float,
        resolve_interval: float,
    ) -> None:
        if not isinstance(timeouts, Timeouts | None):
            raise TypeError(
                f"timeouts is {timeouts!r}: say Timeouts(call={timeouts!r}), or another"
            )
        self._source = sources.address_source(addresses)
        self.policy = Policy(self._policy_changed)
        self._retries = retries or Retries()
        self._timeouts = timeouts or Timeouts()
        self._credentials = credentials or Credentials()
        if self._credentials.secure and self._credentials.server_name is None:
            name = self._source.server_name
            self._credentials = replace(self._credentials, server_name=name)
        self._probe_interval = seconds("probe_interval", probe_interval, least=_SHORTEST)
        self._resolve_interval = seconds("resolve_interval", resolve_interval, least=_SHORTEST)
        self._all: dict[str, ServerHandle] = {}  # those that are leaving too
        self.listed: tuple[ServerHandle, ...] = ()
        self.servers: tuple[ServerHandle, ...] = ()
        self._told_duplicates: set[tuple[str, str]] = set()
        self._router = Router()
        self._change = asyncio.Event()
        self._waits = Waits()
        self._works: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = True
        self._affinity: LoopAffinity | None = None  # from when it begins to open until it is closed

    def unavailable_reason(self) -> str | None:
        """Why no server samples now, the reason of each; None while one does, as far as is known.

        What a rollout that gets no tokens waits for.
        """
        now = asyncio.get_running_loop().time()
        if any(m.problem is None and not m.paused and m.full_until <= now for m in self.servers):
            return None
        return self._problems() or None

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs ``work`` as a task that ends with the fleet at the latest.

        Raises:
            ClosedError: The fleet is not open.
        """
        try:
            self.check_open()
        except ClosedError:
            work.close()
            raise
        return _keep(work, self._works)

    def begin(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        options: RolloutOptions,
        *,
        prefix: Trajectory | None = None,
        waiter: object | None = None,
    ) -> tuple[TrajectoryBuilder, Rollout]:
        """A rollout, and where what it brings will be.

        Args:
            prompt_ids: As ``Fleet.stream`` takes them.
            sampling: In the same way.
            options: In the same way.
            prefix: What was sampled before, of the same prompt; it goes on from there.
            waiter: As ``Rollout`` takes it.
        """
        request = generate_request(prompt_ids, sampling, options)
        replay = options.get("routed_experts")
        if prefix is None:
            draft = TrajectoryBuilder(request.request_id, request.prompt_token_ids, replay)
        else:
            draft = TrajectoryBuilder.after(prefix, request.request_id, replay)
        return draft, self.start(request, draft, waiter=waiter)

    def start(
        self,
        request: rollout_pb2.GenerateRequest,
        draft: TrajectoryBuilder,
        after: WeightTag | None = None,
        waiter: object | None = None,
    ) -> Rollout:
        """A rollout that puts into ``draft`` what it brings; ``after`` sampled what stands before
        it.
        """
        return Rollout(
            request,
            draft,
            pick=self._pick,
            retries=self._retries,
            waits=self._waits,
            after=after,
            waiter=waiter,
        )

    def committed(self, address: str, weights: WeightTag) -> None:
        """The server at ``address`` has committed these weights, as it was told to."""
        if (member := self._all.get(address)) is not None:
            member.committed(weights)
        self.policy.committed(weights)

    def _policy_changed(self) -> None:
        for member in self._all.values():
            member.policy_changed()
        self._on_change()

    async def outdated_servers(self) -> list[ServerHandle]:
        """Asks all servers; those that could serve the policy published last, and do not."""
        listed = self.listed
        infos = await asyncio.gather(*(member.probe() for member in listed))
        servers = self.servers
        return [
            member
            for member, info in zip(listed, infos, strict=True)
            if info is not None and member in servers and member.is_behind(info)
        ]

    async def identified_servers(self) -> tuple[ServerHandle, ...]:
        """The servers of the moment; those that joined just now are asked first who they are."""
        joining = [member for member in self.listed if member.life is Life.JOINING]
        await asyncio.gather(*(member.probe() for member in joining))
        return self.servers

    def _tell_apart(self) -> None:
        """Finds out which of the addresses are of the same server: it counts once, under the first
        at which it answers.
        """
        chosen: dict[str, ServerHandle] = {}
        for member in self.listed:
            first = chosen.setdefault(member.server_id, member)
            if member.answers and not first.answers:
                chosen[member.server_id] = member
        self.servers = tuple(m for m in self.listed if not m.server_id or chosen[m.server_id] is m)
        for member in self.listed:
            if member in self.servers:
                continue
            first = chosen[member.server_id]
            one, other = sorted((first.address, member.address))
            if (one, other) not in self._told_duplicates:
                self._told_duplicates.add((one, other))
                logger.warning(
                    "%s and %s are addresses of one server (server_id %s), which counts once: "
                    "leave one of them out",
                    first.address,
                    member.address,
                    member.server_id,
                )

    async def open(self) -> None:
        self._check_affinity()
        if self._affinity is not None:
            raise RuntimeError("this Fleet is open already")
        self._affinity = LoopAffinity("Fleet")
        self._all, self.listed, self.servers = {}, (), ()
        try:
            await self._find_a_server()
        except BaseException:
            await self._close_clients()
            self._affinity = None
            raise
        self._closed = False
        for member in self._all.values():
            self._run(member)
        _keep(self._tell_waits(), self._running)
        if not self._source.fixed:
            _keep(self._follow(), self._running)

    async def close(self) -> None:
        if self.forked:
            return
        self._check_affinity()
        self._closed = True
        self._on_change()
        try:
            await cancel_all([*self._works, *self._running])
        finally:
            await self._close_clients()
            self._affinity = None

    async def _close_clients(self) -> None:
        await asyncio.gather(*(member.client.close() for member in self._all.values()))

    async def _find_a_server(self) -> None:
        """Asks where they are, and all of them, until one is up."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._timeouts.start
        told = False
        while True:
            problem = await self._resolve()
            infos = await asyncio.gather(*(member.probe() for member in self.listed))
            if any(info is not None and info.state is not ServerState.STARTING for info in infos):
                return
            problem = problem or self._problems()
            if clock() >= give_up:
                raise UnavailableError(f"no server is up: {problem}")
            if not told:
                told = True
                logger.warning("waiting up to %g s for a server: %s", self._timeouts.start, problem)
            await asyncio.sleep(min(_START_POLL, max(give_up - clock(), 0)))

    async def _tell_waits(self) -> None:
        """Says in the log what rollouts wait for, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            for member in self._all.values():
                if member.paused and member.attempts:
                    why = functools.partial(_pause_of, member)
                    self._waits.begin(member, Want.RESUME, why=why)
                else:
                    self._waits.end(member)
            self._waits.tell()

    async def _follow(self) -> None:
        """Keeps up with the list; without one, the servers stay those of the last."""
        before: str | None = None
        while True:
            await asyncio.sleep(self._resolve_interval)
            try:
                problem = await self._resolve()
            except CredentialsError as error:  # a file of theirs is gone
                problem = str(error)
            if problem is not None and problem != before:
                logger.warning(
                    "%s; the fleet keeps its %s", problem, servers_text(len(self.servers))
                )
            before = problem

    async def _resolve(self) -> str | None:
        """Makes the servers those of the list of now; says why if it cannot."""
        if self._source.fixed and self._all:
            return None
        try:
            addresses = await sources.ask(self._source, timeout=self._timeouts.call)
        except LookupError as error:
            return str(error.args[0])
        await self._list(addresses)
        return None

    async def _list(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            member = self._all.get(address)
            if member is None or member.life is Life.GONE:
                await self._join(address)
            elif member.life is Life.LEAVING:
                member.rejoin()
        for member in self.listed:
            if member.address not in addresses:
                member.leave(self._works)
        self.listed = tuple(self._all[address] for address in addresses)
        self._tell_apart()
        self._all = {a: m for a, m in self._all.items() if m.life is not Life.GONE}
        self._on_change()

    async def _join(self, address: str) -> None:
        client = RolloutClient(address, timeouts=self._timeouts, credentials=self._credentials)
        await client.__aenter__()
        member = ServerHandle(
            client,
            changed=self._on_change,
            identified=self._tell_apart,
            policy=self.policy,
            fresh_seconds=self._probe_interval,
        )
        self._all[address] = member
        if not self._closed:
            self._run(member)

    def _run(self, member: ServerHandle) -> None:
        _keep(member.run(functools.partial(self._until_probe, member)), self._running)

    def _until_probe(self, member: ServerHandle) -> float:
        """Seconds until a server is asked again how it is."""
        ready = member.problem is None
        alike = sum((other.problem is None) is ready for other in self.servers)
        times = alike / (_READY_PROBES if ready else _OTHER_PROBES)
        if times <= 1:
            return self._probe_interval
        spread = random.uniform(0.9, 1.1)  # noqa: S311 - not all at once; no secret
        return self._probe_interval * times * spread

    async def _pick(
        self,
        request: rollout_pb2.GenerateRequest,
        after: WeightTag | None,
        *,
        timeout: float,
        other_than: ServerHandle | None,
        waiter: object,
    ) -> ServerHandle:
        """One of the servers that are ready, as ``rollout.Pick`` has it."""
        if after is not None:
            self.policy.seen(after)
        least = request.min_weight_version if request.HasField("min_weight_version") else None
        most = request.max_weight_version if request.HasField("max_weight_version") else None
        clock = asyncio.get_running_loop().time
        give_up = clock() + timeout
        try:
            while True:
                self.check_open()
                now = clock()
                ready = [m for m in self.servers if m.problem is None and not _is_ahead(m, most)]
                if free := [m for m in ready if m.full_until <= now]:
                    others = [m for m in free if m is not other_than] or free
                    fitting = [m for m in others if _fits(m, least, after)]
                    return self._router.choose(fitting or others, request)
                if most is not None and not ready:
                    self._check_bound(most)
                why = functools.partial(self._problems, most)
                want = Want.ROOM if ready else Want.SERVER
                self._waits.begin(waiter, want, give_up=give_up, why=why)
                if now >= give_up:
                    if ready:
                        raise QueueFullError(f"no server has room: {self._problems(most)}")
                    raise UnavailableError(f"no server is ready: {self._problems(most)}")
                until = min([give_up, *(m.full_until for m in ready)])
                change = self._change
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until - now):
                        await change.wait()
        finally:
            self._waits.end(waiter)

    def _check_bound(self, most: int) -> None:
        """Raises WeightVersionError if no server may sample under version ``most`` any more."""
        members = self.servers
        if any(m.may_serve(most) for m in members):
            return
        newest = self.policy.current.version if self.policy.current is not None else None
        if (newest is not None and newest > most) or any(m.is_ahead(most) for m in members):
            raise WeightVersionError(
                f"no server serves version {most} or an older one any more, and none will, unless "
                f"the policy is rolled back: {self._problems(most)}",
                reason="WEIGHTS_TOO_NEW",
            )

    @property
    def forked(self) -> bool:
        """Whether it was opened in another process, of which this one is a fork."""
        return self._affinity is not None and self._affinity.forked

    def check_process(self) -> None:
        """Raises NotOpenHereError in a forked child of the process in which the fleet is open."""
        if self._affinity is not None:
            self._affinity.check_process()

    def check_open(self) -> None:
        """Raises ClosedError if the fleet is not open; NotOpenHereError if it is open elsewhere."""
        self._check_affinity()
        if self._closed:
            raise ClosedError("the fleet is not open: use it within `async with`")

    def _check_affinity(self) -> None:
        if self._affinity is not None:
            self._affinity.check()

    def _on_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _problems(self, most: int | None = None) -> str:
        return "; ".join(_problem(member, most) for member in self.servers)


def _pause_of(member: ServerHandle) -> str:
    return f"{member.address}: {member.told_pause()}"


def _problem(member: ServerHandle, most: int | None) -> str:
    """Why a server does not take a sequence now."""
    if most is not None and member.is_ahead(most):
        version = member.version
        newer = f"version {version}" if version is not None and version > most else "a newer one"
        return f"{member.address}: serves {newer}"
    if member.problem is not None:
        return str(member.problem)
    why = [member.told_pause()] if member.paused else []
    if not why or member.full_until > asyncio.get_running_loop().time():
        why.append("its queue is full")
    return f"{member.address}: {', and '.join(why)}"


def _fits(member: ServerHandle, least: int | None, after: WeightTag | None) -> bool:
    """Whether the server has weights under which the sequence need not wait."""
    bounds = [b for b in (least, member.least_version(after)) if b is not None]
    return not bounds or (member.version is not None and member.version >= max(bounds))


def _is_ahead(member: ServerHandle, most: int | None) -> bool:
    return most is not None and member.is_ahead(most)


def _keep(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
