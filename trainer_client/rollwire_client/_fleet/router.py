"""Which server gets a sequence, and what happens while none can take it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING

from rollwire_client._errors import QueueFullError, UnavailableError, WeightVersionError
from rollwire_client._fleet.wait_log import WaitLog, WaitReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire.v1 import rollout_pb2

    from rollwire_client._fleet.committed_policy import Policy
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._trajectory import TrajectoryBuilder

STICK_TOKENS = 4096
"""A session leaves its server once that has more outstanding tokens than twice those of the least
busy one, and this many more. Leaving costs the prefix cache: the next server reads the conversation
again, which takes about as long as a few thousand tokens of the others' decoding. Twice, so that it
does not leave for a difference which its own next turn would turn round."""

_MAX_SESSIONS = 100_000  # remembered, the latest


class Router:
    """Sends a sequence to the server with the fewest outstanding tokens, and a session's sequences
    to the server that has their prefix, unless that is clearly busier.

    Attributes:
        servers: Those that may get sequences, as the pool has them.
        wait_log: Sequences that wait.
    """

    def __init__(self, policy: Policy, check_open: Callable[[], None]) -> None:
        self.servers: tuple[ServerHandle, ...] = ()
        self.wait_log = WaitLog()
        self._policy = policy
        self._check_open = check_open
        self._change = asyncio.Event()
        self._sessions: OrderedDict[str, tuple[ServerHandle, str]] = OrderedDict()

    def notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def route(
        self,
        request: rollout_pb2.GenerateRequest,
        output: TrajectoryBuilder,
        *,
        timeout: float,
        avoid: ServerHandle | None,
    ) -> ServerHandle:
        """Waits for a server that takes the sequence, preferably one whose weights it need not
        wait for.

        Args:
            request: What is to be sampled.
            output: What was sampled so far.
            timeout: Seconds.
            avoid: This server gets it only if no other is ready.

        Raises:
            WeightVersionError: All servers have newer weights than the request takes.
            QueueFullError: None had room for it within ``timeout`` seconds.
            UnavailableError: None was ready.
        """
        if output.newest is not None:
            self._policy.observed(output.newest)
        max_version = request.max_weight_version if request.HasField("max_weight_version") else None
        clock = asyncio.get_running_loop().time
        give_up = clock() + timeout
        try:
            while True:
                self._check_open()
                now = clock()
                ready = [
                    server
                    for server in self.servers
                    if server.problem is None and not _is_too_new(server, max_version)
                ]
                if free := [server for server in ready if server.full_until <= now]:
                    others = [server for server in free if server is not avoid] or free
                    current = [s for s in others if _serves_now(s, request, output)]
                    return self._choose(current or others, request.session_id)
                if max_version is not None and not ready:
                    self._check_bound(max_version)
                self.wait_log.begin(
                    output,
                    WaitReason.QUEUE if ready else WaitReason.SERVER,
                    give_up=give_up,
                    describe=functools.partial(self.problems, max_version),
                )
                if now >= give_up:
                    if ready:
                        raise QueueFullError(f"no server has room: {self.problems(max_version)}")
                    raise UnavailableError(f"no server is ready: {self.problems(max_version)}")
                until = min([give_up, *(server.full_until for server in ready)])
                change = self._change
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until - now):
                        await change.wait()
        finally:
            self.wait_log.end(output)

    def unavailable_reason(self) -> str | None:
        """Why no server samples now, with the reason of each; None while one does."""
        now = asyncio.get_running_loop().time()
        if any(s.problem is None and not s.paused and s.full_until <= now for s in self.servers):
            return None
        return self.problems() or None

    def problems(self, max_version: int | None = None) -> str:
        """Why each server takes no sequence of at most ``max_version`` now."""
        return "; ".join(_problem(server, max_version) for server in self.servers)

    def _choose(self, servers: Sequence[ServerHandle], session: str) -> ServerHandle:
        least_busy = min(servers, key=lambda server: server.outstanding_tokens)
        if not session:
            return least_busy
        last, server_id = self._sessions.pop(session, (least_busy, least_busy.server_id))
        stays = (
            last in servers
            and last.server_id == server_id  # a process that was restarted has no prefix
            and last.outstanding_tokens <= 2 * least_busy.outstanding_tokens + STICK_TOKENS
        )
        chosen = last if stays else least_busy
        self._sessions[session] = chosen, chosen.server_id
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen

    def _check_bound(self, max_version: int) -> None:
        if any(server.can_serve(max_version) for server in self.servers):
            return
        policy = self._policy.current
        newest = policy.version if policy is not None else None
        if (newest is not None and newest > max_version) or any(
            server.is_newer_than(max_version) for server in self.servers
        ):
            raise WeightVersionError(
                f"no server serves version {max_version} or an older one, and none will unless the "
                f"policy is rolled back: {self.problems(max_version)}",
                reason="WEIGHTS_TOO_NEW",
            )


def _problem(server: ServerHandle, max_version: int | None) -> str:
    if max_version is not None and server.is_newer_than(max_version):
        version = server.version
        newer = f"version {version}" if version is not None and version > max_version else None
        return f"{server.address}: serves {newer or 'a newer one'}"
    if server.problem is not None:
        return str(server.problem)
    reasons = [server.pause_text()] if server.paused else []
    if not reasons or server.full_until > asyncio.get_running_loop().time():
        reasons.append("its queue is full")
    return f"{server.address}: {', and '.join(reasons)}"


def _is_too_new(server: ServerHandle, max_version: int | None) -> bool:
    return max_version is not None and server.is_newer_than(max_version)


def _serves_now(
    server: ServerHandle, request: rollout_pb2.GenerateRequest, output: TrajectoryBuilder
) -> bool:
    """Whether its weights are new enough for the next token of the sequence."""
    bounds = [server.min_version(output.newest)]
    if request.HasField("min_weight_version"):
        bounds.append(request.min_weight_version)
    known = [bound for bound in bounds if bound is not None]
    return not known or (server.version is not None and server.version >= max(known))
