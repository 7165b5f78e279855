"""Manifests that nobody should trust, and those that do not fit."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollwire_transport import (
    Bucket,
    Encoding,
    Manifest,
    ManifestError,
    Span,
    TensorSpec,
    compare,
    plan,
    validate,
)

A, B = TensorSpec("a", "uint8", (100,)), TensorSpec("b", "float32", (5,))
WHOLE = Manifest((A, B), (Bucket(148, (Span(0, 0, 0, 100), Span(1, 0, 128, 20))),))


def with_tensors(*tensors: TensorSpec) -> Manifest:
    return dataclasses.replace(WHOLE, tensors=tensors)


def with_spans(*spans: Span, size: int = 148) -> Manifest:
    return dataclasses.replace(WHOLE, buckets=(Bucket(size, spans),))


HELL = {
    "no tensors": (Manifest((), ()), "there are no tensors"),
    "nothing but aliases": (
        Manifest((TensorSpec("x", "uint8", (1,), alias_of="y"),), ()),
        "there are no tensors",
    ),
    "unknown dtype": (with_tensors(A, TensorSpec("b", "float31", (5,))), "unknown dtype 'float31'"),
    "a dtype that only evaluates": (
        with_tensors(A, TensorSpec("b", "nn.Module", (5,))),
        "unknown dtype 'nn.Module'",
    ),
    "twice the same name": (
        with_tensors(A, TensorSpec("a", "float32", (5,))),
        "an earlier tensor has the same name",
    ),
    "no name": (with_tensors(A, TensorSpec("", "float32", (5,))), "1 to 4096 bytes"),
    "an endless name": (with_tensors(A, TensorSpec("b" * 10**7, "float32", (5,))), "4096 bytes"),
    "half a character": (with_tensors(A, TensorSpec("\ud800", "float32", (5,))), "Unicode"),
    "alias of nothing": (
        with_tensors(A, B, TensorSpec("c", "uint8", (100,), alias_of="z")),
        "alias of 'z'",
    ),
    "alias of itself": (
        with_tensors(A, B, TensorSpec("c", "uint8", (100,), alias_of="c")),
        "alias of 'c'",
    ),
    "alias of an alias": (
        with_tensors(
            A, B, TensorSpec("c", "uint8", (100,), "a"), TensorSpec("d", "uint8", (100,), "c")
        ),
        "alias of 'c'",
    ),
    "alias of another shape": (
        with_tensors(A, B, TensorSpec("c", "uint8", (10, 10), alias_of="a")),
        "another dtype or shape",
    ),
    "negative dimension": (with_tensors(A, TensorSpec("b", "float32", (-5, -1))), "absurd shape"),
    "more bytes than there are": (
        with_tensors(A, TensorSpec("b", "float32", (2**63, 2**63))),
        "absurd shape",
    ),
    "an absurd empty tensor": (
        with_tensors(A, B, TensorSpec("c", "float32", (0, 2**64))),
        "absurd shape",
    ),
    "a million dimensions": (
        with_tensors(A, TensorSpec("b", "float32", (2**63,) * 10**6)),
        "more than 64 dimensions",
    ),
    "a tensor that is not sent": (with_spans(Span(0, 0, 0, 100), size=100), "its spans end at 0"),
    "a tensor that is not sent to its end": (
        with_spans(Span(0, 0, 0, 99), Span(1, 0, 128, 20)),
        "has 100 bytes, its spans end at 99",
    ),
    "a span beyond its tensor": (
        with_spans(Span(0, 0, 0, 101), Span(1, 0, 128, 20)),
        "has 100 bytes, its spans end at 101",
    ),
    "a span beyond its bucket": (
        with_spans(Span(0, 0, 0, 100), Span(1, 0, 128, 20), size=140),
        "140 bytes, but its last span ends at 148",
    ),
    "a bucket with a tail": (
        with_spans(Span(0, 0, 0, 100), Span(1, 0, 128, 20), size=10**6),
        "but its last span ends at 148",
    ),
    "spans that overlap in their bucket": (
        with_spans(Span(0, 0, 0, 100), Span(1, 0, 64, 20), size=84),
        "overlaps",
    ),
    "spans that overlap in their tensor": (
        with_spans(Span(0, 0, 0, 100), Span(0, 64, 128, 36), Span(1, 0, 192, 20), size=212),
        "begins at byte 64",
    ),
    "a gap in a tensor": (
        with_spans(Span(0, 0, 0, 10), Span(0, 64, 64, 36), Span(1, 0, 128, 20)),
        "begins at byte 64 of its tensor, of which 10",
    ),
    "a gap in a bucket": (
        with_spans(Span(0, 0, 0, 100), Span(1, 0, 192, 20), size=212),
        "leaves a gap",
    ),
    "misaligned": (
        with_spans(Span(0, 0, 0, 100), Span(1, 0, 104, 20), size=124),
        "multiple of 64",
    ),
    "no such tensor": (
        with_spans(Span(0, 0, 0, 100), Span(2**32 - 1, 0, 128, 20)),
        "no such tensor",
    ),
    "a negative index": (with_spans(Span(0, 0, 0, 100), Span(-1, 0, 128, 20)), "no such tensor"),
    "a span of an alias": (
        Manifest((A, dataclasses.replace(A, name="c", alias_of="a")), WHOLE.buckets),
        "an alias is not sent",
    ),
    "an empty span": (
        with_spans(Span(0, 0, 0, 100), Span(1, 0, 128, 20), Span(1, 0, 192, 0)),
        "length 0",
    ),
    "an empty bucket": (
        dataclasses.replace(WHOLE, buckets=(*WHOLE.buckets, Bucket(64, ()))),
        "bucket 1 is empty",
    ),
    "a bucket that no memory holds": (
        Manifest((TensorSpec("a", "uint8", (2**47,)),), (Bucket(2**47, (Span(0, 0, 0, 2**47),)),)),
        "absurd size",
    ),
    "another sender": (
        dataclasses.replace(WHOLE, buckets=(dataclasses.replace(WHOLE.buckets[0], sender=1),)),
        "sender 1",
    ),
    "a delta of anything": (dataclasses.replace(WHOLE, encoding=Encoding.DELTA), "base_digest"),
    "a delta that is larger than its bucket": (
        dataclasses.replace(
            with_spans(Span(0, 0, 0, 100), Span(1, 0, 128, 20), size=149),
            encoding=Encoding.DELTA,
            base_digest=1,
        ),
        "149 bytes, but its last span ends at 148",
    ),
    "a delta of nothing": (
        Manifest((TensorSpec("a", "uint8", (0,)),), (), encoding=Encoding.DELTA, base_digest=1),
        "needs a bucket",
    ),
    "a base without a delta": (dataclasses.replace(WHOLE, base_digest=1), "base_digest"),
}


def test_the_manifest_that_all_of_hell_is_made_of_is_valid() -> None:
    validate(WHOLE)


@pytest.mark.parametrize(("manifest", "problem"), HELL.values(), ids=HELL)
def test_manifests_from_hell_are_refused_at_once(manifest: Manifest, problem: str) -> None:
    start = time.process_time()
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    assert any(problem in line for line in caught.value.problems), caught.value.problems
    assert time.process_time() - start < 5  # the worst would take minutes
    assert len(str(caught.value)) < 10_000


def test_all_problems_are_named_at_once() -> None:
    manifest = Manifest(
        (TensorSpec("a", "float31", (1,)), TensorSpec("a", "uint8", (-1,)), B), (Bucket(0, ()),)
    )
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    assert len(caught.value.problems) == 6


numbers = st.sampled_from([-1, 0, 1, 20, 64, 100, 128, 148, 2**31, 2**63]) | st.integers(0, 300)
spans = st.lists(st.builds(Span, st.integers(-1, 2), numbers, numbers, numbers), max_size=4)


@given(st.lists(st.builds(Bucket, numbers, spans.map(tuple)), max_size=3))
def test_what_passes_covers_every_byte_once(buckets: list[Bucket]) -> None:
    manifest = Manifest((A, B), tuple(buckets))
    try:
        validate(manifest)
    except ManifestError:
        return
    covered = {0: 0, 1: 0}
    for bucket in buckets:
        used: set[int] = set()
        for span in bucket.spans:
            place = range(span.bucket_offset, span.bucket_offset + span.length)
            assert place.start >= 0
            assert place.stop <= bucket.size
            assert used.isdisjoint(place)
            used.update(place)
            assert covered[span.tensor] == span.tensor_offset
            covered[span.tensor] += span.length
    assert covered == {0: 100, 1: 20}


def test_a_hundred_thousand_tensors_are_checked_in_about_a_second() -> None:
    specs = [TensorSpec(f"layers.{i}.weight", "bfloat16", (64, 33)) for i in range(100_000)]
    manifest = plan(specs)
    start = time.process_time()
    validate(manifest)
    compare(manifest, specs)
    assert time.process_time() - start < 10  # about one, on a machine that has time


SCHEMA = (
    TensorSpec("embedding", "bfloat16", (8, 4)),
    TensorSpec("norm", "float32", (4,)),
    TensorSpec("head", "bfloat16", (8, 4), alias_of="embedding"),
)


def test_a_manifest_fits_the_schema_that_it_was_made_from() -> None:
    compare(plan(SCHEMA), SCHEMA)


def test_an_alias_may_be_left_out() -> None:
    compare(plan(SCHEMA[:2]), SCHEMA)


def test_a_partial_manifest_may_leave_tensors_out() -> None:
    compare(plan(SCHEMA[1:2], partial=True), SCHEMA)


def test_every_misfit_is_named() -> None:
    manifest = plan(
        [
            TensorSpec("embedding", "float32", (4, 8)),
            TensorSpec("head", "bfloat16", (8, 4)),
            TensorSpec("stranger", "uint8", (1,)),
        ]
    )
    with pytest.raises(ManifestError) as caught:
        compare(manifest, SCHEMA)
    assert sorted(caught.value.problems) == [
        "embedding has dtype float32, expected bfloat16",
        "embedding has shape [4, 8], expected [8, 4]",
        "head has alias_of nothing, expected embedding",
        "norm is missing",
        "stranger is unknown here",
    ]


def test_unknown_tensors_are_refused_in_a_partial_manifest_too() -> None:
    with pytest.raises(ManifestError, match="stranger is unknown here"):
        compare(plan([TensorSpec("stranger", "uint8", (1,))], partial=True), SCHEMA)


def test_a_long_list_of_problems_is_cut_with_a_count() -> None:
    manifest = plan([TensorSpec(f"t{i}", "uint8", (1,)) for i in range(1000)], partial=True)
    with pytest.raises(ManifestError, match="and 980 more") as caught:
        compare(manifest, SCHEMA)
    assert len(caught.value.problems) == 1000
