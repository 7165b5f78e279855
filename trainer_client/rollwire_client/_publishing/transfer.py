"""Moves an update to the servers of a publish, over one transport group after another.

A group consists of the servers that do not have the whole update yet. When a group fails, servers
that are dead or to blame are left out, and the rest form a new group, which goes on from the lowest
bucket that one of them misses. A group that has not failed moves the next update too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
from rollwire.deadlines import Timeout
from rollwire.v1 import weights_pb2

from rollwire_client._concurrency import cancel_all, run_in_thread, run_to_end
from rollwire_client._errors import RollwireError, TransferError
from rollwire_client._fleet.transport_group import TransportGroup
from rollwire_client._publishing.group_failure import (
    GroupError,
    explain_failure,
    one_failed,
    unstaged,
)
from rollwire_client._publishing.source_reading import SourceReading

if TYPE_CHECKING:
    import threading
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import torch

    from rollwire_client._data import PublishTimeouts
    from rollwire_client._fleet.transport_group import GroupKeeper
    from rollwire_client._publishing.payload import Payload
    from rollwire_client._publishing.publish_target import Changes, PublishTarget

logger = logging.getLogger(__name__)

# A server that is alive but fails in the transport may be the victim of another server once.
_MAX_GROUP_FAILURES = 2

_CLOSE_SECONDS = 10.0
_REASON_SECONDS = 0.5  # for a death, or this end of a group, to say why a server has failed


class WeightTransfer:
    """Sends one update to some servers.

    Args:
        payload: The update.
        device: Where the tensors lie; None is the CPU.
        backends: Of the transport. The first is used, and the next where members share a GPU and it
            does not allow that.
        find_host: Finds the address under which the servers reach this machine.
        groups: May have the group of the last update, and keeps the one of this. None: a group is
            formed, and closed in the end.
        changes: Of the servers.
        timeouts: How long to wait.
        progress: Called with the bytes that were sent, from another thread; an exception that it
            raises ends the transfer.
    """

    def __init__(
        self,
        payload: Payload,
        *,
        device: torch.device | None,
        backends: Sequence[str],
        find_host: Callable[[], Awaitable[str]],
        groups: GroupKeeper | None,
        changes: Changes,
        timeouts: PublishTimeouts,
        progress: Callable[[int], None],
    ) -> None:
        self._sender = transport.Sender(payload.layout, cast=payload.cast)
        self._source = payload.source
        self._device = device
        self._backends = list(backends)
        self._find_host = find_host
        self._groups = groups
        self._changes = changes
        self._timeouts = timeouts
        self._progress = progress
        self._link: transport.Link | None = None  # of the group, until it is closed or kept
        self._closing: list[asyncio.Future[bool]] = []
        self._group_failures: Counter[PublishTarget] = Counter()
        self._reading = SourceReading(
            device,
            timeouts.source,
            lambda: self._sender.packing,
            after_queued=not payload.is_copy,
        )

    @property
    def digest(self) -> int:
        """Of what was sent, once all was."""
        return self._sender.digest

    @property
    def digests(self) -> dict[str, int]:
        """Of each tensor that was sent, once all were."""
        return self._sender.digests

    @property
    def casts(self) -> dict[str, str]:
        """By name, the dtypes from which tensors were cast."""
        return self._sender.casts

    async def close(self) -> None:
        """Waits until the links have closed, also when cancelled; some backends take a moment."""
        closing, self._closing = self._closing, []
        if closing:
            await run_to_end(_wait_closed(closing))

    async def run(self, targets: Sequence[PublishTarget]) -> None:
        """Returns when every server is staged or has failed; ``close`` it in the end.

        Raises:
            SchemaMismatchError: The source gives something else than the manifest says.
            SourceError: It raised, or did not give a tensor in time.
            TransferError: No group can be formed from here.
        """
        while members := unstaged(targets):
            try:
                await self._send_over_group(members)
            except transport.UnsuitableDevices as shared:
                if len(self._backends) == 1:
                    raise TransferError(str(shared)) from shared
                backend = self._backends.pop(0)
                logger.info("%s, not %s: %s", self._backends[0], backend, shared)
            except GroupError as failure:
                if self._reading.timeout is not None:
                    raise self._reading.timeout from failure
                logger.warning("a transport group of %d failed: %s", len(members), failure)
                self._blame(members, failure)
                await self.close()

    async def _send_over_group(self, targets: list[PublishTarget]) -> None:
        """Forms a group of these servers, sends to them, and keeps it for the next update.

        Raises:
            GroupError: Not all of them have everything.
        """
        try:
            if (group := self._resume(targets)) is not None:
                first_bucket = 0
            else:
                for target in targets:
                    target.leave_group()
                formed = await self._unless_one_fails(targets, self._form(targets))
                if formed is None:
                    return
                group, first_bucket = formed
            await self._unless_one_fails(targets, self._send(group.link, first_bucket), group.link)
            await self._wait_staged(targets)
            if self._groups is not None and all(target.staged for target in targets):
                self._link = None
                self._groups.keep(group)
        finally:
            self._close_link()

    async def _unless_one_fails(
        self,
        targets: list[PublishTarget],
        work: Any,
        link: transport.Link | None = None,
    ) -> Any:
        """Does a part of the work, and abandons it as soon as a server fails."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._changes.until(lambda: one_failed(targets)))
        try:
            await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                waits_for = None if link is None else link.waits_for
                await self._await_reason(targets, working)
                if not working.done():
                    raise explain_failure(targets, None, waits_for)
            return await working
        except transport.UnsuitableDevices:
            raise
        except transport.TransportError as error:
            self._close_link()
            await self._await_reason(targets)
            raise explain_failure(targets, error, error.peer) from error
        finally:
            await cancel_all([working, failing])

    async def _await_reason(
        self, targets: Sequence[PublishTarget], *working: asyncio.Task[Any]
    ) -> None:
        """Waits a moment for a server's death, or for this end's own failure."""
        dying = asyncio.create_task(
            self._changes.until(lambda: any(target.error is not None for target in targets))
        )
        try:
            await asyncio.wait(
                [dying, *working], timeout=_REASON_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await cancel_all([dying])

    def _resume(self, targets: list[PublishTarget]) -> TransportGroup | None:
        """The group of the last update, if its members are these servers, and all of them use it
        again; orders them by their ranks.
        """
        if self._groups is None or (kept := self._groups.take()) is None:
            return None
        self._link = kept.link
        resumed = {t.address: t for t in targets if t.resumed(kept.epoch)}
        if (
            len(resumed) == len(targets)
            and resumed.keys() == set(kept.members)
            and kept.backend in self._backends
            and kept.device == self._device
        ):
            targets[:] = [resumed[address] for address in kept.members]
            return kept
        logger.info("the transport group of the last update is not used again")
        self._close_link()
        return None

    async def _form(self, targets: list[PublishTarget]) -> tuple[TransportGroup, int] | None:
        """A group of these servers, and the first bucket to send; None if one is staged already."""
        host = await self._find_host()
        epoch = secrets.token_hex(16)
        backend = self._backends[0]
        world_size = len(targets) + 1
        opening = run_in_thread(
            lambda: transport.open_link(
                backend,
                epoch=epoch,
                rank=0,
                world_size=world_size,
                host=host,
                device=self._device,
            )
        )
        try:
            link = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_opened)
            raise
        except (transport.TransportError, OSError, ValueError) as error:
            raise TransferError(
                f"this trainer cannot open a group at {host}: {error}; nothing was sent, the "
                "servers keep what they serve: pass another `backend` or `host`, or neither"
            ) from error
        self._link = link
        requests = {
            target: weights_pb2.JoinTransportRequest(
                step=weights_pb2.JOIN_STEP_PREPARE,
                epoch=epoch,
                backend=backend,
                ranks=[rank],
                world_size=world_size,
                host=host,
            )
            for rank, target in enumerate(targets, start=1)
        }
        answers = await self._join_all(requests)
        # Of one that got the rest while it left the former group, there is no answer.
        staged = [target for target, answer in answers.items() if not answer.answer]
        if staged:
            await self._wait_staged(staged)
            return None
        first_bucket = min(answer.next_bucket for answer in answers.values())
        offers = await run_in_thread(
            lambda: link.offers({r: answers[t].answer for r, t in enumerate(targets, start=1)})
        )
        for rank, target in enumerate(targets, start=1):
            requests[target].step = weights_pb2.JOIN_STEP_CONNECT
            requests[target].offer = offers[rank]
            requests[target].first_bucket = first_bucket
        connecting = run_in_thread(lambda: link.connect(self._timeouts.join))
        await self._join_all(requests, connecting)
        members = tuple(target.address for target in targets)
        return TransportGroup(epoch, backend, self._device, link, members), first_bucket

    async def _join_all(
        self,
        requests: Mapping[PublishTarget, weights_pb2.JoinTransportRequest],
        connecting: asyncio.Future[None] | None = None,
    ) -> dict[PublishTarget, weights_pb2.JoinTransportResponse]:
        """Has all servers take a step at once, beside ``connecting``.

        Raises:
            GroupError: A server did not.
            TransportError: ``connecting`` failed.
        """
        joining = {asyncio.create_task(t.join(request)): t for t, request in requests.items()}
        everything: list[asyncio.Future[Any]] = [*joining]
        if connecting is not None:
            everything.append(connecting)
        try:
            limit = self._timeouts.join
            with contextlib.suppress(TimeoutError):
                async with Timeout(limit):
                    await asyncio.wait(everything, return_when=asyncio.FIRST_EXCEPTION)
            for task, target in joining.items():
                if task.done():
                    await _raise_if_failed(task, target, connecting)
            if connecting is not None and connecting.done():
                connecting.result()
            for task, target in joining.items():
                if not task.done():
                    late = f"{target.address}: did not join within {limit:g} s"
                    raise GroupError(TransferError(late, server=target.address), target)
            if connecting is not None:
                await connecting
            return {target: task.result() for task, target in joining.items()}
        finally:
            await cancel_all(joining)

    async def _send(self, link: transport.Link, first_bucket: int) -> None:
        def send(stop: threading.Event) -> None:
            self._sender.send(
                link,
                self._source,
                first_bucket=first_bucket,
                bucket_timeout=self._timeouts.bucket,
                progress=self._progress,
                stop=stop,
            )

        # Aborting the link ends a wait for a peer.
        await self._reading.run(send, interrupt=link.abort)

    async def _wait_staged(self, targets: Sequence[PublishTarget]) -> None:
        """Waits for servers that were sent everything to verify it; those that do not, fail.

        Raises:
            GroupError: One stalled, or waits for one that failed.
        """
        limit = self._timeouts.staged
        while (waiting := unstaged(targets)) and not one_failed(targets):
            received = sum(target.received_bytes for target in targets)

            def moved(before: int = received) -> bool:
                now = sum(target.received_bytes for target in targets)
                return now != before or one_failed(targets) or not unstaged(targets)

            try:
                async with Timeout(limit):
                    await self._changes.until(moved)
            except TimeoutError:
                for target in waiting:
                    target.fail(
                        TransferError(
                            f"{target.address}: got everything, but did not verify it within "
                            f"{limit:g} s",
                            server=target.address,
                        )
                    )
        if waiting:
            # The others may have all, or wait for this one.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REASON_SECONDS):
                    await self._changes.until(lambda: not unstaged(targets))
            if unstaged(targets):
                raise explain_failure(targets, None, None)

    def _blame(self, group: list[PublishTarget], failure: GroupError) -> None:
        suspects = group if failure.culprit is None else [failure.culprit]
        for suspect in suspects:
            self._group_failures[suspect] += 1
            may_be_victim = isinstance(failure.error, TransferError)
            if self._group_failures[suspect] == _MAX_GROUP_FAILURES or not may_be_victim:
                suspect.fail(failure.error)

    def _close_opened(self, opening: asyncio.Future[transport.Link]) -> None:
        if opening.exception() is None:
            self._closing.append(run_in_thread(opening.result().close))

    def _close_link(self) -> None:
        if self._link is not None:
            self._closing.append(run_in_thread(self._link.close))
            self._link = None


async def _raise_if_failed(
    joined: asyncio.Task[weights_pb2.JoinTransportResponse],
    target: PublishTarget,
    connecting: asyncio.Future[None] | None,
) -> None:
    try:
        joined.result()
    except TransferError as error:
        # The server may be a victim of a member that never came. Then this end of the group is
        # about to say so.
        if connecting is not None:
            done, _ = await asyncio.wait([connecting], timeout=_REASON_SECONDS)
            if done and isinstance(connecting.exception(), transport.TransportError):
                return
        raise GroupError(error, target) from error
    except RollwireError as error:
        raise GroupError(error, target) from error


async def _wait_closed(closing: Sequence[asyncio.Future[bool]]) -> None:
    done, late = await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
    if late:
        logger.warning("a link has not closed within %g s: its thread stays behind", _CLOSE_SECONDS)
    for error in filter(None, (future.exception() for future in done)):
        logger.warning("a link did not close as it should: %s", error)
