"""The routing of real mixtures of experts, whatever happened: what the model itself computes."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import Fleet, KvPolicy, Publisher, RoutingReplay, Sampling
from rollwire_server import builtin_model
from support import reference
from support.fleets import QUICK
from support.servers import ServerProcess, servers
from support.synthetic import each_sampled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rollwire_client import Trajectory
    from support.servers import StartServer
    from transformers import PreTrainedModel

pytestmark = pytest.mark.slow

PROMPT = list(range(1, 20))
MODEL = ("--model", "builtin:tiny-moe")
TOKENS = 400
AS_SAMPLED, LAST_PASS = RoutingReplay.AS_SAMPLED, RoutingReplay.LAST_PASS


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return builtin_model("builtin:tiny-moe").eval()


@pytest.fixture(scope="module")
def stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with servers(tmp_path_factory.mktemp("moe")) as start:
        yield start(*MODEL)


def sampling(seed: int, tokens: int = TOKENS) -> Sampling:
    return Sampling(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def inputs(trajectory: Trajectory) -> list[int]:
    """The tokens that were inputs: all but the last."""
    return [*trajectory.prompt_ids, *trajectory.token_ids[:-1]]


def routed(trajectory: Trajectory) -> torch.Tensor:
    tensor = trajectory.to_tensors().routing
    assert (tensor[-1] == -1).all()
    return tensor[:-1]


@pytest.mark.parametrize("end", ["killed", "drained"])
async def test_routing_crosses_from_server_to_server(
    end: str, stays: ServerProcess, start_server: StartServer, model: PreTrainedModel
) -> None:
    victim = start_server(*MODEL, "--drain-seconds", "0")
    async with Fleet([victim.address, stays.address], timeouts=QUICK) as fleet:
        tasks = [
            asyncio.create_task(
                fleet.generate(
                    PROMPT, sampling(seed), routed_experts=list(RoutingReplay)[seed // 4]
                )
            )
            for seed in range(8)
        ]
        await each_sampled(fleet, 40)
        if end == "killed":
            victim.kill()
        else:
            victim.process.send_signal(signal.SIGTERM)
        trajectories = await asyncio.gather(*tasks)
    moved = [t for t in trajectories if len(t.servers) == 2]
    assert {t.routing.replay for t in moved} == {AS_SAMPLED, LAST_PASS}
    for trajectory in trajectories:
        routing = trajectory.routing
        assert routing.num_rows == len(PROMPT) + TOKENS - 1
        assert torch.equal(routed(trajectory), reference.routing(model, inputs(trajectory)))
        ids = [segment.weights.server_id for segment in routing.segments]
        if routing.replay is LAST_PASS:
            assert ids == [trajectory.segments[-1].weights.server_id]
            assert (routing.recomputed != ()) == (trajectory in moved)
        elif trajectory in moved:
            assert ids == [segment.weights.server_id for segment in trajectory.segments]
            # Up to where the server had sent them they are those that it sampled with.
            switch = len(PROMPT) - 1 + trajectory.segments[1].start
            assert routing.recomputed in ((), ((routing.segments[0].end, switch),))
    if end == "drained":
        assert victim.stop() == 0
        assert all(t.routing.recomputed == () for t in moved if t.routing.replay is AS_SAMPLED)


def other_routers(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model as checkpoints have them, with routers of its own."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name in tensors:
        if name.endswith("gate.weight"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


async def test_routing_crosses_a_publish_that_recomputes(
    start_server: StartServer, model: PreTrainedModel, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    server = start_server(*MODEL)
    tensors = other_routers(model, tmp_path)
    new = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    async with Fleet([server.address], timeouts=QUICK) as fleet:
        publisher = Publisher(fleet)
        tasks = [
            asyncio.create_task(fleet.generate(PROMPT, sampling(5, 1000), routed_experts=replay))
            for replay in (AS_SAMPLED, LAST_PASS)
        ]
        await each_sampled(fleet, 10)
        handle = await publisher.publish(3, tensors, kv_policy=KvPolicy.RECOMPUTE)
        assert (await handle.committed).failed == ()
        as_sampled, last_pass = await asyncio.gather(*tasks)
    before, after = as_sampled.segments
    assert (before.weights.version, after.weights.version) == (None, 3)
    switch = len(PROMPT) - 1 + after.start
    old_rows = reference.routing(model, inputs(as_sampled))[:switch]
    new_rows = reference.routing(new, inputs(as_sampled))
    assert not torch.equal(old_rows, new_rows[:switch])
    assert torch.equal(routed(as_sampled)[:switch], old_rows)
    assert torch.equal(routed(as_sampled)[switch:], new_rows[switch:])
    assert [(s.end, s.weights) for s in as_sampled.routing.segments] == [
        (switch, before.weights),
        (len(new_rows), after.weights),
    ]
    assert as_sampled.routing.recomputed == ()

    assert torch.equal(routed(last_pass), reference.routing(new, inputs(last_pass)))
    (segment,) = last_pass.routing.segments
    assert segment.weights == after.weights
    assert last_pass.routing.recomputed == ((0, len(PROMPT) - 1 + last_pass.segments[1].start),)
