"""The task: a substitution cipher that nobody tells the policy.

A prompt is a text of random letters. The answer is to write, for each of them in order, the letter
that stands for it in a secret alphabet. The policy starts from random weights and has to find out
both where to look and what each letter becomes, from nothing but its rewards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from typing import TYPE_CHECKING

from rollwire_client import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from rollwire_client import Group, Trajectory

LETTERS = 26
LENGTH = 32  # letters of a text, and tokens of an answer
BEGIN, ANSWER = LETTERS, LETTERS + 1  # what a prompt begins and ends with
VOCABULARY = LETTERS + 2


class Cipher:
    """A secret alphabet, and random texts to write in it; ``seed`` fixes both."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"cipher {seed}")  # noqa: S311 - no secret but to the policy
        self._alphabet = self._random.sample(range(LETTERS), LETTERS)

    def prompt(self) -> list[int]:
        """The token ids of the next prompt: BEGIN, the letters, ANSWER."""
        return [BEGIN, *self._random.choices(range(LETTERS), k=LENGTH), ANSWER]

    def prompts(self) -> Iterator[Prompt]:
        for number in count():
            yield Prompt(str(number), self.prompt())

    def solution(self, prompt: Sequence[int]) -> list[int]:
        return [self._alphabet[letter] for letter in prompt[1:-1]]

    def rewards(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """For each position of the answer 1.0 where it has the right letter, 0.0 where not.

        Their mean is the sequence's reward. Missing positions count as wrong.
        """
        padded = [*answer, *[-1] * LENGTH]
        return [float(a == b) for a, b in zip(self.solution(prompt), padded, strict=False)]

    def rewarded(self, group: Group) -> Group:
        """The group with its samples' rewards, for ``rollwire view``."""
        return replace(
            group,
            samples=tuple(
                replace(
                    sample,
                    reward=fmean(self.rewards(group.prompt.token_ids, sample.trajectory.token_ids)),
                )
                for sample in group.samples
            ),
        )

    def score(self, groups: Iterable[Group]) -> list[ScoredAnswer]:
        return [
            ScoredAnswer(
                sample.trajectory, self.rewards(group.prompt.token_ids, sample.trajectory.token_ids)
            )
            for group in groups
            for sample in group.samples
        ]


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """A sampled sequence, and the reward of each of its tokens."""

    trajectory: Trajectory
    rewards: Sequence[float]

    @property
    def reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def crossed(self) -> bool:
        """Whether an update came in between: its tokens are of more than one version."""
        return len(set(self.trajectory.versions)) > 1


def spell(tokens: Sequence[int]) -> str:
    """Tokens for people: letters, and a dot for what is none."""
    return "".join(chr(ord("A") + token) if token < LETTERS else "·" for token in tokens)


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of the letters. Its chat template makes a prompt of the last message."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    begin, answer = "⟨", "⟩ "
    letters = {spell([letter]): letter for letter in range(LETTERS)}
    made = Tokenizer(models.BPE(letters | {begin: BEGIN, answer: ANSWER}, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_tokens([AddedToken(text, normalized=False) for text in (begin, answer)])
    # Named, as transformers otherwise adds its own to the tokenizer of this type of model.
    special = dict.fromkeys(("unk_token", "eos_token", "pad_token"), begin)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = f"{begin}{{{{ messages[-1].content }}}}{answer}"
    tokenizer.save_pretrained(folder)
