"""How the processes of a sharded trainer connect.

Rank 0 broadcasts an invitation over their process group: a secret, and the address at which it
listens. The others connect there over TCP, and send the secret and their rank.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from rollwire_client._errors import PublishError
from rollwire_client._publishing.sharded.connection import Connection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SECRET_BYTES, _RANK_BYTES = 32, 8
_INVITATION_BYTES = 512
_HELLO_SECONDS = 5.0


def connect_ranks(group: ProcessGroup, host: str | None, timeout: float) -> dict[int, Connection]:
    """Blocks until all ranks are connected: rank 0 with each other rank, those with rank 0.

    Args:
        group: Of the processes.
        host: Under which the others reach rank 0. Default: MASTER_ADDR, or this machine's name.
        timeout: Seconds to wait, beside what the group itself waits.

    Raises:
        PublishError: They cannot connect.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group)
    if rank != 0:
        return {0: _connect_to_rank_0(group, rank, timeout)}
    host = host or os.environ.get("MASTER_ADDR") or socket.gethostname()
    return _accept_others(group, host, dist.get_world_size(group), timeout)


def _accept_others(
    group: ProcessGroup, host: str, size: int, timeout: float
) -> dict[int, Connection]:
    try:
        listener = _listen(host)
    except (OSError, ValueError) as error:
        _broadcast(group, "")
        raise PublishError(
            f"the ranks cannot connect at {host}: {error}; pass another address as `host`"
        ) from error
    secret = secrets.token_hex(_SECRET_BYTES // 2)
    connections: dict[int, Connection] = {}
    try:
        with listener:
            _broadcast(group, f"{secret} {listener.getsockname()[1]} {host}")
            deadline = time.monotonic() + timeout
            while missing := [rank for rank in range(1, size) if rank not in connections]:
                try:
                    listener.settimeout(_seconds_left(deadline))
                    accepted, _ = listener.accept()
                except TimeoutError as error:
                    raise PublishError(
                        f"rank {missing[0]} did not connect to {host} within {timeout:g} s"
                    ) from error
                rank = _read_hello(accepted, secret, deadline)
                if rank in missing:
                    connections[rank] = Connection(accepted)
                else:
                    accepted.close()
    except BaseException as error:  # those that have connected need not wait for the others
        for connection in connections.values():
            connection.abort(str(error) or type(error).__name__)
        raise
    return connections


def _connect_to_rank_0(group: ProcessGroup, rank: int, timeout: float) -> Connection:
    invitation = _broadcast(group, "")
    if not invitation:
        raise PublishError("rank 0 has found no address at which the other ranks can connect")
    secret, port, host = invitation.split(" ")
    try:
        connected = socket.create_connection((host, int(port)), timeout=timeout)
        connected.sendall(f"{secret}{rank:0{_RANK_BYTES}d}".encode())
    except OSError as error:
        raise PublishError(
            f"rank 0 cannot be reached at {host}: {error}; pass another address as `host`"
        ) from error
    return Connection(connected)


def _listen(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ValueError(f"host {host!r} is not an address at which others can reach this machine")
    return socket.create_server(address[:2], family=family, backlog=512)


def _read_hello(accepted: socket.socket, secret: str, deadline: float) -> int:
    """The rank of a process that knows the secret; 0 for a stranger."""
    deadline = min(deadline, time.monotonic() + _HELLO_SECONDS)
    hello = b""
    try:
        while missing := _SECRET_BYTES + _RANK_BYTES - len(hello):
            accepted.settimeout(_seconds_left(deadline))
            if not (data := accepted.recv(missing)):
                return 0
            hello += data
    except OSError:
        return 0
    received, rank = hello[:_SECRET_BYTES], hello[_SECRET_BYTES:]
    return int(rank) if secrets.compare_digest(received, secret.encode()) else 0


def _seconds_left(deadline: float) -> float:
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _broadcast(group: ProcessGroup, text: str) -> str:
    """Rank 0's text, on all ranks."""
    import torch
    import torch.distributed as dist

    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    else:
        device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    data = torch.tensor(list(text.encode().ljust(_INVITATION_BYTES, b"\0")), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, group=group, group_src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()
