from __future__ import annotations

import weakref
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from rollwire.types import FinishReason, WeightTag
from rollwire_server.engines.base import (
    PromptLogprobs,
    RoutedExperts,
    SamplingParams,
    SequenceExtras,
    SequenceSpec,
    TopLogprobs,
)
from rollwire_server.sequences.sequence import (
    EXTRA_BYTES,
    Cursor,
    ReadyQueue,
    Request,
    Sequence,
)

TAGS = [WeightTag(version, version, "server", version) for version in range(4)]


def sequence_of(
    prefix: tuple[int, ...] = (), interval: float = 0.0, **sampling: object
) -> Sequence:
    params = SamplingParams(**{"max_new_tokens": 1000, **sampling})  # type: ignore[arg-type]
    spec = SequenceSpec(1, (1, 2), params, prefix)
    return Sequence(Request("r", 0, spec, delivery_interval=interval))


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
def test_a_cursor_takes_every_token_once_in_order(
    prefix: list[int],
    parts: list[tuple[int, int, list[int]]],
    most: int,
    reads: list[bool],
    *,
    tops: bool,
) -> None:
    sequence = sequence_of(tuple(prefix))
    cursor = Cursor(sequence, ReadyQueue(), 7, len(prefix))
    expected, taken = Taken([], [], [], []), Taken([], [], [], [])

    def read() -> None:
        if (segment := cursor.next_token()) is not None:
            taken.tokens.append(sequence.tokens[cursor.position - 1])
            taken.logprobs.append(sequence.logprobs[cursor.position - 1 - len(prefix)])
            taken.tags.append(segment.weights.revision * 10 + segment.oldest_kv_revision)
            assert not cursor.behind
        while (output := cursor.next_output(most)) is not None:
            assert output.offset == len(prefix) + len(taken.tokens)
            assert len(output.token_ids) <= most
            assert len(output.logprobs) == len(output.token_ids)
            assert len(output.tops) == (len(output.token_ids) if tops else 0)
            taken.tokens += output.token_ids
            taken.logprobs += output.logprobs
            taken.tops += [ids for ids, _ in output.tops]
            if output.segment is not None:
                revision = output.segment.weights.revision * 10 + output.segment.oldest_kv_revision
                taken.tags += [revision] * len(output.token_ids)
            if output.end is not None:
                assert not isinstance(output.end, Exception)
                assert output.end.output_tokens == len(prefix) + len(taken.tokens)

    for (tag, oldest, tokens), read_now in zip(parts, reads, strict=False):
        for token in tokens:
            if tops:
                top = SequenceExtras(top_logprobs=TopLogprobs(2, [token, 5], [-0.5, -1.0]))
                sequence.add_extras(top, TAGS[tag])
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
    assert cursor.done
    assert cursor.next_output(most) is None


def test_a_finish_without_tokens_is_told_once() -> None:
    sequence = sequence_of((3, 4))
    cursor = Cursor(sequence, ReadyQueue(), 0, 2)
    assert cursor.next_output(10) is None
    sequence.end = sequence.finish(FinishReason.ABORTED)
    output = cursor.next_output(10)
    assert output is not None
    assert output.offset == 2
    assert not output.token_ids
    assert cursor.done


def test_a_superseded_cursor_says_where_it_stopped() -> None:
    sequence = sequence_of()
    cursor = Cursor(sequence, ReadyQueue(), 0, 0)
    for token in range(3):
        sequence.append(token, -1.0, TAGS[0], 0)
    assert cursor.next_output(2) is not None
    cursor.supersede()
    output = cursor.next_output(10)
    assert output is not None
    assert output.end is not None
    assert not isinstance(output.end, Exception)
    assert output.end.reason is FinishReason.SUPERSEDED
    assert output.end.output_tokens == 2


def test_large_routing_and_prompt_logprobs_are_cut_to_messages() -> None:
    sequence = sequence_of()
    rows, layers, k = 3000, 48, 8
    experts = bytes(i % 251 for i in range(rows * layers * k))
    told = [-float(i) for i in range(200_000)]
    sequence.add_extras(
        SequenceExtras(
            prompt_logprobs=[PromptLogprobs(1, told, 1)],
            routed_experts=[RoutedExperts(0, rows, layers, k, experts, 1, None, 1)],
        ),
        TAGS[1],
    )
    sequence.end = sequence.finish(FinishReason.LENGTH)
    cursor = Cursor(sequence, ReadyQueue(), 0, 0)
    got_experts, got_logprobs, ends = b"", [], 0
    while (output := cursor.next_output(10)) is not None:
        assert output.extra_bytes <= EXTRA_BYTES
        for extra in output.extras:
            part = extra.value
            assert extra.weights is TAGS[1]
            assert part.oldest_kv_revision == 1
            if isinstance(part, PromptLogprobs):
                assert part.start_position == 1 + len(got_logprobs)
                got_logprobs += part.logprobs
            else:
                assert part.start_position == len(got_experts) // (layers * k)
                got_experts += part.experts
        ends += output.end is not None
    assert got_experts == experts
    assert got_logprobs == told
    assert ends == 1


def test_a_complete_prefix_has_the_finish_that_it_had() -> None:
    stop = frozenset({9})
    assert sequence_of((1, 9), stop_token_ids=stop).finish_reason_of_prefix() is FinishReason.STOP
    assert sequence_of((1, 2), max_new_tokens=2).finish_reason_of_prefix() is FinishReason.LENGTH
    assert sequence_of((1, 9), stop_token_ids=stop, max_new_tokens=2).finish_reason_of_prefix() is (
        FinishReason.STOP
    )
    assert sequence_of((9, 1), stop_token_ids=stop).finish_reason_of_prefix() is None
    assert (
        sequence_of((1, 9), stop_token_ids=stop, min_new_tokens=2).finish_reason_of_prefix() is None
    )
    assert sequence_of(()).finish_reason_of_prefix() is None


async def test_cursors_of_one_interval_are_given_together_and_those_that_ended_at_once() -> None:
    queue = ReadyQueue()
    a, b, now = (Cursor(sequence_of(interval=i), queue, 0, 0) for i in (0.01, 0.01, 0.0))
    for cursor in (a, b, now, a):
        queue.put(cursor)
    assert queue.pop_all() == [now]
    await queue.wait()
    assert queue.pop_all() == [a, b]
    queue.put(a)
    queue.put(b)
    a.sequence.end = a.sequence.finish(FinishReason.LENGTH)
    queue.put(a)
    b.supersede()
    assert queue.pop_all() == [a, b]


async def test_a_queue_whose_stream_is_over_holds_nothing() -> None:
    queue = ReadyQueue()
    cursor = Cursor(sequence_of(interval=1e9), queue, 0, 0)
    tokens = weakref.ref(cursor.sequence.tokens)
    queue.put(cursor)
    queue.close()
    del cursor
    assert tokens() is None


async def test_what_ended_is_not_held_to_the_end_of_a_long_interval() -> None:
    queue = ReadyQueue()
    cursor = Cursor(sequence_of(interval=1e9), queue, 0, 0)
    queue.put(cursor)
    cursor.sequence.end = cursor.sequence.finish(FinishReason.LENGTH)
    queue.put(cursor)
    tokens = weakref.ref(cursor.sequence.tokens)
    assert queue.pop_all() == [cursor]
    del cursor
    assert tokens() is None
    queue.close()


def test_a_queue_gives_each_cursor_once() -> None:
    queue = ReadyQueue()
    a, b = Cursor(sequence_of(), queue, 0, 0), Cursor(sequence_of(), queue, 1, 0)
    for cursor in (a, b, a, a):
        queue.put(cursor)
    assert queue.pop_all() == [a, b]
    assert queue.pop_all() == []
