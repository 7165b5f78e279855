"""The servers of a fleet: found by their addresses, probed, and offered to its rollouts."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rollwire.types import ServerState

from rollwire_client._arguments import seconds, server_address, servers_text
from rollwire_client._concurrency import LoopAffinity, cancel_all, run_in_thread
from rollwire_client._errors import ClosedError, UnavailableError
from rollwire_client._fleet.policy import Policy
from rollwire_client._fleet.rollout import Retries, Rollout
from rollwire_client._fleet.router import LOG_INTERVAL, Router, WaitReason
from rollwire_client._fleet.server_handle import ServerHandle, ServerStatus
from rollwire_client._fleet.transport_group import GroupKeeper
from rollwire_client._rpc.channel import Credentials, CredentialsError
from rollwire_client._rpc.client import RolloutClient
from rollwire_client._rpc.conversion import begin_output, generate_request
from rollwire_client._rpc.timeouts import Timeouts, checked_timeouts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

    from rollwire.types import WeightTag

    from rollwire_client._data import Sampling
    from rollwire_client._rpc.conversion import RolloutOptions
    from rollwire_client._trajectory import TrajectoryBuilder

Addresses: TypeAlias = (
    "str | Iterable[str] | Callable[[], Iterable[str]] | Callable[[], Awaitable[Iterable[str]]]"
)
T = TypeVar("T")

logger = logging.getLogger(__name__)

_DNS = "dns:///"
_START_POLL = 0.25  # seconds
_MIN_INTERVAL = 0.001  # seconds

# A probe costs the client half a millisecond or more, so in a large fleet only so many servers are
# probed within a probe interval. Those that are not ready change soon, and rollouts may wait for
# them. A change of a ready server shows when a sequence starts there.
_READY_PROBES = 20
_OTHER_PROBES = 200


class AddressSource:
    """Says where the servers are now: a fixed list, a name that is resolved, or a function."""

    def __init__(self, addresses: Addresses) -> None:
        self.fixed = False  # the addresses never change
        self.server_name: str | None = None  # what all servers' certificates say, if it is known
        self._lookup: Callable[[], Any]
        if callable(addresses):
            self._lookup = addresses
            name = getattr(addresses, "__qualname__", repr(addresses))
            self._description = f"the addresses that {name} gives"
        elif not isinstance(addresses, str):
            listed = _checked_addresses(addresses)
            if not listed:
                raise ValueError("a fleet needs at least one server address")

            async def lookup() -> tuple[str, ...]:
                return listed

            self.fixed = True
            self._lookup = lookup
            self._description = ", ".join(listed)
        elif addresses.startswith(_DNS):
            host, _, port = server_address(addresses.removeprefix(_DNS)).rpartition(":")
            self.server_name = host.strip("[]")
            self._lookup = functools.partial(_resolved, self.server_name, port)
            self._description = f"{_DNS}{self.server_name}:{port}"
        else:
            raise TypeError(
                f"addresses is the text {addresses!r}: give a list of HOST:PORT, "
                f"or {_DNS}NAME:PORT for a name that is resolved periodically"
            )

    async def resolve(self, timeout: float) -> tuple[str, ...]:
        """HOST:PORT of each server, each once; LookupError if there are none."""
        try:
            async with asyncio.timeout(timeout):
                if inspect.iscoroutinefunction(self._lookup):
                    answer = self._lookup()
                else:  # it may block
                    answer = await run_in_thread(self._lookup)
                found = await answer if inspect.isawaitable(answer) else answer
                addresses = _checked_addresses(found)
        except TimeoutError as error:
            raise LookupError(f"{self._description}: no answer within {timeout:g} s") from error
        except Exception as error:
            raise LookupError(f"{self._description}: {error or type(error).__name__}") from error
        if not addresses:
            raise LookupError(f"{self._description}: there are no servers")
        return addresses


def _resolved(name: str, port: str) -> list[str]:
    """Of a name with an address for each server, as headless services have it."""
    found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})  # resolvers shuffle them
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def _checked_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    if isinstance(addresses, str):
        raise TypeError(f"the addresses are the text {addresses!r}: give a list of HOST:PORT")
    return tuple(dict.fromkeys(server_address(address) for address in addresses))


class ServerPool:
    """What rollouts and publishes share of a fleet. Arguments as ``Fleet`` has them."""

    def __init__(
        self,
        addresses: Addresses,
        retries: Retries | None,
        timeouts: Timeouts | None,
        credentials: Credentials | None,
        probe_interval: float,
        resolve_interval: float,
    ) -> None:
        if not isinstance(retries, Retries | None):
            raise TypeError(
                f"retries is {retries!r}: use for example Retries(attempts={retries!r})"
            )
        self._source = AddressSource(addresses)
        self.policy = Policy(self._policy_changed)
        self.router = Router(self.policy, self.check_open)
        self._retries = retries or Retries()
        self._timeouts = checked_timeouts(timeouts)
        self._credentials = credentials or Credentials()
        if self._credentials.secure and self._credentials.server_name is None:
            name = self._source.server_name
            self._credentials = replace(self._credentials, server_name=name)
        self._probe_interval = seconds("probe_interval", probe_interval, minimum=_MIN_INTERVAL)
        self._resolve_interval = seconds(
            "resolve_interval", resolve_interval, minimum=_MIN_INTERVAL
        )
        self.listed: tuple[ServerHandle, ...] = ()  # one for each address
        self._all: dict[str, ServerHandle] = {}  # those that are leaving too
        self._reported_duplicates: set[frozenset[str]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # of publishes
        self._own_tasks: set[asyncio.Task[Any]] = set()
        self.groups = GroupKeeper(self.create_own_task)
        self._closed = True
        self.affinity = LoopAffinity("Fleet", bound=False)  # bound while it opens or is open

    @property
    def servers(self) -> tuple[ServerHandle, ...]:
        """In the order of their addresses. A server that has several is there once."""
        return self.router.servers

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs ``work`` as a task that ends with the fleet at the latest."""
        try:
            self.check_open()
        except ClosedError:
            work.close()
            raise
        return _spawn(work, self._tasks)

    def create_own_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """As ``create_task``, but no server that leaves waits for it."""
        return _spawn(work, self._own_tasks)

    def rollout(
        self, output: TrajectoryBuilder, sampling: Sampling, options: RolloutOptions
    ) -> Rollout:
        """A rollout that has not begun, and continues from what ``output`` has."""
        request = generate_request(output.prompt_ids, sampling, options)
        return Rollout(request, begin_output(output, request, options), self.router, self._retries)

    def committed(self, address: str, weights: WeightTag) -> None:
        """The server at ``address`` has committed these weights, as it was told to."""
        if (server := self._all.get(address)) is not None:
            server.committed(weights)
        self.policy.committed(weights)

    def adopt(self, committed: Mapping[str, WeightTag]) -> None:
        """These servers, by their addresses, have committed a policy that another process's fleet
        has published.
        """
        if not committed:
            return
        weights = next(iter(committed.values()))
        with self.policy.committing(weights.version, weights.digest, rollback=False):
            for address, weights in committed.items():
                self.committed(address, weights)

    def _policy_changed(self) -> None:
        for server in self._all.values():
            server.policy_changed()
        self.router.notify()

    async def outdated_servers(self) -> list[ServerHandle]:
        """Probes all servers; those that could serve the policy, and do not."""
        listed = self.listed
        infos = await asyncio.gather(*(server.probe() for server in listed))
        return [
            server
            for server, info in zip(listed, infos, strict=True)
            if info is not None and server in self.servers and server.is_behind(info)
        ]

    async def identified_servers(self) -> tuple[ServerHandle, ...]:
        """The servers of the moment, once those that joined just now have said who they are."""
        joining = [server for server in self.listed if server.status is ServerStatus.JOINING]
        await asyncio.gather(*(server.probe() for server in joining))
        return self.servers

    async def open(self) -> None:
        self.affinity.check()
        if self.affinity.bound:
            raise RuntimeError("this Fleet is open already")
        self.affinity.bind()
        self._all, self.listed, self.router.servers = {}, (), ()
        try:
            await self._await_a_server()
        except BaseException:
            await self._close_clients()
            self.affinity.release()
            raise
        self._closed = False
        for server in self._all.values():
            self._run(server)
        _spawn(self._log_waits(), self._own_tasks)
        if not self._source.fixed:
            _spawn(self._follow_addresses(), self._own_tasks)

    async def close(self) -> None:
        if self.affinity.forked:
            return
        self.affinity.check()
        self._closed = True
        self.router.notify()
        try:
            await cancel_all([*self._tasks, *self._own_tasks])
        finally:
            await self.groups.close()
            await self._close_clients()
            self.affinity.release()

    def check_open(self) -> None:
        """Raises ClosedError if the fleet is not open; NotOpenHereError if it is open elsewhere."""
        self.affinity.check()
        if self._closed:
            raise ClosedError("the fleet is not open: use it within `async with`")

    async def _close_clients(self) -> None:
        await asyncio.gather(*(server.client.close() for server in self._all.values()))

    async def _await_a_server(self) -> None:
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._timeouts.start
        warned = False
        while True:
            problem = await self._resolve()
            infos = await asyncio.gather(*(server.probe() for server in self.listed))
            if any(info is not None and info.state is not ServerState.STARTING for info in infos):
                return
            problem = problem or self.router.problems()
            if clock() >= give_up:
                raise UnavailableError(f"no server is up: {problem}")
            if not warned:
                warned = True
                logger.warning("waiting up to %g s for a server: %s", self._timeouts.start, problem)
            await asyncio.sleep(min(_START_POLL, max(give_up - clock(), 0)))

    async def _log_waits(self) -> None:
        wait_log = self.router.wait_log
        while True:
            await asyncio.sleep(LOG_INTERVAL)
            for server in self._all.values():
                if server.paused and server.attempts:
                    describe = functools.partial(_describe_pause, server)
                    wait_log.begin(server, WaitReason.RESUME, describe=describe)
                else:
                    wait_log.end(server)
            wait_log.log()

    async def _follow_addresses(self) -> None:
        """Keeps up with the list of addresses; while there is none, the servers stay."""
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
        """Takes over the addresses of now; returns why it cannot."""
        if self._source.fixed and self._all:
            return None
        try:
            addresses = await self._source.resolve(self._timeouts.call)
        except LookupError as error:
            return str(error.args[0])
        for address in addresses:
            server = self._all.get(address)
            if server is None or server.status is ServerStatus.GONE:
                await self._join(address)
            elif server.status is ServerStatus.LEAVING:
                server.rejoin()
        for server in self.listed:
            if server.address not in addresses:
                server.leave(self._tasks)
        self.listed = tuple(self._all[address] for address in addresses)
        self._find_duplicates()
        self._all = {
            address: server
            for address, server in self._all.items()
            if server.status is not ServerStatus.GONE
        }
        self.router.notify()
        return None

    async def _join(self, address: str) -> None:
        client = RolloutClient(address, timeouts=self._timeouts, credentials=self._credentials)
        await client.__aenter__()
        server = ServerHandle(
            client,
            on_change=self.router.notify,
            on_identity=self._find_duplicates,
            policy=self.policy,
            fresh_seconds=self._probe_interval,
        )
        self._all[address] = server
        if not self._closed:
            self._run(server)

    def _find_duplicates(self) -> None:
        """A server that answers at several of the addresses counts once: at the first of them."""
        chosen: dict[str, ServerHandle] = {}
        for server in self.listed:
            first = chosen.setdefault(server.server_id, server)
            if server.answers and not first.answers:
                chosen[server.server_id] = server
        self.router.servers = tuple(
            server
            for server in self.listed
            if not server.server_id or chosen[server.server_id] is server
        )
        for server in self.listed:
            if server in self.servers:
                continue
            first = chosen[server.server_id]
            pair = frozenset({first.address, server.address})
            if pair not in self._reported_duplicates:
                self._reported_duplicates.add(pair)
                logger.warning(
                    "%s and %s are addresses of one server (server_id %s), which counts once: "
                    "leave one of them out",
                    first.address, server.address, server.server_id,
                )  # fmt: skip

    def _run(self, server: ServerHandle) -> None:
        _spawn(server.run(functools.partial(self._probe_delay, server)), self._own_tasks)

    def _probe_delay(self, server: ServerHandle) -> float:
        ready = server.problem is None
        alike = sum((other.problem is None) is ready for other in self.servers)
        times = alike / (_READY_PROBES if ready else _OTHER_PROBES)
        if times <= 1:
            return self._probe_interval
        spread = random.uniform(0.9, 1.1)  # noqa: S311 - not all at once; no secret
        return self._probe_interval * times * spread


def _describe_pause(server: ServerHandle) -> str:
    return f"{server.address}: {server.pause_text()}"


def _spawn(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
