"""The routing of a sequence, from the passes that computed it: any number, torn anywhere."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire_client import Routing, RoutingReplay, WeightTag
from rollwire_client._routing_replay import RoutingBuilder, Rows, joined
from support.examples import examples

AS_SAMPLED, LAST_PASS = RoutingReplay.AS_SAMPLED, RoutingReplay.LAST_PASS
SHAPE = (1, 2, 2)


def tag(server: int, revision: int = 0) -> WeightTag:
    return WeightTag(revision, revision, f"server {server}", revision)


def rows(start: int, end: int, number: int = 1, weights: WeightTag | None = None) -> Rows:
    """Rows that say of which pass they are, and of which position."""
    experts = b"".join(struct.pack("<HH", number, p) for p in range(start, end))
    return Rows(start, end - start, SHAPE, experts, weights or tag(0))


def passes(routing: Routing | None) -> list[int]:
    """Which pass each row is of."""
    if routing is None:
        return []
    told = list(struct.iter_unpack("<HH", routing.experts))
    assert [position for _, position in told] == list(range(routing.start, routing.end))
    return [number for number, _ in told]


@dataclass
class Token:
    """A sampled token: its weights, and the pass that had the row before it."""

    weights: WeightTag
    number: int


@dataclass
class Play:
    """What happened to one sequence, as the library gets to know it."""

    prompt: int
    builder: RoutingBuilder
    tokens: list[Token] = field(default_factory=list)
    came: dict[int, list[int]] = field(default_factory=dict)  # rows of each pass, by its number
    weights: dict[tuple[int, int], WeightTag] = field(default_factory=dict)
    whole: bool = True  # nothing of the last attempt was lost
    taken: list[int] = field(default_factory=list)  # the passes that chunks brought, in order

    def runs(self) -> list[tuple[int, WeightTag]]:
        ends = enumerate(self.tokens, start=self.prompt + 1)
        return [(end, token.weights) for end, token in ends]

    def chunk(self) -> None:
        routing = self.builder.take(self.runs())
        if routing is not None:
            assert routing.start <= len(self.taken)
            self.taken[routing.start :] = passes(routing)

    def begin_attempt(self) -> None:
        self.builder.begin_attempt(len(self.tokens))
        useful = range(self.prompt + len(self.tokens) - 1 if self.tokens else 0)
        self.came = {n: [p for p in came if p in useful] for n, came in self.came.items()}

    def deliver(self, part: Rows | Token) -> None:
        if isinstance(part, Token):
            self.tokens.append(part)
            return
        self.builder.add(part)
        number = struct.unpack_from("<H", part.experts)[0]
        self.came.setdefault(number, []).extend(range(part.start, part.end))
        self.weights |= {(number, p): part.weights for p in range(part.start, part.end)}


def attempt(draw, play: Play, server: int, numbers) -> None:
    """One server's: passes over the prefix, of which the last ones may sample; then it is lost."""
    computed: list[Rows] = []
    sampled: list[Token] = []
    for revision in range(draw(st.integers(1, 3))):
        number, weights = next(numbers), tag(server, 10 * revision)
        known = play.prompt + len(play.tokens) + len(sampled)
        fresh = draw(st.integers(0, 4))  # 0: the prefill was not finished
        at, prefill = 0, known if fresh else draw(st.integers(0, known - 1))
        while at < prefill:
            end = draw(st.integers(at + 1, prefill))
            computed.append(rows(at, end, number, weights))
            at = end
        for n in range(fresh):
            if n:
                if draw(st.booleans()):  # a commit that kept keys and values
                    weights = tag(server, weights.revision + 1)
                computed.append(rows(at, at + 1, number, weights))
                at += 1
            sampled.append(Token(weights, number))
    # Rows and tokens come in order, but one may be ahead of the other.
    queues = [computed, sampled]
    lost = draw(st.booleans())
    for queue in queues:
        del queue[draw(st.integers(0, len(queue))) if lost else len(queue) :]
    play.whole = not lost and fresh > 0
    while parts := [queue for queue in queues if queue]:
        play.deliver(draw(st.sampled_from(parts)).pop(0))
        if draw(st.booleans()):
            play.chunk()


@st.composite
def plays(draw, replay: RoutingReplay) -> Play:
    prompt = draw(st.integers(1, 5))
    play, numbers = Play(prompt, RoutingBuilder(replay, prompt)), count(1)
    for server in range(draw(st.integers(1, 4))):
        if server:
            play.begin_attempt()
        attempt(draw, play, server, numbers)
    play.chunk()
    return play


def check_whatever(play: Play, routing: Routing) -> None:
    """What is so of both forms."""
    assert routing.num_rows <= play.prompt + max(len(play.tokens), 0) - 1
    if play.whole and play.tokens:
        assert routing.num_rows == play.prompt + len(play.tokens) - 1
    ends = [0, *(segment.end for segment in routing.segments)]
    assert [segment.start for segment in routing.segments] == ends[:-1]
    assert ends[-1] == routing.num_rows
    again = [p for start, end in routing.recomputed for p in range(start, end)]
    assert again == sorted(set(again))
    of = passes(routing)
    for one, other in zip(routing.segments, routing.segments[1:], strict=False):
        assert one.weights != other.weights
    for segment in routing.segments:
        for p in range(segment.start, segment.end):
            assert play.weights[of[p], p] == segment.weights
            if play.tokens:
                sampled = play.tokens[max(p + 1 - play.prompt, 0)].weights
                assert (p in again) == (segment.weights != sampled)


@settings(max_examples=examples(300))
@given(plays(AS_SAMPLED))
def test_as_sampled_is_what_sampled_the_token_after_it(play: Play) -> None:
    routing = play.builder.routing(play.runs())
    if routing is None:
        assert not play.came
        return
    check_whatever(play, routing)
    of = passes(routing)
    for output, token in enumerate(play.tokens):
        row = play.prompt + output - 1
        came = play.came.get(token.number, [])
        if row in came:
            assert of[row] == token.number
        elif row < len(of):
            assert of[row] > token.number  # lost; a later server's
    if play.tokens:
        first = play.tokens[0].number
        if play.prompt - 1 in play.came.get(first, []):
            assert of[: play.prompt] == [first] * play.prompt
    assert play.taken == of[: len(play.taken)]  # no row twice, and none taken back
    if play.whole:
        assert play.taken == of


@settings(max_examples=examples(300))
@given(plays(LAST_PASS))
def test_last_pass_is_the_newest_that_has_all(play: Play) -> None:
    routing = play.builder.routing(play.runs())
    if routing is None:
        assert not play.came
        return
    check_whatever(play, routing)
    of = passes(routing)
    length = play.prompt + len(play.tokens) - 1
    whole = [n for n, came in play.came.items() if len(set(came)) >= length]
    if whole and play.tokens:
        (one,) = set(of) or {max(whole)}
        assert one in whole
        # A newer one has not caught up yet: rows came whose tokens were lost.
        rows_of = {n: len(set(play.came[n])) for n in whole}
        assert all(rows_of[n] < rows_of[one] for n in whole if n > one)
        if play.whole:
            assert one == max(whole)
            assert play.taken == of
    else:
        assert len(set(of)) <= 1  # never a mixture


@pytest.mark.parametrize("replay", RoutingReplay)
def test_no_more_is_kept_than_the_sequence_and_the_pass_of_now(replay: RoutingReplay) -> None:
    builder = RoutingBuilder(replay, 100)
    for number in range(50):
        builder.add(rows(0, 60, number))
        builder.add(rows(60, 100, number))
        stores = [s for s in (builder._rows, builder._longer_pass) if s is not None]
        assert sum(len(store._experts) for store in stores) == 100 * 4
    builder.add(rows(0, 60, 99))
    assert len(builder._rows._experts) == 60 * 4 if replay is LAST_PASS else 100 * 4


def test_it_goes_on_from_what_an_earlier_rollout_had() -> None:
    first = RoutingBuilder(AS_SAMPLED, 3)
    first.add(rows(0, 5, 1, tag(1)))
    before = first.routing([(6, tag(1))])
    assert before is not None
    for replay, want in ((AS_SAMPLED, [1] * 5 + [2] * 2), (LAST_PASS, [2] * 7)):
        builder = RoutingBuilder(replay, 3)
        builder.load(before)
        assert builder.routing([(6, tag(1))]).experts == before.experts
        builder.add(rows(0, 3, 2, tag(2)))
        assert passes(builder.routing([(6, tag(1))])) == [1] * 5
        builder.add(rows(3, 7, 2, tag(2)))
        routing = builder.routing([(6, tag(1)), (8, tag(2))])
        assert passes(routing) == want
        assert routing.recomputed == (() if replay is AS_SAMPLED else ((0, 5),))


def test_segments_carry_the_oldest_keys_of_their_rows() -> None:
    """A prompt that spans commits which keep keys and values, and what goes on from it."""

    def part(start: int, end: int, revision: int, oldest: int) -> Rows:
        return replace(rows(start, end, weights=tag(0, revision)), oldest_kv_revision=oldest)

    builder = RoutingBuilder(AS_SAMPLED, 6)
    for one in (part(0, 2, 1, 1), part(2, 3, 2, 1), part(3, 5, 2, 2), part(5, 7, 2, 2)):
        builder.add(one)
    told = builder.routing([(8, tag(0, 2))])
    assert told is not None
    later = RoutingBuilder(AS_SAMPLED, 6)
    later.load(told)
    for routing in (told, later.routing([(8, tag(0, 2))]), joined([told])):
        assert routing is not None
        spans = [(s.start, s.end, s.weights, s.oldest_kv_revision) for s in routing.segments]
        assert spans == [(0, 2, tag(0, 1), 1), (2, 7, tag(0, 2), 1)]


def test_turns_make_a_conversation() -> None:
    def turn(replay: RoutingReplay, prompt: int, end: int, number: int) -> Routing:
        builder = RoutingBuilder(replay, prompt)
        builder.add(rows(0, end - 1, number, tag(number)))
        return builder.routing([(end, tag(number))])

    ends = [(3, 6), (8, 10), (10, 15)]
    for replay, want in (
        (AS_SAMPLED, [0] * 5 + [1] * 4 + [2] * 5),
        (LAST_PASS, [2] * 14),
    ):
        turns = [turn(replay, *end, number) for number, end in enumerate(ends)]
        whole = joined(turns)
        assert passes(whole) == want
        assert whole.segments[-1].weights == tag(2)
        assert whole.recomputed == ()
    assert joined([]) is None


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([rows(0, 3), rows(4, 5)], "tokens 3 to 3 never came"),
        ([rows(1, 3)], "tokens 0 to 0 never came"),
        ([rows(0, 3), Rows(3, 1, (2, 1, 2), b"1234", tag(0))], r"in each of 2 layers, and was 2"),
    ],
)
def test_rows_that_do_not_fit_those_before(parts: list[Rows], said: str) -> None:
    builder = RoutingBuilder(AS_SAMPLED, 3)
    for part in parts[:-1]:
        builder.add(part)
    with pytest.raises(ValueError, match=said):
        builder.add(parts[-1])
