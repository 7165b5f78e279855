"""The task: a substitution cipher that nobody tells the policy.

A prompt is a text of random letters. The answer is to write, for each of them in order, the letter
that stands for it in a secret alphabet. The policy starts from random weights and has to find out
both where to look and what each letter becomes, from nothing but its rewards.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LETTERS = 26
LENGTH = 32  # letters of a text, and tokens of an answer
BEGIN, ANSWER = LETTERS, LETTERS + 1  # what a prompt begins and ends with
VOCABULARY = LETTERS + 2


class Cipher:
    """A secret alphabet, and random texts to write in it.

    Args:
        seed: Of both.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"cipher {seed}")  # noqa: S311 - no secret but to the policy
        self._alphabet = self._random.sample(range(LETTERS), LETTERS)

    def prompt(self) -> list[int]:
        """The token ids of the next prompt: BEGIN, the letters, ANSWER."""
        return [BEGIN, *self._random.choices(range(LETTERS), k=LENGTH), ANSWER]

    def solution(self, prompt: Sequence[int]) -> list[int]:
        """The token ids of the right answer."""
        return [self._alphabet[letter] for letter in prompt[1:-1]]

    def rewards(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """For each position of the answer 1.0 where it has the right letter, 0.0 where not.

        Their mean is the sequence's reward. Missing positions count as wrong.
        """
        given = [*answer, *[-1] * LENGTH]
        return [float(a == b) for a, b in zip(self.solution(prompt), given, strict=False)]


def spell(tokens: Sequence[int]) -> str:
    """Tokens for people: letters, and a dot for what is none."""
    return "".join(chr(ord("A") + token) if token < LETTERS else "·" for token in tokens)
