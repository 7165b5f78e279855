"""Moves an update to the servers of a publish, over one transport group after another.

A group consists of the servers that do not have the whole update yet. When a group fails, servers
that are dead or to blame are left out, and the rest form a new group, which goes on from the lowest
bucket that one of them misses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
from rollwire.deadlines import Timeout, elapsed
from rollwire.types import UpdatePhase
from rollwire.v1 import weights_pb2

from rollwire_client._concurrency import cancel_all, run_in_thread, run_to_end
from rollwire_client._errors import RollwireError, SchemaMismatchError, SourceError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from rollwire_client._data import PublishTimeouts
    from rollwire_client._publishing.publish_target import PublishTarget
    from rollwire_client._publishing.tensors import TensorSource

logger = logging.getLogger(__name__)

# A server that is alive but fails in the transport may be the victim of another server once.
_MAX_GROUP_FAILURES = 2

_CLOSE_SECONDS = 10.0
_REASON_SECONDS = 0.5  # for this end of a group to say why a server could not join


class _GroupError(Exception):
    """A group failed; ``culprit`` is the server to blame, where it is known."""

    def __init__(self, error: RollwireError, culprit: PublishTarget | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.culprit = culprit


class WeightTransfer:
    """Sends one update to some servers.

    Args:
        manifest: The layout.
        source: Gives a fresh iterator of (name, tensor).
        device: Where the tensors lie; None is the CPU.
        backends: Of the transport. The first is used, and the next where members share a GPU and it
            does not allow that.
        host: Under which the servers reach this machine.
        timeouts: How long to wait.
        progress: Called with the bytes that every server of the group has, from another thread;
            an exception that it raises ends the transfer.
    """

    def __init__(
        self,
        manifest: transport.Manifest,
        source: TensorSource,
        *,
        device: torch.device | None,
        backends: Sequence[str],
        host: str,
        timeouts: PublishTimeouts,
        progress: Callable[[int], None],
    ) -> None:
        self._sender = transport.Sender(manifest)
        self._source = source
        self._device = device
        self._backends = list(backends)
        self._host = host
        self._timeouts = timeouts
        self._progress = progress
        self._closing: list[asyncio.Future[bool]] = []
        self._group_failures: Counter[PublishTarget] = Counter()
        self._source_timeout: SourceError | None = None

    @property
    def digest(self) -> int:
        """Of what was sent, once all was."""
        return self._sender.digest

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
        while group := [t for t in targets if t.error is None and not t.staged]:
            try:
                await self._send_unless_one_dies(group)
            except _GroupError as failure:
                shared = isinstance(failure.__cause__, transport.SharedDevice)
                if shared and len(self._backends) > 1:
                    backend = self._backends.pop(0)
                    logger.info("%s, not %s: %s", self._backends[0], backend, failure)
                    continue
                if self._source_timeout is not None:
                    raise self._source_timeout from failure
                await self.close()
                logger.warning("a transport group of %d failed: %s", len(group), failure)
                self._blame(group, failure)
                # Knowing how far they came is worth a moment, but not needed: joining the next
                # group makes a server leave this one.
                await _wait_settled(group, self._timeouts.stalled)
            else:
                limit = self._timeouts.staged
                for late in await _wait_settled(group, limit):
                    late.fail(_unverified(late, f"did not verify it within {limit:g} s"))
                for target in group:
                    if target.phase is UpdatePhase.STALLED:
                        error = _unverified(target, "stalled before it had verified it")
                        self._blame(group, _GroupError(error, target))

    async def _send_unless_one_dies(self, group: list[PublishTarget]) -> None:
        """Forms a group and sends to it; abandons it as soon as a member fails.

        Raises:
            _GroupError: Not all members have everything.
        """
        sending = asyncio.create_task(self._form_and_send(group))
        deaths = [asyncio.create_task(target.wait(lambda _: False)) for target in group]
        try:
            await asyncio.wait([sending, *deaths], return_when=asyncio.FIRST_COMPLETED)
            dead = next((target for target in group if target.error is not None), None)
            if not sending.done() and dead is not None and dead.error is not None:
                raise _GroupError(dead.error, dead)
            await sending
        finally:
            await cancel_all([sending, *deaths])

    async def _form_and_send(self, group: list[PublishTarget]) -> None:
        first_bucket = min(target.next_bucket for target in group)
        link = await self._form(group, first_bucket)
        try:
            await self._send(link, first_bucket)
        except transport.TransportError as error:
            raise _group_error(error, group) from error
        except transport.TensorSourceError as error:
            raise SourceError(
                f"{error}; nothing was committed, the servers keep what they serve"
            ) from error.__cause__
        except transport.ManifestError as error:
            raise SchemaMismatchError(
                "the tensors do not match Publisher.schema() or its order; nothing was committed: "
                f"{error}"
            ) from error
        finally:
            # In the background: a backend may take half a second.
            self._closing.append(run_in_thread(link.close))

    async def _form(self, group: list[PublishTarget], first_bucket: int) -> transport.Link:
        """Forms a group: this end waits in a thread while the servers are told to join."""
        epoch = secrets.token_hex(16)
        try:
            rendezvous = transport.open_rendezvous(
                self._backends[0],
                epoch=epoch,
                world_size=len(group) + 1,
                host=self._host,
                device=self._device,
            )
        except (transport.TransportError, OSError) as error:
            raise TransferError(
                f"this trainer cannot open a group at {self._host}: {error}; nothing was sent, the "
                "servers keep what they serve: pass another `backend` or `host`, or neither"
            ) from error
        forming = run_in_thread(lambda: rendezvous.form_group(self._timeouts.join))
        joining = {
            asyncio.create_task(
                target.join(
                    weights_pb2.JoinTransportRequest(
                        epoch=epoch,
                        backend=self._backends[0],
                        ranks=[rank],
                        world_size=len(group) + 1,
                        rendezvous=rendezvous.address,
                        first_bucket=first_bucket,
                    )
                )
            ): target
            for rank, target in enumerate(group, start=1)
        }
        everything: list[asyncio.Future[Any]] = [forming, *joining]
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_EXCEPTION)
            for task, target in joining.items():
                if task.done():
                    await _raise_if_failed(task, target, forming)
            link = forming.result()
        except BaseException as error:
            await run_to_end(_abandon(rendezvous, forming, joining))
            if isinstance(error, transport.TransportError):
                raise _group_error(error, group) from error
            raise
        rendezvous.close()
        return link

    async def _send(self, link: transport.Link, first_bucket: int) -> None:
        """Sends in a thread, which is abandoned if the source hangs."""
        stop = threading.Event()
        send = functools.partial(
            self._sender.send,
            link,
            self._source,
            first_bucket=first_bucket,
            bucket_timeout=self._timeouts.bucket,
            progress=self._progress,
            stop=stop,
        )
        sending = run_in_thread(transport.on_side_stream(self._device, send))
        overdue = asyncio.create_task(self._wait_until_overdue())
        either: list[asyncio.Future[Any]] = [sending, overdue]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()  # nothing more is read from the source
            if not sending.done():
                # Ends a wait for a peer, but not one for the source.
                await run_in_thread(link.abort)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if overdue.done() and not sending.done():
                self._source_timeout = overdue.result()
                logger.warning("%s", self._source_timeout)
                sending.cancel()
            await cancel_all([overdue])
        if self._source_timeout is not None:
            raise self._source_timeout
        await sending

    async def _wait_until_overdue(self) -> SourceError:
        """Returns an error once the source has taken too long over a bucket."""
        limit = self._timeouts.source
        while True:
            packing = self._sender.packing
            left = limit if packing is None else limit - elapsed(packing.started_at)
            if packing is not None and left <= 0:
                return SourceError(
                    f"the source did not provide {packing.tensor} within {limit:g} s: its thread "
                    "stays behind; nothing was committed, the servers keep what they serve"
                )
            await asyncio.sleep(left)

    def _blame(self, group: list[PublishTarget], failure: _GroupError) -> None:
        suspects = group if failure.culprit is None else [failure.culprit]
        for suspect in suspects:
            self._group_failures[suspect] += 1
            may_be_victim = isinstance(failure.error, TransferError)
            if self._group_failures[suspect] == _MAX_GROUP_FAILURES or not may_be_victim:
                suspect.fail(failure.error)


async def _raise_if_failed(
    joined: asyncio.Task[None], target: PublishTarget, forming: asyncio.Future[transport.Link]
) -> None:
    try:
        joined.result()
    except TransferError as error:
        # The server may be a victim: of two members on one GPU, or of a member that never came.
        # Then this end of the group is about to say so.
        done, _ = await asyncio.wait([forming], timeout=_REASON_SECONDS)
        if done and isinstance(forming.exception(), transport.TransportError):
            return
        raise _GroupError(error, target) from error
    except RollwireError as error:
        raise _GroupError(error, target) from error


async def _abandon(
    rendezvous: transport.Rendezvous,
    forming: asyncio.Future[transport.Link],
    joining: Iterable[asyncio.Task[None]],
) -> None:
    rendezvous.close()
    await cancel_all(joining)
    await asyncio.wait([forming])
    if forming.exception() is None:
        await run_in_thread(forming.result().close)


async def _wait_settled(group: Sequence[PublishTarget], timeout: float) -> list[PublishTarget]:
    """Waits until all are stalled, staged or have failed; returns those that are not by then."""
    settled = {UpdatePhase.STALLED, UpdatePhase.STAGED}
    waiting = {
        asyncio.create_task(target.wait(lambda t: t.phase in settled)): target for target in group
    }
    try:
        with contextlib.suppress(TimeoutError):
            async with Timeout(timeout):
                await asyncio.wait(waiting)
        return [target for task, target in waiting.items() if not task.done()]
    finally:
        await cancel_all(waiting)


async def _wait_closed(closing: Sequence[asyncio.Future[bool]]) -> None:
    done, late = await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
    if late:
        logger.warning("a link has not closed within %g s: its thread stays behind", _CLOSE_SECONDS)
    for error in filter(None, (future.exception() for future in done)):
        logger.warning("a link did not close as it should: %s", error)


def _unverified(target: PublishTarget, why: str) -> TransferError:
    address = target.address
    return TransferError(f"{address}: got everything, but {why}", server=address)


def _group_error(error: transport.TransportError, group: Sequence[PublishTarget]) -> _GroupError:
    """A transport's error that names a rank, as an error that names its server."""
    rank = (error.peer or "").removeprefix("rank ")
    culprit = group[int(rank) - 1] if rank.isdecimal() and 0 < int(rank) <= len(group) else None
    address = culprit.address if culprit is not None else None
    where = f"{address}: " if address is not None else ""
    return _GroupError(TransferError(f"{where}{error}", server=address), culprit)
