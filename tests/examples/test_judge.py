"""The example judge, as a reader runs it; a judge takes no updates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, Publisher, PublishFailedError
from rollwire_server import builtin_model
from support.programs import ran

if TYPE_CHECKING:
    from support.servers import ServerProcess, StartServer

SCRIPT = Path(__file__).parents[2] / "examples" / "judge.py"


@pytest.mark.slow
async def test_answers_are_judged_by_a_server_that_stays_as_it_is(
    server: ServerProcess, start_server: StartServer
) -> None:
    judge = start_server("--frozen")

    def judged() -> list[str]:
        done = ran(SCRIPT, "--servers", server.address, "--judges", judge.address)
        return done.stdout.splitlines()

    told = judged()
    rewards = [float(re.match(r"(\d\.\d{3}) for 24 tokens: ", line)[1]) for line in told]
    assert len(rewards) == 8
    assert len(set(rewards)) > 1
    assert all((8 * reward).is_integer() for reward in rewards)

    async with Fleet([judge.address]) as fleet:
        with pytest.raises(PublishFailedError, match="frozen"):
            await Publisher(fleet).publish(1, builtin_model("builtin:tiny").state_dict())
    assert judged() == told
