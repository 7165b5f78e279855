"""Trainers and servers on GPUs: FSDP2 over NCCL publishes while it trains, over each backend.

A GPU that members of a group have to share counts as one for each: NCCL is told of several hosts,
and moves bytes by sockets. The same runs on a CPU, over Gloo.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import pytest
import rollwire_transport as transport
import torch
from rollwire_client import Fleet, Publisher, PublishTimeouts, Sampling
from rollwire_server import builtin_model
from support import fsdp_trainer, reference
from support.crossing import PROMPT
from support.fleets import open_fleet, policy, publisher
from support.fsdp_trainer import VERSION, WORLD_SIZE, Order, published
from support.phases import Strike, Victim
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from support.servers import ServerProcess, StartServer
    from torch import Tensor

pytestmark = pytest.mark.slow

ALIASES = {"lm_head.weight"}
BOUND = 40  # seconds in which a death is found, on a busy machine
SAMPLING = Sampling(max_new_tokens=30, seed=7, ignore_eos=True)
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)


class Way(NamedTuple):
    """How a trainer's ranks talk with each other, and how they publish."""

    device: str
    groups: str
    backend: str


WAYS = [
    pytest.param(Way("cpu", "gloo", "gloo"), id="cpu"),
    pytest.param(Way("cuda", "nccl", "nccl"), id="nccl", marks=GPU),
    pytest.param(Way("cuda", "cpu:gloo,cuda:nccl", "gloo"), id="gloo", marks=GPU),
    pytest.param(Way("cuda", "nccl", "ucx"), id="ucx", marks=GPU),
]
DEATHS = WAYS[:3]


class Hosts:
    """Where servers run, and what NCCL is told of hosts."""

    def __init__(self, device: str, servers: int) -> None:
        count = torch.cuda.device_count() if device == "cuda" else 0
        self.devices = [
            f"cuda:{-1 - i % count + count}" if count else "cpu" for i in range(servers)
        ]
        members = {"cuda:0", *self.devices}  # rank 0 of the trainer, and servers
        self._shared = count and (count < WORLD_SIZE or len(members) <= servers)

    def of(self, member: str) -> dict[str, str]:
        return {"NCCL_HOSTID": member} if self._shared else {}

    def start(
        self, start: StartServer, monkeypatch: pytest.MonkeyPatch, *flags: str
    ) -> list[ServerProcess]:
        servers = []
        for number, device in enumerate(self.devices):
            for name, value in self.of(f"server {number}").items():
                monkeypatch.setenv(name, value)
            servers.append(start("--device", device, *flags))
        return servers

    def ranks(self) -> list[dict[str, str]]:
        return [{"GLOO_SOCKET_IFNAME": "lo", **self.of(f"rank {r}")} for r in range(WORLD_SIZE)]


def require(backend: str) -> None:
    availability = transport.available_backends()[backend]
    if not availability.ok:
        pytest.skip(f"{backend}: {availability.reason}")


async def samples(server: ServerProcess, weights: Mapping[str, Tensor], digest: int) -> None:
    """It samples under these weights, and says so."""
    model = builtin_model("builtin:tiny").eval().requires_grad_(requires_grad=False)
    model = reference.with_tensors(model, weights)
    async with Fleet([server.address]) as fleet:
        got = await fleet.generate(PROMPT, SAMPLING)
    (segment,) = got.segments
    assert (segment.weights.version, segment.weights.digest) == (VERSION, digest)
    expected = reference.logprobs(model, PROMPT, got.token_ids)
    torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-4, rtol=0)


async def digest(servers: Sequence[ServerProcess], weights: Mapping[str, Tensor]) -> int:
    """Of weights, aliases left out."""
    async with Fleet([server.address for server in servers]) as fleet:
        specs = await Publisher(fleet).schema()
    assert {spec.name for spec in specs if spec.alias_of} == ALIASES <= set(weights)
    return transport.sum_digests(
        transport.tensor_digest(spec, weights[spec.name]) for spec in specs if not spec.alias_of
    )


@pytest.mark.parametrize("way", WAYS)
async def test_ranks_publish_while_they_train(
    way: Way, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(way.backend)
    hosts = Hosts(way.device, 1)
    (server,) = hosts.start(start_server, monkeypatch)
    order = Order(tmp_path, [server.address], *way)
    leader, other = fsdp_trainer.run(order, hosts.ranks())
    assert leader.get("error") == other.get("error") is None
    weights = published(order)
    assert leader["digest"] == await digest([server], weights)
    assert leader["failed"] == []
    await samples(server, weights, leader["digest"])
    went_on_to_train(leader, other)
    # The critic was trained once before, and at each gather.
    assert leader["steps"] == 1 + len(weights) - len(ALIASES)


def went_on_to_train(*ranks: dict[str, float]) -> None:
    """Both models, over all ranks."""
    for told in ranks:
        assert told["steps"] == ranks[0]["steps"] > 1
        assert told["critic"] == sum(range(1, WORLD_SIZE + 1)) * told["steps"]
        assert math.isfinite(told["loss"])


@pytest.mark.parametrize("way", DEATHS)
async def test_the_only_server_dies_and_all_ranks_go_on_to_train(
    way: Way, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(way.backend)
    hosts = Hosts(way.device, 1)
    (server,) = hosts.start(start_server, monkeypatch)
    order = Order(tmp_path, [server.address], *way, victim=server.process.pid)
    leader, other = fsdp_trainer.run(order, hosts.ranks())
    assert leader["error"].startswith("PublishFailedError: ")
    assert server.address in leader["error"]
    assert other["error"].startswith("PublishError: rank 0 did not publish: ")
    assert max(leader["seconds"], other["seconds"]) < BOUND
    went_on_to_train(leader, other)


@pytest.mark.parametrize("way", DEATHS)
async def test_a_server_dies_and_the_other_gets_what_all_ranks_publish(
    way: Way, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(way.backend)
    hosts = Hosts(way.device, 2)
    victim, server = hosts.start(start_server, monkeypatch)
    addresses = [victim.address, server.address]
    order = Order(tmp_path, addresses, *way, victim=victim.process.pid)
    leader, other = fsdp_trainer.run(order, hosts.ranks())
    assert leader.get("error") == other.get("error") is None
    assert leader["failed"] == [victim.address]
    assert max(leader["seconds"], other["seconds"]) < BOUND
    went_on_to_train(leader, other)
    await samples(server, published(order), leader["digest"])


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]])
async def test_three_servers_commit_the_same_and_one_death_costs_one(
    way: Way, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(way.backend)
    hosts = Hosts(way.device, 3)
    servers = hosts.start(start_server, monkeypatch)
    for name, value in hosts.of("trainer").items():
        monkeypatch.setenv(name, value)
    first, victim, last = servers
    steps = Steps()
    async with open_fleet([server.address for server in servers], steps) as fleet:
        trainer = publisher(fleet, way.backend, timeouts=PublishTimeouts(), delta=False)
        for version in (VERSION - 1, VERSION):
            tensors = {n: t.to(way.device) for n, t in (await policy(trainer, version)).items()}
            strike = Strike("transfer", steps, Victim.of(victim), victim.kill)
            source = tensors if version < VERSION else strike.source(tensors)
            report = await (await trainer.publish(version, source)).committed
            served = [s.weights for s in report.servers if s.weights is not None]
            assert {(tag.version, tag.digest) for tag in served} == {(version, report.digest)}
            failed = [s.address for s in report.failed]
            assert failed == ([] if version < VERSION else [victim.address])
    for server in (first, last):
        weights = {name: tensor.cpu() for name, tensor in tensors.items()}
        await samples(server, weights, report.digest)
