"""Network namespaces on a bridge: machines of their own, whose cables a test may pull.

This process stays where it is and has an address on the bridge. Needs root and ``ip``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support import own
from support.fleets import Servers
from support.forked import ServerCommand
from support.servers import START_SECONDS, STOP_SECONDS, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_NETWORK = "10.213.{}.{}"


@dataclass(frozen=True)
class Machine:
    """A network namespace on the bridge.

    Attributes:
        address: Of its own.
        enter: What a command is to begin with that runs inside.
    """

    address: str
    enter: tuple[str, ...]
    cable: str
    bridge: str

    def pull(self) -> None:
        """Takes the cable out of the switch: packets are lost, and nobody is told."""
        _ip("link", "set", self.cable, "nomaster")

    def plug(self) -> None:
        """Puts it back."""
        _ip("link", "set", self.cable, "master", self.bridge)

    @property
    def network(self) -> Path:
        """Its namespace, as a file."""
        return Path("/run/netns", self.cable)

    def sysctl(self, name: str, value: str) -> None:
        """Sets a parameter of its kernel, of those that belong to the network."""
        _run(*self.enter, "sysctl", "-w", f"{name}={value}")

    def trickle(self, bits_per_second: int) -> None:
        """From now on this is what reaches it, at most."""
        _run(
            *("tc", "qdisc", "replace", "dev", self.cable, "root", "tbf"),
            *("rate", f"{bits_per_second}bit", "burst", "3000", "limit", "100000"),
        )

    def whisper(self, bits_per_second: int) -> None:
        """From now on this is what it sends, at most."""
        _run(
            *self.enter,
            *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", f"{bits_per_second}bit", "burst", "3000", "limit", "20000"),
        )

    def flow(self) -> None:
        """Takes the limit away."""
        _run("tc", "qdisc", "del", "dev", self.cable, "root")


@dataclass(frozen=True)
class Network:
    """Machines, and this process, on one bridge."""

    address: str  # of this process
    machines: tuple[Machine, ...]


def unavailable() -> str:
    """Why this machine cannot make namespaces, or nothing."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} missing: install iproute2"
    name = f"rw{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """``count`` machines; taken down afterwards, whatever happens."""
    name = f"rw{uuid.uuid4().hex[:8]}"
    subnet = own.number()
    with contextlib.ExitStack() as undo:
        _ip("link", "add", name, "type", "bridge")
        undo.callback(_ip, "link", "del", name)
        address = _NETWORK.format(subnet, 1)
        _ip("addr", "add", f"{address}/24", "dev", name)
        _ip("link", "set", name, "up")
        machines = tuple(_machine(undo, name, subnet, number) for number in range(count))
        yield Network(address, machines)


def _machine(undo: contextlib.ExitStack, bridge: str, subnet: int, number: int) -> Machine:
    own = f"{bridge}m{number}"
    address = _NETWORK.format(subnet, 10 + number)
    _ip("netns", "add", own)
    undo.callback(_ip, "netns", "del", own)
    _ip("link", "add", own, "type", "veth", "peer", "name", "eth0", "netns", own)
    undo.callback(_ip, "link", "del", own)
    _ip("link", "set", own, "master", bridge, "up")
    for device in ("lo", "eth0"):
        _ip("-n", own, "link", "set", device, "up")
    _ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
    return Machine(address, ("ip", "netns", "exec", own), own, bridge)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def servers_on(machines: tuple[Machine, ...], folder: Path, *flags: str) -> Iterator[Servers]:
    """One server on each machine; killed afterwards."""
    with contextlib.ExitStack() as undo:
        processes = [
            undo.enter_context(_process(machine, folder / f"{number}", flags))
            for number, machine in enumerate(machines)
        ]
        started = [_wait(process, folder / f"{number}") for number, process in enumerate(processes)]
        yield Servers(started)
    for server in started:
        assert "Traceback" not in server.log.read_text(), server.log.read_text()


@contextlib.contextmanager
def _process(machine: Machine, folder: Path, flags: tuple[str, ...]) -> Iterator[ServerCommand]:
    folder.mkdir()
    (folder / "log").touch()
    flags = ("--model", "builtin:tiny", *flags, "--listen", f"{machine.address}:50051")
    flags += ("--ready-file", str(folder / "ready.json"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = ServerCommand(flags, folder / "log", environment, machine.network)
    try:
        yield process
    finally:
        process.kill()
        process.wait(STOP_SECONDS)


def _wait(process: ServerCommand, folder: Path) -> ServerProcess:
    ready, log = folder / "ready.json", folder / "log"
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    told = json.loads(ready.read_text())
    return ServerProcess(process, told["listen"], told["server_id"], log, ready)
