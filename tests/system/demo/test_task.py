"""The task: what an answer is worth, and what the trainer learns from."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from rollwire_client import Group, Prompt, Sample, Segment, Trajectory, WeightTag
from rollwire_demo.task import (
    ANSWER,
    BEGIN,
    LENGTH,
    LETTERS,
    VOCABULARY,
    Cipher,
    save_tokenizer,
    spell,
)
from rollwire_demo.trainer import make_policy, save_policy
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_the_right_answer_has_every_reward() -> None:
    task = Cipher(0)
    prompt = task.prompt()
    assert task.rewards(prompt, task.solution(prompt)) == [1.0] * LENGTH


def test_each_position_is_rewarded_by_itself() -> None:
    task = Cipher(1)
    prompt = task.prompt()
    answer = task.solution(prompt)
    answer[0] = (answer[0] + 1) % LETTERS
    answer[5] = ANSWER
    rewards = task.rewards(prompt, answer)
    assert [i for i, reward in enumerate(rewards) if reward == 0.0] == [0, 5]


def test_missing_positions_are_wrong() -> None:
    task = Cipher(2)
    prompt = task.prompt()
    rewards = task.rewards(prompt, task.solution(prompt)[:10])
    assert rewards == [1.0] * 10 + [0.0] * (LENGTH - 10)


def test_a_prompt_is_a_text_between_two_marks() -> None:
    task = Cipher(3)
    prompt = task.prompt()
    assert (prompt[0], prompt[-1], len(prompt)) == (BEGIN, ANSWER, LENGTH + 2)
    assert all(0 <= letter < LETTERS for letter in prompt[1:-1])
    assert max(prompt) < VOCABULARY
    assert task.prompt() != prompt


def test_every_letter_has_another_partner_and_a_seed_its_own_alphabet() -> None:
    text = [BEGIN, *range(LETTERS), ANSWER]
    partners = Cipher(4).solution(text)
    assert sorted(partners) == list(range(LETTERS))
    assert Cipher(4).solution(text) == partners
    assert Cipher(5).solution(text) != partners


def test_tokens_are_spelt_as_letters() -> None:
    assert spell([BEGIN, 0, 25, ANSWER]) == "·AZ·"


def trajectory(token_ids: list[int], *versions: int) -> Trajectory:
    """Sampled under these versions, a part each."""
    part = LENGTH // len(versions)
    return Trajectory(
        request_id="a",
        prompt_ids=(),
        token_ids=tuple(token_ids),
        logprobs=(0.0,) * LENGTH,
        segments=tuple(
            Segment(i * part, (i + 1) * part, WeightTag(version, version, "s", version), version)
            for i, version in enumerate(versions)
        ),
        finish=None,
        servers=("s",),
    )


def test_prompts_are_those_of_the_task_and_differ() -> None:
    made = list(islice(Cipher(3).prompts(), 20))
    assert len({prompt.id for prompt in made}) == len({tuple(p.token_ids) for p in made}) == 20
    again = Cipher(3)
    assert [prompt.token_ids for prompt in made] == [again.prompt() for _ in range(20)]


def test_each_token_is_rewarded_and_crossings_are_seen() -> None:
    task = Cipher(0)
    prompt = Prompt("0", task.prompt())
    right = task.solution(prompt.token_ids)
    half = right[: LENGTH // 2] + [-1] * (LENGTH // 2)
    samples = (Sample(trajectory(right, 1), None), Sample(trajectory(half, 1, 2), None))
    first, second = task.score([Group(prompt, samples)])
    assert (first.reward, first.crossed) == (1.0, False)
    assert (second.reward, second.crossed) == (0.5, True)
    assert task.rewarded(Group(prompt, samples)).rewards == (1.0, 0.5)
    assert list(second.rewards) == [1.0] * (LENGTH // 2) + [0.0] * (LENGTH // 2)


def test_the_tokenizer_reads_letters_and_makes_prompts_of_messages(tmp_path: Path) -> None:
    save_policy(make_policy(0), tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == VOCABULARY  # no token that the policy does not have
    message = {"role": "user", "content": "ABZ"}
    prompt = tokenizer.apply_chat_template([message], return_dict=False)
    assert prompt == [BEGIN, 0, 1, 25, ANSWER]
    assert tokenizer.decode([*prompt, 2]) == "⟨ABZ⟩ C"
