"""A fleet behind one name: its processes come and go, and certificates must say the name."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Credentials, Fleet, Timeouts, UnavailableError
from support.certificates import Authority
from support.synthetic import PROMPT, sampled, sampling, start_synthetic, undisturbed, until

if TYPE_CHECKING:
    from pathlib import Path

    from rollwire_client import Trajectory
    from support.servers import ServerProcess, StartServer

NAME = "rollouts.example"


class Records:
    """What the name resolves to: addresses of this machine, or nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, port: int) -> None:
        self.hosts: list[str] = []
        real = socket.getaddrinfo

        def resolve(host: str, *more: object, **named: object):
            if host != name:
                return real(host, *more, **named)
            if not self.hosts:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.hosts
            ]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    def of(self, *servers: ServerProcess) -> None:
        self.hosts = [server.address.rpartition(":")[0] for server in servers]


@pytest.mark.slow
async def test_processes_behind_a_name_change_and_are_all_gone_for_a_while(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, tokens, rate = 24, 250, 100
    want = await undisturbed(start_synthetic(start_server, 0), rollouts, tokens)
    a = start_synthetic(start_server, rate, "--listen", "127.0.0.2:0")
    port = int(a.address.rpartition(":")[2])

    async def pod(number: int) -> ServerProcess:
        listen = f"127.0.0.{number}:{port}"
        return await asyncio.to_thread(start_synthetic, start_server, rate, "--listen", listen)

    records = Records(monkeypatch, NAME, port)
    records.of(a)
    async with Fleet(f"dns:///{NAME}:{port}", probe_interval=0.2, resolve_interval=0.05) as fleet:
        trajectories: dict[int, Trajectory] = {}

        async def sample(seed: int) -> None:
            trajectories[seed] = await fleet.generate(PROMPT, sampling(seed, tokens))

        async def ready(*servers: ServerProcess) -> None:
            want = {server.server_id for server in servers}
            await until(lambda: {m.server_id for m in fleet._pool.servers if not m.problem} == want)

        async with asyncio.TaskGroup() as tasks:

            def begin(seeds: range) -> None:
                for seed in seeds:
                    tasks.create_task(sample(seed))

            begin(range(8))
            b, c = await pod(3), await pod(4)
            records.of(a, b)
            await ready(a, b)
            begin(range(8, 16))
            records.of(b, c)  # one is replaced, and killed while it is leaving
            await ready(b, c)
            a.kill()
            begin(range(16, 24))
            await sampled(fleet, 100)
            for server in (b, c):
                server.kill()
            records.of()
            await until(lambda: all(m.problem for m in fleet._pool.servers))
            d = await pod(5)
            records.of(d)
            await ready(d)
    assert [trajectories[seed].token_ids for seed in range(rollouts)] == want


async def test_certificates_say_the_fleet_s_name(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own = authority.sign("server")  # for 127.0.0.1 and localhost
    server = start_synthetic(
        start_server, 0, "--listen", "127.0.0.1:0",
        "--tls-cert", str(own.certificate), "--tls-key", str(own.key),
    )  # fmt: skip
    port = int(server.address.rpartition(":")[2])
    real = socket.getaddrinfo

    def resolve(host: str, *more: object, **named: object):
        if host in {NAME, "localhost"}:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return real(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    trusting = Credentials(ca=authority.certificate)
    async with Fleet(f"dns:///localhost:{port}", credentials=trusting) as fleet:
        assert (await fleet.generate(PROMPT, sampling(1, 5))).servers == (server.address,)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1"):
        async with Fleet(f"dns:///{NAME}:{port}", credentials=trusting, timeouts=Timeouts(start=1)):
            pass
    told = Credentials(ca=authority.certificate, server_name="localhost")
    async with Fleet(f"dns:///{NAME}:{port}", credentials=told) as fleet:
        assert (await fleet.generate(PROMPT, sampling(1, 5))).complete
