from __future__ import annotations

import weakref
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from rollwire.types import FinishReason, WeightTag
from rollwire_server.engines.base import (
    Extras,
    PromptLogprobs,
    RoutedExperts,
    SamplingParams,
    SequenceSpec,
    TopLogprobs,
)
from rollwire_server.sequences.cursor import Outbox, Reader
from rollwire_server.sequences.sequence import EXTRA_BYTES, Request, Sequence, new_sequence

TAGS = [WeightTag(version, version, "server", version) for version in range(4)]


def sequence_of(
    prefix: tuple[int, ...] = (), interval: float = 0.0, **sampling: object
) -> Sequence:
    params = SamplingParams(**{"max_new_tokens": 1000, **sampling})  # type: ignore[arg-type]
    spec = SequenceSpec(1, (1, 2), params, prefix)
    return new_sequence(Request("r", 0, spec, delivery_interval=interval))


@dataclass
class Taken:
    tokens: list[int]
    logprobs: list[float]
    tags: list[int]
    tops: list[list[int]]


@given(
    prefix=st.lists(st.integers(0, 99), max_size=5),
    parts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1), st.lists(st.integers(0, 99), max_size=6)),
        max_size=12,
    ),
    most=st.integers(1, 5),
    reads=st.lists(st.booleans(), min_size=12, max_size=12),
    tops=st.booleans(),
)
def test_a_reader_takes_every_token_once_in_order(
    prefix: list[int],
    parts: list[tuple[int, int, list[int]]],
    most: int,
    reads: list[bool],
    *,
    tops: bool,
) -> None:
    sequence = sequence_of(tuple(prefix))
    reader = Reader(sequence, Outbox(), 7, len(prefix))
    expected, taken = Taken([], [], [], []), Taken([], [], [], [])

    def read() -> None:
        if (run := reader.next_token()) is not None:
            taken.tokens.append(sequence.tokens[reader.cursor - 1])
            taken.logprobs.append(sequence.logprobs[reader.cursor - 1 - len(prefix)])
            taken.tags.append(run.weights.revision * 10 + run.oldest_kv_revision)
            assert not reader.behind
        while (chunk := reader.next_chunk(most)) is not None:
            assert chunk.offset == len(prefix) + len(taken.tokens)
            assert len(chunk.token_ids) <= most
            assert len(chunk.logprobs) == len(chunk.token_ids)
            assert len(chunk.tops) == (len(chunk.token_ids) if tops else 0)
            taken.tokens += chunk.token_ids
            taken.logprobs += chunk.logprobs
            taken.tops += [ids for ids, _ in chunk.tops]
            if chunk.run is not None:
                revision = chunk.run.weights.revision * 10 + chunk.run.oldest_kv_revision
                taken.tags += [revision] * len(chunk.token_ids)
            if chunk.end is not None:
                assert not isinstance(chunk.end, Exception)
                assert chunk.end.output_tokens == len(prefix) + len(taken.tokens)

    for (tag, oldest, tokens), read_now in zip(parts, reads, strict=False):
        for token in tokens:
            if tops:
                top = Extras(top_logprobs=TopLogprobs(2, [token, 5], [-0.5, -1.0]))
                sequence.extend(top, TAGS[tag])
                expected.tops.append([token, 5])
            sequence.append(token, -token / 2, TAGS[tag], oldest)
            expected.tokens.append(token)
            expected.logprobs.append(-token / 2)
            expected.tags.append(tag * 10 + oldest)
        if read_now:
            read()
    sequence.end = sequence.finish(FinishReason.LENGTH)
    read()
    assert taken == expected
    assert reader.done
    assert reader.next_chunk(most) is None


def test_a_finish_without_tokens_is_told_once() -> None:
    sequence = sequence_of((3, 4))
    reader = Reader(sequence, Outbox(), 0, 2)
    assert reader.next_chunk(10) is None
    sequence.end = sequence.finish(FinishReason.ABORTED)
    chunk = reader.next_chunk(10)
    assert chunk is not None
    assert chunk.offset == 2
    assert not chunk.token_ids
    assert reader.done


def test_a_superseded_reader_says_where_it_stopped() -> None:
    sequence = sequence_of()
    reader = Reader(sequence, Outbox(), 0, 0)
    for token in range(3):
        sequence.append(token, -1.0, TAGS[0], 0)
    assert reader.next_chunk(2) is not None
    reader.supersede()
    chunk = reader.next_chunk(10)
    assert chunk is not None
    assert chunk.end is not None
    assert not isinstance(chunk.end, Exception)
    assert chunk.end.reason is FinishReason.SUPERSEDED
    assert chunk.end.output_tokens == 2


def test_large_routing_and_prompt_logprobs_are_cut_to_messages() -> None:
    sequence = sequence_of()
    rows, layers, k = 3000, 48, 8
    experts = bytes(i % 251 for i in range(rows * layers * k))
    told = [-float(i) for i in range(200_000)]
    sequence.extend(
        Extras(
            prompt_logprobs=[PromptLogprobs(1, told, 1)],
            routed_experts=[RoutedExperts(0, rows, layers, k, experts, 1, None, 1)],
        ),
        TAGS[1],
    )
    sequence.end = sequence.finish(FinishReason.LENGTH)
    reader = Reader(sequence, Outbox(), 0, 0)
    got_experts, got_logprobs, ends = b"", [], 0
    while (chunk := reader.next_chunk(10)) is not None:
        assert chunk.extra_bytes <= EXTRA_BYTES
        for part in chunk.prompt_logprobs:
            assert part.start_position == 1 + len(got_logprobs)
            assert part.oldest_kv_revision == 1
            got_logprobs += part.logprobs
        for part, tag in chunk.routed_experts:
            assert part.start_position == len(got_experts) // (layers * k)
            assert tag is TAGS[1]
            assert part.oldest_kv_revision == 1
            got_experts += part.experts
        ends += chunk.end is not None
    assert got_experts == experts
    assert got_logprobs == told
    assert ends == 1


def test_a_complete_prefix_has_the_finish_that_it_had() -> None:
    stop = frozenset({9})
    assert sequence_of((1, 9), stop_token_ids=stop).complete() is FinishReason.STOP
    assert sequence_of((1, 2), max_new_tokens=2).complete() is FinishReason.LENGTH
    assert sequence_of((1, 9), stop_token_ids=stop, max_new_tokens=2).complete() is (
        FinishReason.STOP
    )
    assert sequence_of((9, 1), stop_token_ids=stop).complete() is None
    assert sequence_of((1, 9), stop_token_ids=stop, min_new_tokens=2).complete() is None
    assert sequence_of(()).complete() is None


async def test_readers_of_one_interval_are_given_together_and_those_that_ended_at_once() -> None:
    outbox = Outbox()
    a, b, now = (Reader(sequence_of(interval=i), outbox, 0, 0) for i in (0.01, 0.01, 0.0))
    for reader in (a, b, now, a):
        outbox.put(reader)
    assert outbox.take() == [now]
    await outbox.wait()
    assert outbox.take() == [a, b]
    outbox.put(a)
    outbox.put(b)
    a.sequence.end = a.sequence.finish(FinishReason.LENGTH)
    outbox.put(a)
    b.supersede()
    assert outbox.take() == [a, b]


async def test_an_outbox_whose_stream_is_over_holds_nothing() -> None:
    outbox = Outbox()
    reader = Reader(sequence_of(interval=1e9), outbox, 0, 0)
    tokens = weakref.ref(reader.sequence.tokens)
    outbox.put(reader)
    outbox.close()
    del reader
    assert tokens() is None


async def test_what_ended_is_not_held_to_the_end_of_a_long_interval() -> None:
    outbox = Outbox()
    reader = Reader(sequence_of(interval=1e9), outbox, 0, 0)
    outbox.put(reader)
    reader.sequence.end = reader.sequence.finish(FinishReason.LENGTH)
    outbox.put(reader)
    tokens = weakref.ref(reader.sequence.tokens)
    assert outbox.take() == [reader]
    del reader
    assert tokens() is None
    outbox.close()


def test_an_outbox_gives_each_reader_once() -> None:
    outbox = Outbox()
    a, b = Reader(sequence_of(), outbox, 0, 0), Reader(sequence_of(), outbox, 1, 0)
    for reader in (a, b, a, a):
        outbox.put(reader)
    assert outbox.take() == [a, b]
    assert outbox.take() == []
