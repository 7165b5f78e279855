"""Many rollout servers as one: a sequence goes to the least busy, and elsewhere if that fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self, Unpack

from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError, UnavailableError
from rollwire_client._fleet.many import generate_many
from rollwire_client._fleet.server_pool import ServerPool
from rollwire_client._fleet.session import Session
from rollwire_client._rpc.conversion import DEFAULT_SAMPLING, RolloutOptions, checked_token_ids
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from rollwire.types import WeightTag

    from rollwire_client._data import Sampling
    from rollwire_client._fleet.rollout import Retries, Rollout
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.server_pool import Addresses
    from rollwire_client._rpc.channel import Credentials
    from rollwire_client._rpc.client import Timeouts
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

    def _rollout(
        self, prompt_ids: Sequence[int], sampling: Sampling, options: RolloutOptions
    ) -> Rollout:
        output = TrajectoryBuilder(checked_token_ids(prompt_ids))
        return self._pool.rollout(output, sampling, options)
