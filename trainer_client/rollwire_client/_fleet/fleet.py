"""Many rollout servers as one: a sequence goes to the least busy, and elsewhere if that fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self, Unpack

from rollwire.types import SleepingWeights

from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError, UnavailableError
from rollwire_client._fleet import control
from rollwire_client._fleet.many import generate_many
from rollwire_client._fleet.server_pool import ServerPool
from rollwire_client._fleet.session import Session
from rollwire_client._rpc.conversion import DEFAULT_SAMPLING, RolloutOptions, checked_token_ids
from rollwire_client._rpc.pausing import PAUSED_LEASE
from rollwire_client._rpc.timeouts import SLEEP_TIMEOUT
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from rollwire.types import WeightTag

    from rollwire_client._data import Asleep, FleetReport, Pause, Require, Resumed, Sampling
    from rollwire_client._fleet.rollout import Retries, Rollout
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.server_pool import Addresses
    from rollwire_client._rpc.channel import Credentials
    from rollwire_client._rpc.timeouts import Timeouts
    from rollwire_client._trajectory import Chunk, Trajectory


class Fleet:
    """Rollout servers that serve the same policy; an async context manager.

    A sequence goes to the server with the fewest outstanding tokens among those that are ready. If
    that server interrupts it, dies, or is cut off, the sequence continues on another server, from
    the tokens that have arrived, and never under older weights than theirs. A server that missed
    the last publish through this fleet gets no sequences until it has those weights. Leaving a
    rollout aborts it; closing the fleet aborts all rollouts.

    Args:
        addresses: HOST:PORT of each server, at least one; or ``dns:///NAME:PORT``, a name that is
            resolved periodically; or a function, async or not, that returns the addresses.
        retries: When to give a sequence up.
        timeouts: How long to wait for a server.
        credentials: TLS and token, for all servers.
        probe_interval: Seconds between two probes of a server. If more than 20 servers are ready,
            20 of them are probed per interval. A server that has been silent is also probed when a
            sequence starts there.
        resolve_interval: Seconds between two lookups of the addresses.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    def __init__(
        self,
        addresses: Addresses,
        *,
        retries: Retries | None = None,
        timeouts: Timeouts | None = None,
        credentials: Credentials | None = None,
        probe_interval: float = 1.0,
        resolve_interval: float = 5.0,
    ) -> None:
        self._pool = ServerPool(
            addresses, retries, timeouts, credentials, probe_interval, resolve_interval
        )

    async def __aenter__(self) -> Self:
        """Opens the channels, and waits until one of the servers has loaded its model.

        Raises:
            UnavailableError: No server has loaded its model within ``timeouts.start`` seconds; the
                message says why for each.
        """
        await self._pool.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Aborts the sequences under way and closes the channels. Idempotent."""
        await self._pool.close()

    @property
    def policy(self) -> WeightTag | None:
        """The weights that were published last through this fleet; None before that."""
        return self._pool.policy.current

    def unavailable_reason(self) -> str | None:
        """Why no server samples now, with the reason for each; None while any server samples."""
        return self._pool.router.unavailable_reason()

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        **options: Unpack[RolloutOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Samples one sequence and yields its tokens as they arrive, each once and in order.

        The last chunk has ``finish``. Leaving the iteration aborts the sequence.

        Args:
            prompt_ids: Token ids, at least one: any sequence of integers, including arrays and
                tensors of one dimension.
            sampling: How to sample.
            **options: The options of ``RolloutOptions``.

        Raises:
            TypeError: There is no such option.
            InvalidRequestError: A value is invalid; ``violations`` names the field.
            RefusedError: A server refused the request, and others would too.
            RolloutFailedError: The fleet gave the sequence up; see ``Retries``.
            RollwireError: Another error. ``.trajectory`` of each has the tokens sampled before it.
        """
        return self._rollout(prompt_ids, sampling, options).chunks()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        **options: Unpack[RolloutOptions],
    ) -> Trajectory:
        """Samples one sequence to its end; see ``stream``."""
        rollout = self._rollout(prompt_ids, sampling, options)
        await rollout.run()
        return rollout.output.trajectory()

    async def generate_many(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        n: int = 1,
        **options: Unpack[RolloutOptions],
    ) -> list[list[Trajectory]]:
        """Samples ``n`` sequences of each prompt, all at once; see ``stream``.

        The samples of a prompt go to the same server, where they share its prefix, unless that
        server is clearly busier than the others. Sequences that find all queues full wait, at most
        as long as the option ``timeout`` says. Nothing is sampled if one of the prompts is not
        valid. An error of one sequence ends the others.

        Args:
            prompts: Token ids of each prompt, as for ``stream``; also an array or tensor with a
                prompt in each row.
            sampling: How to sample. With a seed, sample i of prompt p is sampled with
                ``seed + p * n + i``.
            n: Number of samples of each prompt.
            **options: The options of ``RolloutOptions``, except ``request_id`` and ``session_id``.

        Returns:
            For each prompt, in their order, its ``n`` trajectories.

        Raises:
            RollwireError: The first error of a sequence; a note says of which.
            TypeError, ValueError: ``n`` is not a positive integer, or an option is not allowed.
        """
        return await generate_many(self._pool, prompts, sampling, n, options)

    def session(self, prompt_ids: Sequence[int] = ()) -> Session:
        """A conversation that begins with these tokens; see ``Session``.

        Raises:
            InvalidRequestError: They are not token ids.
        """
        self._pool.affinity.check_process()
        return Session(prompt_ids, self._pool)

    async def info(self) -> dict[str, ServerInfo | RollwireError]:
        """The ``ServerInfo`` of each server, or the error with which it answered, by address.

        Raises:
            ClosedError: The fleet is not open.
        """
        self._pool.check_open()

        async def info_or_error(server: ServerHandle) -> ServerInfo | RollwireError:
            try:
                return await server.client.info()
            except RollwireError as error:
                return error

        servers = self._pool.listed
        answers = await asyncio.gather(*(info_or_error(server) for server in servers))
        return {server.address: a for server, a in zip(servers, answers, strict=True)}

    async def newest_version(self) -> int | None:
        """The newest version that any answering server has committed; None if there is none.

        After a restart, a trainer's next version must be above this one, also if an update without
        a version was published since.

        Raises:
            UnavailableError: No server answers.
            ClosedError: The fleet is not open.
        """
        answers = (await self.info()).values()
        infos = [answer for answer in answers if isinstance(answer, ServerInfo)]
        if not infos:
            raise UnavailableError(f"no server answers: {'; '.join(map(str, answers))}")
        versions = [info.highest_version for info in infos]
        return max((v for v in versions if v is not None), default=None)

    async def sleep(
        self,
        weights: SleepingWeights = SleepingWeights.HOST_BACKUP,
        *,
        finish_within: float = 0.0,
        require: Require = "all",
        timeout: float = SLEEP_TIMEOUT,
    ) -> FleetReport[Asleep]:
        """Frees the device memory of all servers, until ``wake_up``. Idempotent.

        New rollouts wait from now on. Those under way have ``finish_within`` seconds to end; then
        the servers interrupt them. They keep their tokens, and continue after ``wake_up``, or on a
        server that stayed awake. This wait does not count for ``Retries.seconds``; only a rollout's
        own ``timeout`` ends it. An update that was not committed is discarded; a commit that has
        begun is waited for.

        Args:
            weights: What becomes of the weights. The KV cache is freed in any case.
            finish_within: Seconds in which this fleet's sequences under way may end. Those of other
                clients are interrupted.
            require: Which servers must sleep: "all", "any", or a share of them, such as 0.5.
            timeout: Seconds to wait for each server's answer. One that takes longer still falls
                asleep.

        Raises:
            FleetCallError: Fewer servers sleep. Its ``report`` says which, and why the others do
                not; what sleeps goes on sleeping.
            ClosedError: The fleet is not open.
            InvalidRequestError, TypeError, ValueError: An argument is invalid.
        """
        return await control.sleep(
            self._pool, weights, finish_within=finish_within, require=require, timeout=timeout
        )

    async def wake_up(
        self,
        *,
        reload_checkpoint: bool = False,
        require: Require = "all",
        timeout: float = SLEEP_TIMEOUT,
    ) -> FleetReport[ServerInfo]:
        """Has all servers allocate their memory again; those that serve get rollouts at once.

        Nothing happens to servers that are awake. After ``SleepingWeights.DISCARD`` a server awaits
        an update; until then its state in the report is ``AWAITING_WEIGHTS``.

        Args:
            reload_checkpoint: Load the checkpoint with which the server started instead.
            require: Which servers must be awake: "all", "any", or a share of them, such as 0.5.
            timeout: Seconds to wait for each server's answer. One that takes longer still wakes up.

        Raises:
            FleetCallError: Fewer servers are awake. Its ``report`` says which, and why the others
                are not. A server that has no memory sleeps on, and can be woken later.
            ClosedError: The fleet is not open.
            InvalidRequestError, TypeError, ValueError: An argument is invalid.
        """
        return await control.wake_up(
            self._pool, reload_checkpoint=reload_checkpoint, require=require, timeout=timeout
        )

    async def pause(
        self, pause_id: str = "", *, lease: float | None = None, require: Require = "all"
    ) -> FleetReport[Pause]:
        """Stops sampling on all servers at their next step, until ``resume``.

        Servers hold their sequences, and new ones wait there. Memory stays as it is.

        Args:
            pause_id: Id of the pause on each server; the id of an active pause renews its lease.
                "": a new one, which the report has.
            lease: Seconds after which a server resumes by itself; 0: never; None: the server's
                default.
            require: Which servers must pause: "all", "any", or a share of them, such as 0.5.

        Raises:
            FleetCallError: Fewer servers have paused. Its ``report`` says which; they stay paused
                until ``resume``, or until the lease ends.
            ClosedError: The fleet is not open.
            InvalidRequestError, ValueError: An argument is invalid.
        """
        return await control.pause(self._pool, pause_id, lease=lease, require=require)

    async def resume(self, pause_id: str = "", *, require: Require = "all") -> FleetReport[Resumed]:
        """Ends one pause on all servers, or all pauses if ``pause_id`` is "". Idempotent.

        Args:
            pause_id: Id of the pause.
            require: Which servers must answer: "all", "any", or a share of them, such as 0.5.

        Raises:
            FleetCallError: Fewer have answered; a pause of the others ends with its lease.
            ClosedError: The fleet is not open.
            InvalidRequestError, ValueError: An argument is invalid.
        """
        return await control.resume(self._pool, pause_id, require=require)

    def paused(
        self, *, lease: float = PAUSED_LEASE, require: Require = "all"
    ) -> AbstractAsyncContextManager[FleetReport[Pause]]:
        """Pauses all servers for the time of an ``async with`` block, and renews the lease.

        Servers that join or restart meanwhile are paused with the next renewal.

        Args:
            lease: Seconds after which servers resume if this process dies, or its event loop is
                blocked.
            require: Which servers must pause: "all", "any", or a share of them, such as 0.5. If
                fewer do, ``FleetCallError`` is raised, and all are resumed.
        """
        return control.paused(self._pool, lease=lease, require=require)

    def _rollout(
        self, prompt_ids: Sequence[int], sampling: Sampling, options: RolloutOptions
    ) -> Rollout:
        output = TrajectoryBuilder(checked_token_ids(prompt_ids))
        return self._pool.rollout(output, sampling, options)
