"""The example agents, as a reader runs them; and a conversation against a real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, RolloutClient, Sampling
from support.programs import ran

if TYPE_CHECKING:
    from support.servers import ServerProcess

SCRIPT = Path(__file__).parents[2] / "examples" / "agent.py"


@pytest.mark.slow
def test_agents_call_their_tool_and_go_on(server: ServerProcess) -> None:
    done = ran(SCRIPT, "--servers", server.address, "--agents", "5")
    told = [
        [int(number) for number in re.findall(r"\d+", line)] for line in done.stdout.split("\n")
    ]
    assert [numbers[0] for numbers in told[:-1]] == list(range(5))
    for _, turns, tokens, sampled, cached in told[:-1]:
        calls = (tokens - sampled - 3) / 2  # three are the prompt, two what a call brings
        assert calls in {turns - 1, turns}
        assert (cached > 0) == (turns > 1)
    assert any(turns > 1 for _, turns, *_ in told[:-1])


async def test_a_turn_equals_one_that_reads_everything_anew(server: ServerProcess) -> None:
    def sampling(seed: int) -> Sampling:
        return Sampling(max_new_tokens=30, seed=seed, ignore_eos=True)

    async with Fleet([server.address]) as fleet, RolloutClient(server.address) as client:
        session = fleet.session([5, 6, 7])
        await session.generate(sampling(1))
        session.append([8, 9])
        history = session.token_ids
        turn = await session.generate(sampling(2))
        anew = await client.generate(history, sampling(2))
    assert turn.finish is not None
    assert turn.finish.cached_prompt_tokens > 3  # of the turn before, not of the prompt alone
    assert turn.token_ids == anew.token_ids
    assert turn.logprobs == pytest.approx(anew.logprobs, abs=1e-4)
