"""The trainer learns of each token how old the keys and values were to which it attended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import Fleet, Publisher, RoutingReplay, Sampling
from rollwire_server import builtin_model
from rollwire_server.engines.embedded.checkpoint import checkpoint_tensors
from support import reference
from support.fleets import QUICK
from support.synthetic import each_sampled

if TYPE_CHECKING:
    from support.servers import StartServer

PROMPT = list(range(1, 20))
VERSIONS = (1, 2, 3)


@pytest.mark.slow
async def test_what_a_trajectory_says_of_keys_and_values_is_what_a_forward_pass_finds(
    start_server: StartServer,
) -> None:
    server = start_server("--model", "builtin:tiny-moe")
    model = builtin_model("builtin:tiny-moe").eval()
    models = {None: model}
    async with Fleet([server.address], timeouts=QUICK) as fleet:
        publisher = Publisher(fleet, max_kv_lag=1)
        await publisher.prepare()
        sampling = Sampling(max_new_tokens=500, seed=1, ignore_eos=True)
        routed = RoutingReplay.AS_SAMPLED
        tasks = [
            asyncio.create_task(fleet.generate([i, *PROMPT], sampling, routed_experts=routed))
            for i in range(4)
        ]
        for version in VERSIONS:
            await each_sampled(fleet, 4 * 20)
            models[version] = reference.with_tensors(model, reference.changed(model, seed=version))
            await publisher.publish_and_wait(version, checkpoint_tensors(models[version]))
        trajectories = await asyncio.gather(*tasks)
    seen = set()
    for trajectory in trajectories:
        lags = torch.tensor(trajectory.kv_lags)
        seen |= {(segment.weights.version, segment.kv_lag) for segment in trajectory.segments}
        prompt = len(trajectory.prompt_ids)
        assert trajectory.to_tensors().kv_lags.tolist() == [0] * prompt + lags.tolist()
        for segment in trajectory.segments:
            expected = reference.logprobs(
                models[segment.weights.version], trajectory.prompt_ids, trajectory.token_ids
            )
            differences = (torch.tensor(trajectory.logprobs) - expected).abs()
            worst = differences[segment.start : segment.end].max()
            assert (worst < 1e-4) == (segment.kv_lag == 0), segment
        assert trajectory.routing is not None
        assert {(s.weights, s.oldest_kv_revision) for s in trajectory.routing.segments} == {
            (s.weights, s.oldest_kv_revision) for s in trajectory.segments
        }
    assert seen == {(None, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)}
