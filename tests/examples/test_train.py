"""The example trainer, as a reader runs it: on real servers, and again where it left off."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, Publisher
from rollwire_server import builtin_model
from support.programs import ran

if TYPE_CHECKING:
    from support.servers import StartServer

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"


def train(folder: Path, addresses: list[str], steps: int) -> list[str]:
    """What a run says, a line each."""
    done = ran(SCRIPT, "--servers", *addresses, "--steps", str(steps), cwd=folder)
    return done.stdout.splitlines()


def versions_and_rewards(lines: list[str]) -> list[tuple[int, float]]:
    found = [re.fullmatch(r"version (\d+): reward (\d\.\d{3})", line) for line in lines]
    assert all(found), lines
    return [(int(match[1]), float(match[2])) for match in found if match]


async def served(addresses: list[str]) -> list[int | None]:
    async with Fleet(addresses) as fleet:
        infos = (await fleet.info()).values()
    return [getattr(getattr(info, "weights", None), "version", None) for info in infos]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_learns_publishes_and_goes_on_where_it_left_off(
    start_server: StartServer, tmp_path: Path
) -> None:
    servers = [start_server(), start_server()]
    addresses = [server.address for server in servers]
    first = versions_and_rewards(train(tmp_path, addresses, 15))
    assert [version for version, _ in first] == list(range(1, 16))
    assert asyncio.run(served(addresses)) == [15, 15]

    second = versions_and_rewards(train(tmp_path, addresses, 2))
    assert [version for version, _ in second] == [16, 17]
    assert second[-1][1] > first[0][1] + 0.05  # it went on from what it had learned

    servers[0].kill()
    third = train(tmp_path, addresses, 1)
    assert third[0].startswith(f"{addresses[0]} does not serve version 18: ")
    assert versions_and_rewards(third[1:])[0][0] == 18
    assert asyncio.run(served(addresses)) == [None, 18]


async def test_the_built_in_model_is_what_servers_begin_with(start_server: StartServer) -> None:
    async with Fleet([start_server().address]) as fleet:
        tensors = builtin_model("builtin:tiny").state_dict()
        (server,) = (await (await Publisher(fleet).publish(None, tensors)).committed).servers
    assert server.already_current


def test_a_built_in_model_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no built-in model 'tiny', only builtin:tiny, "):
        builtin_model("tiny")
