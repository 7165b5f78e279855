"""The digests against their definition, and what they notice."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rollwire_transport import (
    Span,
    TensorSpec,
    describe,
    describe_all,
    sum_digests,
    tensor_digest,
    tensor_digests,
)
from rollwire_transport._bucket_digest import BucketDigester, magic
from rollwire_transport._digest import (
    _sum_words,
    bucket_digest,
    compile_sums,
    digest_of_sum,
    span_sum,
)
from rollwire_transport._manifest import Bucket
from support.examples import examples
from support.tensors import content, random_tensor, tensors
from torch import Tensor

MODULUS = 2**64
GOLDEN = 0x9E3779B97F4A7C15

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def reference_mix(x: int) -> int:
    x %= MODULUS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
    return x ^ x >> 31


def reference_sum(data: bytes, first: int = 0) -> int:
    padded = data + bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    return sum(reference_mix(w + i * GOLDEN) for i, w in enumerate(words, first)) % MODULUS


def reference_digest(spec: TensorSpec, data: bytes) -> int:
    parts = [spec.name.encode(), spec.dtype.encode()]
    text = b"".join(struct.pack("<I", len(p)) + p for p in parts)
    text += struct.pack("<I", len(spec.shape))
    text += b"".join(struct.pack("<Q", d) for d in spec.shape)
    salt = hashlib.blake2b(text, digest_size=8, person=b"rollwire").digest()
    return reference_mix(reference_sum(data) + int.from_bytes(salt, "little"))


def span_sums(data: Tensor, spans: list[Span]) -> list[int]:
    return [int(span_sum(data, span)) % MODULUS for span in spans]


@given(tensors())
def test_the_digest_is_the_one_that_is_written_down(tensor: Tensor) -> None:
    spec = describe("layer.0.wäight", tensor)
    assert tensor_digest(spec, tensor) == reference_digest(spec, content(tensor))


def test_the_digest_never_changes() -> None:
    tensor = torch.arange(1000, dtype=torch.float32).to(torch.bfloat16).view(10, 100)
    assert tensor_digest(describe("w", tensor), tensor) == 0xD14ADA11A2B3D68E
    assert bucket_digest(3, [1, 2, 3]) % MODULUS == 0x5D5780F0AD0B8AD4


@settings(max_examples=examples(20))
@given(st.integers(0, 100_000), st.integers(0, 100), st.integers(0, 2**32))
def test_every_implementation_gives_the_same_sum(size: int, offset: int, seed: int) -> None:
    words = random_tensor(torch.int64, (size,), seed)
    (on_cpu,) = span_sums(words.view(torch.uint8), [Span(0, offset * 64, 0, words.nbytes)])
    assert on_cpu == int(_sum_words(words, offset * 8)) % MODULUS  # what other devices run


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_buckets_have_the_same_records_on_any_device(device: str) -> None:
    lengths = [[1, 7, 8, 65535], [65536], [65537, 131_072 + 3, 64, 3_000_001]]
    buckets, tensors = [], itertools.count()
    for number, sizes in enumerate(lengths):
        ends = list(itertools.accumulate(-(-size // 64) * 64 for size in sizes))
        spans = [
            Span(next(tensors), 2 ** (6 + 9 * number), begin, size)
            for begin, size in zip([0, *ends], sizes, strict=False)
        ]
        buckets.append(Bucket(spans[-1].bucket_offset + sizes[-1], tuple(spans)))
    digester = BucketDigester(buckets, 5, torch.device(device))
    for index, bucket in enumerate(buckets, start=5):
        data = random_tensor(torch.uint8, (bucket.size,), index)
        sums = [
            reference_sum(content(data[s.bucket_offset :][: s.length]), s.tensor_offset // 8)
            for s in bucket.spans
        ]
        sealed = digester.record(index, data.to(device))
        assert sealed.data_ptr() % 16 == 0  # or else a GPU's kernel is compiled in mid-transfer
        record = sealed.tolist()
        assert record[:3] == [magic(0), index, bucket.size]
        assert record[3] == bucket_digest(index, sums)
        assert [total % MODULUS for total in record[4:]] == sums


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_sums_are_of_what_is_there_when_they_are_asked_for(device: str) -> None:
    shapes = [(300, 70), (0,), (), (1, 1), (65536,)]
    held = [random_tensor(torch.bfloat16, shape, 1).to(device) for shape in shapes]
    held.append(random_tensor(torch.uint8, (100_003,), 1).to(device)[3:])  # not aligned
    for aligned in (held[:-1], held):
        sums = compile_sums(aligned)
        for seed in (2, 3):
            for tensor in aligned:
                tensor.copy_(random_tensor(tensor.dtype, tuple(tensor.shape), seed))
            expected = [reference_sum(content(tensor.cpu())) for tensor in aligned]
            assert [total % MODULUS for total in sums().tolist()] == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_the_digests_of_many_tensors_are_those_of_each(device: str) -> None:
    tensors = {
        "a": random_tensor(torch.bfloat16, (30, 7), 1),
        "transposed": random_tensor(torch.float32, (5, 9), 2).t(),
        "empty": torch.zeros(0, 3),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()} | {
        "on the host": random_tensor(torch.uint8, (11,), 3)
    }
    tensors["tied"] = tensors["a"]
    specs = describe_all(tensors)
    digests = tensor_digests(specs, tensors)
    assert digests == {
        spec.name: tensor_digest(spec, tensors[spec.name])
        for spec in specs
        if spec.alias_of is None
    }
    with pytest.raises(ValueError, match="float32"):
        tensor_digests(specs, tensors | {"a": torch.zeros(30, 7)})


def test_threads_share_a_large_tensor() -> None:
    words = random_tensor(torch.int64, (3_000_001,), 1)
    spans = [Span(0, 640, 0, words.nbytes)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = span_sums(words.view(torch.uint8), spans)
        torch.set_num_threads(3)
        assert span_sums(words.view(torch.uint8), spans) == alone
    finally:
        torch.set_num_threads(threads)


def test_a_view_that_is_not_aligned_has_the_same_digest() -> None:
    data = random_tensor(torch.uint8, (100_003,), 1)
    spec = TensorSpec("w", "uint8", (100_000,))
    assert tensor_digest(spec, data[3:]) == tensor_digest(spec, data[3:].clone())


@given(st.integers(1, 1000), st.lists(st.integers(1, 5), max_size=4), st.integers(0, 2**32))
def test_the_sums_of_spans_add_up_to_the_tensors(size: int, cuts: list[int], seed: int) -> None:
    data = random_tensor(torch.uint8, (size,), seed)
    bounds = sorted({0, *(c for c in itertools.accumulate(c * 64 for c in cuts) if c < size), size})
    spans = [Span(0, start, start, stop - start) for start, stop in itertools.pairwise(bounds)]
    assert sum(span_sums(data, spans)) % MODULUS == reference_sum(content(data))


@given(tensors(), st.data())
def test_a_flipped_bit_is_noticed(tensor: Tensor, data: st.DataObject) -> None:
    assume(tensor.numel() > 0)
    before = content(tensor)
    position = data.draw(st.integers(0, 8 * len(before) - 1))
    changed = torch.tensor(list(before), dtype=torch.uint8)
    changed[position // 8] ^= 1 << position % 8
    spec = describe("w", tensor)
    total = span_sums(changed, [Span(0, 0, 0, len(before))])[0]
    assert digest_of_sum(spec, total) != tensor_digest(spec, tensor)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_swapped_words_are_noticed(words: list[int], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(words) - 1))
    j = data.draw(st.integers(0, len(words) - 1))
    assume(words[i] != words[j])
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    spec = TensorSpec("w", "int64", (len(words),))
    assert tensor_digest(spec, torch.tensor(words)) != tensor_digest(spec, torch.tensor(swapped))


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_the_same_bit_flipped_in_many_words_is_noticed(bit: int) -> None:
    spec = TensorSpec("w", "int64", (64,))
    words = random_tensor(torch.int64, (64,), seed=1)
    seen = {tensor_digest(spec, words)}
    for i in range(64):
        for j in range(i):
            flipped = words.clone()
            flipped[[i, j]] ^= torch.tensor(1) << bit
            seen.add(tensor_digest(spec, flipped))
    assert len(seen) == 1 + 64 * 63 // 2


def test_name_dtype_shape_and_length_are_noticed() -> None:
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4)
    zeros = torch.zeros(12, dtype=torch.int16)
    variants = [
        ("w", tensor),
        ("v", tensor),
        ("w", tensor.t()),
        ("w", tensor.view(4, 3)),
        ("w", tensor.view(12)),
        ("w", tensor.view(torch.bfloat16)),
        ("w", zeros),
        ("w", zeros[:11]),
        ("w", zeros[:0]),
        ("w", zeros[:0].view(0, 1)),
    ]
    digests = {tensor_digest(describe(name, variant), variant) for name, variant in variants}
    assert len(digests) == len(variants)


def test_swapped_tensors_are_noticed() -> None:
    a, b = random_tensor(torch.float32, (5,), 1), random_tensor(torch.float32, (5,), 2)
    spec_a, spec_b = describe("a", a), describe("b", b)
    right = sum_digests([tensor_digest(spec_a, a), tensor_digest(spec_b, b)])
    wrong = sum_digests([tensor_digest(spec_a, b), tensor_digest(spec_b, a)])
    assert right != wrong


def test_the_digest_of_a_set_does_not_depend_on_order_and_wraps() -> None:
    assert sum_digests([1, 2**64 - 1, 5]) == sum_digests([5, 1, 2**64 - 1]) == 5
    assert sum_digests([]) == 0


@given(st.integers(0, 2**32), st.lists(st.integers(0, MODULUS - 1), max_size=5))
def test_a_buckets_digest_is_the_one_that_is_written_down(index: int, sums: list[int]) -> None:
    value = reference_mix(index + 1)
    for total in sums:
        value = reference_mix((value ^ total) + GOLDEN)
    assert bucket_digest(index, sums) % MODULUS == value
    assert bucket_digest(index + 1, sums) != value


def test_a_tensor_that_is_not_its_specs_is_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        tensor_digest(TensorSpec("w", "float32", (2, 3)), torch.zeros(3, 2))
