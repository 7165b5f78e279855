"""Calls to all servers of a fleet at once: sleep and wake-up, pause and resume."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, TypeVar

from rollwire_client._arguments import seconds
from rollwire_client._data import FleetReport, Require, checked_share
from rollwire_client._errors import RollwireError
from rollwire_client._rpc import pausing
from rollwire_client._rpc.conversion import (
    pause_request,
    resume_request,
    sleep_request,
    wake_up_request,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from rollwire.types import SleepingWeights

    from rollwire_client._data import Asleep, Pause, Resumed, ServerInfo
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._fleet.server_pool import ServerPool

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def sleep(
    pool: ServerPool,
    weights: SleepingWeights,
    *,
    finish_within: float,
    require: Require,
    timeout: float,
) -> FleetReport[Asleep]:
    sleep_request(weights)  # raises what is wrong, as the next ones do
    finish_within = seconds("finish_within", finish_within)
    timeout = seconds("timeout", timeout)

    async def call(server: ServerHandle) -> Asleep:
        return await server.sleep(weights, finish_within=finish_within, timeout=timeout)

    return await _on_all(pool, "sleep", require, call)


async def wake_up(
    pool: ServerPool, *, reload_checkpoint: bool, require: Require, timeout: float
) -> FleetReport[ServerInfo]:
    wake_up_request(reload_checkpoint=reload_checkpoint)
    timeout = seconds("timeout", timeout)

    async def call(server: ServerHandle) -> ServerInfo:
        return await server.wake_up(reload_checkpoint=reload_checkpoint, timeout=timeout)

    return await _on_all(pool, "wake_up", require, call)


async def pause(
    pool: ServerPool, pause_id: str, *, lease: float | None, require: Require
) -> FleetReport[Pause]:
    pause_request(pause_id, lease)
    pause_id = pause_id or uuid.uuid4().hex  # the same on all servers

    async def call(server: ServerHandle) -> Pause:
        return await server.pause(pause_id, lease)

    return await _on_all(pool, "pause", require, call)


async def resume(pool: ServerPool, pause_id: str, *, require: Require) -> FleetReport[Resumed]:
    resume_request(pause_id)

    async def call(server: ServerHandle) -> Resumed:
        return await server.resume(pause_id)

    return await _on_all(pool, "resume", require, call)


def paused(
    pool: ServerPool, *, lease: float, require: Require
) -> AbstractAsyncContextManager[FleetReport[Pause]]:
    lease, pause_id = seconds("lease", lease, minimum=pausing.MIN_LEASE), uuid.uuid4().hex
    return pausing.paused(
        lambda: pause(pool, pause_id, lease=lease, require=require),
        lambda: pause(pool, pause_id, lease=lease, require="all"),
        lambda: resume(pool, pause_id, require="all"),
        lease=lease,
    )


async def _on_all(
    pool: ServerPool,
    name: str,
    require: Require,
    call: Callable[[ServerHandle], Awaitable[T]],
) -> FleetReport[T]:
    checked_share(require)
    pool.check_open()
    answers: dict[str, T] = {}
    errors: dict[str, RollwireError] = {}

    async def attempt(server: ServerHandle) -> None:
        try:
            answers[server.address] = await call(server)
        except RollwireError as error:
            errors[server.address] = error

    servers = await pool.identified_servers()
    async with asyncio.TaskGroup() as tasks:
        for server in servers:
            tasks.create_task(attempt(server))
    addresses = [server.address for server in servers]  # reports are in their order
    report = FleetReport(
        name,
        {address: answers[address] for address in addresses if address in answers},
        {address: errors[address] for address in addresses if address in errors},
    )
    report.require(require)
    for error in report.errors.values():
        logger.warning("%s: %s", name, error)
    return report
