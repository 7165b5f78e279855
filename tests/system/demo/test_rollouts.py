"""What the trainer learns from."""

from __future__ import annotations

from itertools import islice

from rollwire_client import Group, Prompt, Sample, Segment, Trajectory, WeightTag
from rollwire_demo.task import LENGTH, Cipher


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
    assert list(second.rewards) == [1.0] * (LENGTH // 2) + [0.0] * (LENGTH // 2)
