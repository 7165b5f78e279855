"""What the transport's tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def trainers_own_group() -> Iterator[None]:
    """A default process group, as a sharded trainer has one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
