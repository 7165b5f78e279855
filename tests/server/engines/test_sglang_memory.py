"""Memory that SGLang's processes share: where the tensors of an update lie in it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_server.engines import memory as engine_memory
from rollwire_server.engines.base import NoMemoryError
from rollwire_server.engines.memory import (
    allocate_on_devices,
    allocate_on_host,
    open_parts,
    tensor_views,
)
from rollwire_transport import TensorSpec, plan
from rollwire_transport._layout import in_place_view
from rollwire_transport._manifest import as_bytes, nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import Manifest
    from torch import Tensor

CPU = torch.device("cpu")

specs = st.lists(st.integers(0, 3000), min_size=1, max_size=20).map(
    lambda sizes: [TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)]
)


def homes(manifest: Manifest, staged: Mapping[str, Tensor]) -> list[Tensor | None]:
    targets = {i: as_bytes(staged[spec.name]) for i, spec in enumerate(manifest.tensors)}
    return [in_place_view(bucket, targets, CPU) for bucket in manifest.buckets]


@given(specs)
def test_buckets_have_their_place_in_it(specs: list[TensorSpec]) -> None:
    staged = allocate_on_host(specs).lend(specs)
    assert all(place is not None for place in homes(plan(specs, bucket_bytes=640), staged))


@given(specs, st.data())
def test_so_have_those_of_a_partial_update(specs: list[TensorSpec], data: st.DataObject) -> None:
    memory = allocate_on_host(specs)
    some = data.draw(st.lists(st.sampled_from(specs), min_size=1, unique=True))
    staged = memory.lend(some)
    for number, spec in enumerate(some):
        staged[spec.name].fill_(number)
    assert all((staged[spec.name] == number).all() for number, spec in enumerate(some))
    assert all(place is not None for place in homes(plan(some, bucket_bytes=640), staged))


@given(specs, st.integers(1, 4))
def test_devices_have_about_as_much_each(specs: list[TensorSpec], devices: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_memory, "export_handle", lambda _: {})  # of which there is none here
        staged = allocate_on_devices([CPU] * devices, specs, ranks=1).lend(specs)
    sizes = [0] * devices
    for place in staged.layout.places:
        sizes[place.part] += place.nbytes
    largest = max(nbytes(spec) for spec in specs)
    most = sum(sizes) / devices + largest + 64 * len(specs)
    assert max(sizes) <= most
    for number, spec in enumerate(specs):
        staged[spec.name].fill_(number)
    assert all((staged[spec.name] == number).all() for number, spec in enumerate(specs))
    # All but the buckets across two devices come in place.
    cut = sum(place is None for place in homes(plan(specs, bucket_bytes=640), staged))
    assert cut < devices


def test_whoever_holds_a_tensor_keeps_the_memory_and_keeps_it_from_being_lent() -> None:
    specs = [TensorSpec("a", "bfloat16", (3, 5)), TensorSpec("b", "float32", ())]
    memory = allocate_on_host(specs)
    assert not memory.in_use
    staged = memory.lend(specs)
    path = Path(staged.layout.parts[0]["path"])
    held = staged["a"].view(torch.uint8)[1:2]
    del staged
    assert memory.in_use
    del memory
    held.fill_(7)
    assert path.exists()
    del held
    assert not path.exists()


def test_memory_is_lent_again_once_nobody_holds_a_tensor_of_it() -> None:
    specs = [TensorSpec("a", "float32", (2,))]
    memory = allocate_on_host(specs)
    where = set()
    for _ in range(3):
        staged = memory.lend(specs)
        where.add(staged["a"].data_ptr())
        assert memory.in_use
        del staged
        assert not memory.in_use
    assert len(where) == 1


@given(specs, st.integers(1, 3))
def test_other_tensors_are_lent_too_if_they_fit(specs: list[TensorSpec], devices: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_memory, "export_handle", lambda _: {})
        memory = allocate_on_devices([CPU] * devices, specs, ranks=1)
    room = [region.memory.numel() for region in memory.regions]
    others = [TensorSpec(f"{i}", "uint8", (size - 1,)) for i, size in enumerate(room)]
    staged = memory.lend(others)
    for number, tensor in enumerate(staged.values()):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(staged.values()))
    assert devices > 1 or homes(plan(others), staged) != [None], "received in place"
    with pytest.raises(NoMemoryError, match="do not fit"):
        memory.lend([*others, TensorSpec("one more", "uint8", (1,))])


def test_it_is_the_same_in_another_process() -> None:
    specs = [TensorSpec("a", "bfloat16", (3, 5)), TensorSpec("b", "float32", ())]
    staged = allocate_on_host(specs).lend(specs)
    for name, tensor in tensor_views(staged.layout, open_parts(staged.layout.parts)).items():
        tensor.fill_(7)
        assert (staged[name] == 7).all()
    path = staged.layout.parts[0]["path"]
    read = subprocess.run(["cat", path], capture_output=True, check=True)
    told = torch.full((15,), 7, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert read.stdout[:30] == told


def test_another_file_of_the_same_name_is_not_taken_for_it() -> None:
    (part,) = allocate_on_host([TensorSpec("a", "float32", (2,))]).lend([]).layout.parts
    with pytest.raises(OSError, match="No such file"):
        open_parts([part])
    other = allocate_on_host([TensorSpec("b", "float32", (2,))])
    (its,) = other.lend([]).layout.parts
    with pytest.raises(OSError, match="not the memory that was staged"):
        open_parts([{**its, "inode": part["inode"]}])
