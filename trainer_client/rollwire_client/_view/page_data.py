"""Groups as the page has them.

Tokens and log-probabilities of all samples are two columns of numbers; all else is one JSON value.
``data.js`` reads both.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from rollwire_client._batches.group_file import split_turns

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from rollwire_client._batches.batch import Group, Sample
    from rollwire_client._trajectory import Trajectory
    from rollwire_client._view.tokenizer import Tokenizer

K = TypeVar("K", bound="Hashable")

_LOGPROB_STEP = 0.001
_LOGPROB_MOST = 65534  # steps; lower log-probabilities are shown as this one
_LOGPROB_UNKNOWN = 65535  # not a number, or not sampled


@dataclass(frozen=True, slots=True)
class PageData:
    """What a page shows.

    Attributes:
        overview: All but the columns, for JSON.
        token_ids: Base64 of the index of each token in ``overview["vocabulary"]``, little-endian:
            16 bits if those suffice, else 32. Of each group the prompt, then each sample's tokens.
        logprobs: Base64 of the log-probability of each token of a sample, as steps of -0.001 of 16
            bits; 65535 for tokens that were given, such as a tool's output.
    """

    overview: dict[str, Any]
    token_ids: str
    logprobs: str


def page_data(groups: Iterable[Group], tokenizer: Tokenizer | None) -> PageData:
    packer = _Packer()
    listed = [packer.add(group) for group in groups]
    vocabulary = list(packer.vocabulary)
    overview = {
        "groups": listed,
        "weights": [_weights(tag) for tag in packer.weights],
        "servers": list(packer.servers),
        "vocabulary": vocabulary,
        "pieces": None if tokenizer is None else [_piece(tokenizer, id_) for id_ in vocabulary],
        "special": [
            i for i, id_ in enumerate(vocabulary) if tokenizer and id_ in tokenizer.special
        ],
    }
    narrow = len(vocabulary) <= 1 << 16
    token_ids = array("H", packer.token_ids) if narrow else packer.token_ids
    return PageData(overview, _base64(token_ids), _base64(packer.logprobs))


@dataclass(slots=True)
class _Packer:
    """Tables of what is met, by their order, and the columns."""

    vocabulary: dict[int, int] = field(default_factory=dict)
    weights: dict[Any, int] = field(default_factory=dict)
    servers: dict[str, int] = field(default_factory=dict)
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[int] = field(default_factory=lambda: array("H"))

    def add(self, group: Group) -> dict[str, Any]:
        self._add_tokens(group.prompt.token_ids)
        info = group.prompt.info
        return {
            "id": group.prompt.id,
            "epoch": group.prompt.epoch,
            "info": None if info is None else json.dumps(info, indent=1, ensure_ascii=False),
            "dropped": None if group.dropped is None else group.dropped.value,
            "error": None if group.error is None else str(group.error),
            "prompt": len(group.prompt.token_ids),
            "samples": [
                self._add_sample(sample, group.prompt.token_ids) for sample in group.samples
            ],
        }

    def _add_sample(self, sample: Sample, prompt_ids: Sequence[int]) -> list[Any]:
        """In the order of ``data.js``."""
        turns, rest = split_turns(sample, prompt_ids)
        length, segments = 0, list[list[int | None]]()
        for given, turn in turns:
            length += self._add_given(given)
            self._add_tokens(turn.token_ids)
            self.logprobs.extend(map(_steps, turn.logprobs))
            segments += self._segments(turn, length)
            length += len(turn.token_ids)
        length += self._add_given(rest)
        last, conversation = sample.trajectory, sample.conversation
        finish = last.finish
        servers = dict.fromkeys(server for turn in sample.turns for server in turn.servers)
        return [
            last.request_id if conversation is None else conversation.session_id,
            sample.reward,
            None if finish is None else finish.reason.value,
            _finish_text(last),
            [_number(self.servers, server) for server in servers],
            length,
            segments,
        ]

    def _add_given(self, token_ids: Sequence[int]) -> int:
        self._add_tokens(token_ids)
        self.logprobs.extend([_LOGPROB_UNKNOWN] * len(token_ids))
        return len(token_ids)

    def _segments(self, trajectory: Trajectory, begin: int) -> list[list[int | None]]:
        """Of each: its start and end, weights, oldest KV revision, and server if that is known."""
        servers = _servers_of_segments(trajectory)
        return [
            [
                begin + segment.start,
                begin + segment.end,
                _number(self.weights, segment.weights),
                segment.oldest_kv_revision,
                None if server is None else _number(self.servers, server),
            ]
            for segment, server in zip(trajectory.segments, servers, strict=True)
        ]

    def _add_tokens(self, token_ids: Iterable[int]) -> None:
        vocabulary = self.vocabulary
        self.token_ids.extend([vocabulary.setdefault(t, len(vocabulary)) for t in token_ids])


def _servers_of_segments(trajectory: Trajectory) -> list[str | None]:
    """The address of each segment's server. A segment has only the id of its process; the
    addresses, in order, match these where no server was restarted or sampled nothing.
    """
    ids = [segment.weights.server_id for segment in trajectory.segments]
    if len(set(trajectory.servers)) == 1:
        return [trajectory.servers[0] for _ in ids]
    changes = [a != b for a, b in pairwise(ids)]
    if not ids or sum(changes) + 1 != len(trajectory.servers):
        return [None for _ in ids]
    places = [sum(changes[:index]) for index in range(len(ids))]
    return [trajectory.servers[place] for place in places]


def _finish_text(trajectory: Trajectory) -> str:
    if trajectory.stop_string is not None:
        return f"stop string {json.dumps(trajectory.stop_string, ensure_ascii=False)}"
    return "" if trajectory.finish is None else trajectory.finish.message


def _number(table: dict[K, int], key: K) -> int:
    return table.setdefault(key, len(table))


def _steps(logprob: float) -> int:
    if math.isnan(logprob):
        return _LOGPROB_UNKNOWN
    return round(min(max(-logprob / _LOGPROB_STEP, 0.0), _LOGPROB_MOST))


def _weights(tag: Any) -> list[Any]:
    return [tag.version, tag.revision, tag.server_id, f"{tag.digest:016x}"]


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int] | None:
    """Its text; its bytes if these are a part of a character; None if the tokenizer has it not."""
    piece = tokenizer.pieces.get(token_id)
    if piece is None:
        return None
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _base64(column: array[int]) -> str:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode()
