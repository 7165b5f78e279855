"""Groups in a file of JSON lines, to be looked at and counted; ``Batcher.save`` has another format.

A line is a group::

    {"format": "rollwire group 1",
     "prompt": {"id": "7", "epoch": 0, "token_ids": [1, 2], "info": null},
     "dropped": null, "error": null,
     "samples": [{"request_id": "…", "token_ids": [5], "logprobs": [-0.5], "reward": 1.0,
                  "segments": [{"start": 0, "end": 1, "weights": {"version": 3, "revision": 3,
                                "server_id": "…", "digest": "00000000000000ff"},
                                "oldest_kv_revision": 3}],
                  "finish": {"reason": "stop", "stop_token_id": 5, …}, "stop_string": null,
                  "servers": ["a:1"]}]}

A sample that is a conversation has its turns, each with the tokens that were given before it::

    {"session_id": "…", "turns": [{"given_ids": [], "request_id": …}, {"given_ids": [9], …}],
     "given_ids": [], "ended": true, "reward": 1.0}
"""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import asdict, replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rollwire.types import Finish, FinishReason, WeightTag

from rollwire_client._batches.batch import DropReason, Group, Prompt, Sample
from rollwire_client._batches.group import checked_prompt
from rollwire_client._errors import GroupFileError, InvalidRequestError, RollwireError
from rollwire_client._fleet.session import Conversation
from rollwire_client._trajectory import Segment, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FORMAT = "rollwire group 1"

_MAX_TOKEN_ID = (1 << 32) - 1
_MAX_COUNT = (1 << 63) - 1
_DIGEST_DIGITS = 16


def append_groups(path: str | os.PathLike[str], groups: Iterable[Group]) -> None:
    """Appends groups to a file, one line of JSON for each; makes the file if there is none.

    The file is for people and their scripts: ``rollwire view`` shows it, ``read_groups`` reads it.
    A trainer appends each batch, for example ``[*batch.groups, *batch.dropped.groups]``. The call
    blocks while it writes, about a second for a million tokens; from a coroutine, use
    ``asyncio.to_thread``.

    Log-probabilities are written as float32. ``Prompt.sampling``, text and routing are
    left out. A
    ``Prompt.info`` that cannot be JSON is written as its ``repr``.

    Raises:
        ValueError, TypeError, InvalidRequestError: A group cannot be written, such as one whose
            reward is NaN; nothing is written.
        OSError: The file cannot be written.
    """
    lines = [_line(group) for group in groups]
    with Path(path).open("ab") as file:
        if file.tell() and not _ends_line(Path(path)):  # whoever wrote before was killed at it
            file.write(b"\n")
        file.writelines(lines)


def read_groups(path: str | os.PathLike[str]) -> Iterator[Group]:
    """Yields the groups that ``append_groups`` wrote, in their order.

    ``Group.error`` is a ``RollwireError`` with the text of the error that was written.

    Raises:
        GroupFileError: A line is not such a group. The message names file and line, and says what
            to do.
        OSError: The file cannot be read.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                group = _group(_Object(_parsed(line), ""))
            except (ValueError, OverflowError, RecursionError) as error:
                cut = "" if line.endswith(b"\n") else " (it has no end: its writer was stopped)"
                raise GroupFileError(
                    f"{os.fspath(path)}, line {number}{cut}: {error}; delete the line, or write "
                    "the file again with append_groups"
                ) from error
            yield group


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _line(group: Group) -> bytes:
    prompt = _writable(group)
    fields = {
        "format": FORMAT,
        "prompt": {
            "id": prompt.id,
            "epoch": prompt.epoch,
            "token_ids": prompt.token_ids,
            "info": _json_value(prompt.info),
        },
        "dropped": None if group.dropped is None else group.dropped.value,
        "error": None if group.error is None else _error_text(group.error),
        "samples": [_sample_fields(sample, prompt) for sample in group.samples],
    }
    try:
        text = json.dumps(fields, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"prompt {prompt.id!r}: a reward or log-probability is not a finite number"
        ) from error
    return text.encode() + b"\n"


def _writable(group: Group) -> Prompt:
    """Its prompt with plain values, as far as it has any: for others it may have been refused."""
    prompt = group.prompt
    try:
        return checked_prompt(replace(prompt, sampling=None))
    except (TypeError, ValueError, InvalidRequestError):
        if group.samples:
            raise
        return Prompt(str(prompt.id), (), info=prompt.info)


def _json_value(info: object) -> object:
    try:
        json.dumps(info, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(info)
    return info


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def split_turns(
    sample: Sample, prompt_ids: Sequence[int]
) -> tuple[list[tuple[tuple[int, ...], Trajectory]], tuple[int, ...]]:
    """What was sampled, each turn with the tokens that were given before it, and what was given
    after the last turn.
    """
    if sample.conversation is None:
        return [((), sample.trajectory)], ()
    turns, so_far = [], len(prompt_ids)
    for turn in sample.conversation.turns:
        turns.append((turn.prompt_ids[so_far:], turn))
        so_far = len(turn.prompt_ids) + len(turn.token_ids)
    return turns, sample.conversation.token_ids[so_far:]


def _sample_fields(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    trajectory, conversation = sample.trajectory, sample.conversation
    begin = trajectory.prompt_ids if conversation is None else conversation.token_ids
    if begin[: len(prompt.token_ids) if conversation else None] != prompt.token_ids:
        raise ValueError(f"sequence {trajectory.request_id}: it has another prompt than its group")
    reward = None if sample.reward is None else float(sample.reward)
    if conversation is None:
        return {**_trajectory_fields(trajectory), "reward": reward}
    turns, given_ids = split_turns(sample, prompt.token_ids)
    return {
        "session_id": conversation.session_id,
        "turns": [{"given_ids": given, **_trajectory_fields(turn)} for given, turn in turns],
        "given_ids": given_ids,
        "ended": trajectory.finish is not None,
        "reward": reward,
    }


def _trajectory_fields(trajectory: Trajectory) -> dict[str, Any]:
    segments = []
    for segment in trajectory.segments:
        fields = asdict(segment)
        fields["weights"]["digest"] = f"{segment.weights.digest:016x}"
        segments.append(fields)
    finish = trajectory.finish
    return {
        "request_id": trajectory.request_id,
        "token_ids": trajectory.token_ids,
        "logprobs": [float(f"{value:.9g}") for value in trajectory.logprobs],
        "segments": segments,
        "finish": None if finish is None else {**asdict(finish), "reason": finish.reason.value},
        "stop_string": trajectory.stop_string,
        "servers": trajectory.servers,
    }


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error


class _Object:
    """An object of a line, whose fields are checked as they are read; ``where`` ends in a dot."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where.rstrip('.') or 'the line'} is not a JSON object")  # noqa: TRY004 - a file's
        self._value = value
        self.where = where

    def value(self, name: str) -> object:
        if name not in self._value:
            raise ValueError(f"{self.where}{name} is missing")
        return self._value[name]

    def has(self, name: str) -> bool:
        return name in self._value

    def boolean(self, name: str) -> bool:
        if not isinstance(value := self.value(name), bool):
            self.fail(name, "true or false")
        return value

    def text(self, name: str) -> str:
        if not isinstance(value := self.value(name), str):
            self.fail(name, "text")
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self.value(name) is None else self.text(name)

    def integer(self, name: str, minimum: int = 0) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, "an integer")
        if not minimum <= value <= _MAX_COUNT:
            self.fail(name, f"from {minimum} to {_MAX_COUNT}")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return None if self.value(name) is None else self.integer(name)

    def number_or_none(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            self.fail(name, "a finite number")
        return float(value)

    def items(self, name: str) -> list[Any]:
        if not isinstance(value := self.value(name), list):
            self.fail(name, "a list")
        return value

    def objects(self, name: str) -> list[_Object]:
        items = enumerate(self.items(name))
        return [_Object(item, f"{self.where}{name}[{index}].") for index, item in items]

    def object(self, name: str) -> _Object:
        return _Object(self.value(name), f"{self.where}{name}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        items = self.items(name)
        if not all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in items):
            self.fail(name, "a list of token ids")
        return tuple(items)

    def fail(self, name: str, expected: str) -> NoReturn:
        raise ValueError(f"{self.where}{name} is not {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _group(line: _Object) -> Group:
    if (found := line.value("format")) != FORMAT:
        raise ValueError(f"its format is {found!r:.40}, not {FORMAT!r}, which this release reads")
    fields = line.object("prompt")
    prompt_ids = fields.token_ids("token_ids")
    prompt = Prompt(
        id=fields.text("id"),
        token_ids=prompt_ids,
        epoch=fields.integer("epoch", minimum=-_MAX_COUNT - 1),
        info=fields.value("info"),
    )
    dropped, error = line.text_or_none("dropped"), line.text_or_none("error")
    return Group(
        prompt=prompt,
        samples=tuple(_sample(sample, prompt_ids) for sample in line.objects("samples")),
        dropped=None if dropped is None else _member(DropReason, dropped, "dropped"),
        error=None if error is None else RollwireError(error),
    )


def _sample(fields: _Object, prompt_ids: tuple[int, ...]) -> Sample:
    reward = fields.number_or_none("reward")
    if not fields.has("turns"):
        return Sample(_trajectory(fields, prompt_ids), reward)
    token_ids, turns = prompt_ids, list[Trajectory]()
    logprobs, versions = [0.0] * len(token_ids), list[int | None]([None] * len(token_ids))
    mask = [False] * len(token_ids)

    def add_given(given_ids: tuple[int, ...]) -> tuple[int, ...]:
        logprobs.extend([0.0] * len(given_ids))
        versions.extend([None] * len(given_ids))
        mask.extend([False] * len(given_ids))
        return token_ids + given_ids

    for turn_fields in fields.objects("turns"):
        token_ids = add_given(turn_fields.token_ids("given_ids"))
        turn = _trajectory(turn_fields, token_ids)
        turns.append(turn)
        token_ids += turn.token_ids
        logprobs += turn.logprobs
        versions += turn.versions
        mask += [True] * len(turn.token_ids)
    token_ids = add_given(fields.token_ids("given_ids"))
    conversation = Conversation(
        session_id=fields.text("session_id"),
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        mask=tuple(mask),
        turns=tuple(turns),
    )
    last = turns[-1] if turns else Trajectory("", prompt_ids, (), (), (), None, ())
    ended = fields.boolean("ended")
    return Sample(last if ended else replace(last, finish=None), reward, conversation)


def _trajectory(fields: _Object, prompt_ids: tuple[int, ...]) -> Trajectory:
    token_ids, logprobs = fields.token_ids("token_ids"), fields.items("logprobs")
    if len(logprobs) != len(token_ids) or not all(map(_is_number, logprobs)):
        fields.fail("logprobs", "a list of one number for each token")
    segments = tuple(_segment(segment) for segment in fields.objects("segments"))
    bounds = [0, *(segment.end for segment in segments)]
    starts = [*(segment.start for segment in segments), len(token_ids)]
    if bounds != starts or not all(a < b for a, b in pairwise(bounds)):
        fields.fail("segments", "a list of segments that cover the tokens in order")
    servers = fields.items("servers")
    if not all(isinstance(server, str) for server in servers):
        fields.fail("servers", "a list of addresses")
    return Trajectory(
        request_id=fields.text("request_id"),
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=tuple(array("f", logprobs)),
        segments=segments,
        finish=None if fields.value("finish") is None else _finish(fields.object("finish")),
        servers=tuple(servers),
        stop_string=fields.text_or_none("stop_string"),
    )


def _segment(fields: _Object) -> Segment:
    weights = fields.object("weights")
    digest = weights.text("digest")
    if len(digest) != _DIGEST_DIGITS or not set(digest) <= set("0123456789abcdef"):
        weights.fail("digest", f"{_DIGEST_DIGITS} hexadecimal digits")
    tag = WeightTag(
        version=weights.integer_or_none("version"),
        revision=weights.integer("revision"),
        server_id=weights.text("server_id"),
        digest=int(digest, 16),
    )
    return Segment(
        fields.integer("start"), fields.integer("end"), tag, fields.integer("oldest_kv_revision")
    )


def _finish(fields: _Object) -> Finish:
    return Finish(
        reason=_member(FinishReason, fields.text("reason"), f"{fields.where}reason"),
        stop_token_id=fields.integer_or_none("stop_token_id"),
        message=fields.text("message"),
        prompt_tokens=fields.integer("prompt_tokens"),
        output_tokens=fields.integer("output_tokens"),
        cached_prompt_tokens=fields.integer("cached_prompt_tokens"),
    )


def _member(kind: Any, value: str, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ValueError(f"{where} is {value!r:.40}, not one of {known}") from None
