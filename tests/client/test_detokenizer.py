"""Text of a sequence's tokens, and stop strings that begin and end within tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import pytest
from client.scripted import until
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollwire_client import (
    Batcher,
    Detokenizer,
    FinishReason,
    Fleet,
    InvalidRequestError,
    Prompt,
    RolloutClient,
    Sampling,
    Timeouts,
)
from rollwire_client._detokenizer import TextBuilder
from rollwire_client.testing import FakeServer
from support.examples import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLOSE = Timeouts(close=0.2)
STOPS = ["ab", "b한", "</s>", "aab", "b", "한국", "a\n\n"]

# Tokens of bytes, as byte-level BPE has them: characters are split over tokens.
PIECES = [
    *(bytes([b]) for b in "한국é€".encode()),
    *(
        piece.encode()
        for piece in ("a", "b", "ab", "</", "s>", "</s>", "\n", "a\n", "한", "b한", "")
    ),
    b"\xff",
]


def of_bytes(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


def of_words(ids: list[int]) -> str:
    """As SentencePiece: a word's token has the space before it, but for the first."""
    words = ["".join(piece.decode("utf-8", "replace")) for piece in PIECES]
    return "".join(f" {words[i]}" if i % 2 else words[i] for i in ids).removeprefix(" ")


def whole(text: str) -> str:
    return text.rstrip("\ufffd")


def expected(
    decode: Callable[[list[int]], str], stop: Sequence[str], ids: list[int], least: int
) -> tuple[int, str, str | None]:
    """By definition: the tokens that are kept, their text, and the stop string."""
    before = len(whole(decode(ids[: max(least - 1, 0)])))
    for count in range(max(least, 1), len(ids) + 1):
        text = whole(decode(ids[:count]))
        found = [
            (place, -len(s), s)
            for s in stop
            for place in [text.find(s, max(before - len(s) + 1, 0))]
            if place >= 0
        ]
        if found:
            place, _, which = min(found)
            return count, text[:place], which
    return len(ids), decode(ids), None


@settings(max_examples=examples(300))
@given(
    decode=st.sampled_from([of_bytes, of_words]),
    stop=st.lists(st.sampled_from(STOPS), max_size=3, unique=True),
    chunks=st.lists(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=6), max_size=60),
    least=st.integers(0, 12),
)
@example(decode=of_bytes, stop=["한국"], chunks=[[0, 1], [2, 3], [4], [5]], least=0)
def test_a_stop_string_ends_it_wherever_tokens_begin(
    decode: Callable[[list[int]], str], stop: list[str], chunks: list[list[int]], least: int
) -> None:
    ids = [i for chunk in chunks for i in chunk]
    kept, text, which = expected(decode, stop, ids, least)
    builder = TextBuilder(Detokenizer(decode, stop), least)
    taken, shown = 0, ""
    for chunk in chunks:
        taken += builder.append(chunk)
        shown += builder.take()
        assert text.startswith(shown)  # of a stop string, nothing was shown
        if builder.stop_string is not None:
            break
    builder.end(hides_last=False)
    shown += builder.take()
    assert (taken, shown, builder.text, builder.stop_string) == (kept, text, text, which)


@settings(max_examples=examples(100))
@given(
    chunks=st.lists(
        st.lists(st.tuples(st.text("ab\ufffd한", max_size=3), st.integers(0, 2)), min_size=1),
        max_size=30,
    )
)
def test_what_was_shown_is_part_of_the_text_whatever_the_tokenizer_does(chunks: list) -> None:
    def decode(ids: list[int]) -> str:  # a token may take back what others have said
        text = ""
        for token in ids:
            piece, taken_back = pieces[token]
            text = text[: max(len(text) - taken_back, 0)] + piece
        return text

    pieces = [piece for chunk in chunks for piece in chunk]
    builder, shown, number = TextBuilder(Detokenizer(decode, ["ab"]), 0), "", 0
    for chunk in chunks:
        builder.append(range(number, number + len(chunk)))
        number += len(chunk)
        shown += builder.take()
        if builder.stop_string is not None:
            break
    builder.end(hides_last=False)
    shown += builder.take()
    assert builder.text == shown


@settings(max_examples=examples(100))
@given(ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=200), data=st.data())
def test_it_goes_on_from_tokens_that_came_before(ids: list[int], data: st.DataObject) -> None:
    split = data.draw(st.integers(0, len(ids)))
    kept, text, which = expected(of_bytes, ["</s>"], ids, split + 1)
    builder = TextBuilder(Detokenizer(of_bytes, ["</s>"]), 0)
    builder.skip(ids[:split])
    assert split + (builder.append(ids[split:]) if ids[split:] else 0) == kept
    builder.end(hides_last=False)
    builder.take()
    assert (builder.text, builder.stop_string) == (text, which)


CORPUS = ["오늘 날씨는 맑음입니다.", "don't stop , now !", "</tool> <tool> é€ 😀", "a  b\n\nc"] * 4


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A small one of either kind: byte-level BPE, or SentencePiece's, with bytes for the rest."""
    if request.param == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet)
        made.train_from_iterator(CORPUS, trainer)
        return made
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "▁a", "b", "</", "tool", ">", "▁날", "씨", "▁맑음", ".", "x"):
        vocabulary[piece] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@settings(max_examples=examples(60))
@given(data=st.data())
def test_real_tokenizers(tokenizer: Tokenizer, data: st.DataObject) -> None:
    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    vocabulary = tokenizer.get_vocab()
    if "▁" in vocabulary:
        pieces = [[vocabulary[p]] for p in sorted(vocabulary) if not p.startswith("<0x")]
        pieces += [[*c.encode()] for c in "é국😀\n"]
    else:
        pieces = [tokenizer.encode(word).ids for text in CORPUS for word in (text, text[-3:])]
    ids = [i for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=60)) for i in piece]
    stop = data.draw(st.lists(st.sampled_from(["</tool>", "씨", " 맑", "b", "\n"]), max_size=2))
    kept, text, which = expected(decode, stop, ids, 0)
    builder = TextBuilder(Detokenizer(decode, stop), 0)
    taken, shown = 0, ""
    while taken < len(ids) and builder.stop_string is None:
        size = data.draw(st.integers(1, 8))
        taken += builder.append(ids[taken : taken + size])
        shown += builder.take()
        assert text.startswith(shown)
    builder.end(hides_last=False)
    shown += builder.take()
    assert (taken, shown, builder.text, builder.stop_string) == (kept, text, text, which)


@pytest.mark.parametrize("said", ["국" * 40, "é국😀" * 20, "😀é" * 30])
def test_long_runs_of_characters_in_several_tokens(tokenizer: Tokenizer, said: str) -> None:
    """SentencePiece's decoder makes U+FFFD of a whole run of bytes that begins in a character."""
    by_bytes = "▁" in tokenizer.get_vocab()
    ids = [*said.encode()] if by_bytes else tokenizer.encode(said).ids
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids, skip_special_tokens=False)

    builder, shown = TextBuilder(Detokenizer(decode, ["never"]), 0), ""
    for token in ids:
        builder.append([token])
        shown += builder.take()
    builder.end(hides_last=False)
    assert (shown + builder.take(), builder.text) == (said, said)
    assert longest < 100


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("least", [0, 5, 17])
def test_stop_strings_in_runs_of_characters_in_several_tokens(
    tokenizer: Tokenizer, size: int, least: int
) -> None:
    said = "국é\n😀국국\nx국</tool>국국"
    by_bytes = "▁" in tokenizer.get_vocab()
    ids = [*said.encode()] if by_bytes else tokenizer.encode(said).ids

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    for stop in (["\n"], ["국\n"], ["국국"], ["</tool>", "\nx"]):
        prefixes = [decode(ids[:count]) for count in range(len(ids) + 1)]
        ends = [count for count, text in enumerate(prefixes) if not text.endswith("\ufffd")]
        before = max(len(prefixes[count]) for count in ends if count < max(least, 1))
        found = (
            (count, place, text)
            for count in ends
            for text in stop
            for place in [prefixes[count].find(text, max(before - len(text) + 1, 0))]
            if place >= 0 and count >= least
        )
        kept, place, which = min(found, default=(len(ids), len(said), None))
        builder, taken, shown = TextBuilder(Detokenizer(decode, stop), least), 0, ""
        while taken < len(ids) and builder.stop_string is None:
            taken += builder.append(ids[taken : taken + size])
            shown += builder.take()
        builder.end(hides_last=False)
        shown += builder.take()
        assert (taken, builder.stop_string) == (kept, which)
        assert shown == builder.text == said[:place]


@pytest.mark.parametrize("hides_last", [False, True])
@pytest.mark.parametrize("count", [1, 32, 33, 34, 40, 100])
@pytest.mark.parametrize("before", [0, 5, 33, 50])
def test_the_last_message_may_bring_many_tokens(count: int, before: int, hides_last: bool) -> None:
    ids = [ord("a") + i % 26 for i in range(before + count)]
    text = utf8(ids[:-1] if hides_last else ids)
    builder = TextBuilder(Detokenizer(utf8, ["never"]), 0)
    builder.append(ids[:before])
    shown = builder.take()
    builder.append(ids[before:])
    builder.end(hides_last=hides_last)
    assert (shown + builder.take(), builder.text) == (text, text)
    assert builder.text == text


def test_a_text_that_ends_within_a_character(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("국")[0][0]
    pieces = [f"<0x{byte:02X}>" for byte in "국".encode()] if "▁" in vocabulary else [*last]
    ids = ([vocabulary[piece] for piece in pieces] * 4)[:-1]
    builder = TextBuilder(Detokenizer(tokenizer.decode), 0)
    builder.append(ids)
    assert builder.text == "국국국\ufffd"
    builder.end(hides_last=False)
    assert builder.take() == builder.text == "국국국\ufffd"


def test_a_token_is_decoded_with_a_bounded_number_of_others() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return of_bytes(ids)

    builder = TextBuilder(Detokenizer(decode, ["never"]), 0)
    for _ in range(3000):
        builder.append([12])
        builder.take()
    assert longest < 100
    assert builder.text == of_bytes([12]) * 3000


@pytest.mark.parametrize(
    ("decode", "stop", "problem"),
    [
        ("text", (), "decode is"),
        (of_bytes, "</s>", "not a list of texts"),
        (of_bytes, [1], "not a list of texts"),
        (of_bytes, ["a", ""], "an empty text"),
    ],
)
def test_what_is_no_detokenizer_is_refused(decode: object, stop: object, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Detokenizer(decode, stop)


# Over the API: the server says these bytes, one a token, and then for ever "x".

SAID = "날씨: 맑음</tool> and on"
EOS = 300


def say(_: Sequence[int], output: Sequence[int]) -> int:
    said = SAID.encode()
    return said[len(output)] if len(output) < len(said) else ord("x")


def utf8(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


STOP = Detokenizer(utf8, ["</tool>"])
KEPT = len("날씨: 맑음</tool>".encode())


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer(say)


async def test_a_sequence_ends_where_the_string_is_complete(fake: FakeServer) -> None:
    async with fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
        done = await fleet.generate([1], Sampling(max_new_tokens=4000), detokenizer=STOP)
        async with RolloutClient(fake.address, timeouts=CLOSE) as client:
            alone = await client.generate([1], Sampling(max_new_tokens=4000), detokenizer=STOP)
        await until(lambda: fake.running == 0)  # they were aborted
    for trajectory in (done, alone):
        assert trajectory.token_ids == tuple("날씨: 맑음</tool>".encode())
        assert len(trajectory.logprobs) == KEPT == trajectory.segments[-1].end
        assert (trajectory.text, trajectory.stop_string) == ("날씨: 맑음", "</tool>")
        assert trajectory.complete
        assert trajectory.finish.reason is FinishReason.STOP
        assert (trajectory.finish.prompt_tokens, trajectory.finish.output_tokens) == (1, KEPT)
        assert trajectory.finish.stop_token_id is None


async def test_chunks_have_the_text_that_is_certain() -> None:
    fake = FakeServer(say, tokens_per_second=100)
    async with fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
        chunks = [c async for c in fleet.stream([1], detokenizer=STOP)]
        async with RolloutClient(fake.address, timeouts=CLOSE) as client:
            alone = [c async for c in client.stream([1], detokenizer=STOP)]
        await until(lambda: fake.running == 0)
    for read in (chunks, alone):
        text = ""
        for chunk in read:
            text += chunk.text
            assert "날씨: 맑음".startswith(text)
            assert (chunk.finish is None) == (chunk is not read[-1])
        assert text == "날씨: 맑음"
        assert sum(len(chunk.token_ids) for chunk in read) == KEPT
        assert sum(bool(chunk.text) for chunk in read) > 3  # as it came


async def test_a_server_learns_of_a_stop_string_before_the_reader_goes_on() -> None:
    async with (
        FakeServer(say, tokens_per_second=500) as fake,
        Fleet([fake.address], timeouts=CLOSE) as fleet,
        RolloutClient(fake.address, timeouts=CLOSE) as client,
    ):
        for sampler in (fleet, client):
            stream = sampler.stream([1], Sampling(max_new_tokens=50_000), detokenizer=STOP)
            async for chunk in stream:
                if chunk.finish is not None:
                    await until(lambda: fake.running == 0)
            assert chunk.finish.output_tokens == KEPT


async def test_the_text_of_other_ends(fake: FakeServer) -> None:
    async with fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
        cut = await fleet.generate([1], Sampling(max_new_tokens=5), detokenizer=STOP)
        token = ord("<")
        stopped = await fleet.generate([1], Sampling(stop_token_ids=[token]), detokenizer=STOP)
        later = await fleet.generate(
            [1], Sampling(min_new_tokens=KEPT + 1, max_new_tokens=KEPT + 5), detokenizer=STOP
        )
        plain = await fleet.generate([1], Sampling(max_new_tokens=5))
    assert (cut.text, cut.finish.reason) == ("날\ufffd", FinishReason.LENGTH)
    assert (stopped.text, stopped.token_ids[-1]) == ("날씨: 맑음", token)
    assert stopped.finish.stop_token_id == token
    assert (later.text, later.stop_string) == ("날씨: 맑음</tool> and ", None)
    assert (plain.text, plain.stop_string) == (None, None)


async def test_a_string_that_an_interruption_splits() -> None:
    async with (
        FakeServer(say, tokens_per_second=100) as one,
        FakeServer(say, tokens_per_second=100) as two,
        Fleet([one.address, two.address], timeouts=CLOSE) as fleet,
    ):
        text, tokens, faults = "", 0, [KEPT - 3, KEPT - 6]
        async with contextlib.aclosing(fleet.stream([1], detokenizer=STOP)) as stream:
            async for chunk in stream:
                text += chunk.text
                tokens += len(chunk.token_ids)
                if faults and tokens >= faults[-1]:
                    for server in (one, two):
                        server.interrupt() if len(faults) == 1 else server.cut()
                    faults.pop()
        assert len(one.requests) + len(two.requests) > 1
        assert (text, chunk.finish.output_tokens) == ("날씨: 맑음", KEPT)


async def test_turns_and_batches_end_at_stop_strings_too(fake: FakeServer, tmp_path) -> None:
    async with fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
        session = fleet.session([1])
        turn = await session.generate(detokenizer=STOP)
        assert (turn.text, len(session.token_ids)) == ("날씨: 맑음", 1 + KEPT)
        many = await fleet.generate_many([[1], [2]], n=2, detokenizer=STOP)
        assert {t.text for group in many for t in group} == {"날씨: 맑음"}
        options = {"detokenizer": STOP}
        async with Batcher(fleet, seed=1, group_size=2, options=options, bar=False) as batcher:
            prompts = iter([Prompt(str(i), [i + 1]) for i in range(2)])
            batch = await batcher.collect(prompts, 1, prefetch=1)
            assert [s.trajectory.stop_string for s in batch.groups[0].samples] == ["</tool>"] * 2
            await until(lambda: fake.running == 0)
            batcher.save(tmp_path / "buffer")
        async with Batcher(fleet, seed=1, group_size=2, options=options, bar=False) as batcher:
            batcher.load(tmp_path / "buffer")
            asked = len(fake.requests)
            (group,) = (await batcher.collect(iter(()), 1)).groups
            assert len(fake.requests) == asked  # complete when it was saved
            for sample in group.samples:
                assert dataclasses.replace(sample.trajectory, request_id="", segments=()) == (
                    dataclasses.replace(
                        batch.groups[0].samples[0].trajectory,
                        request_id="", segments=(), prompt_ids=(2,),
                    )
                )  # fmt: skip


async def test_an_error_of_decode_is_the_caller_s(fake: FakeServer) -> None:
    def broken(_: list[int]) -> str:
        raise ZeroDivisionError("of the tokenizer")

    async with fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
        with pytest.raises(ZeroDivisionError, match="of the tokenizer"):
            await fleet.generate([1], detokenizer=Detokenizer(broken, ["x"]))
        with pytest.raises(InvalidRequestError, match="detokenizer"):
            await fleet.generate([1], detokenizer=utf8)
        await until(lambda: fake.running == 0)
        assert len(fake.requests) == 1


@pytest.mark.parametrize("stop", [(), ["x"]])
async def test_tokens_that_decode_does_not_know_cost_their_group_alone(stop: Sequence[str]) -> None:
    def some(ids: list[int]) -> str:
        return "".join({5: "a", 6: "b"}[i] for i in ids)

    # A model's vocabulary may be larger than its tokenizer's.
    def say_seven(prompt: Sequence[int], output: Sequence[int]) -> int:
        return 7 if len(output) == 3 and prompt[0] == 1 else 5

    options = {"detokenizer": Detokenizer(some, stop)}
    sampling = Sampling(max_new_tokens=6)
    async with FakeServer(say_seven) as fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
        async with Batcher(
            fleet, seed=1, group_size=2, sampling=sampling, options=options, bar=False
        ) as batcher:
            prompts = iter([Prompt(str(i), [i]) for i in range(3)])
            batch = await batcher.collect(prompts, 2)
            assert [group.prompt.id for group in batch.groups] == ["0", "2"]
            (dropped,) = batch.dropped.groups
            assert isinstance(dropped.error, KeyError)
        session = fleet.session([1])
        with pytest.raises(KeyError):
            await session.generate(sampling, **options)
        assert session.token_ids[:5] == (1, 5, 5, 5, 7)  # none is lost


def test_left_over_tasks_of_a_stopped_stream(fake: FakeServer) -> None:
    async def run() -> None:
        async with fake, Fleet([fake.address], timeouts=CLOSE) as fleet:
            await asyncio.gather(*(fleet.generate([1], detokenizer=STOP) for _ in range(20)))
            await until(lambda: fake.running == 0)
            await until(lambda: fleet._pool.servers[0].outstanding_tokens == 0)

    asyncio.run(run())
