"""Batches on real processes: killed servers, a policy that moves on, a trainer that dies."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import Carry, Fleet, Prompt, Publisher, Sampling
from rollwire_client._batches.group import sample_seed
from rollwire_client.sync import SyncBatcher, SyncFleet
from support.batching import (
    GROUP,
    LAG,
    RATE,
    SAMPLING,
    SEED,
    batcher_of,
    begun,
    endless,
    length,
    prompts,
    start_one,
    trained,
    under_way,
)
from support.synthetic import PROMPT, labels_are_honest, start_synthetic, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollwire_client import Batch, Batcher, Group
    from support.servers import ServerProcess, StartServer

SECONDS = 240


def assert_honest(groups: Iterable[Group]) -> None:
    """Fails unless each token is what the weights of its label sample at its place."""
    for group in groups:
        for member, sample in enumerate(group.samples):
            seed = sample_seed(SEED, group.prompt.id, group.prompt.epoch, member)
            assert labels_are_honest(sample.trajectory, seed)


@pytest.mark.slow
async def test_servers_that_die_and_policies_that_move_on_lose_no_group(
    start_server: StartServer,
) -> None:
    servers = [start_one(start_server) for _ in range(3)]
    batches: list[Batch] = []
    moves = {version: f"moves after {version}" for version in (4, 7)}
    async with Fleet([s.address for s in servers]) as fleet, batcher_of(fleet) as batcher:
        source = prompts()
        batches += await trained(fleet, batcher, source, range(1, 4))
        for version, name in moves.items():
            # There is room for eight prompts at least: so many went with the batch before.
            some = chain(islice(source, 7), [endless(name)], source)
            batches += await trained(fleet, batcher, some, range(version, version + 1))
            sample = (await begun(batcher, name)).samples[0]
            (victim,) = (s for s in servers if s.address == sample.trajectory.servers[-1])
            victim.kill()
            batches += await trained(fleet, batcher, source, range(version + 1, version + 2))
            await moved(batcher, name, version)
            batches += await trained(fleet, batcher, source, range(version + 2, version + 3))
            servers.remove(victim)
            servers += [
                await asyncio.to_thread(start_one, start_server, "--listen", victim.address)
            ]
        taken = int(next(source).id)
    finished = [group for batch in batches for group in batch.groups]
    dropped = [group for batch in batches for group in batch.dropped.groups]
    assert len(finished) == 9 * 8
    everything = [*finished, *dropped, *batches[-1].carried.groups]
    known = [group.prompt.id for group in everything]
    assert sorted(known) == sorted([*map(str, range(taken)), *moves.values()])
    assert_honest(everything)
    for batch in batches:
        for group in batch.groups:
            assert group.complete
            assert min(group.versions) >= batch.version - LAG


async def moved(batcher: Batcher, name: str, version: int) -> None:
    """Returns once a sample has gone on at another server, and under the next version."""

    def so() -> bool:
        trajectory = under_way(batcher, name).samples[0].trajectory
        both = {version, version + 1} <= set(trajectory.versions)
        return both and len(set(trajectory.servers)) > 1

    await until(so)


def saved_and_killed(buffer: Path, addresses: list[str]) -> list[str]:
    """The prompts of the first batch of a trainer that saved the rest, and died."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.batching", buffer, *addresses],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None
        told = trainer.stdout.readline().split()
        trainer.kill()
    return told


@pytest.mark.slow
async def test_a_trainer_that_is_killed_goes_on_with_what_it_saved(
    start_server: StartServer, tmp_path: Path
) -> None:
    servers = [start_one(start_server) for _ in range(2)]
    addresses = [server.address for server in servers]
    first = await asyncio.to_thread(saved_and_killed, tmp_path / "buffer", addresses)
    assert len(first) == 8
    async with Fleet(addresses) as fleet, batcher_of(fleet) as batcher:
        batcher.load(tmp_path / "buffer")
        saved = under_way(batcher, "endless")
        (batch,) = await trained(fleet, batcher, prompts(15), range(2, 3))
        await until(lambda: under_way(batcher, "endless").versions == {1, 2})
        crossed = under_way(batcher, "endless")
    carried = {*map(str, range(15)), "endless"} - set(first)
    again = {group.prompt.id for group in (*batch.groups, *batch.carried.groups)}
    assert carried <= again
    assert not again & set(first)
    assert_honest([*batch.groups, *batch.carried.groups, crossed])
    for was, now in zip(saved.samples, crossed.samples, strict=True):
        tokens = was.trajectory.token_ids
        assert tokens == now.trajectory.token_ids[: len(tokens)] != ()


async def test_a_trainer_that_goes_on_above_the_servers_keeps_what_it_carried(
    start_server: StartServer, tmp_path: Path
) -> None:
    """It saved at version 5, died at 9, and goes on as newest_version + 1: one step, not five."""
    server = start_one(start_server)
    buffer = tmp_path / "buffer"
    source = prompts()
    long = Prompt("long", PROMPT, sampling=Sampling(max_new_tokens=300))
    async with Fleet([server.address]) as fleet, batcher_of(fleet) as batcher:
        for version in range(3, 10):
            handle = await Publisher(fleet).publish(version, {"weight": torch.zeros(1024)})
            await handle.committed
            if version == 5:
                some = chain(islice(source, 1), [long])
                await batcher.collect(some, 1, over_sample=2.0, tail=Carry())
                await begun(batcher, "long")
                batcher.save(buffer)
    async with Fleet([server.address]) as fleet, batcher_of(fleet) as batcher:
        batcher.load(buffer)
        version = (await fleet.newest_version() or 0) + 1
        assert version == 10
        handle = await Publisher(fleet).publish(version, {"weight": torch.ones(1024)})
        await handle.committed
        batch = await batcher.collect(source, 1)
    (group,) = batch.groups
    assert group.prompt.id == "long"
    assert group.versions == {5, 10}
    assert batch.dropped.groups == ()
    assert_honest(batch.groups)


@pytest.fixture
def one(start_server: StartServer) -> ServerProcess:
    return start_synthetic(start_server, RATE)


def test_a_trainer_that_is_not_async(one: ServerProcess, tmp_path: Path) -> None:
    named = {"seed": SEED, "group_size": GROUP, "sampling": SAMPLING, "reward": length}
    with SyncFleet([one.address]) as fleet:
        source = prompts()
        with SyncBatcher(fleet, **named) as batcher:
            batch = batcher.collect(source, 2, over_sample=2.0, tail=Carry())
            batcher.save(tmp_path / "buffer")
            assert (batcher.handed_out, batcher.dropped, batcher.version) == (2, 0, None)
            told = batcher.evaluate(islice(prompts(100), 3), samples=2)
            assert len(told.samples.lengths) == 6
        with SyncBatcher(fleet, **named) as batcher:
            batcher.load(tmp_path / "buffer")
            rest = batcher.collect([], 2)
    assert len(rest.groups) == 2
    both = {group.prompt.id for group in (*batch.groups, *rest.groups)}
    assert both == {"0", "1", "2", "3"}
    assert_honest([*batch.groups, *rest.groups])


INTERRUPTED = """
import os, signal, sys, threading
from rollwire_client import Decision, Prompt, Sampling
from rollwire_client.sync import SyncBatcher, SyncFleet

interrupted = threading.Event()

def interrupt(*_):
    interrupted.set()
    raise KeyboardInterrupt

def decide(group):
    if group.prompt.id == "3":  # the batch is complete when the waiting thread is interrupted
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(60)
    return Decision.TAKE

signal.signal(signal.SIGINT, interrupt)
prompts = (Prompt(str(number), [1]) for number in range(4))
with SyncFleet(sys.argv[1:]) as fleet:
    batcher = SyncBatcher(fleet, seed=1, group_size=1, sampling=Sampling(max_new_tokens=3))
    try:
        batcher.collect(prompts, 4, decide=decide)
    except KeyboardInterrupt:
        print("interrupted")
    print(*(group.prompt.id for group in batcher.collect([], 4).groups), batcher.handed_out)
"""


def test_a_batch_that_ctrl_c_kept_from_its_caller_is_the_next_one(one: ServerProcess) -> None:
    command = [sys.executable, "-c", INTERRUPTED, one.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n0 1 2 3 4\n", "")


SCRIPT = """
import sys
from rollwire_client import Prompt, Sampling
from rollwire_client.sync import SyncBatcher, SyncFleet

with SyncFleet(sys.argv[1:]) as fleet:
    batcher = SyncBatcher(fleet, seed=1, group_size=1, sampling=Sampling(max_new_tokens=100))
    batcher.collect([Prompt(str(i), [1]) for i in range(3)], 3)
"""


def test_a_batch_shows_a_bar_on_a_terminal_and_nothing_elsewhere(one: ServerProcess) -> None:
    command = [sys.executable, "-c", SCRIPT, one.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(command, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while piece := read(ours):
            shown += piece
    os.close(ours)
    assert process.returncode == 0
    assert b"batch" in shown
    assert b"0/3" in shown
    assert b"sampling" in shown


def read(terminal: int) -> bytes:
    """What was written, until nobody can write any more."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
