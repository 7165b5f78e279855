"""How the processes of a sharded trainer find each other.

rank 0 → others    a note over their own process group: a secret, and where it listens
others → rank 0    over TCP: the secret and the rank
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from rollwire_client._errors import PublishError
from rollwire_client._publishing.sharded.connection import Line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SECRET_BYTES, _RANK_BYTES = 32, 8
_NOTE_BYTES = 512
_HELLO_SECONDS = 5.0


def meet(group: ProcessGroup, host: str | None, timeout: float) -> dict[int, Line]:
    """Blocks until all have come; rank 0 gets a line to each other rank, they get one to rank 0.

    Args:
        group: Of the processes.
        host: Under which the others reach rank 0. Default: MASTER_ADDR, or this machine's name.
        timeout: Seconds to wait, beside what the group itself waits.

    Raises:
        PublishError: They cannot meet.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group)
    if rank != 0:
        return {0: _find_rank_0(group, rank, timeout)}
    host = host or os.environ.get("MASTER_ADDR") or socket.gethostname()
    return _receive_others(group, host, dist.get_world_size(group), timeout)


def _receive_others(group: ProcessGroup, host: str, size: int, timeout: float) -> dict[int, Line]:
    from rollwire_transport._links import addresses

    try:
        listener, rendezvous = addresses.listen(host, 0)
    except (OSError, ValueError) as error:
        _note(group, "")
        raise PublishError(
            f"the ranks cannot meet at {host}: {error}; name another address as `host`"
        ) from error
    secret = secrets.token_hex(_SECRET_BYTES // 2)
    lines: dict[int, Line] = {}
    try:
        with listener:
            _note(group, f"{secret} {rendezvous}")
            deadline = time.monotonic() + timeout
            while missing := [rank for rank in range(1, size) if rank not in lines]:
                try:
                    connection = _accept(listener, deadline)
                except TimeoutError as error:
                    raise PublishError(
                        f"rank {missing[0]} did not come to {rendezvous} within {timeout:g} s"
                    ) from error
                rank = _read_hello(connection, secret, deadline)
                if rank in missing:
                    lines[rank] = Line(connection)
                else:
                    connection.close()
    except BaseException as error:  # those that have come do not wait for the others
        for line in lines.values():
            line.dismiss(str(error) or type(error).__name__)
        raise
    return lines


def _find_rank_0(group: ProcessGroup, rank: int, timeout: float) -> Line:
    from rollwire_transport._links import addresses

    secret, _, rendezvous = _note(group, "").partition(" ")
    if not rendezvous:
        raise PublishError("rank 0 has found no address at which the ranks can meet")
    try:
        connection = socket.create_connection(addresses.split(rendezvous), timeout=timeout)
        connection.sendall(f"{secret}{rank:0{_RANK_BYTES}d}".encode())
    except OSError as error:
        raise PublishError(
            f"rank 0 cannot be reached at {rendezvous}: {error}; name another address as `host`"
        ) from error
    return Line(connection)


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    listener.settimeout(_left(deadline))
    return listener.accept()[0]


def _read_hello(connection: socket.socket, secret: str, deadline: float) -> int:
    """The rank of one who belongs here; 0 for anybody else."""
    deadline = min(deadline, time.monotonic() + _HELLO_SECONDS)
    hello = b""
    try:
        while missing := _SECRET_BYTES + _RANK_BYTES - len(hello):
            connection.settimeout(_left(deadline))
            if not (piece := connection.recv(missing)):
                return 0
            hello += piece
    except OSError:
        return 0
    told, rank = hello[:_SECRET_BYTES], hello[_SECRET_BYTES:]
    return int(rank) if secrets.compare_digest(told, secret.encode()) else 0


def _left(deadline: float) -> float:
    """Seconds to go; raises TimeoutError when there are none."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _note(group: ProcessGroup, text: str) -> str:
    """What rank 0 says, on all ranks."""
    import torch
    import torch.distributed as dist

    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    else:
        device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    note = torch.tensor(list(text.encode().ljust(_NOTE_BYTES, b"\0")), dtype=torch.uint8)
    note = note.to(device)
    dist.broadcast(note, group=group, group_src=0)
    return bytes(note.tolist()).rstrip(b"\0").decode()
