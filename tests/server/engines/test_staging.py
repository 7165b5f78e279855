"""Where an update waits for its commit."""

from __future__ import annotations

import errno

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_server.engines.base import EngineError, NoMemoryError
from rollwire_server.engines.embedded.weights import (
    Staging,
    allocate_slabs,
    allocate_staging,
    choose_staging,
)
from rollwire_server.engines.memory import allocating
from rollwire_transport import describe_all, plan
from rollwire_transport._layout import in_place_view
from rollwire_transport._manifest import as_bytes

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "device", "free", "chosen"),
    [
        ("auto", CUDA, 101, "auto"),
        ("auto", CUDA, 99, "host"),
        ("device", CUDA, 99, "device"),
        ("host", CUDA, 1000, "host"),
        ("auto", CPU, 1000, "host"),
        ("device", CPU, 1000, "host"),
    ],
)
def test_the_place_follows_from_the_memory_there_is(
    asked: Staging, device: torch.device, free: int, chosen: Staging
) -> None:
    assert choose_staging(asked, device, needed=100, free=free) == chosen


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.bool]), min_size=12),
    slab=st.sampled_from([1, 256, 1000, 1 << 30]),
)
def test_tensors_in_slabs_are_apart(
    shapes: list[list[int]], dtypes: list[torch.dtype], slab: int
) -> None:
    targets = {
        f"t{i}": torch.empty(shape, dtype=dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    staged = allocate_slabs(describe_all(targets), slab)
    assert list(staged) == list(targets)
    for number, (name, tensor) in enumerate(staged.items()):
        assert (tensor.shape, tensor.dtype) == (targets[name].shape, targets[name].dtype)
        assert tensor.is_contiguous()
        tensor.fill_(number % 2)
    for number, tensor in enumerate(staged.values()):
        assert (tensor == number % 2).all()


def test_buckets_have_their_place_in_it() -> None:
    targets = {f"t{i}": torch.empty(size) for i, size in enumerate((100, 3, 0, 1000, 1))}
    manifest = plan(describe_all(targets), bucket_bytes=640)
    staged = allocate_staging(describe_all(targets), CPU, "host")
    there = {i: as_bytes(staged[spec.name]) for i, spec in enumerate(manifest.tensors)}
    assert all(in_place_view(bucket, there, CPU) is not None for bucket in manifest.buckets)


def test_an_update_that_no_memory_is_left_for_is_named_as_such() -> None:
    targets = {"large": torch.empty(1).expand(1 << 50)}
    with pytest.raises(NoMemoryError, match=f"an update of {1 << 32} MiB cannot be staged"):
        allocate_staging(describe_all(targets), CPU, "host")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), NoMemoryError),
        (OSError(errno.ENOSPC, "No space left on device"), NoMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), NoMemoryError),
        (RuntimeError("CUDA error: out of memory\nmore lines"), NoMemoryError),
        (MemoryError(), NoMemoryError),
        (OSError(errno.EPERM, "Operation not permitted"), EngineError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), EngineError),
    ],
)
def test_only_memory_that_is_not_there_counts_as_none(
    error: Exception, kind: type[EngineError]
) -> None:
    said = pytest.raises(EngineError, match=r"^it failed \(.+\): leave more$")
    with said as caught, allocating("it failed", "leave more"):
        raise error
    assert type(caught.value) is kind
