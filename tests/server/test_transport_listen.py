"""--transport-listen: transfers listen there and nowhere else, or the server says why not."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import rollwire_transport as transport
from rollwire.v1 import weights_pb2
from rollwire_server.settings import parse_listen_range, read_settings
from support.calls import connected, reason_of
from support.namespaces import network, servers_on, unavailable
from support.publishing import Update, random_weights
from support.servers import failed_start

if TYPE_CHECKING:
    from support.servers import ServerProcess, StartServer

SYSTEM = tuple(map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
UCX = transport.available_backends()["ucx"]
PORTS = range(52000, 52064)
FAILS = (
    *("--model", "none", "--engine", "synthetic"),
    *("--listen", "127.0.0.1:0", "--log-level", "error"),
)


@pytest.mark.parametrize(
    ("told", "means"),
    [
        ("0.0.0.0:0", (None, None)),
        ("[::]:0", (None, None)),
        ("0.0.0.0:52000-52999", (None, (52000, 52999))),
        ("127.0.0.1:52000-52015", ("127.0.0.1", (52000, 52015))),
        ("[::1]:1-65535", ("::1", (1, 65535))),
    ],
)
def test_what_it_says(told: str, means: object) -> None:
    assert parse_listen_range(told) == means


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("127.0.0.1", "must be HOST:FIRST-LAST"),
        ("127.0.0.1:52000", "must be HOST:FIRST-LAST"),
        (":52000-52999", "must be HOST:FIRST-LAST"),
        ("127.0.0.1:52000-", "must be HOST:FIRST-LAST"),
        ("127.0.0.1:-52000", "must be HOST:FIRST-LAST"),
        ("127.0.0.1:٥٢٠٠٠-٥٢٩٩٩", "must be HOST:FIRST-LAST"),
        ("localhost:0", "localhost is not an IP address"),
        ("eth0:52000-52999", "eth0 is not an IP address"),
        ("0.0.0.0:52999-52000", "52999-52000 is not a range of ports"),
        ("0.0.0.0:0-100", "0-100 is not a range of ports"),
        ("0.0.0.0:60000-70000", "60000-70000 is not a range of ports"),
        ("0.0.0.0:52000-52014", "fewer than 16 ports"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    told: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        read_settings(["--model", "none", "--transport-listen", told])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rollwire-server: --transport-listen is {told!r}: ")
    assert said in line


def test_it_is_an_environment_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWIRE_TRANSPORT_LISTEN", "127.0.0.1:52000-52999")
    assert read_settings(["--model", "none"]).transport_listen == "127.0.0.1:52000-52999"
    monkeypatch.setenv("ROLLWIRE_TRANSPORT_LISTEN", "127.0.0.1")
    with pytest.raises(SystemExit):
        read_settings(["--model", "none"])


@pytest.mark.skipif(UCX.ok, reason="UCX can be kept to any ports")
def test_ports_that_cannot_be_kept(tmp_path: Path) -> None:
    failed = failed_start(tmp_path, *FAILS, "--transport-listen", "0.0.0.0:1-16")
    assert failed.code == 1
    ports = f"gloo uses ports that the system chooses, {SYSTEM[0]} to {SYSTEM[1]} here"
    for said in ("no backend can be limited to it", ports, "set net.ipv4.ip_local_port_range"):
        assert said in failed.line


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    failed = failed_start(tmp_path, *FAILS, "--transport-listen", "192.0.2.77:0")
    assert failed.code == 1
    assert "192.0.2.77 is not an address of this machine" in failed.line


def test_who_is_found_by_an_interface_is_not_kept_to_an_address() -> None:
    """What NCCL and UCX say where there are any."""
    bound, anywhere = (
        transport.ListenOptions("127.0.0.1"),
        transport.ListenOptions(ports=(1, 65535)),
    )
    assert "NCCL_SOCKET_IFNAME" in bound.fixed_host_problem("nccl", "NCCL_SOCKET_IFNAME")
    assert not anywhere.fixed_host_problem("ucx", "UCX_NET_DEVICES")
    assert not anywhere.ephemeral_ports_problem("nccl")
    refused = transport.available_backends(transport.ListenOptions(ports=(1, 16)))["gloo"]
    assert not refused.ok
    with pytest.raises(transport.TransportError, match="gloo cannot be used: gloo uses ports"):
        transport.open_link(
            "gloo", epoch="e", rank=1, world_size=2,
            listen=transport.ListenOptions(ports=(1, 16)),
        )  # fmt: skip


# Where a group really listens.


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address and port of all that a process listens on."""
    told = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "ss", "-Hltnp"], capture_output=True, text=True,
        timeout=20, check=True,
    ).stdout  # fmt: skip
    own = (line for line in told.splitlines() if f"pid={pid}," in line)
    ends = (line.split()[3].rpartition(":") for line in own)
    return {(host.removeprefix("[::ffff:").strip("[]"), int(port)) for host, _, port in ends}


async def opened_by_a_group(
    server: ServerProcess, trainer: str, backend: str = "gloo"
) -> set[tuple[str, int]]:
    """What a server listens on more while it is in a group, through which an update then comes."""
    before = listeners(server.process.pid)
    async with connected(server.address) as api:
        change = Update(api, await random_weights(api, 1), 1)
        await change.announce()
        link = await change.form(backend=backend, host=trainer)
        opened = listeners(server.process.pid) - before
        await change.send(link)
        await change.until(weights_pb2.UPDATE_PHASE_STAGED)
        await asyncio.to_thread(link.close)
        assert (await change.commit()).weights.version == 1
    return opened


async def test_an_address_of_its_own(start_server: StartServer) -> None:
    server = start_server("--engine", "synthetic", "--transport-listen", "127.0.0.9:0")
    async with connected(server.address) as api:
        assert list((await api.info()).transports) == ["gloo"]
    assert {host for host, _ in await opened_by_a_group(server, "127.0.0.1")} == {"127.0.0.9"}


async def test_a_backend_that_cannot_be_kept_is_not_joined(start_server: StartServer) -> None:
    server = start_server("--engine", "synthetic", "--transport-listen", "127.0.0.9:0")
    async with connected(server.address) as api:
        change = Update(api, await random_weights(api, 1), 1)
        await change.announce()
        with pytest.raises(grpc.aio.AioRpcError, match="cannot use backend 'ucx'") as caught:
            await change.prepare("epoch", backend="ucx")
        assert reason_of(caught.value) == "BAD_REQUEST"


@pytest.mark.skipif(bool(why := unavailable()), reason=why)
async def test_ports_that_a_firewall_may_name(tmp_path: Path) -> None:
    """As a pod whose sysctl net.ipv4.ip_local_port_range is set."""
    flags = ("--engine", "synthetic", "--transport-listen", f"0.0.0.0:{PORTS[0]}-{PORTS[-1]}")
    with network(1) as lan:
        (machine,) = lan.machines
        machine.sysctl("net.ipv4.ip_local_port_range", f"{PORTS[0]} {PORTS[-1]}")
        with servers_on(lan.machines, tmp_path, *flags) as far:
            opened = await opened_by_a_group(far.all[0], lan.address)
    assert {host for host, _ in opened} == {machine.address}
    assert {port for _, port in opened} <= set(PORTS)


@pytest.mark.skipif(not UCX.ok, reason=UCX.reason)
async def test_ports_of_ucx(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    told = f"0.0.0.0:{PORTS[0]}-{PORTS[-1]}"
    server = start_server("--engine", "synthetic", "--transport-listen", told)
    async with connected(server.address) as api:
        assert list((await api.info()).transports) == ["ucx"]
    opened = await opened_by_a_group(server, "127.0.0.1", "ucx")
    assert opened
    assert {port for _, port in opened} <= set(PORTS)
