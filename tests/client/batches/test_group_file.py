"""Groups in files of JSON lines: what is written is read, and what nobody writes is told."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollwire_client import (
    Conversation,
    DropReason,
    Finish,
    FinishReason,
    Group,
    GroupFileError,
    Prompt,
    RollwireError,
    Sample,
    Segment,
    StepFailedError,
    Trajectory,
    WeightTag,
    append_groups,
    read_groups,
)
from support.viewing import conversation_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TAGS = (
    WeightTag(3, 4, "server-a", 2**64 - 1),
    WeightTag(None, 0, "server-b", 0),
)


def float32(value: float) -> float:
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


def sample(prompt: tuple[int, ...] = (1, 2), reward: float | None = 0.25) -> Sample:
    trajectory = Trajectory(
        request_id="request",
        prompt_ids=prompt,
        token_ids=(5, 6, 2**32 - 1),
        logprobs=tuple(map(float32, (-0.1, -1 / 3, -12.345678))),
        segments=(Segment(0, 2, TAGS[0], 3), Segment(2, 3, TAGS[1], 0)),
        finish=Finish(FinishReason.STOP, 7, "a\nmessage", 2, 3, 1),
        servers=("10.0.0.1:7000", "10.0.0.2:7000"),
        stop_string="\n\n",
    )
    return Sample(trajectory, reward)


UNFINISHED = Sample(Trajectory("", (1, 2), (), (), (), None, ()), None)
WHOLE = Group(Prompt("p </script> é", (1, 2), epoch=-1, info={"answer": [4]}), (sample(),))
DROPPED = Group(Prompt("q", (1, 2)), (sample(), UNFINISHED), DropReason.CUT)


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    append_groups(path, [WHOLE])
    append_groups(path, iter([DROPPED]))
    assert list(read_groups(path)) == [WHOLE, DROPPED]
    assert path.read_bytes().count(b"\n") == 2


def test_a_conversation_is_read_with_its_turns(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    group = conversation_of(replace(WHOLE, samples=(sample(), sample())), given=(8, 9))
    (told,) = group.samples
    unfinished = replace(told, trajectory=replace(told.trajectory, finish=None), reward=None)
    assert told.conversation is not None
    begun = Conversation("s", (1, 2), (0.0, 0.0), (None, None), (False, False), ())
    empty = Sample(Trajectory("", (1, 2), (), (), (), None, ()), None, begun)
    written = replace(group, samples=(told, unfinished, empty))
    append_groups(path, [written])
    assert list(read_groups(path)) == [written]


def test_an_error_is_read_as_its_text(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    append_groups(path, [replace(DROPPED, error=StepFailedError("no memory"))])
    (read,) = read_groups(path)
    assert type(read.error) is RollwireError
    assert str(read.error) == "StepFailedError: no memory"


@pytest.mark.parametrize(
    "wrong",
    [{"token_ids": ["no token"]}, {"epoch": "first"}, {"epoch": 2**63}, {"token_ids": [-1]}],
)
def test_a_prompt_that_was_refused_is_written_as_far_as_it_can_be(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    path = tmp_path / "groups.jsonl"
    refused = replace(Prompt("bad", [1], info=object), **wrong)
    append_groups(path, [Group(refused, (), DropReason.FAILED, ValueError("no integers"))])
    (read,) = read_groups(path)
    assert (read.prompt.id, read.prompt.token_ids) == ("bad", ())
    assert read.prompt.info == repr(object)
    assert read.dropped is DropReason.FAILED


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (replace(WHOLE, samples=(sample(reward=float("nan")),)), "not a finite number"),
        (replace(WHOLE, samples=(sample(prompt=(9,)),)), "another prompt than its group"),
    ],
)
def test_a_group_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, group: Group, told: str
) -> None:
    path = tmp_path / "groups.jsonl"
    append_groups(path, [WHOLE])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=told):
        append_groups(path, [DROPPED, group])
    assert path.read_bytes() == before


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    append_groups(path, [WHOLE])
    with path.open("ab") as file:
        file.write(b'{"format": "roll')
    with pytest.raises(GroupFileError, match=r"line 2 \(it has no end: its writer was stopped\)"):
        list(read_groups(path))
    append_groups(path, [DROPPED])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\n" + lines[2])  # as the error says; empty lines do no harm
    assert list(read_groups(path)) == [WHOLE, DROPPED]


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Changes a field of a line; ``...`` takes it away."""

    def change(line: dict[str, Any]) -> None:
        *parents, name = [int(part) if part.isdigit() else part for part in path.split("/")]
        at: Any = line
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[name]
        else:
            at[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            put("format", "rollwire group 2"),
            r"format is 'rollwire group 2', not 'rollwire group 1'",
        ),
        (put("format", ...), "format is missing"),
        (put("prompt", 5), "prompt is not a JSON object"),
        (put("prompt/id", 5), "prompt.id is not text"),
        (put("prompt/epoch", 0.5), "prompt.epoch is not an integer"),
        (put("prompt/token_ids", [1, -1]), "prompt.token_ids is not a list of token ids"),
        (put("prompt/token_ids", [True]), "prompt.token_ids is not a list of token ids"),
        (put("prompt/token_ids", [2**32]), "prompt.token_ids is not a list of token ids"),
        (put("dropped", "lost"), "dropped is 'lost', not one of tail, stale"),
        (put("samples", {}), "samples is not a list"),
        (put("samples/0/token_ids", "abc"), r"samples\[0\].token_ids is not a list"),
        (put("samples/0/logprobs", [0.0]), r"samples\[0\].logprobs is not a list of one number"),
        (put("samples/0/logprobs", [0, 0, "0"]), r"samples\[0\].logprobs"),
        (put("samples/0/logprobs", [0, 0, 10**400]), "too large"),
        (put("samples/0/segments", []), r"samples\[0\].segments is not a list of segments that"),
        (put("samples/0/segments/1/end", 2), r"samples\[0\].segments"),
        (put("samples/0/segments/0/weights/digest", "xyz"), r"segments\[0\].weights.digest"),
        (put("samples/0/segments/0/weights/version", -1), r"weights.version is not from 0"),
        (put("samples/0/servers", [1]), r"samples\[0\].servers is not a list of addresses"),
        (put("samples/0/reward", "high"), r"samples\[0\].reward is not a finite number"),
        (put("samples/0/reward", float("inf")), r"samples\[0\].reward is not a finite number"),
        (put("samples/0/finish/reason", "tired"), r"finish.reason is 'tired', not one of stop"),
        (put("samples/0/request_id", None), r"samples\[0\].request_id is not text"),
    ],
)
def test_a_wrong_line_is_told_with_its_file_and_number(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    path = tmp_path / "groups.jsonl"
    append_groups(path, [WHOLE, WHOLE])
    first, second = path.read_text().splitlines()
    line = json.loads(second)
    change(line)
    path.write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(GroupFileError, match=told) as caught:
        list(read_groups(path))
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert str(caught.value).endswith("delete the line, or write the file again with append_groups")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"[1]", "the line is not a JSON object"),
        (b'{"a": ', "not JSON at column"),
        (b"\xff{}", "not UTF-8 text"),
        (b"[" * 100_000, "recursion"),
        (b'{"format": ' + b"9" * 5000 + b"}", "digits"),
    ],
    ids=["list", "cut", "bytes", "deep", "long"],
)
def test_what_is_no_json_object_is_told(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(GroupFileError, match=told):
        list(read_groups(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


def places(value: Any, path: str = "") -> Iterator[str]:
    """Of every field of a line."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield f"{path}{name}"
        if isinstance(inner, dict | list):
            yield from places(inner, f"{path}{name}/")


@given(data=st.data())
def test_whatever_a_field_is_the_line_is_read_or_told(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("groups") / "groups.jsonl"
    append_groups(path, [DROPPED, WHOLE])
    first, second = path.read_text().splitlines()
    line = json.loads(second)
    put(data.draw(st.sampled_from(list(places(line)))), data.draw(JSON))(line)
    path.write_text(f"{first}\n{json.dumps(line)}\n")
    groups = read_groups(path)
    assert next(groups) == DROPPED
    try:
        group = next(groups)
    except GroupFileError as error:
        assert f"{path}, line 2: " in str(error)  # noqa: PT017 - or it is read
    else:
        append_groups(path, [group])
