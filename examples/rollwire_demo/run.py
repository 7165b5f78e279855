"""The demo's course: servers up, learn, servers down, check."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rollwire_client import Batcher, Fleet, KvPolicy, Publisher, RollwireError, Sampling
from rollwire_client._wording import servers_text

from rollwire_demo.check import CheckResult, check_labels
from rollwire_demo.history import History
from rollwire_demo.policy import make_policy, save_policy, snapshot
from rollwire_demo.rollouts import prompts, rewarded
from rollwire_demo.servers import DemoError, rollout_servers
from rollwire_demo.task import LENGTH, Cipher
from rollwire_demo.trainer import Trainer, TrainingBatch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from rollwire_client import Batch, PublishReport
    from torch import Tensor

    from rollwire_demo.display import Display
    from rollwire_demo.rollouts import Rollout
    from rollwire_demo.servers import Server
    from rollwire_demo.settings import DemoSettings

GROUP = 8  # samples of a prompt
GROUPS_PER_STEP = 8
GROUPS_AHEAD = 12  # are under way beyond those of a step
SAMPLING = Sampling(max_new_tokens=LENGTH, ignore_eos=True)

WATCHER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        history: Of the training.
        check: Of the labels.
        seconds: All together.
    """

    history: History
    check: CheckResult
    seconds: float


async def run_demo(settings: DemoSettings, display: Display) -> Outcome:
    """Teaches a policy through rollout servers and a publisher, then checks the labels.

    It ends when the goal is held for some steps, or at a limit.

    Raises:
        RollwireError: It cannot go on.
    """
    began = time.monotonic()
    torch.set_num_threads(1)  # the servers share the cores
    model = make_policy(settings.seed)
    checkpoint = settings.output / "checkpoint"
    save_policy(model, checkpoint)
    learning = _Learning(settings, model, display)
    try:
        display.phase(f"starting {servers_text(settings.servers)}")
        async with rollout_servers(settings.servers, checkpoint, settings.output) as servers:
            await learning.run(servers)
    except ExceptionGroup as errors:
        raise _most_telling(errors) from None
    display.phase("checking labels")
    history = learning.history
    check = await asyncio.to_thread(
        check_labels, model, history.sample, learning.weights, history.digests
    )
    return Outcome(history, check, time.monotonic() - began)


class _Learning:
    """The trainer's part; ``run`` it once."""

    def __init__(self, settings: DemoSettings, model: Any, display: Display) -> None:
        self.history = History()
        self.weights: dict[int | None, dict[str, Tensor]] = {None: snapshot(model)}
        self._settings = settings
        self._model = model
        self._trainer = Trainer(model, settings.seed)
        self._display = display
        self._alive: set[str] = set()

    async def run(self, servers: Sequence[Server]) -> None:
        self._alive = {server.address for server in servers}
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self._watch(server)) for server in servers]
            try:
                await self._sample_and_learn()
            except (RollwireError, ExceptionGroup):
                # A link breaks before its process is known to be dead: who watches it tells more.
                await asyncio.sleep(WATCHER_SECONDS)
                raise
            for task in watching:
                task.cancel()

    async def _sample_and_learn(self) -> None:
        async with Fleet(sorted(self._alive)) as fleet:
            publisher = Publisher(fleet, kv_policy=KvPolicy.RECOMPUTE)
            async with Batcher(
                fleet, seed=self._settings.seed, group_size=GROUP, sampling=SAMPLING, bar=False
            ) as batcher:
                await self._learn(batcher, publisher)

    async def _learn(self, batcher: Batcher, publisher: Publisher) -> None:
        """Trains and publishes while the next rollouts are under way."""
        deadline = time.monotonic() + 60 * self._settings.minutes
        task = Cipher(self._settings.seed)
        source = prompts(task)

        def collect() -> Coroutine[Any, Any, Batch]:
            return batcher.collect(source, GROUPS_PER_STEP, prefetch=GROUPS_AHEAD)

        self._display.phase("learning")
        self.history.begin()
        batch = await collect()
        for version in range(1, self._settings.steps + 1):
            rollouts = rewarded(task, batch.groups)
            await asyncio.to_thread(self._trainer.step, _training_batch(rollouts))
            self.weights[version] = snapshot(self._model)
            # New groups begin before the update, and cross it, however fast the servers are.
            async with asyncio.TaskGroup() as step:
                collecting = step.create_task(collect())
                publishing = step.create_task(self._publish(publisher, version))
            batch = collecting.result()
            self.history.add(version, rollouts, publishing.result())
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
        """Tells that a server died; the others go on with its sequences."""
        what = await server.died()
        self._alive.discard(server.address)
        if not self._alive:
            raise DemoError(f"{what}; none is left")
        self._display.note(f"{what}; the others go on with its sequences")


def _training_batch(rollouts: Sequence[Rollout]) -> TrainingBatch:
    shape = (GROUPS_PER_STEP, GROUP, -1)
    tensors = [rollout.trajectory.to_tensors() for rollout in rollouts]
    return TrainingBatch(
        token_ids=torch.stack([t.token_ids for t in tensors]).view(shape),
        logprobs=torch.stack([t.logprobs[-LENGTH:] for t in tensors]).view(shape),
        rewards=torch.tensor([rollout.rewards for rollout in rollouts]).view(shape),
    )


def _most_telling(errors: ExceptionGroup[Exception]) -> Exception:
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
