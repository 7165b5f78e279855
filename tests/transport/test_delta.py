"""Deltas: what changed since the last snapshot arrives bit for bit, or is refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_transport import (
    ManifestError,
    PublishedCopy,
    ReceivedDelta,
    Receiver,
    Sender,
    TensorSourceError,
    delta_layout,
    describe_all,
    plan,
    sum_digests,
    tensor_digests,
    validate,
)
from rollwire_transport._delta import DeltaEncoder, decode
from rollwire_transport._manifest import as_bytes
from support.memory_link import MemoryLink
from support.tensors import content, random_tensor, room_for, weights
from support.transfers import receive

if TYPE_CHECKING:
    from rollwire_transport import Delta, Manifest, Snapshot
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

CPU = torch.device("cpu")


def take(copy: PublishedCopy, manifest: Manifest, tensors: dict[str, Tensor]) -> Snapshot:
    return copy.take(manifest, tensors.items, device=CPU)


def changed(tensor: Tensor, draw: st.DataObject) -> Tensor:
    """The same tensor, with some of its bytes changed: one, every so many, or all."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor)
    data = as_bytes(plain)
    if size := data.numel():
        first = draw.draw(st.integers(0, size - 1))
        step = draw.draw(st.sampled_from((1, 2, 7, 64, size)))
        flip = 1 if tensor.dtype is torch.bool else draw.draw(st.integers(1, 255))
        data[first::step] ^= flip
    return plain


def delivered(delta: Delta, serving: dict[str, Tensor]) -> ReceivedDelta:
    """The delta after its way over a link."""
    layout = delta_layout(delta.manifest)
    link = MemoryLink()
    Sender(layout).send(link, delta.tensors.items, bucket_timeout=1)
    room = room_for(layout)
    receiver = Receiver(layout, room)
    receive(receiver, link)
    return ReceivedDelta(delta.manifest, room, serving)


def served(manifest: Manifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of a server's own."""
    sent = [spec.name for spec in manifest.tensors if spec.alias_of is None]
    serving = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype) for name in sent}
    for name, tensor in serving.items():
        tensor.copy_(tensors[name])
    return serving


@given(tensors=weights(), bucket_words=st.integers(1, 12), steps=st.integers(1, 3), draw=st.data())
def test_base_and_delta_are_the_new_tensors(
    tensors: dict[str, Tensor], bucket_words: int, steps: int, draw: st.DataObject
) -> None:
    manifest = plan(describe_all(tensors), bucket_bytes=64 * bucket_words)
    copy = PublishedCopy(CPU)
    first = take(copy, manifest, tensors)
    assert first.delta is None
    serving = served(manifest, tensors)
    sent = list(serving)
    for _ in range(steps):
        before = tensor_digests(manifest.tensors, serving)
        new = {name: changed(serving[name], draw) for name in sent}
        snapshot = take(copy, manifest, new)
        if not manifest.buckets:
            assert snapshot.delta is None
            return
        assert snapshot.delta is not None
        validate(snapshot.delta.manifest)
        assert snapshot.delta.manifest.base_digest == sum_digests(before.values())
        received = delivered(snapshot.delta, serving)
        assert received.digests(before) == snapshot.digests == tensor_digests(
            manifest.tensors, new
        )  # fmt: skip
        assert (
            content(serving[sent[0]]) != content(new[sent[0]])
            or tensor_digests(manifest.tensors, serving) == before
        )
        received.apply()
        for name in sent:
            assert content(serving[name]) == content(new[name]) == content(snapshot.tensors[name])


@given(
    size=st.integers(1, 40),
    positions=st.lists(st.integers(0, 4 * 40 * 64), max_size=30),
    seed=st.integers(0, 1000),
)
def test_a_delta_is_what_changed_or_there_is_none(
    size: int, positions: list[int], seed: int
) -> None:
    old = random_tensor(torch.uint8, (size * 64 * 8,), seed)
    new = old.clone()
    words = new.view(torch.int16)
    where = sorted({position % words.numel() for position in positions})
    words[where] ^= 1
    encoder = DeltaEncoder([new.numel()], CPU)
    encoder.encode(old, new)
    ((delta, count),) = encoder.results()
    assert count == len(where)
    assert old.tolist() == new.tolist()
    if delta is None:
        assert len(where) > new.numel() // 6
        return
    assert delta.numel() < new.numel()
    found = decode(delta, delta[:16].view(torch.int64).tolist())
    assert found.positions.tolist() == where
    assert found.bits.tolist() == words[where].tolist()
    assert found.totals.tolist() == [len(where), where[-1] + 1 if where else 0]


@pytest.mark.parametrize(("unchanged", "share"), [(0.999, 1 / 300), (0.99, 1 / 60), (0.9, 1 / 6)])
def test_its_size_follows_from_what_changed(unchanged: float, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"t": random_tensor(torch.bfloat16, (1 << 20,), 1)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    words = tensors["t"].view(torch.int16)
    words ^= (torch.rand(words.shape, generator=generator) >= unchanged).short()
    delta = take(copy, manifest, tensors).delta
    assert delta is not None
    assert delta.nbytes / tensors["t"].nbytes <= share
    assert delta.changed_words / delta.words == pytest.approx(1 - unchanged, rel=0.1)


def test_what_is_equal_takes_no_more_than_a_head_for_each_bucket() -> None:
    tensors = {"t": torch.tensor([float("nan"), -0.0] * 64)}
    manifest = plan(describe_all(tensors), bucket_bytes=128)
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    delta = take(copy, manifest, tensors).delta
    assert delta is not None
    assert delta.nbytes == 16 * len(manifest.buckets)
    tensors["t"][1] = 0.0  # equal numbers, other bits
    delta = take(copy, manifest, tensors).delta
    assert delta is not None
    assert delta.changed_words == 1


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.01, 0.1, 0.32, 0.5, 1.0])
def test_a_gpu_finds_and_applies_the_same(share: float) -> None:
    cuda = torch.device("cuda")
    generator = torch.Generator().manual_seed(int(share * 1e5))
    tensors = {
        "matrix": random_tensor(torch.bfloat16, (1500, 3000), 1),
        "bytes": random_tensor(torch.uint8, (12345,), 2),
        "wide": random_tensor(torch.float32, (77, 11), 3),
    }
    manifest = plan(describe_all(tensors), bucket_bytes=1 << 20)
    there = {name: tensor.to(cuda) for name, tensor in tensors.items()}
    copies = [PublishedCopy(CPU), PublishedCopy(cuda), PublishedCopy(CPU)]
    take(copies[0], manifest, tensors)
    for copy in copies[1:]:
        copy.take(manifest, there.items, device=cuda)
    serving = {name: tensor.clone() for name, tensor in there.items()}
    before = tensor_digests(manifest.tensors, serving)
    for name, tensor in tensors.items():
        data = as_bytes(tensor)
        data ^= (torch.rand(data.shape, generator=generator) < share / 2).to(torch.uint8)
        there[name].copy_(tensor)
    expected = take(copies[0], manifest, tensors)
    assert expected.delta is not None
    for copy in copies[1:]:
        found = copy.take(manifest, there.items, device=cuda)
        assert found.delta is not None
        assert found.digests == expected.digests
        assert found.delta.manifest == expected.delta.manifest
        assert found.delta.changed_words == expected.delta.changed_words
        sent = {n: t() if callable(t) else t for n, t in found.delta.tensors.items()}
        for name, tensor in expected.delta.tensors.items():
            assert torch.equal(sent[name].cpu(), tensor() if callable(tensor) else tensor)
    received = ReceivedDelta(
        found.delta.manifest, {name: tensor.to(cuda) for name, tensor in sent.items()}, serving
    )
    assert received.digests(before) == expected.digests
    received.apply()
    assert tensor_digests(manifest.tensors, serving) == expected.digests


def test_a_snapshot_does_not_change_with_the_trainers_tensors() -> None:
    tensors = {"t": torch.arange(1000.0)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    snapshot = take(copy, manifest, tensors)
    tensors["t"].zero_()
    assert snapshot.tensors["t"].tolist() == list(map(float, range(1000)))


def test_another_base_leads_to_another_digest() -> None:
    tensors = {"t": random_tensor(torch.bfloat16, (1000,), 1)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    serving = served(manifest, tensors)
    before = tensor_digests(manifest.tensors, serving)
    tensors["t"].view(torch.int16)[77] ^= 1
    snapshot = take(copy, manifest, tensors)
    assert snapshot.delta is not None
    serving["t"].view(torch.int16)[77] ^= 4
    assert delivered(snapshot.delta, serving).digests(before) != snapshot.digests


def test_what_was_not_published_is_no_base() -> None:
    tensors = {"t": torch.arange(1000.0), "u": torch.arange(10.0)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    copy.forget()
    assert take(copy, manifest, tensors).delta is None

    def fails() -> object:
        yield "t", tensors["t"]
        raise OSError("gone")

    with pytest.raises(TensorSourceError, match="gone"):
        copy.take(manifest, fails, device=CPU)  # type: ignore[arg-type]
    assert take(copy, manifest, tensors).delta is None
    assert take(copy, manifest, tensors).delta is not None


def test_other_layouts_and_parts_build_on_the_same_copy() -> None:
    tensors = {name: random_tensor(torch.bfloat16, (33, 5), i) for i, name in enumerate("abc")}
    copy = PublishedCopy(CPU)
    take(copy, plan(describe_all(tensors), bucket_bytes=64), tensors)
    part = {"c": tensors["c"], "a": tensors["a"]}
    part["a"].view(torch.int16)[3, 3] ^= 1
    manifest = plan(describe_all(part), bucket_bytes=128, partial=True)
    serving = served(manifest, part)
    serving["a"].view(torch.int16)[3, 3] ^= 1
    before = tensor_digests(manifest.tensors, serving)
    snapshot = take(copy, manifest, part)
    assert snapshot.delta is not None
    assert snapshot.delta.manifest.base_digest == sum_digests(before.values())
    assert snapshot.delta.changed_words == 1
    received = delivered(snapshot.delta, serving)
    assert received.digests(before) == snapshot.digests
    received.apply()
    assert content(serving["a"]) == content(part["a"])


def test_aliases_are_in_no_delta() -> None:
    tensor = random_tensor(torch.float32, (50,), 1)
    tensors = {"t": tensor, "tied": tensor}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    delta = take(copy, manifest, tensors).delta
    assert delta is not None
    assert delta.manifest.tensors[1].alias_of == "t"
    received = ReceivedDelta(delta.manifest, dict(delta.tensors), {"t": tensor})  # type: ignore[arg-type]
    assert received.digests(tensor_digests(manifest.tensors, tensors)).keys() == {"t"}


def test_bytes_beyond_a_tensor_are_no_change_of_it() -> None:
    tensors = {"t": torch.zeros(1001, dtype=torch.uint8)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    serving = served(manifest, tensors)
    tensors["t"][-1] = 7
    delta = take(copy, manifest, tensors).delta
    assert delta is not None
    sent = delta.tensors["0"]
    assert isinstance(sent, torch.Tensor)
    received = ReceivedDelta(delta.manifest, {"0": sent.clone()}, serving)
    received.apply()
    assert serving["t"].tolist() == tensors["t"].tolist()
    (place,) = (sent[16:18] == 7).nonzero().squeeze(1).tolist()
    sent[16 + 1 - place] = 1
    with pytest.raises(ManifestError, match="not the delta of a bucket"):
        ReceivedDelta(delta.manifest, {"0": sent}, serving)


@pytest.mark.parametrize("elements", [64, 100, 40])
@given(draw=st.data())
def test_what_is_no_delta_is_refused(elements: int, draw: st.DataObject) -> None:
    """Whatever arrives is applied within the tensors, or refused."""
    tensors = {"t": random_tensor(torch.bfloat16, (elements,), 1)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(CPU)
    take(copy, manifest, tensors)
    memory = torch.zeros(elements + 64, dtype=torch.bfloat16)
    serving = {"t": memory[32 : 32 + elements]}
    serving["t"].copy_(tensors["t"])
    tensors["t"].view(torch.int16)[:: max(elements // 3, 1)] ^= 1
    delta = take(copy, manifest, tensors).delta
    assert delta is not None
    sent = delta.tensors["0"]
    assert isinstance(sent, torch.Tensor)
    broken = sent.clone()
    broken[draw.draw(st.integers(0, broken.numel() - 1))] ^= draw.draw(st.integers(1, 255))
    broken = broken[: draw.draw(st.integers(0, broken.numel()))].clone()
    (bucket,) = delta.manifest.buckets
    bucket = dataclasses.replace(bucket, size=broken.numel())
    layout = dataclasses.replace(delta.manifest, buckets=(bucket,))
    try:
        ReceivedDelta(layout, {"0": broken}, serving).apply()
    except ManifestError as error:
        assert "not the delta of a bucket" in str(error)  # noqa: PT017 - either is right
    assert not memory[:32].any()
    assert not memory[32 + elements :].any()
