"""Where buckets come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_transport import describe_all, padded_nbytes, plan
from rollwire_transport._layout import in_place_view
from rollwire_transport._manifest import as_bytes
from rollwire_transport._receiver import SlotPool
from support.tensors import room_for, room_in_one, weights

if TYPE_CHECKING:
    from rollwire_transport import Manifest
    from torch import Tensor

CPU = torch.device("cpu")


def targets(manifest: Manifest, room: dict[str, Tensor]) -> dict[int, Tensor]:
    return {i: as_bytes(room[s.name]) for i, s in enumerate(manifest.tensors) if s.name in room}


@given(weights(), st.integers(1, 10))
def test_tensors_in_one_memory_are_the_home_of_each_bucket(
    tensors: dict[str, Tensor], size: int
) -> None:
    manifest = plan(describe_all(tensors), bucket_bytes=size * 64)
    there = targets(manifest, room_in_one(manifest))
    for number, bucket in enumerate(manifest.buckets):
        place = in_place_view(bucket, there, CPU)
        assert place is not None
        place.fill_(number % 251)
        for span in bucket.spans:
            piece = there[span.tensor][span.tensor_offset : span.tensor_offset + span.length]
            assert (piece == number % 251).all()


def three(size: int = 64) -> Manifest:
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name in "abc"}
    return plan(describe_all(tensors), bucket_bytes=3 * size)


def one_memory(begin: int, size: int) -> dict[str, Tensor]:
    memory = torch.zeros(size, dtype=torch.uint8)
    return {name: memory[begin + 64 * i :][:64] for i, name in enumerate("abc")}


@pytest.mark.parametrize(
    "room",
    [
        room_for(three()),
        one_memory(begin=8, size=256),
        {**one_memory(begin=0, size=256), "c": torch.zeros(64, dtype=torch.uint8)},
        dict(zip("abc", reversed(one_memory(begin=0, size=192).values()), strict=True)),
    ],
    ids=["apart", "not aligned", "one elsewhere", "in another order"],
)
def test_others_are_no_home(room: dict[str, Tensor]) -> None:
    manifest = three()
    assert in_place_view(manifest.buckets[0], targets(manifest, room), CPU) is None


def test_what_fills_up_the_last_tensor_has_to_be_there() -> None:
    manifest = plan(describe_all({"a": torch.zeros(100, dtype=torch.uint8)}), bucket_bytes=128)
    exact = {0: torch.zeros(100, dtype=torch.uint8)}
    assert in_place_view(manifest.buckets[0], exact, CPU) is None
    filled_up = {0: torch.zeros(padded_nbytes(100), dtype=torch.uint8)[:100]}
    assert in_place_view(manifest.buckets[0], filled_up, CPU) is not None


def test_tensors_of_another_device_are_no_home() -> None:
    manifest = three()
    room = one_memory(begin=0, size=192)
    assert in_place_view(manifest.buckets[0], targets(manifest, room), CPU) is not None
    assert in_place_view(manifest.buckets[0], targets(manifest, room), torch.device("meta")) is None


def test_buckets_take_turns_and_only_those_without_a_home_share_buffers() -> None:
    manifest = plan([*describe_all({"a": torch.zeros(640, dtype=torch.uint8)})], bucket_bytes=64)
    memory = torch.zeros(640, dtype=torch.uint8)
    homes = [memory[64 * i :][:64] if i % 2 else None for i in range(10)]
    slots = SlotPool(manifest.buckets, 0, homes, CPU, CPU)
    seen, buffers = [], set()
    under_way = [slot for _ in range(9) if (slot := slots.acquire()) is not None]
    assert 2 <= len(under_way) < 9
    while under_way:
        slot = under_way.pop(0)
        seen.append(slot.index)
        assert slot.in_place == bool(slot.index % 2)
        if not slot.in_place:
            buffers.add(slot.payload.data_ptr())
        slots.release(slot)
        if (following := slots.acquire()) is not None:
            under_way.append(following)
    assert seen == list(range(10))
    assert len(buffers) < 5


def test_headers_may_come_elsewhere_than_what_they_are_of() -> None:
    manifest = three()
    elsewhere = torch.device("meta")
    slots = SlotPool(manifest.buckets, 0, [None] * len(manifest.buckets), CPU, elsewhere)
    slot = slots.acquire()
    assert slot is not None
    assert (slot.header.device, slot.payload.device) == (elsewhere, CPU)
