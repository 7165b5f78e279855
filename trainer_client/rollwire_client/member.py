"""One server of a fleet: whether it can serve, and how busy it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire_client.data import ServerInfo, ServerState, WeightTag
from rollwire_client.errors import RollwireError, ServerNotReadyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire.v1 import rollout_pb2

    from rollwire_client.client import RolloutClient
    from rollwire_client.link import Attempt

_READY = {ServerState.SERVING, ServerState.PAUSED}
_CURABLE = {ServerState.AWAITING_WEIGHTS, ServerState.QUARANTINED}  # by a full update


class Member:
    """A server of a fleet, asked every so often how it is.

    It takes sequences while ``problem`` is None. A failed sequence casts doubt on it: it gets
    nothing until it was asked again, and answered well.

    Attributes:
        client: Of the server.
        info: What it said last.
        problem: Why it takes no sequences.
        full_until: Its queue was full; when to try again, on the event loop's clock.
    """

    def __init__(self, client: RolloutClient, *, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever it becomes ready, or has more room."""
        self.client = client
        self.info: ServerInfo | None = None
        self.problem: RollwireError | None = ServerNotReadyError(
            f"{client.address}: was not asked yet", server=client.address
        )
        self.full_until = 0.0
        self._changed = changed
        self._policy: WeightTag | None = None
        self._starting_tokens = 0
        self._doubted = asyncio.Event()

    @property
    def address(self) -> str:
        """Of the server."""
        return self.client.address

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that its sequences may still bring."""
        return self.client.outstanding_tokens + self._starting_tokens

    def has(self, version: int | None) -> bool:
        """Whether its weights are known to be at least of this version."""
        if version is None:
            return True
        served = self.info.weights.version if self.info is not None else None
        return served is not None and served >= version

    async def start(self, request: rollout_pb2.GenerateRequest) -> Attempt:
        """Starts an attempt here, which counts as outstanding at once."""
        context = self.info.context_length if self.info is not None else 0
        tokens = request.sampling.max_new_tokens or context
        self._starting_tokens += tokens
        try:
            return await self.client.start(request)
        finally:
            self._starting_tokens -= tokens

    def doubt(self, error: RollwireError) -> None:
        """A sequence failed here: ask the server before it gets another."""
        self.problem = error
        self._doubted.set()

    def learn(self, weights: WeightTag) -> None:
        """The server has committed these weights."""
        if self.info is not None:
            self.info = replace(self.info, weights=weights)

    def expect(self, policy: WeightTag) -> None:
        """From now on the server takes sequences only under this policy, or a newer one."""
        self._policy = policy
        if self.info is not None and self.problem is None:
            self.problem = self._judge(self.info)
        self._doubted.set()

    async def watch(self, interval: float) -> None:
        """Asks the server for ever: every ``interval`` seconds, and whenever it is in doubt."""
        while True:
            await self.probe()
            try:
                async with asyncio.timeout(interval):
                    await self._doubted.wait()
            except TimeoutError:
                pass

    async def probe(self) -> ServerInfo | None:
        """Asks the server how it is; None if it does not say."""
        self._doubted.clear()
        try:
            info = await self.client.info(timeout=self.client.timeouts.probe)
        except RollwireError as error:
            self.problem = error
            return None
        if self.info is not None and _is_later(self.info.weights, info.weights):
            info = replace(info, weights=self.info.weights)
        self.info = info
        if not self._doubted.is_set():  # else it is asked again at once
            self.problem = self._judge(self.info)
        if self.problem is None:
            self._changed()
        return info

    def is_behind(self, info: ServerInfo) -> bool:
        """Whether the fleet's policy is what a server that is so needs to serve it."""
        if self._policy is None or not info.accepts_updates:
            return False
        if info.state in _CURABLE:
            return True
        return info.state in _READY and _is_behind(info.weights, self._policy)

    def _judge(self, info: ServerInfo) -> RollwireError | None:
        if info.state not in _READY:
            return ServerNotReadyError(
                f"{self.address}: is {info.state.value}", server=self.address
            )
        if self._policy is not None and _is_behind(info.weights, self._policy):
            return ServerNotReadyError(
                f"{self.address}: serves version {info.weights.version}, the fleet "
                f"{self._policy.version}: the next publish brings it up, or catch_up()",
                server=self.address,
            )
        return None


def _is_later(known: WeightTag, told: WeightTag) -> bool:
    """Whether a commit overtook an answer."""
    return known.server_id == told.server_id and known.revision > told.revision


def _is_behind(weights: WeightTag, policy: WeightTag) -> bool:
    if weights.digest == policy.digest:
        return False
    if weights.version is None or policy.version is None:
        return True
    return weights.version <= policy.version
