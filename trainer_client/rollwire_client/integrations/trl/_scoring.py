"""Rewards and advantages of a group, as TRL's AsyncGRPO computes them."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from rollwire_client._batches.callbacks import is_async
from rollwire_client._concurrency import cancel_all, run_in_thread
from rollwire_client._errors import CallbackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from rollwire_client._batches.batch import Group, Sample
    from rollwire_client.integrations.trl._conversation import Conversations, Task

_OWN_COLUMNS = {"prompt", "completion", "completion_ids"}


class Scorer:
    """Makes a trainer's samples of complete groups."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        conversations: Conversations,
        timeout: float,
    ) -> None:
        if not functions:
            raise ValueError("there are no reward functions")
        self._functions = {_name(function): function for function in functions}
        if len(self._functions) < len(functions):
            raise ValueError("two reward functions have one name")
        self._conversations = conversations
        self._timeout = timeout

    async def samples(self, group: Group, model_version: int) -> list[Any]:
        """The samples of a group whose oldest token is of ``model_version``.

        Raises:
            CallbackError: A reward function raised, took too long, or gave another number of
                rewards.
        """
        # TRL warns when it is imported: not where only GRPOTrainer is used.
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        task: Task = group.prompt.info
        completions = [self._conversations.messages(sample, task) for sample in group.samples]
        rewards = await self._rewards(group, task, completions)
        total = np.where(np.isnan(rewards).all(axis=0), np.nan, np.nansum(rewards, axis=0))
        scored = ~np.isnan(total)
        mean = float(total[scored].mean()) if scored.any() else float("nan")
        std = float(total[scored].std()) if scored.any() else float("nan")
        advantages = np.where(scored, (total - mean) / (std + 1e-8), 0.0)
        made = []
        for number, sample in enumerate(group.samples):
            token_ids, mask, logprobs = _row(sample)
            metrics = {"reward": float(total[number]), "reward_std": std}
            for name, of_function in zip(self._functions, rewards, strict=True):
                metrics[f"rewards/{name}"] = float(of_function[number])
            use = self._conversations.tool_use(sample, task)
            if self._conversations.tools:
                metrics["tools/call_frequency"] = float(use.calls)
                metrics["tools/failure_frequency"] = use.failures / max(use.calls, 1)
            made.append(
                RolloutSample(
                    prompt=task.row["prompt"],
                    completion=completions[number],
                    input_ids=np.asarray(token_ids, dtype=np.int64),
                    completion_mask=np.asarray(mask, dtype=np.int64),
                    old_log_probs=np.asarray(logprobs, dtype=np.float32),
                    advantage=float(advantages[number]),
                    model_version=model_version,
                    group_id=task.number,
                    metrics=metrics,
                )
            )
        return made

    async def _rewards(
        self, group: Group, task: Task, completions: list[list[dict[str, Any]]]
    ) -> NDArray[np.float64]:
        """[functions, samples]; NaN where a function gives None."""
        size = len(group.samples)
        arguments: dict[str, Any] = {
            name: [value] * size for name, value in task.row.items() if name not in _OWN_COLUMNS
        }
        arguments["prompts"] = [task.row["prompt"]] * size
        arguments["completions"] = completions
        arguments["completion_ids"] = [
            [token for turn in sample.turns for token in turn.token_ids] for sample in group.samples
        ]
        calls = [
            asyncio.create_task(self._call(name, function, arguments))
            for name, function in self._functions.items()
        ]
        try:
            rows = await asyncio.gather(*calls)
        finally:
            await cancel_all(calls)
        for name, row in zip(self._functions, rows, strict=True):
            if len(row) != size:
                raise CallbackError(
                    f"the reward function {name} gave {len(row)} rewards for {size} completions",
                    callback="reward",
                )
        return np.array([[np.nan if r is None else r for r in row] for row in rows], dtype=float)

    async def _call(
        self, name: str, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> list[float | None]:
        try:
            async with asyncio.timeout(self._timeout):
                if is_async(function):
                    return list(await function(**arguments))
                return list(await run_in_thread(functools.partial(function, **arguments)))
        except TimeoutError as error:
            raise CallbackError(
                f"the reward function {name} took more than {self._timeout:g} s", callback="reward"
            ) from error
        except Exception as error:
            raise CallbackError(
                f"the reward function {name} raised {error!r}", callback="reward"
            ) from error


def _name(function: Any) -> str:
    """Of a function, or of what a ``functools.partial`` or an object calls."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__name__", type(function).__name__))


def _row(sample: Sample) -> tuple[Sequence[int], Sequence[bool], Sequence[float]]:
    """Token ids, mask and log-probabilities of all that was given and sampled."""
    if (conversation := sample.conversation) is not None:
        return conversation.token_ids, conversation.mask, conversation.logprobs
    trajectory, given = sample.trajectory, len(sample.trajectory.prompt_ids)
    return (
        trajectory.prompt_ids + trajectory.token_ids,
        (False,) * given + (True,) * len(trajectory.token_ids),
        (0.0,) * given + trajectory.logprobs,
    )
