"""Trainers fork while rollouts are under way: DataLoaders, pools of rewards, commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support import forking_trainer

if TYPE_CHECKING:
    from support.servers import StartServer

HARMLESS = ("close", "exit", "close, RolloutClient", "close, Batcher")


@pytest.mark.slow
@pytest.mark.parametrize("facade", ["async", "sync"])
def test_children_live_and_are_told_and_the_parent_loses_nothing(
    facade: str, start_server: StartServer
) -> None:
    server = start_server("--engine", "synthetic", "--engine-arg", "tokens-per-second=400")
    environment = {n: v for n, v in os.environ.items() if n != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, forking_trainer.__file__, facade, server.address],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["children"] == [0] * forking_trainer.CHILDREN, done.stderr
    assert set(result["tokens"]) == {forking_trainer.SAMPLING.max_new_tokens}
    assert result["pool"] == [number * number for number in range(8)]
    assert (result["command"], result["loader"]) == (0, list(range(8)))
    told: dict[str, str] = result["told"]
    assert told.pop("exit code") == "0"
    for name in HARMLESS:
        assert told.pop(name, "returned None") == "returned None"
    for name, message in told.items():
        assert message.startswith("NotOpenHereError: "), (name, message)
        assert "fork" in message, name
        assert "'spawn'" in message, name
        what = {"its own": "process", "its own client": "process"}.get(name, "this ")
        assert message.removeprefix("NotOpenHereError: ").startswith(what), name


def test_a_child_of_a_process_that_only_imported_it_may_open_a_fleet(
    start_server: StartServer,
) -> None:
    server = start_server("--engine", "synthetic")
    program = f"""
import multiprocessing
from rollwire_client import Sampling
from rollwire_client.sync import SyncFleet

def sample(seed):
    with SyncFleet(["{server.address}"]) as fleet:
        return fleet.generate([1], Sampling(max_new_tokens=5, seed=seed)).token_ids

with multiprocessing.get_context("fork").Pool(2) as pool:
    told = pool.map_async(sample, [1, 1, 2]).get(30)
assert told[0] == told[1] != told[2], told
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
