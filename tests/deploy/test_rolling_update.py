"""What a cluster does with a fleet, rehearsed: pods are network namespaces, their Service a name.

A rolling update under load: one pod after the other is told to go, drains, and is replaced by one
at another address, which awaits weights; meanwhile rollouts are under way and policies come.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, Publisher, ServerInfo, ServerState
from rollwire_client._fleet.server_handle import ServerStatus
from support.calls import until
from support.fleets import policy
from support.namespaces import network, unavailable
from support.synthetic import PROMPT, labels_are_honest, sampling

if TYPE_CHECKING:
    from deploy.chart import Helm
    from deploy.pod import Pod, RunPod
    from rollwire_client import PublishReport, Trajectory

REPLICAS = 3
WORKERS, TOKENS, RATE = 24, 200, 50  # four seconds a sequence
DRAIN = 0.5  # seconds
SECONDS = 120  # for what takes a moment, on a machine that is busy with other things
NAME = "fleet-rollwire.default.svc"
VALUES = (
    "--set", f"engine=synthetic,engineArgs.tokens-per-second={RATE}",
    "--set-json", f"drainSeconds={DRAIN}",
)  # fmt: skip

pytestmark = pytest.mark.skipif(bool(why := unavailable()), reason=why)


class Service:
    """A headless one that lists pods that are not ready too: a name for the pods that there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pods: list[Pod] = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    @property
    def addresses(self) -> set[str]:
        return {pod.address("api") for pod in self.pods}

    def _resolve(self, host: str, port: int, *more: object, **named: object) -> object:
        if host != NAME:
            return self._real(host, port, *more, **named)
        if not self.pods:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        hosts = [pod.address("api").rpartition(":")[0] for pod in self.pods]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]


class Load:
    """Rollouts, so many at any time. One that fails ends the test."""

    def __init__(self, fleet: Fleet, tasks: asyncio.TaskGroup) -> None:
        self.done: dict[int, Trajectory] = {}
        self.begun = 0
        self._fleet = fleet
        self._over = False
        self._workers = [tasks.create_task(self._work()) for _ in range(WORKERS)]

    async def end(self) -> None:
        """Begins no more; returns when all that was begun is there."""
        self._over = True
        await asyncio.gather(*self._workers)

    async def _work(self) -> None:
        while not self._over:
            seed, self.begun = self.begun, self.begun + 1
            self.done[seed] = await self._fleet.generate(PROMPT, sampling(seed, TOKENS))


class Trainer:
    """Publishes one version after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._publisher = Publisher(fleet)
        self._version = 0

    async def publish(self) -> PublishReport:
        self._version += 1
        tensors = await policy(self._publisher, self._version)
        return await (await self._publisher.publish(self._version, tensors)).committed

    async def catch_up(self) -> PublishReport:
        return await self._publisher.catch_up(await policy(self._publisher, self._version))


def committed(report: PublishReport) -> set[str]:
    return {server.address for server in report.servers if server.error is None}


async def awaits_weights(fleet: Fleet, address: str) -> None:
    """Returns when the trainer has found a server that waits for it."""

    async def so() -> bool:
        info = (await fleet.info()).get(address)
        return isinstance(info, ServerInfo) and info.state is ServerState.AWAITING_WEIGHTS

    await until(so, SECONDS)


async def samples(fleet: Fleet, address: str) -> None:
    """Returns when a server has rollouts, one at least that outlasts a drain."""
    most = WORKERS * DRAIN * RATE

    async def so() -> bool:
        return any(
            m.address == address and m.status is ServerStatus.READY and m.outstanding_tokens > most
            for m in fleet._pool.servers
        )

    await until(so, SECONDS)


@pytest.mark.slow
async def test_a_rolling_update_under_load_loses_no_rollout(
    helm: Helm, run_pod: RunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = helm.render("policy", *VALUES)
    service = Service(monkeypatch)
    with network(2 * REPLICAS) as lan:
        service.pods = [run_pod(rendered, machine=machine) for machine in lan.machines[:REPLICAS]]
        before = service.addresses
        for pod in service.pods:
            await pod.started()
        async with (
            Fleet(f"dns:///{NAME}:50051", probe_interval=0.2, resolve_interval=0.2) as fleet,
            asyncio.TaskGroup() as tasks,
        ):
            trainer = Trainer(fleet)
            for address in service.addresses:
                await awaits_weights(fleet, address)
            assert committed(await trainer.publish()) == before
            load = Load(fleet, tasks)
            for number, machine in enumerate(lan.machines[REPLICAS:]):
                old = service.pods[0]
                await samples(fleet, old.address("api"))
                publishing = tasks.create_task(trainer.publish())  # while one goes down
                old.terminate()
                others = service.addresses - {old.address("api")}
                assert others <= committed(await publishing)
                assert await asyncio.to_thread(old.wait) == 0

                new = run_pod(rendered, machine=machine)
                service.pods = [*service.pods[1:], new]
                await new.started()
                await awaits_weights(fleet, new.address("api"))
                assert await new.probe("readiness") == "NOT_SERVING"
                if number == 1:
                    assert committed(await trainer.publish()) == service.addresses
                else:
                    assert committed(await trainer.catch_up()) == {new.address("api")}
                await new.until_probe("readiness", "SERVING")
                await samples(fleet, new.address("api"))
            assert committed(await trainer.publish()) == service.addresses
            await load.end()
            assert {member.address for member in fleet._pool.servers} == service.addresses
    assert not before & service.addresses
    assert len(load.done) == load.begun
    for seed, trajectory in load.done.items():
        assert len(trajectory.token_ids) == TOKENS
        assert labels_are_honest(trajectory, seed)
        versions = [segment.weights.version or 0 for segment in trajectory.segments]
        assert versions == sorted(versions)
        assert versions[0] > 0  # never the checkpoint
    assert any(len(trajectory.servers) > 1 for trajectory in load.done.values())
    assert {t.servers[-1] for t in load.done.values()} >= service.addresses
