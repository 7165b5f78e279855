"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CONTAINER = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate on a CUDA device, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (meminfo := Path("/proc/meminfo")).exists():
        available = meminfo.read_text().partition("MemAvailable:")[2]
        free = int(available.split()[0]) << 10
    limit = _CONTAINER / "memory.max"
    if limit.exists() and (maximum := limit.read_text().strip()) != "max":
        used = int((_CONTAINER / "memory.current").read_text()) - _cached_files()
        free = min(free, int(maximum) - used)
    return free


def _cached_files() -> int:
    """Bytes of a container's memory that the kernel takes back when they are needed."""
    lines = (_CONTAINER / "memory.stat").read_text().splitlines()
    statistics = dict(line.split() for line in lines)
    return int(statistics["active_file"]) + int(statistics["inactive_file"])
