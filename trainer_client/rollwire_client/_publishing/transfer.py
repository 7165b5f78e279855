"""Moves an update to the servers of a publish, over one transport group after another.

A group holds those that do not have everything yet. When it fails, those that are dead or to blame
are cut out, and the rest form a new one and go on from the lowest bucket that one of them misses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import rollwire_transport as transport
from rollwire.deadlines import Timeout, elapsed
from rollwire.types import UpdatePhase
from rollwire.v1 import weights_pb2

from rollwire_client._concurrency.tasks import cancel_all, run_to_end
from rollwire_client._concurrency.threads import run_in_thread
from rollwire_client._errors import RollwireError, SchemaMismatchError, SourceError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rollwire_client._publishing.publish_target import PublishTimeouts, Recipient
    from rollwire_client._publishing.schema import Source

T = TypeVar("T")

logger = logging.getLogger(__name__)

# A server that is alive but fails in the transport may have been the victim of another once.
_STRIKES = 2

_CLOSE_SECONDS = 10.0
_VERDICT_SECONDS = 0.5  # for this end of a rendezvous to say why a server could not join


class _GroupFailed(Exception):  # noqa: N818 - what happened to a group, not shown to anybody
    """A group failed; ``culprit`` is the server to blame, where it is known."""

    def __init__(self, error: RollwireError, culprit: Recipient | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.culprit = culprit


class Transfer:
    """Sends one update to a set of recipients.

    Args:
        manifest: The layout.
        source: Gives a fresh iterator of (name, tensor).
        device: Where the tensors lie; None is the CPU.
        backends: Of the transport: the first, or, where members share a GPU and it cannot serve
            that, the next.
        host: Under which the servers reach this machine.
        timeouts: How long to wait.
        progress: Called with the bytes that every server of the group has, from another thread;
            what it raises ends the transfer.
    """

    def __init__(
        self,
        manifest: transport.Manifest,
        source: Source,
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
        self._link: transport.Link | None = None
        self._closing: list[asyncio.Future[bool]] = []
        self._strikes: Counter[Recipient] = Counter()
        self._given_up: SourceError | None = None

    @property
    def digest(self) -> int:
        """Of what was sent, once all was."""
        return self._sender.digest

    async def close(self) -> None:
        """Gives everything back, which a backend may take a moment for; also when cancelled."""
        closing, self._closing = self._closing, []
        if closing:
            await run_to_end(_closed(closing))

    async def run(self, recipients: Sequence[Recipient]) -> None:
        """Returns when every recipient is staged or out; ``close`` it in the end.

        Raises:
            SchemaMismatchError: The source gives something else than the manifest says.
            SourceError: It raised, or did not give a tensor in time.
            TransferError: No group can be formed from here.
        """
        while group := [r for r in recipients if r.error is None and not r.staged]:
            try:
                await self._watched(group)
            except _GroupFailed as failed:
                shared = isinstance(failed.__cause__, transport.SharedDevice)
                if shared and len(self._backends) > 1:
                    backend = self._backends.pop(0)
                    logger.info("%s, not %s: %s", self._backends[0], backend, failed)
                    continue
                if self._given_up is not None:
                    raise self._given_up from failed
                await self.close()
                logger.warning("a transport group of %d failed: %s", len(group), failed)
                self._blame(group, failed)
                # How far they came is worth a moment, but not needed: joining the next group
                # makes a server leave this one.
                await _settled(group, self._timeouts.stalled)
            else:
                limit = self._timeouts.staged
                for late in await _settled(group, limit):
                    late.fail(_unverified(late, f"did not verify it within {limit:g} s"))
                for r in (r for r in group if r.phase is UpdatePhase.STALLED):
                    error = _unverified(r, "stalled before it had verified it")
                    self._blame(group, _GroupFailed(error, r))

    async def _watched(self, group: list[Recipient]) -> None:
        """One group from its rendezvous to its end, given up at once when a member dies.

        Raises:
            _GroupFailed: It did not come to its end.
        """
        work = asyncio.create_task(self._exchange(group))
        deaths = [asyncio.create_task(r.wait(lambda _: False)) for r in group]
        try:
            await asyncio.wait([work, *deaths], return_when=asyncio.FIRST_COMPLETED)
            dead = next((r for r in group if r.error is not None), None)
            if not work.done() and dead is not None and dead.error is not None:
                raise _GroupFailed(dead.error, dead)
            await work
        finally:
            try:
                await cancel_all([work, *deaths])
            finally:
                if self._link is not None:
                    # Beside what comes next: a backend may take half a second.
                    self._closing.append(run_in_thread(self._link.close))
                    self._link = None

    async def _exchange(self, group: list[Recipient]) -> None:
        first_bucket = min(recipient.next_bucket for recipient in group)
        link = self._link = await self._form(group, first_bucket)
        try:
            await self._send(link, first_bucket)
        except transport.TransportError as error:
            raise _group_failed(error, group) from error
        except transport.SourceError as error:
            raise SourceError(
                f"{error}; nothing was committed, the servers keep what they serve"
            ) from error.__cause__
        except transport.ManifestError as error:
            raise SchemaMismatchError(
                f"the tensors do not come as the servers want them, in the order of "
                f"Publisher.schema(); nothing was committed: {error}"
            ) from error

    async def _send(self, link: transport.Link, first_bucket: int) -> None:
        """Sends beside the event loop, in a thread that is given up if the source hangs."""
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
        overdue = asyncio.create_task(self._overdue())
        either: list[asyncio.Future[Any]] = [sending, overdue]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()  # the source is asked for nothing more
            if not sending.done():
                await run_in_thread(
                    link.abort
                )  # ends what waits for a peer, not what the source does
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if overdue.done() and not sending.done():
                self._given_up = overdue.result()
                logger.warning("%s", self._given_up)
                sending.cancel()
            await cancel_all([overdue])
        if self._given_up is not None:
            raise self._given_up
        await sending

    async def _overdue(self) -> SourceError:
        """Waits until the source has taken too long over a bucket; what to say of it."""
        limit = self._timeouts.source
        while True:
            packing = self._sender.packing
            left = limit if packing is None else limit - elapsed(packing.since)
            if packing is not None and left <= 0:
                return SourceError(
                    f"the source did not give {packing.tensor} within {limit:g} s: its thread is "
                    "left to itself; nothing was committed, the servers keep what they serve"
                )
            await asyncio.sleep(left)

    async def _form(self, group: list[Recipient], first_bucket: int) -> transport.Link:
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
                f"this trainer opens no group at {self._host}: {error}; nothing was sent, the "
                "servers keep what they serve: name another `backend` or `host`, or leave them out"
            ) from error
        forming = asyncio.create_task(
            _in_thread(
                lambda: rendezvous.form_group(self._timeouts.join),
                stop=rendezvous.close,
                undo=lambda link: link.close(),
            )
        )
        joining = {
            asyncio.create_task(
                recipient.join(
                    weights_pb2.JoinTransportRequest(
                        epoch=epoch,
                        backend=self._backends[0],
                        ranks=[rank],
                        world_size=len(group) + 1,
                        rendezvous=rendezvous.address,
                        first_bucket=first_bucket,
                    )
                )
            ): recipient
            for rank, recipient in enumerate(group, start=1)
        }
        link = None
        try:
            await asyncio.wait([forming, *joining], return_when=asyncio.FIRST_EXCEPTION)
            for task, recipient in joining.items():
                if task.done():
                    await self._look(task, recipient, forming)
            link = await forming
        except transport.TransportError as error:
            raise _group_failed(error, group) from error
        finally:
            rendezvous.close()
            await cancel_all([forming, *joining])
            if link is None and not forming.cancelled() and forming.exception() is None:
                await run_in_thread(forming.result().close)
        return link

    async def _look(
        self,
        joined: asyncio.Task[None],
        recipient: Recipient,
        forming: asyncio.Task[transport.Link],
    ) -> None:
        """Raises what came of a join, if it failed."""
        try:
            joined.result()
        except TransferError as error:
            # It may be a victim: of one GPU for two, or of a member that never came. Rank 0 knows.
            done, _ = await asyncio.wait([forming], timeout=_VERDICT_SECONDS)
            if done and isinstance(forming.exception(), transport.TransportError):
                return
            raise _GroupFailed(error, recipient) from error
        except RollwireError as error:
            raise _GroupFailed(error, recipient) from error

    def _blame(self, group: list[Recipient], failed: _GroupFailed) -> None:
        suspects = group if failed.culprit is None else [failed.culprit]
        for suspect in suspects:
            self._strikes[suspect] += 1
            may_be_victim = isinstance(failed.error, TransferError)
            if self._strikes[suspect] == _STRIKES or not may_be_victim:
                suspect.fail(failed.error)


def _unverified(recipient: Recipient, why: str) -> TransferError:
    address = recipient.address
    return TransferError(f"{address}: got everything, but {why}", server=address)


async def _closed(closing: Sequence[asyncio.Future[bool]]) -> None:
    done, late = await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
    if late:
        logger.warning("a link has not closed within %g s: it is left to itself", _CLOSE_SECONDS)
    for error in filter(None, (future.exception() for future in done)):
        logger.warning("a link did not close as it should: %s", error)


async def _in_thread(
    work: Callable[[], T], *, stop: Callable[[], None], undo: Callable[[T], object]
) -> T:
    """Runs blocking work beside the event loop; a cancelled caller stops it, and waits."""
    running = run_in_thread(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await run_in_thread(stop)
        await asyncio.wait([running])
        if running.exception() is None:
            result = running.result()
            await run_in_thread(lambda: undo(result))
        raise


def _group_failed(error: transport.TransportError, group: Sequence[Recipient]) -> _GroupFailed:
    """What the transport says of a rank, as said of a server."""
    rank = (error.peer or "").removeprefix("rank ")
    culprit = group[int(rank) - 1] if rank.isdecimal() and 0 < int(rank) <= len(group) else None
    address = culprit.address if culprit is not None else None
    where = f"{address}: " if address is not None else ""
    return _GroupFailed(TransferError(f"{where}{error}", server=address), culprit)


async def _settled(group: Sequence[Recipient], timeout: float) -> list[Recipient]:
    """Waits until all are stalled, staged or out; returns those that are not by then."""
    settled = {UpdatePhase.STALLED, UpdatePhase.STAGED}
    waits = {
        asyncio.create_task(recipient.wait(lambda r: r.phase in settled)): recipient
        for recipient in group
    }
    try:
        with contextlib.suppress(TimeoutError):
            async with Timeout(timeout):
                await asyncio.wait(waits)
        return [recipient for task, recipient in waits.items() if not task.done()]
    finally:
        await cancel_all(waits)
