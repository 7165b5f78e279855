"""Sender and receiver, over a link that tests hold in their hands."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_transport import (
    DigestMismatch,
    Manifest,
    ManifestError,
    Receiver,
    Sender,
    TensorSpec,
    TransportError,
    _bucket_digest,
    describe_all,
    plan,
    sum_digests,
    tensor_digest,
)
from rollwire_transport import _receiver as receiver_module
from support.memory_link import MemoryLink
from support.tensors import content, random_tensor, room_for, room_in_one, weights
from support.transfers import receive, send, some_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Room = Callable[[Manifest], dict[str, Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

bucket_bytes = st.integers(1, 10).map(lambda n: n * 64)


@pytest.fixture(scope="module", params=["apart", "in one memory", "as on a GPU"])
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    """What makes destinations; with the last one, buckets are verified many at a time."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as on a GPU":
            patch.setattr(receiver_module, "_digests_in_batches", lambda _: True)
        yield room_for if request.param == "apart" else room_in_one


@given(weights(), bucket_bytes)
def test_everything_arrives_bit_for_bit(room: Room, tensors: dict[str, Tensor], size: int) -> None:
    manifest = plan(describe_all(tensors), bucket_bytes=size)
    link, destination = MemoryLink(), room(manifest)
    sender = send(manifest, tensors, link)
    receiver = Receiver(manifest, destination)
    receive(receiver, link)

    assert receiver.complete
    assert receiver.received_bytes == sum(bucket.size for bucket in manifest.buckets)
    assert {n: content(t) for n, t in destination.items()} == {
        name: content(tensors[name]) for name in destination
    }
    expected = {
        s.name: tensor_digest(s, tensors[s.name]) for s in manifest.tensors if s.alias_of is None
    }
    assert sender.digests == receiver.digests == expected
    assert sender.digest == receiver.digest == sum_digests(expected.values())
    assert link.finished
    assert not link.aborted


class Failure(NamedTuple):
    arrive: int  # buckets until rank 1 dies
    again: int  # buckets that it begins before the lowest that is missing


failures = st.builds(Failure, st.integers(0, 4), st.integers(0, 3))


@given(weights(), bucket_bytes, st.lists(failures, max_size=4))
def test_after_failures_it_goes_on_from_a_bucket_that_is_missing(
    room: Room, tensors: dict[str, Tensor], size: int, failures: list[Failure]
) -> None:
    manifest = plan(describe_all(tensors), bucket_bytes=size)
    count = len(manifest.buckets)
    sender, destination = Sender(manifest), room(manifest)
    receiver = Receiver(manifest, destination)
    for failure in failures:
        first = max(0, receiver.next_bucket - failure.again)
        if first + failure.arrive >= count:
            continue
        expected = max(receiver.next_bucket, first + failure.arrive)
        link = MemoryLink(capacity=failure.arrive)
        with pytest.raises(TransportError) as at_sender:
            sender.send(link, tensors.items, first_bucket=first, bucket_timeout=1)
        with pytest.raises(TransportError) as at_receiver:
            receive(receiver, link, first)
        assert (at_sender.value.peer, at_receiver.value.peer) == (1, 0)
        assert link.aborted
        assert receiver.next_bucket == expected
        assert receiver.received_bytes == sum(b.size for b in manifest.buckets[:expected])

    link, first = MemoryLink(), receiver.next_bucket
    sender.send(link, tensors.items, first_bucket=first, bucket_timeout=1)
    receive(receiver, link, first)
    assert all(content(destination[name]) == content(tensors[name]) for name in destination)
    assert sender.digest == receiver.digest


def test_buckets_come_straight_into_tensors_that_lie_as_they_do() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=128)
    sender, destination = Sender(manifest), room_in_one(manifest)
    receiver = Receiver(manifest, destination)
    memory = destination["a"].untyped_storage()

    def all_there(link: MemoryLink) -> bool:
        begins = [payload.data_ptr() - memory.data_ptr() for payload in link.given]
        return all(0 <= begin < memory.nbytes() for begin in begins)

    for capacity, in_place in ((2, True), (None, False), (None, False)):
        link = MemoryLink(capacity)
        with contextlib.suppress(TransportError):
            sender.send(link, tensors.items, bucket_timeout=1)
        with contextlib.suppress(TransportError):
            receive(receiver, link)
        assert all_there(link) == in_place  # not in the place of what is here already
    assert receiver.digest == sender.digest


def test_buckets_that_come_again_count_once(room: Room) -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    receiver = Receiver(manifest, room(manifest))
    for _ in range(2):
        link = MemoryLink()
        sender = send(manifest, tensors, link)
        receive(receiver, link)
    assert receiver.digest == sender.digest
    assert receiver.received_bytes == sum(bucket.size for bucket in manifest.buckets)


def test_digests_are_there_when_a_transfer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link, receiver = MemoryLink(), Receiver(manifest, room_for(manifest))
    sender = send(manifest, tensors, link)
    receive(receiver, link)
    monkeypatch.delattr(_bucket_digest, "digest_of_sum")  # of many tensors they take long
    assert sender.digests == receiver.digests
    assert sender.digest == receiver.digest


def test_packing_goes_on_while_buckets_are_under_way(room: Room) -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link = MemoryLink()
    send(manifest, tensors, link)
    assert link.most_in_flight >= 2
    link.most_in_flight = 0
    receive(Receiver(manifest, room(manifest)), link)
    assert link.most_in_flight >= 2


def flip(tensor: Tensor, index: int) -> None:
    tensor.view(-1)[index] ^= 1


@pytest.mark.parametrize("position", [0, 7, 8, 63])
def test_a_wrong_byte_is_noticed_and_its_bucket_is_missing(room: Room, position: int) -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link, receiver = MemoryLink(), Receiver(manifest, room(manifest))
    sender = send(manifest, tensors, link)
    flip(link.messages[2][1], position)
    with pytest.raises(DigestMismatch, match="bucket 2") as caught:
        receive(receiver, link)
    assert caught.value.peer == 0
    assert link.aborted
    assert receiver.next_bucket == 2
    with pytest.raises(RuntimeError, match="no digest yet"):
        _ = receiver.digest

    link = MemoryLink()
    sender.send(link, tensors.items, first_bucket=2, bucket_timeout=1)
    receive(receiver, link, first_bucket=2)
    assert receiver.digest == sender.digest


@pytest.mark.parametrize("word", [0, 3])
def test_what_is_here_stays_when_something_else_comes_in_its_place(room: Room, word: int) -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    sender, destination = Sender(manifest), room(manifest)
    receiver = Receiver(manifest, destination)
    for first, last in ((0, 5), (2, 9), (5, 9)):
        link = MemoryLink()
        sender.send(link, tensors.items, first_bucket=first, bucket_timeout=1)
        if first == 2:  # three that are here already come again, and none of them whole
            for header, payload in itertools.islice(link.messages, 3):
                header[word] ^= 1
                payload.bitwise_not_()
        while len(link.messages) > last - first:
            link.messages.pop()
        with contextlib.suppress(TransportError):
            receive(receiver, link, first)
        assert receiver.next_bucket == (9 if first == 5 else 5)
    assert receiver.digest == sender.digest
    assert all(content(destination[name]) == content(tensors[name]) for name in tensors)


def test_buckets_whose_payloads_were_swapped_are_noticed(room: Room) -> None:
    tensors = {"a": random_tensor(torch.uint8, (256,), 1)}
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link = MemoryLink()
    send(manifest, tensors, link)
    (header_0, payload_0), (header_1, payload_1) = link.messages[0], link.messages[1]
    link.messages[0], link.messages[1] = (header_0, payload_1), (header_1, payload_0)
    with pytest.raises(DigestMismatch, match="bucket 0"):
        receive(Receiver(manifest, room(manifest)), link)


@pytest.mark.parametrize(
    ("word", "value", "problem"),
    [
        (0, 0, "no header of this format"),
        (0, -1, "no header of this format"),
        (1, 5, "bucket 5"),
        (1, -1, "bucket -1"),
        (2, 63, "with 63 bytes"),
        (2, 2**62, f"with {2**62} bytes"),
        (3, 0, "digest"),
    ],
)
def test_a_header_is_not_trusted(room: Room, word: int, value: int, problem: str) -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link, receiver = MemoryLink(), Receiver(manifest, room(manifest))
    send(manifest, tensors, link)
    link.messages[0][0][word] = value
    with pytest.raises(TransportError, match=problem):
        receive(receiver, link)
    assert receiver.next_bucket == 0


def test_a_destination_that_does_not_fit_is_refused_with_all_that_is_wrong() -> None:
    names = ("missing", "dtype", "shape", "strided", "right")
    manifest = plan([TensorSpec(name, "float32", (4, 4)) for name in names])
    destination = {
        "dtype": torch.zeros(4, 4, dtype=torch.int32),
        "shape": torch.zeros(16),
        "strided": torch.zeros(4, 4).t(),
        "right": torch.zeros(4, 4),
    }
    with pytest.raises(ManifestError) as caught:
        Receiver(manifest, destination)
    assert [problem.split()[0] for problem in caught.value.problems] == list(names[:4])


def test_a_gap_is_refused() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link = MemoryLink()
    with pytest.raises(TransportError, match="here 0 is the first that is missing"):
        receive(Receiver(manifest, room_for(manifest)), link, first_bucket=1)
    assert link.aborted
    with pytest.raises(ValueError, match="buckets"):
        Sender(manifest).send(MemoryLink(), tensors.items, first_bucket=10**6, bucket_timeout=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_may_lie_on_a_gpu_at_both_ends() -> None:
    tensors = {name: tensor.cuda() for name, tensor in some_weights().items()}
    tensors["t"] = random_tensor(torch.float16, (30, 50), 4).cuda().t()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    destination = {name: tensor.cuda() for name, tensor in room_for(manifest).items()}
    link, receiver = MemoryLink(), Receiver(manifest, destination)
    sender = send(manifest, tensors, link)
    receive(receiver, link)
    for spec in manifest.tensors:
        assert content(destination[spec.name]) == content(tensors[spec.name])
        assert sender.digests[spec.name] == tensor_digest(spec, tensors[spec.name])


def test_nothing_but_empty_tensors_is_an_update_too(room: Room) -> None:
    tensors = {"empty": torch.zeros(0, 3)}
    manifest = plan(describe_all(tensors))
    link, receiver = MemoryLink(), Receiver(manifest, room(manifest))
    sender = send(manifest, tensors, link)
    receive(receiver, link)
    assert receiver.complete
    assert receiver.digest == sender.digest
