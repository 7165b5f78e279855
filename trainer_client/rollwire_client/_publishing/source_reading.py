"""Reads the trainer's source in a thread that is left behind if the source hangs."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import rollwire_transport as transport
from rollwire.deadlines import elapsed

from rollwire_client._concurrency import cancel_all, run_in_thread
from rollwire_client._errors import PublishError, SchemaMismatchError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SourceReading:
    """Runs what reads the trainer's source, one call at a time.

    Args:
        device: Where the tensors lie; None is the CPU.
        limit: Seconds that the source may take over a bucket.
        packing: The bucket that is being packed now.
        after_queued: Whether reading begins after what the caller has queued on its CUDA stream.

    Attributes:
        timeout: Set once the source has taken too long: its thread stays behind.
    """

    def __init__(
        self,
        device: torch.device | None,
        limit: float,
        packing: Callable[[], transport.PackingStatus | None],
        *,
        after_queued: bool = True,
    ) -> None:
        self.timeout: SourceError | None = None
        self._device = device
        self._limit = limit
        self._packing = packing
        self._after_queued = after_queued

    async def run(
        self,
        read: Callable[[threading.Event], T],
        *,
        interrupt: Callable[[], None] | None = None,
    ) -> T:
        """Returns what ``read`` does.

        Args:
            read: Called in a thread. Once the event that it gets is set it should read no more.
            interrupt: Ends its waits for something else than the source.

        Raises:
            SchemaMismatchError: The source gives something else than the manifest says.
            SourceError: It raised, or took too long.
        """
        stop = threading.Event()
        work = run_in_thread(
            transport.on_side_stream(
                self._device, functools.partial(read, stop), after_queued=self._after_queued
            )
        )
        overdue = asyncio.create_task(self._wait_until_overdue())
        either: list[asyncio.Future[Any]] = [work, overdue]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            if not work.done():
                if interrupt is not None:
                    await run_in_thread(interrupt)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if overdue.done() and not work.done():
                self.timeout = overdue.result()
                logger.warning("%s", self.timeout)
                work.cancel()
            await cancel_all([overdue])
        if self.timeout is not None:
            raise self.timeout
        try:
            return await work
        except transport.TensorSourceError as error:
            if isinstance(error.__cause__, PublishError):  # it was found out while it was read
                raise error.__cause__ from None
            raise SourceError(
                f"{error}; nothing was committed, the servers keep what they serve"
            ) from error.__cause__
        except transport.ManifestError as error:
            raise SchemaMismatchError(
                f"the tensors do not match the servers' schema; nothing was committed: {error}"
            ) from error

    async def _wait_until_overdue(self) -> SourceError:
        """Returns an error once the source has taken too long over a bucket."""
        while True:
            packing = self._packing()
            left = self._limit if packing is None else self._limit - elapsed(packing.started_at)
            if packing is not None and left <= 0:
                missing = packing.tensor or "its end"
                return SourceError(
                    f"the source did not provide {missing} within {self._limit:g} s: its thread "
                    "stays behind; nothing was committed, the servers keep what they serve"
                )
            await asyncio.sleep(left)
