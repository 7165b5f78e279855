"""``rollwire view``: what its page holds, texts of tokens, and mistakes. tests/browser opens it."""

from __future__ import annotations

import base64
import json
import re
import struct
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from client.batches.support import begun, held, prompts
from rollwire_client import Carry, Group, Prompt, RollwireError, Sample, append_groups, read_groups
from rollwire_client._cli.app import run
from rollwire_client._view.tokenizer import read_tokenizer
from support.viewing import END, Words, conversation_of, word_problems
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "Three naïve cafés, 12 ÷ 3 = 4 — 🙂 and 東京.\n\tEnd of it, the end, the very end."


def data_of(page: str, name: str) -> str:
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)
    assert match is not None
    return match[1]


def overview_of(page: str) -> Any:
    return json.loads(data_of(page, "overview"))


def numbers_of(page: str, name: str, code: str = "H") -> tuple[int, ...]:
    octets = base64.b64decode(data_of(page, name))
    return struct.unpack(f"<{len(octets) // struct.calcsize(code)}{code}", octets)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def groups(words: Words) -> list[Group]:
    return list(word_problems(words, 30, 2))


@pytest.fixture
def shown(tmp_path: Path, words: Words) -> Callable[..., str]:
    """The page of groups, by the command."""

    def view(groups: list[Group], *arguments: str) -> str:
        (tmp_path / "groups.jsonl").unlink(missing_ok=True)
        append_groups(tmp_path / "groups.jsonl", groups)
        words.save(tmp_path / "tokenizer.json")
        output = tmp_path / "page.html"
        assert (
            run(["view", str(tmp_path / "groups.jsonl"), "--output", str(output), *arguments]) == 0
        )
        return output.read_text("utf-8")

    return view


def test_a_page_has_every_token_with_its_logprob_and_its_weights(
    groups: list[Group], shown: Callable[..., str]
) -> None:
    page = shown(groups)
    overview = overview_of(page)
    vocabulary = overview["vocabulary"]
    tokens = iter(vocabulary[index] for index in numbers_of(page, "token-ids"))
    logprobs = iter(numbers_of(page, "logprobs"))
    for group, packed in zip(groups, overview["groups"], strict=True):
        assert [next(tokens) for _ in range(packed["prompt"])] == list(group.prompt.token_ids)
        assert packed["dropped"] == (group.dropped.value if group.dropped else None)
        assert (packed["error"] is None) == (group.error is None)
        for sample, fields in zip(group.samples, packed["samples"], strict=True):
            request_id, reward, finish, _, servers, length, segments = fields
            trajectory = sample.trajectory
            assert (request_id, reward) == (trajectory.request_id, sample.reward)
            assert finish == (trajectory.finish.reason.value if trajectory.finish else None)
            assert [overview["servers"][place] for place in servers] == list(trajectory.servers)
            assert [next(tokens) for _ in range(length)] == list(trajectory.token_ids)
            for exact in trajectory.logprobs:
                assert -next(logprobs) / 1000 == pytest.approx(exact, abs=0.001)
            for segment, (start, end, tag, kv_revision, server) in zip(
                trajectory.segments, segments, strict=True
            ):
                weights = segment.weights
                assert (start, end) == (segment.start, segment.end)
                assert overview["weights"][tag] == [
                    weights.version, weights.revision, weights.server_id, f"{weights.digest:016x}"
                ]  # fmt: skip
                assert kv_revision == segment.oldest_kv_revision
                assert overview["servers"][server].startswith("10.0.0.1")
    assert next(tokens, None) is next(logprobs, None) is None


def test_the_server_of_a_segment_is_left_open_where_it_is_not_known(
    groups: list[Group], shown: Callable[..., str]
) -> None:
    crossed = next(s for g in groups for s in g.samples if len(s.trajectory.segments) == 1)
    more = replace(crossed.trajectory, servers=("10.0.0.1:1", "10.0.0.2:1"))  # one sampled nothing
    prompt = Prompt("p", more.prompt_ids)
    page = shown([Group(prompt, (Sample(more, None),))])
    ((_, _, _, _, server),) = overview_of(page)["groups"][0]["samples"][0][-1]
    assert server is None


def test_more_than_65536_different_tokens_take_32_bits(
    groups: list[Group], shown: Callable[..., str]
) -> None:
    page = shown([Group(Prompt("p", range(70_000)), ())])
    assert numbers_of(page, "token-ids", "I")[-1] == 69_999


def test_texts_come_from_the_tokenizer(
    groups: list[Group], shown: Callable[..., str], tmp_path: Path
) -> None:
    without = overview_of(shown(groups))
    assert without["pieces"] is None
    overview = overview_of(shown(groups, "--tokenizer", str(tmp_path)))
    text = "".join(overview["pieces"])
    assert " naï" in text
    assert overview["special"] == [overview["vocabulary"].index(0)]


def test_nothing_that_is_shown_can_be_html(words: Words, shown: Callable[..., str]) -> None:
    evil = "</script><script>alert(1)</script><!--style--><img src=x>"
    token_ids = words.encode(evil)
    page = shown([Group(Prompt(evil, token_ids, info=evil), ())])
    assert page.count("</script") == page.count("<script") == 4  # three of data, one that runs
    assert "alert(1)" in overview_of(page)["groups"][0]["id"]
    assert re.search(r'(?:src|href)=(?!"data:,")', page.split("<script")[0]) is None


def test_the_name_of_a_file_is_text_too(tmp_path: Path, groups: list[Group]) -> None:
    path = tmp_path / "<img src=x>&.jsonl"
    append_groups(path, groups[:1])
    assert run(["view", str(path), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<title>&lt;img src=x&gt;&amp;.jsonl · rollwire view</title>" in page
    assert overview_of(page)["name"] == "<img src=x>&.jsonl"


def test_given_tokens_of_a_conversation_have_neither_logprobs_nor_weights(
    groups: list[Group], shown: Callable[..., str]
) -> None:
    group = conversation_of(groups[0], given=(1, 2))
    page = shown([group])
    overview = overview_of(page)
    (fields,) = overview["groups"][0]["samples"]
    _, _, _, _, _, length, segments = fields
    turns = group.samples[0].turns
    first, second = (len(turn.token_ids) for turn in turns)
    assert length == first + 2 + second + 2
    logprobs = numbers_of(page, "logprobs")
    assert [i for i, steps in enumerate(logprobs) if steps == 65535] == [
        first, first + 1, length - 2, length - 1
    ]  # fmt: skip
    covered = [i for start, end, *_ in segments for i in range(start, end)]
    assert covered == [i for i, steps in enumerate(logprobs) if steps != 65535]


async def test_a_saved_buffer_is_shown_while_its_groups_are_under_way(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    async with held(2, version=3, reward=lambda p, t: 1.0) as (_, batcher):
        await batcher.collect(prompts(), 1, version=3, over_sample=2.0, tail=Carry())
        await begun(batcher, "1")
        batcher.save(path)
    assert run(["view", str(path), "--output", str(tmp_path / "page.html")]) == 0
    overview = overview_of((tmp_path / "page.html").read_text())
    (group,) = overview["groups"]
    assert group["id"] == "1"
    assert json.loads(group["info"]) == {"answer": 1}
    assert [fields[2] for fields in group["samples"]] == [None, None]  # unfinished
    assert "version 3; groups handed out before: 1, dropped: 0" in overview["summary"]


def trained(kind: str) -> Tokenizer:
    """A tokenizer that learned to write TEXT, of a kind that checkpoints have."""
    special = [END]
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        )  # fmt: skip
    elif kind == "byte-fallback":
        octets = [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special + octets, limit_alphabet=20, show_progress=False
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=special, unk_token=END, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=END))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(
            vocab_size=120, special_tokens=special, show_progress=False
        )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:1]  # bytes are plain tokens
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "unigram", "word-piece"])
def test_pieces_join_to_what_the_tokenizer_decodes(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    read = read_tokenizer(tmp_path)
    joined = b"".join(read.pieces[i] for i in ids).decode()
    expected = tokenizer.decode(ids)
    assert joined.lstrip() == expected  # a decoder of words leaves out the first space
    assert len(expected) > 50
    assert read.special >= {0}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "does not exist: save the tokenizer in this format"),
        ("{", "is not JSON"),
        ("[]", "is not a tokenizer"),
        ("{}", "is not a tokenizer"),
        ('{"model": {"vocab": 5}}', "is not a tokenizer"),
        ('{"model": {"vocab": {}}, "added_tokens": [{}]}', "is not a tokenizer"),
        ('{"model": {"vocab": {}}, "decoder": {"decoders": [5]}}', "is not a tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_told(
    content: str | None, told: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RollwireError, match=told) as caught:
        read_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, groups: list[Group], capfd: pytest.CaptureFixture[str]
) -> None:
    whole, output = tmp_path / "groups.jsonl", tmp_path / "page.html"
    append_groups(whole, groups[:2])
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "pickle").write_bytes(b"\x80\x04K\x01.")
    (tmp_path / "damaged").write_bytes(b"rollwire buffer 1\nabc")
    (tmp_path / "broken").write_bytes(whole.read_bytes() + b"{}\n")
    for name, code, told in (
        ("nowhere", 2, "nowhere"),
        ("empty", 1, "has no groups"),
        ("pickle", 1, "is neither a buffer that Batcher.save wrote nor a file that append_groups"),
        ("damaged", 1, "is damaged"),
        ("broken", 1, "broken, line 3: format is missing; delete the line"),
    ):
        assert run(["view", str(tmp_path / name), "--output", str(output)]) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert told in err
        assert err.startswith("rollwire: ")
        assert err.count("\n") == 1
        assert not output.exists()
    before = whole.read_bytes()
    assert run(["view", str(whole), "--output", str(whole)]) == 2
    assert whole.read_bytes() == before
    assert run(["view", str(whole), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot be written" in capfd.readouterr().err


GUIDE = (Path(__file__).parents[2] / "docs" / "viewing.md").read_text()


def test_the_guide_shows_a_line_that_is_read(tmp_path: Path) -> None:
    match = re.search(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    assert match is not None
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps(json.loads(match[1])))
    (group,) = read_groups(path)
    append_groups(tmp_path / "again", [group])
    assert json.loads((tmp_path / "again").read_text()) == json.loads(match[1])


def test_the_guide_names_every_filter() -> None:
    script = files("rollwire_client._view").joinpath("search.js").read_text("utf-8")
    filters = re.findall(r"^  (\w+): \(value\) =>", script, re.MULTILINE)
    assert len(filters) > 10
    for name in ["token", *filters]:
        assert f"`{name}:" in GUIDE
