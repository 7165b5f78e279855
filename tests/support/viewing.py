"""Groups to look at, made up: word problems, answers that differ, updates that cross them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire_client import (
    Conversation,
    DropReason,
    Finish,
    FinishReason,
    Group,
    Prompt,
    Sample,
    Segment,
    StepFailedError,
    Trajectory,
    WeightTag,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVERS = ("10.0.0.11:7000", "10.0.0.12:7000", "10.0.0.13:7000")
IDS = tuple(f"{number:x}" * 32 for number in range(11, 11 + len(SERVERS)))  # of the processes
END = "<|im_end|>"
_TOKEN = re.compile(r"<\|\w+\|>|\n+| ?[^\W\d_]{1,6}|[^\W\d_]{1,6}|\d| ?[^\w\s]+|\s")

_THINGS = (
    ("bakery", "trays of muffins", "muffins"),
    ("library", "shelves of atlases", "atlases"),
    ("harbour", "crates of oranges", "oranges"),
    ("nursery", "rows of tulips", "tulips"),
    ("workshop", "boxes of gears", "gears"),
)
_STARTS = (
    "Let me work this out step by step.",
    "First, count what there is at the beginning.",
    "We are told three numbers; two of them are multiplied.",
    "Okay, so the question asks what is left in the evening.",
)
_CHECKS = (
    "Let me check this: {total} is {each} times {rows}, and taking away {sold} gives {left}.",
    "Wait, did I use the right numbers? {each} and {rows}, yes.",
    "Another way: sell first, then count. It comes to {left} too.",
    "The units agree, so this should be fine — naïve, but fine.",
)


class Words:
    """A tokenizer of words that grows as it meets them."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {END: 0}

    def encode(self, text: str) -> tuple[int, ...]:
        pieces = _TOKEN.findall(text)
        return tuple(self.ids.setdefault(piece, len(self.ids)) for piece in pieces)

    def save(self, path: Path) -> None:
        """As a tokenizer.json, whose vocabulary is in the form of byte-level ones."""
        shown = {piece.replace(" ", "Ġ").replace("\n", "Ċ"): i for piece, i in self.ids.items()}
        vocabulary = {
            "".join(c if c in "ĠĊ" else _byte_level(c) for c in piece): i
            for piece, i in shown.items()
        }
        content = {
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": END},
            "decoder": {"type": "ByteLevel"},
            "added_tokens": [{"id": 0, "content": END, "special": True}],
        }
        path.write_text(json.dumps(content))


def _byte_level(character: str) -> str:
    """Of the Latin-1 characters that ``encode`` meets, their UTF-8 bytes as GPT-2 writes them."""
    if character.isascii():
        return character
    return "".join(chr(b) if b >= 0xAE else chr(0x100 + b - 0x5E) for b in character.encode())


def word_problems(
    words: Words, count: int, size: int = 8, *, seed: int = 0, long: int = 0
) -> Iterator[Group]:
    """Groups of ``size`` samples; with ``long``, outputs are filled up to so many tokens."""
    draw = random.Random(seed)
    for number in range(count):
        place, rows_of, things = draw.choice(_THINGS)
        each, rows, sold = draw.randint(6, 24), draw.randint(3, 12), draw.randint(5, 17)
        text = (
            f"A {place} has {rows} {rows_of}, with {each} {things} each. During the day "
            f"{sold} {things} are sold. How many {things} are left?\nReason step by step, and end "
            "with “Answer: ” and the number."
        )
        facts = {"each": each, "rows": rows, "sold": sold, "total": each * rows}
        facts["left"] = facts["total"] - sold
        prompt = Prompt(f"math-{number:04}", words.encode(text), info={"answer": facts["left"]})
        first = 9 + number // 24
        dropped = draw.random() < 0.04
        samples = tuple(
            _sample(words, draw, prompt, facts, first, long, cut=dropped and index == 0)
            for index in range(size)
        )
        error = StepFailedError("no memory for another 512 tokens") if dropped else None
        yield Group(prompt, samples, DropReason.FAILED if dropped else None, error)


def conversation_of(group: Group, given: tuple[int, ...]) -> Group:
    """A group of one conversation: the first two samples as its turns, ``given`` after each."""
    token_ids = tuple(group.prompt.token_ids)
    logprobs, versions = [0.0] * len(token_ids), list[int | None]([None] * len(token_ids))
    mask, turns = [False] * len(token_ids), []
    for sample in group.samples[:2]:
        turn = replace(sample.trajectory, prompt_ids=token_ids)
        turns.append(turn)
        token_ids += turn.token_ids + given
        logprobs += [*turn.logprobs, *[0.0] * len(given)]
        versions += [*turn.versions, *[None] * len(given)]
        mask += [*[True] * len(turn.token_ids), *[False] * len(given)]
    conversation = Conversation(
        session_id="session",
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        mask=tuple(mask),
        turns=tuple(turns),
    )
    return replace(group, samples=(Sample(turns[-1], 0.5, conversation),))


def _sample(
    words: Words,
    draw: random.Random,
    prompt: Prompt,
    facts: dict[str, int],
    first: int,
    long: int,
    *,
    cut: bool,
) -> Sample:
    right = draw.random() < 0.35 + 0.04 * (first - 9)
    left = facts["left"] + (0 if right else draw.choice((-10, -1, 1, facts["sold"])))
    said = {**facts, "left": left}
    lines = [
        draw.choice(_STARTS),
        "{rows} * {each} = {total}, so {total} at first.".format(**said),
        *(draw.choice(_CHECKS).format(**said) for _ in range(draw.randint(1, 5))),
        f"{facts['total']} - {facts['sold']} = {left}.",
    ]
    token_ids = words.encode("\n\n".join(lines))
    while len(token_ids) < long:
        token_ids += words.encode("\n\n" + draw.choice(_CHECKS).format(**said))
    token_ids += words.encode(f"\n\nAnswer: {left}{END}")
    if cut:
        token_ids = token_ids[: len(token_ids) * 2 // 3]
    segments, servers = _segments(draw, len(token_ids), first)
    trajectory = Trajectory(
        request_id=draw.randbytes(16).hex(),
        prompt_ids=tuple(prompt.token_ids),
        token_ids=token_ids,
        logprobs=_logprobs(draw, len(token_ids)),
        segments=segments,
        finish=None if cut else Finish(FinishReason.STOP, 0, output_tokens=len(token_ids)),
        servers=servers,
    )
    reward = None if cut else (1.0 if right else 0.0) + round(0.2 * draw.random(), 3)
    return Sample(trajectory, reward)


def _logprobs(draw: random.Random, length: int) -> tuple[float, ...]:
    scales = (0.02, 0.02, 0.02, 0.1, 0.5, 2.5)
    return tuple(-draw.expovariate(1 / draw.choice(scales)) for _ in range(length))


def _segments(
    draw: random.Random, length: int, first: int
) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
    cuts = sorted(draw.sample(range(1, length), k=min(draw.choice((0, 1, 1, 2)), length - 1)))
    server = draw.randrange(len(SERVERS))
    servers, segments = [server], []
    for step, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        if step and draw.random() < 0.25:
            server = (server + 1) % len(SERVERS)
            servers.append(server)
        version = first + step
        tag = WeightTag(version, version, IDS[server], version * 0x9E3779B97F4A7C15 % 2**64)
        segments.append(Segment(start, end, tag, version))
    return tuple(segments), tuple(SERVERS[place] for place in servers)
