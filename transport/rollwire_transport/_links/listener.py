"""Where a receiver's end listens for its peers, so that a firewall can name it.

A receiver calls rank 0 (see ``control``), and then listens itself, as its backend does:

          on which address                          on which ports
    gloo  the one that is asked for                 the system's
    ucx   all that UCX_NET_DEVICES names, or all    those that are asked for; none over RDMA
    nccl  the one that NCCL_SOCKET_IFNAME names     the system's

The system's ports are those that the kernel gives to whoever asks for any. They belong to the
network namespace (net.ipv4.ip_local_port_range), and a process without rights cannot change them;
so what is asked for is kept where they lie within it, and else refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """What the listeners of a receiver's end must keep to.

    Attributes:
        host: An IP address of this machine; None: the backend chooses. Gloo takes the address that
            faces rank 0.
        ports: The first and the last; None: any.
    """

    host: str | None = None
    ports: tuple[int, int] | None = None

    def needs_system_ports(self, backend: str) -> str:
        """Why a backend that takes the system's ports cannot keep to this; "" if it can."""
        if self.ports is None:
            return ""
        first, last = self.ports
        try:
            lowest, highest = map(int, _SYSTEM_PORTS.read_text().split())
        except (OSError, ValueError):
            return f"{backend} takes ports of the system's choice, and those are not known here"
        if first <= lowest and highest <= last:
            return ""
        return (
            f"{backend} takes ports of the system's choice, {lowest} to {highest} here, which are "
            f"not within {first} to {last}: set net.ipv4.ip_local_port_range to those"
        )

    def needs_no_host(self, backend: str, variable: str) -> str:
        """Why a backend that finds its interfaces itself cannot keep to this; "" if it can."""
        if self.host is None:
            return ""
        return (
            f"{backend} cannot be told to listen on {self.host}: name no address, and its "
            f"interface in {variable}"
        )


ANYWHERE = ListenOptions()
