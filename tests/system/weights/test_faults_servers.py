"""One server dies or freezes in a phase of a publish: the others commit, and it comes back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from rollwire_client import (
    Fleet,
    RolloutClient,
    Sampling,
    ServerInfo,
    ServerState,
    UnavailableError,
)
from support.calls import connected, until
from support.crossing import PROMPT
from support.fleets import QUICK, TIMEOUTS
from support.footprint import Footprint, nothing_is_left
from support.one_death import costs_one_server, takes_the_next, trainer_after
from support.phases import Strike, Victim, publishes
from support.publishing import status
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.fleets import RestartableServers
    from support.servers import ServerProcess

# A server is found by its silence, or because it does not answer; then the others get a new group.
# The rest is for a busy machine.
BOUND = TIMEOUTS.silence + TIMEOUTS.commit_silence + QUICK.call + 60


def kill(server: ServerProcess) -> None:
    server.kill()


def freeze(server: ServerProcess) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)


def thaw(server: ServerProcess) -> None:
    os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.parametrize(("phase", "delta"), publishes(fast="transfer", fast_delta="staged"))
@pytest.mark.parametrize("fault", [kill, freeze])
async def test_a_fault_costs_one_server(
    three: RestartableServers, fault: Callable[[ServerProcess], None], phase: str, *, delta: bool
) -> None:
    first, victim, last = three.all
    old, new, newer = (three.next_version() for _ in range(3))
    steps = Steps()
    async with three.fleet(steps) as fleet:
        trainer = await trainer_after(fleet, phase, old, delta=delta)
        before = [Footprint.of(server.process.pid) for server in (first, last)]
        strike = Strike(phase, steps, Victim.of(victim), lambda: fault(victim))
        await costs_one_server(
            trainer, strike, victim, (first, last), old=old, new=new, bound=BOUND
        )
        for server, footprint in zip((first, last), before, strict=True):
            await nothing_is_left(server, footprint)

        if fault is kill:
            victim = three.restart(victim)
            await serves_nothing(victim, fleet)
        else:
            thaw(victim)
            await is_not_taken_for_current(victim, fleet, old, new)
        await takes_the_next(trainer, victim, newer)


async def serves_nothing(server: ServerProcess, fleet: Fleet) -> None:
    """A server that was started again; returns when the fleet knows it."""
    async with RolloutClient(server.address) as client:
        assert (await client.info()).state is ServerState.AWAITING_WEIGHTS
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT, Sampling(max_new_tokens=1))

    async def known() -> bool:
        info = (await fleet.info())[server.address]
        return isinstance(info, ServerInfo) and info.server_id == server.server_id

    await until(known)


async def is_not_taken_for_current(server: ServerProcess, fleet: Fleet, old: int, new: int) -> None:
    """A server that was frozen serves what it served, says so, and gets nothing from the fleet.

    One that was told to commit meanwhile may do so now.
    """
    async with connected(server.address) as api:
        told = await status(api, verify=True)
    assert told.intact
    assert told.weights.version in (old, new)
    (member,) = [m for m in fleet._pool.servers if m.address == server.address]

    async def known() -> bool:
        return "the next publish or catch_up() updates it" in str(member.problem) or (
            member.problem is None and member.version == new
        )

    await until(known)
    for _ in range(3):
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=1))
        assert trajectory.versions == (new,)
