"""Casts to the dtypes of the manifest, while tensors are packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_transport import (
    ManifestError,
    Receiver,
    Sender,
    TensorSpec,
    describe_all,
    plan,
    tensor_digests,
)
from support.memory_link import MemoryLink
from support.tensors import content, random_tensor, room_for
from support.transfers import receive, send

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def finite(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits of what every dtype can represent as a finite number, and infinities."""
    tensor = random_tensor(dtype, shape, seed)
    tensor[tensor.isnan() | ((tensor.abs() > 60000) & tensor.isfinite())] = -0.0
    return tensor


@st.composite
def masters(draw: st.DrawFn) -> tuple[Tensor, torch.dtype]:
    dtype, to = (getattr(torch, draw(st.sampled_from(FLOATS))) for _ in range(2))
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32))
    layout = draw(st.sampled_from(("contiguous", "transposed", "strided")))
    if layout == "transposed":
        return finite(dtype, (columns, rows), seed).T, to
    if layout == "strided":
        return finite(dtype, (rows, columns, 3), seed)[..., 1], to
    return finite(dtype, (rows, columns), seed), to


def givens(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


@given(
    drawn=st.lists(masters(), min_size=1, max_size=4),
    bucket_words=st.integers(1, 40),
    order=st.randoms(use_true_random=False),
    called=st.booleans(),
)
def test_what_arrives_is_what_tensor_to_gives_however_buckets_split_it(
    drawn: list[tuple[Tensor, torch.dtype]], bucket_words: int, order: Any, called: bool
) -> None:
    given_tensors = {f"t{i}": tensor for i, (tensor, _) in enumerate(drawn)}
    want = {f"t{i}": tensor.to(dtype) for i, (tensor, dtype) in enumerate(drawn)}
    manifest = plan(describe_all(want), bucket_bytes=64 * bucket_words)
    items: list[tuple[str, Any]] = list(given_tensors.items())
    order.shuffle(items)
    if called:
        items = [(name, givens(tensor)) for name, tensor in items]
    link, sender = MemoryLink(), Sender(manifest)
    sender.send(link, lambda: items, bucket_timeout=1)
    destination = room_for(manifest)
    receive(Receiver(manifest, destination), link)
    assert {name: content(t) for name, t in destination.items()} == {
        name: content(t) for name, t in want.items()
    }
    assert sender.digests == tensor_digests(manifest.tensors, want)
    assert sender.casts == {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in given_tensors.items()
        if tensor.dtype != want[name].dtype
    }


def test_a_nan_stays_one() -> None:
    tensor = torch.full((100,), float("nan"))
    manifest = plan([TensorSpec("a", "bfloat16", (100,))], bucket_bytes=64)
    link, destination = MemoryLink(), room_for(manifest)
    send(manifest, {"a": tensor}, link)
    receive(Receiver(manifest, destination), link)
    assert destination["a"].isnan().all()


@pytest.mark.parametrize("first_bucket", [0, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_a_finite_value_that_would_become_infinite_is_refused(
    first_bucket: int, *, strided: bool
) -> None:
    tensors = {"a": torch.zeros(64), "b": torch.zeros(64), "c": torch.zeros(64)}
    tensors["b"][40] = -70000
    tensors["c"][0] = torch.inf
    if strided:
        tensors = {name: t.repeat_interleave(2)[::2] for name, t in tensors.items()}
    specs = [TensorSpec(name, "float16", (64,)) for name in tensors]
    link = MemoryLink()
    with pytest.raises(ManifestError, match=r"^b has finite values that float16 cannot represent"):
        Sender(plan(specs, bucket_bytes=64)).send(
            link, tensors.items, first_bucket=first_bucket, bucket_timeout=1
        )
    assert link.aborted


def test_an_overflow_before_a_group_failed_is_told_in_the_next_group() -> None:
    tensors = {"a": torch.full((64,), 1e6), "b": torch.zeros(64)}
    sender = Sender(plan([TensorSpec(n, "float16", (64,)) for n in tensors], bucket_bytes=64))
    with pytest.raises(Exception, match="it died"):
        sender.send(MemoryLink(capacity=2), tensors.items, bucket_timeout=1)
    with pytest.raises(ManifestError, match=r"^a has finite values"):
        sender.send(MemoryLink(), tensors.items, first_bucket=2, bucket_timeout=1)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.zeros(64, dtype=torch.int32), "float32"),
        (torch.zeros(64, dtype=torch.bool), "bfloat16"),
        (torch.zeros(64), "int8"),
        (torch.zeros(64), "float8_e4m3fn"),
        (torch.zeros(64, dtype=torch.float8_e4m3fn), "bfloat16"),
        (torch.zeros(64, dtype=torch.complex64), "float32"),
    ],
)
def test_only_floating_point_is_cast(tensor: Tensor, dtype: str) -> None:
    manifest = plan([TensorSpec("a", dtype, (64,))])
    with pytest.raises(ManifestError, match="the source gave a "):
        Sender(manifest).send(MemoryLink(), lambda: [("a", tensor)], bucket_timeout=1)


def test_nothing_is_cast_if_that_is_not_wanted() -> None:
    manifest = plan([TensorSpec("a", "bfloat16", (64,))])
    sender = Sender(manifest, cast=False)
    with pytest.raises(ManifestError, match=r"a bfloat16 \[64\] .* the source gave a float32"):
        sender.send(MemoryLink(), lambda: [("a", torch.zeros(64))], bucket_timeout=1)
    tensor = torch.zeros(64, dtype=torch.bfloat16)
    sender.send(MemoryLink(), lambda: [("a", tensor)], bucket_timeout=1)
    assert sender.casts == {}
