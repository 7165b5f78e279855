"""The floor of moving weights: a bare broadcast of as many bytes, by torch.distributed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PIECE_BYTES = 64 << 20


def bare_broadcast(devices: list[str], size: int) -> float:
    """The seconds that ``size`` bytes take, warm, from a process on the first device to one on each
    of the others: over NCCL between GPUs, else over Gloo.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_member, (devices, size, folder), len(devices))
        return float((Path(folder) / "seconds").read_text())


def host(devices: list[str], rank: int) -> dict[str, str]:
    """Where a GPU is shared, NCCL takes members for hosts."""
    return {} if len(set(devices)) == len(devices) else {"NCCL_HOSTID": f"rank {rank}"}


def _member(rank: int, devices: list[str], size: int, folder: str) -> None:
    os.environ.update(host(devices, rank))
    device = torch.device(devices[rank])
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=len(devices)
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    piece = torch.empty(min(size, _PIECE_BYTES), dtype=torch.uint8, device=device)
    dist.broadcast(piece, 0)
    times = []
    for _ in range(2):
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        began = time.perf_counter()
        for _ in range(-(-size // piece.numel())):
            dist.broadcast(piece, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(min(times)))
    dist.destroy_process_group()
