"""A pause that lasts as long as a block of code, and whose lease is renewed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, TypeVar

from rollwire_client._errors import RollwireError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")

logger = logging.getLogger(__name__)

PAUSED_LEASE = 60.0  # seconds
MIN_LEASE = 0.1  # seconds: a lease of 0 would never end
_RENEWALS = 3  # in the time of a lease, so that two of them may fail


@contextlib.asynccontextmanager
async def paused(
    pause: Callable[[], Awaitable[T]],
    renew: Callable[[], Awaitable[object]],
    resume: Callable[[], Awaitable[object]],
    *,
    lease: float,
) -> AsyncIterator[T]:
    """Pauses, renews the lease (seconds) while the block runs, and resumes. An error of ``pause``
    is raised, those of the other two are logged.
    """
    ended = asyncio.Event()
    try:
        answer = await pause()
        renewing = asyncio.create_task(_renew(renew, lease, ended))
        try:
            yield answer
        finally:
            # A renewal under way is waited for: the server must not get it after the resume.
            ended.set()
            await renewing
    finally:
        try:
            await resume()
        except RollwireError as error:
            logger.warning("a pause was not resumed, its lease ends in %g s: %s", lease, error)


async def _renew(
    renew: Callable[[], Awaitable[object]], lease: float, ended: asyncio.Event
) -> None:
    clock = asyncio.get_running_loop().time
    renewed, problem = clock(), ""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lease / _RENEWALS):
                await ended.wait()
                return
        if (late := clock() - renewed) > lease and not problem:
            logger.warning(
                "a pause is renewed after %.1f s, and its lease is %g s: servers sample meanwhile",
                late, lease,
            )  # fmt: skip
        began = clock()
        try:
            await renew()
        except RollwireError as error:
            if str(error) != problem:
                logger.warning("a pause was not renewed: %s", error)
            problem = str(error)
        else:
            renewed, problem = began, ""
