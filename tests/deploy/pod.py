"""A pod as a process of this machine: what a kubelet does with it, without a container.

Mounts are folders, and paths in arguments and environment lead there; Secrets lie in them as a
kubelet puts them, behind a link that a renewal turns. Addresses and ports, flags and variables are
the manifest's own, but for the host: one of this machine instead of all. A pod may have a network
namespace of its own, with the sysctls of the manifest; in that of this machine, weight transfers
listen on any port.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import until
from support.forked import ServerCommand

if TYPE_CHECKING:
    from deploy.chart import Object, Rendered
    from support.namespaces import Machine

START_SECONDS = 300
STOP_SECONDS = 120

Secrets = Mapping[str, Mapping[str, bytes]]


class Pod:
    """The container of a rendered pod, started.

    Args:
        secrets: The content of each Secret by its name, as bytes by key.
        volumes: Folders for volumes that are neither Secrets nor scratch space, by name.
        machine: Where it runs; default: on this machine, with the address ``host``.
    """

    def __init__(
        self,
        rendered: Rendered,
        folder: Path,
        host: str,
        secrets: Secrets,
        volumes: Mapping[str, Path],
        machine: Machine | None = None,
    ) -> None:
        folder.mkdir()
        self._machine = machine
        if machine is not None:
            for setting in rendered.pod["securityContext"]["sysctls"]:
                machine.sysctl(setting["name"], setting["value"])
        self._container = rendered.container
        self._host = host
        self._folder = folder
        self._turns = itertools.count()
        sources = {volume["name"]: volume for volume in rendered.pod["volumes"]}
        for name, source in sources.items():
            if "secret" in source:
                self._put_secret(source, secrets)
            elif name not in volumes:
                (folder / name).mkdir()
        self._paths = {
            mount["mountPath"]: volumes.get(mount["name"], folder / mount["name"])
            for mount in self._container["volumeMounts"]
        }
        self._sources = sources
        self.log = folder / "log"
        self.log.touch()
        environment = {e["name"]: self._here(e["value"]) for e in self._container["env"]}
        self._process = ServerCommand(
            [self._here(argument) for argument in self._container["args"]],
            self.log,
            environment,
            None if machine is None else machine.network,
        )

    def address(self, port: str) -> str:
        """HOST:PORT of a port by its name."""
        numbers = {p["name"]: p["containerPort"] for p in self._container["ports"]}
        return f"{self._host}:{numbers[port]}"

    def renew(self, secrets: Secrets) -> None:
        """Secrets have new content."""
        for source in self._sources.values():
            if "secret" in source:
                self._put_secret(source, secrets)

    async def probe(self, which: str) -> str:
        """One try of "startup", "liveness" or "readiness": the health status, or the error."""
        told: Object = self._container[f"{which}Probe"]["grpc"]
        asked = health_pb2.HealthCheckRequest(service=told.get("service", ""))
        async with grpc.aio.insecure_channel(f"{self._host}:{told['port']}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code().name
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    async def started(self) -> None:
        """Returns when the startup probe passes."""
        await self.until_probe("startup", "SERVING")

    async def until_probe(self, which: str, status: str) -> None:
        """Returns when a probe says so."""

        async def is_so() -> bool:
            assert self._process.poll() is None, self.log.read_text()
            return await self.probe(which) == status

        await until(is_so, START_SECONDS)

    def terminate(self) -> None:
        """SIGTERM, as when the pod is deleted."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.wait()

    def _here(self, value: str) -> str:
        """A flag or variable, its path and its host those of this machine."""
        flag, equals, told = value.rpartition("=")
        for path, folder in self._paths.items():
            if told == path or told.startswith(path + "/"):
                told = str(folder) + told.removeprefix(path)
                break
        host, colon, port = told.rpartition(":")
        if host == "0.0.0.0":  # noqa: S104  it is replaced
            listening = flag == "--transport-listen" and self._machine is None
            told = self._host + colon + ("0" if listening else port)
        return flag + equals + told

    def _put_secret(self, source: Object, secrets: Secrets) -> None:
        folder = self._folder / source["name"]
        mode = source["secret"]["defaultMode"]
        turn = folder / f"..{next(self._turns)}"
        turn.mkdir(parents=True)
        for key, content in secrets[source["secret"]["secretName"]].items():
            (turn / key).write_bytes(content)
            (turn / key).chmod(mode)
            if not (folder / key).is_symlink():
                (folder / key).symlink_to(Path("..data", key))
        link = folder / "..data_tmp"
        link.symlink_to(turn.name)
        link.replace(folder / "..data")


RunPod = Callable[..., Pod]
