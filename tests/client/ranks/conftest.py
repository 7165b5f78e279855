"""What the tests of a sharded trainer's ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
