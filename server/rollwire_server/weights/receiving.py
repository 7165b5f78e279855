"""Updates in transport groups: joined, received and verified, left again."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import rollwire_transport as transport
import structlog
from rollwire.reasons import Reason
from rollwire.types import UpdatePhase

from rollwire_server.errors import ServiceError
from rollwire_server.weights.update import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.weights.state import ServedWeights
    from rollwire_server.weights.update import Membership, Update

log = structlog.get_logger()


class Receiving:
    """Receives updates, each in one group after the other.

    Args:
        engine: Says on which device.
        served: What serves meanwhile.
        counters: Are kept up to date.
        tasks: Owns receiving.
        bucket_timeout: Seconds that a member waits for the next bucket.
        listening: Where transfers may listen.
        move: Has an update enter a phase, and says why.
        give_up: Drops an update, and says why.
    """

    def __init__(
        self,
        engine: Engine,
        served: ServedWeights,
        counters: ServerCounters,
        tasks: asyncio.TaskGroup,
        *,
        bucket_timeout: float,
        listening: transport.ListenOptions,
        move: Callable[[Update, UpdatePhase, str], None],
        give_up: Callable[[Update, str], None],
    ) -> None:
        self._engine = engine
        self._served = served
        self._counters = counters
        self._tasks = tasks
        self._bucket_timeout = bucket_timeout
        self._listening = listening
        self._move = move
        self._give_up = give_up

    async def join(self, update: Update, membership: Membership, timeout: float) -> None:
        """Joins a group, out of the former one, and begins to receive; nothing if that has brought
        all.
        """
        await self.leave(update)
        _check_still_wanted(update, membership)
        if update.phase is UpdatePhase.STAGED:  # by what was still under way in the former group
            return
        update.left = threading.Event()
        try:
            link = await asyncio.to_thread(
                transport.join_group,
                membership.backend,
                epoch=membership.epoch,
                rank=membership.rank,
                world_size=membership.world_size,
                rendezvous=membership.rendezvous,
                timeout=timeout,
                device=self._engine.describe().device,
                closed=update.left,
                listen=self._listening,
            )
        except transport.TransportError as error:
            _check_still_wanted(update, membership)
            self._move(update, UpdatePhase.STALLED, str(error))
            late = isinstance(error, transport.TransportTimeout)
            raise ServiceError(
                Reason.TRANSPORT_TIMEOUT if late else Reason.TRANSPORT_FAILED,
                str(error),
                metadata={"peer": error.peer or ""},
            ) from error
        try:
            _check_still_wanted(update, membership)
        except ServiceError:
            await asyncio.to_thread(link.close)
            raise
        update.link = link
        self._move(update, UpdatePhase.RECEIVING, "")
        update.receiving = self._tasks.create_task(
            self._receive(update, link, membership.first_bucket),
            name=f"receive {update.announcement.update_id}",
        )

    async def leave(self, update: Update) -> None:
        """Ends the update's former group, if it had one."""
        update.left.set()
        link, update.link = update.link, None
        if link is not None:
            link.abort()
            update.forwarded_bytes += link.forwarded_bytes
        if update.receiving is not None:
            await update.receiving

    async def _receive(self, update: Update, link: transport.Link, first_bucket: int) -> None:
        began, had = time.monotonic_ns(), update.receiver.received_bytes
        try:
            await asyncio.to_thread(
                update.receiver.receive,
                link,
                first_bucket=first_bucket,
                bucket_timeout=self._bucket_timeout,
            )
        except transport.DigestMismatch as error:
            update.failure = ServiceError(
                Reason.DIGEST_MISMATCH,
                f"{error}; the update is discarded, the server serves {told(self._served.weights)}",
            )
            self._move(update, UpdatePhase.STALLED, str(error))
        except transport.TransportError as error:
            if update.link is link:
                self._move(update, UpdatePhase.STALLED, str(error))
        except Exception as error:
            log.exception("a bug: receiving failed")
            self._move(update, UpdatePhase.STALLED, f"{type(error).__name__}: {error}")
        else:
            self._move(update, UpdatePhase.STAGED, "")
        finally:
            update.receive_ns += time.monotonic_ns() - began
            self._counters.received_bytes += update.receiver.received_bytes - had
            let_go = await asyncio.to_thread(link.close)
            self._counters.forwarded_bytes += link.forwarded_bytes
            if not (let_go or update.receiver.complete):
                self._give_up(update, "its former group may still write into what is staged")


def _check_still_wanted(update: Update, membership: Membership) -> None:
    """Raises ServiceError if an update was dropped, or joins another group by now."""
    if update.failure is not None:
        raise update.failure
    if update.epoch != membership.epoch:
        update_id = update.announcement.update_id
        raise ServiceError(Reason.NOT_STAGED, f"update {update_id} joins another group")
