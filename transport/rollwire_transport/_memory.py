"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate on a CUDA device, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (meminfo := Path("/proc/meminfo")).exists():
        available = meminfo.read_text().partition("MemAvailable:")[2]
        free = int(available.split()[0]) << 10
    group = Path("/sys/fs/cgroup")  # a container's limit
    limit = group / "memory.max"
    if limit.exists() and (maximum := limit.read_text().strip()) != "max":
        free = min(free, int(maximum) - int((group / "memory.current").read_text()))
    return free
