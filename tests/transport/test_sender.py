"""What a sender takes from its source, over a link that tests hold in their hands."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire_transport import (
    ManifestError,
    Receiver,
    Sender,
    TensorSourceError,
    TensorSpec,
    TransportError,
    describe_all,
    plan,
)
from support.examples import examples
from support.memory_link import MemoryLink
from support.tensors import content, random_tensor, room_for
from support.transfers import receive, send, some_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_the_source_may_have_aliases_anywhere() -> None:
    embedding, bias = torch.randn(4, 4), torch.randn(4)
    tensors = {"embedding": embedding, "head": embedding, "bias": bias}
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link, destination = MemoryLink(), room_for(manifest)
    send(manifest, tensors, link)
    receive(Receiver(manifest, destination), link)
    assert destination.keys() == {"embedding", "bias"}
    assert content(destination["bias"]) == content(bias)


def test_progress_counts_the_bytes_that_are_sent_and_those_skipped() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    sizes = [bucket.size for bucket in manifest.buckets]
    seen: list[int] = []
    Sender(manifest).send(
        MemoryLink(), tensors.items, first_bucket=2, bucket_timeout=1, progress=seen.append
    )
    assert seen == list(itertools.accumulate(sizes))[2:]


def test_the_source_is_consumed_as_far_as_needed_one_tensor_at_a_time() -> None:
    tensors = {f"t{i}": random_tensor(torch.uint8, (64,), i) for i in range(8)}
    manifest = plan(describe_all(tensors), bucket_bytes=128)
    gathered: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def still_there() -> int:
        return sum(memory() is not None for memory in gathered)

    def gather() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            alive.append(still_there())
            whole = tensor.clone()
            gathered.append(weakref.ref(whole.untyped_storage()))
            yield name, whole
            del whole

    Sender(manifest).send(MemoryLink(), gather, first_bucket=1, bucket_timeout=1)
    assert max(alive) == 0
    gathered.clear()
    with pytest.raises(TransportError) as caught:
        Sender(manifest).send(MemoryLink(capacity=0), gather, bucket_timeout=1)
    assert len(gathered) < len(tensors)
    assert still_there() == 0, caught  # the error holds on to nothing


WRONG: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "another name": (
        lambda: [("x", torch.zeros(64, dtype=torch.uint8))],
        "the source gave x, which is not in the manifest",
    ),
    "another dtype": (lambda: [("a", torch.zeros(64, dtype=torch.int8))], r"gave a int8 \[64\]"),
    "another shape": (
        lambda: [("a", torch.zeros(8, 8, dtype=torch.uint8))],
        r"gave a uint8 \[8, 8\]",
    ),
    "a tensor twice": (
        lambda: [("b", torch.zeros(64, dtype=torch.uint8))] * 2,
        "the source gave b twice",
    ),
    "too few": (list, "the source ended before it"),
    "no pair": (lambda: [("a",)], "the source gave a tuple, not a name and a tensor"),
    "an array": (lambda: [("a", np.zeros(64, np.uint8))], "a: a ndarray is not a torch tensor"),
    "nothing": (lambda: [("a", None)], "a: a NoneType is not a torch tensor"),
    "sparse": (lambda: [("a", torch.zeros(64).to_sparse())], "a: a torch.sparse_coo tensor"),
    "no data": (
        lambda: [("a", torch.zeros(64, dtype=torch.uint8, device="meta"))],
        "the source gave a on the meta device, which holds no data",
    ),
}


@pytest.mark.parametrize(("source", "problem"), WRONG.values(), ids=WRONG)
def test_a_source_that_gives_something_else_sends_none_of_it(
    source: Callable[[], list[Any]], problem: str
) -> None:
    manifest = plan([TensorSpec("a", "uint8", (64,)), TensorSpec("b", "uint8", (64,))])
    link = MemoryLink()
    with pytest.raises(ManifestError, match=problem):
        Sender(manifest).send(link, source, bucket_timeout=1)
    assert not link.messages
    assert link.aborted


@settings(max_examples=examples(50))
@given(order=st.permutations(range(6)), first_bucket=st.integers(0, 4), data=st.data())
def test_any_order_is_taken_and_memory_that_is_used_again_is_copied_in_time(
    order: list[int], first_bucket: int, data: st.DataObject
) -> None:
    sizes = [64, 0, 192, 64, 320, 64]
    tensors = {f"t{i}": random_tensor(torch.uint8, (s,), i) for i, s in enumerate(sizes)}
    manifest = plan(describe_all(tensors), bucket_bytes=128)
    ended: list[bool] = []
    buffer = torch.empty(max(sizes), dtype=torch.uint8)

    def source() -> Iterator[tuple[str, Tensor | Callable[[], Tensor]]]:
        for i in order:
            given = buffer[: sizes[i]]
            given.copy_(tensors[f"t{i}"])
            yield f"t{i}", (lambda g=given: g) if data.draw(st.booleans()) else given
        ended.append(True)

    link, sender = MemoryLink(), Sender(manifest)
    sender.send(link, source, first_bucket=first_bucket, bucket_timeout=1)
    whole = MemoryLink()
    send(manifest, tensors, whole)
    want = [content(payload) for _, payload in whole.messages][first_bucket:]
    assert [content(payload) for _, payload in link.messages] == want
    assert ended == [True]


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ([("x", torch.zeros(4))], "the source gave x, which is not in the manifest"),
        ([("a", torch.zeros(4))], "the source gave a twice"),
        ([], r"tensor 2 \(empty\): the source ended before it"),
    ],
)
def test_what_is_too_much_or_too_little_is_noticed_at_the_end(
    rest: list[tuple[str, Tensor]], problem: str
) -> None:
    tensors = {"a": torch.zeros(64), "b": torch.zeros(64), "empty": torch.zeros(0)}
    manifest = plan(describe_all(tensors))
    link = MemoryLink()
    source = [("b", tensors["b"]), ("a", tensors["a"]), *rest]
    with pytest.raises(ManifestError, match=problem):
        Sender(manifest).send(link, lambda: source, bucket_timeout=1)
    assert link.aborted


def test_an_error_at_the_end_of_a_source_is_told() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    sender, asked = Sender(manifest), []

    def source() -> Iterator[tuple[str, Tensor]]:
        yield from tensors.items()
        asked.append(sender.packing.tensor if sender.packing else None)
        raise ZeroDivisionError("as scripted")

    with pytest.raises(TensorSourceError, match=r"asked for its end: as scripted"):
        sender.send(MemoryLink(), source, bucket_timeout=1)
    assert asked == [""]


def test_a_tensor_before_its_turn_begins_the_source_s_time_anew() -> None:
    tensors = {f"t{i}": random_tensor(torch.uint8, (64,), i) for i in range(3)}
    sender = Sender(plan(describe_all(tensors)))
    begun: list[float] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name in ("t2", "t0", "t1"):
            assert sender.packing is not None
            begun.append(sender.packing.started_at)
            yield name, tensors[name]

    sender.send(MemoryLink(), source, bucket_timeout=1)
    assert begun[0] < begun[1] == begun[2]


def test_a_dtensor_is_gathered_if_it_is_needed(
    trainers_own_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    tensors = {
        name: DTensor.from_local(random_tensor(torch.uint8, (64,), seed), mesh, [Replicate()])
        for seed, name in enumerate("abc")
    }
    gathered: list[str] = []
    full_tensor = DTensor.full_tensor

    def gather(tensor: DTensor) -> Tensor:
        gathered.append(next(name for name, known in tensors.items() if known is tensor))
        return full_tensor(tensor)

    monkeypatch.setattr(DTensor, "full_tensor", gather)
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link = MemoryLink()
    Sender(manifest).send(link, tensors.items, first_bucket=1, bucket_timeout=1)
    assert gathered == ["b", "c"]
    assert [content(payload) for _, payload in link.messages] == [
        content(tensors[name].to_local()) for name in "bc"
    ]


def test_a_function_in_place_of_a_tensor_is_called_if_it_is_needed() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    called: list[str] = []

    def give(name: str) -> Tensor:
        called.append(name)
        return tensors[name]

    first = next(i for i, b in enumerate(manifest.buckets) if b.spans[0].tensor == 1)
    link = MemoryLink()
    Sender(manifest).send(
        link,
        lambda: [(name, lambda name=name: give(name)) for name in tensors],
        first_bucket=first,
        bucket_timeout=1,
    )
    assert called == ["b", "c"]
    assert len(link.messages) == len(manifest.buckets) - first


def test_what_a_source_raises_is_told_with_the_tensor() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)

    def source() -> Iterator[tuple[str, Tensor]]:
        yield "a", tensors["a"]
        raise ZeroDivisionError("as scripted")

    link, sender = MemoryLink(), Sender(manifest)
    with pytest.raises(
        TensorSourceError, match=r"ZeroDivisionError .* asked for b: as sc"
    ) as caught:
        sender.send(link, source, bucket_timeout=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.tensor == "b"
    assert link.aborted
    assert sender.packing is None


def test_a_sender_tells_what_it_waits_for() -> None:
    tensors = {f"t{i}": random_tensor(torch.uint8, (64,), i) for i in range(4)}
    sender = Sender(plan(describe_all(tensors), bucket_bytes=128))
    asked: list[str] = []
    begun: list[float] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for item in tensors.items():
            assert sender.packing is not None
            asked.append(sender.packing.tensor)
            begun.append(sender.packing.started_at)
            yield item

    sender.send(MemoryLink(), source, bucket_timeout=1)
    assert asked == list(tensors)
    assert begun[0] == begun[1] < begun[2] == begun[3]
    assert sender.packing is None


def test_the_time_that_a_link_takes_is_not_the_source_s() -> None:
    tensors = {f"t{i}": random_tensor(torch.uint8, (64,), i) for i in range(5)}
    sender = Sender(plan(describe_all(tensors), bucket_bytes=64))
    begun: list[float] = []
    waited_since: list[float] = []
    enter = sender._update_digest.add_bucket

    def source() -> Iterator[tuple[str, Tensor]]:
        for item in tensors.items():
            begun.append(sender.packing.started_at)
            yield item

    def note(index: int, sums: Sequence[int]) -> None:
        waited_since.append(sender.packing.started_at)
        enter(index, sums)

    sender._update_digest.add_bucket = note
    sender.send(MemoryLink(), source, bucket_timeout=1)
    assert begun[2] <= waited_since[0] <= begun[3]  # three are under way


def test_the_number_of_buckets_is_what_the_size_says() -> None:
    tensors = some_weights()
    manifest = plan(describe_all(tensors), bucket_bytes=64)
    link = MemoryLink()
    send(manifest, tensors, link)
    assert len(link.messages) == sum(math.ceil(t.nbytes / 64) for t in tensors.values())


@given(
    words=st.integers(1, 9),
    first=st.integers(0, 100),
    order=st.randoms(use_true_random=False),
    called=st.booleans(),
)
def test_the_matrices_of_packed_experts_may_come_in_its_place(
    words: int, first: int, order: Any, *, called: bool
) -> None:
    tensors = {
        "embedding": random_tensor(torch.bfloat16, (5, 7), 1),
        "mlp.experts.gate_up_proj": random_tensor(torch.bfloat16, (3, 10, 7), 2),
        "mlp.experts.down_proj": random_tensor(torch.bfloat16, (3, 7, 5), 3),
        "norm": random_tensor(torch.bfloat16, (7,), 4),
    }
    manifest = plan(describe_all(tensors), bucket_bytes=64 * words)
    whole = MemoryLink()
    send(manifest, tensors, whole)
    gate_up, down = (tensors[f"mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    parts = {"embedding": tensors["embedding"], "norm": tensors["norm"]}
    for i in range(3):
        matrices = (*gate_up[i].chunk(2), down[i])
        for name, matrix in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True):
            parts[f"mlp.experts.{i}.{name}.weight"] = matrix
    items: list[tuple[str, Any]] = [*parts.items()]
    if called:
        items = [(name, lambda tensor=tensor: tensor) for name, tensor in items]
    order.shuffle(items)
    first = min(first, len(manifest.buckets))
    link = MemoryLink()
    Sender(manifest).send(link, lambda: items, first_bucket=first, bucket_timeout=1)
    rest = list(whole.messages)[first:]
    assert len(link.messages) == len(rest)
    for bucket, (_, got), (_, want) in zip(
        manifest.buckets[first:], link.messages, rest, strict=True
    ):
        for span in bucket.spans:  # what lies between them is arbitrary
            piece = slice(span.bucket_offset, span.bucket_offset + span.length)
            assert content(got[piece]) == content(want[piece])
    lacking = [item for item in items if item[0] != "mlp.experts.1.up_proj.weight"]
    with pytest.raises(ManifestError, match=r"gate_up_proj\): the source ended before it"):
        Sender(manifest).send(MemoryLink(), lambda: lacking, bucket_timeout=1)
    again = [*items, ("mlp.experts.gate_up_proj", gate_up)]
    with pytest.raises(ManifestError, match=r"gave mlp\.experts\.gate_up_proj twice"):
        Sender(manifest).send(MemoryLink(), lambda: again, bucket_timeout=1)
