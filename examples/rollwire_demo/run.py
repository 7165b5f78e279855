"""The course of the demo: servers up, train and publish, servers down, check."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import torch
from rollwire_client import Batcher, Fleet, KvPolicy, Publisher, RollwireError, Sampling

from rollwire_demo.check import check_labels
from rollwire_demo.results import DemoResult, TrainingHistory
from rollwire_demo.servers import DemoError, rollout_servers
from rollwire_demo.task import LENGTH, Cipher
from rollwire_demo.trainer import Trainer, TrainingBatch, make_policy, save_policy, snapshot

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from pathlib import Path

    from rollwire_client import Batch, PublishReport
    from torch import Tensor

    from rollwire_demo.display import Display
    from rollwire_demo.servers import Server
    from rollwire_demo.task import ScoredAnswer

GROUP_SIZE = 8  # samples of a prompt
GROUPS_PER_STEP = 8
PREFETCHED_GROUPS = 12
SAMPLING = Sampling(max_new_tokens=LENGTH, ignore_eos=True)
EXIT_SECONDS = 1.0  # for a dead server's process to be known as dead


async def run_demo(
    display: Display, *, seed: int, servers: int, steps: int, minutes: float, output: Path
) -> DemoResult:
    """Teaches a policy through rollout servers and a publisher, then checks the labels.

    It ends when the goal is held for some steps, or after ``steps`` or ``minutes``.

    Args:
        display: Shows what happens.
        seed: Of the policy, the task and every draw.
        servers: How many rollout servers.
        steps: At most.
        minutes: At most.
        output: The folder for the checkpoint and the servers' logs; it exists.

    Raises:
        RollwireError: It cannot go on.
    """
    began = time.monotonic()
    torch.set_num_threads(1)  # the servers share the cores
    model = make_policy(seed)
    save_policy(model, output / "checkpoint")
    loop = _TrainingLoop(model, seed, display)
    try:
        display.phase(f"starting {servers} server{'' if servers == 1 else 's'}")
        async with rollout_servers(servers, output / "checkpoint", output) as started:
            await loop.run(started, steps=steps, seconds=60 * minutes)
    except ExceptionGroup as errors:
        raise _clearest(errors) from None
    display.phase("checking labels")
    history = loop.history
    check = await asyncio.to_thread(
        check_labels, model, history.sample, loop.weights, history.digests
    )
    return DemoResult(history, check, time.monotonic() - began)


class _TrainingLoop:
    """Trains and publishes beside watching the servers.

    Attributes:
        history: What happened.
        weights: The policy by version; None is the initial checkpoint.
    """

    def __init__(self, model: Any, seed: int, display: Display) -> None:
        self.history = TrainingHistory()
        self.weights: dict[int | None, dict[str, Tensor]] = {None: snapshot(model)}
        self._model = model
        self._seed = seed
        self._trainer = Trainer(model, seed)
        self._display = display
        self._alive: set[str] = set()

    async def run(self, servers: Sequence[Server], *, steps: int, seconds: float) -> None:
        self._alive = {server.address for server in servers}
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self._watch(server)) for server in servers]
            try:
                await self._train(steps, seconds)
            except (RollwireError, ExceptionGroup):
                # A link breaks before its process is known to be dead, which says more.
                await asyncio.sleep(EXIT_SECONDS)
                raise
            for task in watching:
                task.cancel()

    async def _train(self, steps: int, seconds: float) -> None:
        """Trains and publishes while the next rollouts are under way."""
        deadline = time.monotonic() + seconds
        cipher = Cipher(self._seed)
        prompts = cipher.prompts()
        async with (
            Fleet(sorted(self._alive)) as fleet,
            Batcher(
                fleet, seed=self._seed, group_size=GROUP_SIZE, sampling=SAMPLING, bar=False
            ) as batcher,
        ):
            publisher = Publisher(fleet, kv_policy=KvPolicy.RECOMPUTE)

            def collect() -> Coroutine[Any, Any, Batch]:
                return batcher.collect(prompts, GROUPS_PER_STEP, prefetch=PREFETCHED_GROUPS)

            self._display.phase("learning")
            self.history.begin()
            batch = await collect()
            for version in range(1, steps + 1):
                answers = cipher.score(batch.groups)
                await asyncio.to_thread(self._trainer.step, _training_batch(answers))
                self.weights[version] = snapshot(self._model)
                # New groups begin before the update, and cross it, however fast the servers are.
                async with asyncio.TaskGroup() as step:
                    collecting = step.create_task(collect())
                    publishing = step.create_task(self._publish(publisher, version))
                batch = collecting.result()
                self.history.add(version, answers, publishing.result())
                self._display.step(self.history)
                if self.history.goal_held or time.monotonic() > deadline:
                    return

    async def _publish(self, publisher: Publisher, version: int) -> PublishReport:
        publish = await publisher.publish(version, self.weights[version])
        report = await publish.committed
        for server in report.failed:
            if server.address in self._alive:
                self._display.note(f"version {version}: {server.error}")
        return report

    async def _watch(self, server: Server) -> None:
        """Says that a server died; the others go on with its sequences."""
        death = await server.died()
        self._alive.discard(server.address)
        if not self._alive:
            raise DemoError(f"{death}; none is left")
        self._display.note(f"{death}; the others go on with its sequences")


def _training_batch(answers: Sequence[ScoredAnswer]) -> TrainingBatch:
    shape = (GROUPS_PER_STEP, GROUP_SIZE, -1)
    tensors = [answer.trajectory.to_tensors() for answer in answers]
    return TrainingBatch(
        token_ids=torch.stack([t.token_ids for t in tensors]).view(shape),
        logprobs=torch.stack([t.logprobs[-LENGTH:] for t in tensors]).view(shape),
        rewards=torch.tensor([answer.rewards for answer in answers]).view(shape),
    )


def _clearest(errors: ExceptionGroup[Exception]) -> Exception:
    """What the demo itself says, before what follows from it; the group if there is a bug in it."""
    leaves = list(_leaves(errors))
    if not all(isinstance(leaf, RollwireError) for leaf in leaves):
        return errors
    return next((leaf for leaf in leaves if isinstance(leaf, DemoError)), leaves[0])


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
