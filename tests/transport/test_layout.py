"""Describing tensors, and laying them into buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_transport import (
    ManifestError,
    TensorSpec,
    compare,
    describe,
    describe_all,
    plan,
    validate,
)
from rollwire_transport._manifest import DTYPES, nbytes
from support.tensors import shapes
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

specs = st.lists(
    st.builds(TensorSpec, st.just(""), st.sampled_from(sorted(DTYPES)), shapes), min_size=1
).map(lambda found: [TensorSpec(f"t{i}", s.dtype, s.shape) for i, s in enumerate(found)])
bucket_bytes = st.integers(1, 40).map(lambda n: n * 64)


@pytest.mark.parametrize(
    ("mib", "bucket_mib"), [(1, 1), (200, 64), (4096, 64), (9600, 150), (15_000, 235), (10**6, 256)]
)
def test_buckets_grow_with_the_update(mib: int, bucket_mib: int) -> None:
    whole = TensorSpec("w", "uint8", (mib << 20,))
    manifest = plan([whole, TensorSpec("tied", "uint8", (mib << 20,), "w")])
    assert max(bucket.size for bucket in manifest.buckets) >> 20 == pytest.approx(bucket_mib, abs=1)


@given(specs, bucket_bytes)
def test_a_plan_is_valid_fits_its_own_schema_and_is_always_the_same(
    tensors: list[TensorSpec], size: int
) -> None:
    manifest = plan(tensors, bucket_bytes=size)
    validate(manifest)
    compare(manifest, tensors)
    assert plan(list(tensors), bucket_bytes=size) == manifest
    assert all(bucket.size <= size for bucket in manifest.buckets)


@given(specs, bucket_bytes)
def test_every_byte_has_one_place(tensors: list[TensorSpec], size: int) -> None:
    manifest = plan(tensors, bucket_bytes=size)
    places = [(s.tensor, s.tensor_offset, s.length) for b in manifest.buckets for s in b.spans]
    assert places == sorted(places)
    for index, spec in enumerate(manifest.tensors):
        covered = 0
        for tensor, offset, length in places:
            if tensor == index:
                assert offset == covered
                covered += length
        assert covered == nbytes(spec)


def test_small_tensors_share_a_bucket_and_large_ones_are_split() -> None:
    small = [TensorSpec(f"small{i}", "float32", (3,)) for i in range(4)]
    manifest = plan([*small, TensorSpec("large", "uint8", (600,))], bucket_bytes=320)
    assert [b.size for b in manifest.buckets] == [320, 320, 216]
    assert [len(b.spans) for b in manifest.buckets] == [5, 1, 1]


def test_aliases_and_empty_tensors_travel_in_no_bucket() -> None:
    tensors = [
        TensorSpec("head", "float32", (4, 2), alias_of="embedding"),
        TensorSpec("empty", "float32", (0, 7)),
        TensorSpec("embedding", "float32", (4, 2)),
    ]
    manifest = plan(tensors)
    assert [t.name for t in manifest.tensors] == ["empty", "embedding", "head"]
    assert [s.tensor for b in manifest.buckets for s in b.spans] == [1]


@pytest.mark.parametrize("size", [0, -64, 100])
def test_a_bucket_size_that_cannot_be_aligned_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        plan([TensorSpec("a", "uint8", (1,))], bucket_bytes=size)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [TensorSpec("a", "float31", (1,))],
        [TensorSpec("a", "uint8", (1,)), TensorSpec("a", "uint8", (1,))],
        [TensorSpec("a", "uint8", (1,), alias_of="b")],
        [TensorSpec("a", "uint8", (2**40, 2**40))],
        [TensorSpec("a", "uint8", (-1,))],
    ],
)
def test_tensors_that_cannot_travel_are_refused(tensors: list[TensorSpec]) -> None:
    with pytest.raises(ManifestError):
        plan(tensors)


def test_a_tensor_is_described_as_a_checkpoint_has_it() -> None:
    assert describe("w", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorSpec(
        "w", "bfloat16", (2, 3)
    )
    assert describe("s", torch.tensor(1.0), alias_of="w") == TensorSpec("s", "float32", (), "w")


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w: a .*sparse"):
        describe("w", torch.zeros(3, 3).to_sparse())


def test_only_the_same_view_of_the_same_memory_is_an_alias() -> None:
    base = torch.zeros(6, 6)
    found = describe_all(
        {
            "base": base,
            "same": base,
            "view": base.view(6, 6),
            "parameter": torch.nn.Parameter(base),
            "transposed": base.t(),
            "part": base[1:],
            "first": base[0],
            "second": base[1],
            "reshaped": base.view(36),
            "bits": base.view(torch.int32),
            "equal": base.clone(),
            "empty": torch.zeros(0),
            "also empty": torch.zeros(0),
        }
    )
    assert {spec.name: spec.alias_of for spec in found if spec.alias_of} == {
        "same": "base",
        "view": "base",
        "parameter": "base",
    }


def test_tensors_that_are_made_one_by_one_are_never_taken_for_aliases() -> None:
    found = describe_all((f"t{i}", torch.zeros(1000)) for i in range(50))
    assert not any(spec.alias_of for spec in found)


def test_tied_tensors_without_memory_are_aliases() -> None:
    with torch.device("meta"):
        tied = torch.zeros(3)
        found = describe_all({"a": tied, "b": torch.zeros(3), "c": tied})
    assert [spec.alias_of for spec in found] == [None, None, "a"]


def test_a_dtensor_is_described_with_its_global_shape(trainers_own_group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    local = torch.zeros(4, 2)
    sharded = DTensor.from_local(local, mesh, [Shard(0)], shape=(8, 2), stride=(2, 1))
    whole = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
    found = describe_all({"sharded": sharded, "tied": sharded, "whole": whole})
    assert found == [
        TensorSpec("sharded", "float32", (8, 2)),
        TensorSpec("tied", "float32", (8, 2), "sharded"),
        TensorSpec("whole", "float32", (3,)),
    ]
