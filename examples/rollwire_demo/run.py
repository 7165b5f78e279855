"""The course of the demo: servers up, train and publish, servers down, check."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rollwire_client import (
    Batcher,
    Fleet,
    KvPolicy,
    Publisher,
    RollwireError,
    Sampling,
    append_groups,
)

from rollwire_demo.report import TrainingHistory
from rollwire_demo.task import LENGTH, Cipher, save_tokenizer
from rollwire_demo.trainer import Trainer, check_labels, make_policy, save_policy, snapshot

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence

    from rollwire_client import Batch, PublishReport
    from torch import Tensor

    from rollwire_demo.report import CheckResult, Display
    from rollwire_demo.task import ScoredAnswer

GROUP_SIZE = 8  # samples of a prompt
GROUPS_PER_STEP = 8
PREFETCHED_GROUPS = 12
SAMPLING = Sampling(max_new_tokens=LENGTH, ignore_eos=True)
START_SECONDS = 120.0
STOP_SECONDS = 10.0
EXIT_SECONDS = 1.0  # for a dead server's process to be known as dead
POLL_SECONDS = 0.05


class DemoError(RollwireError):
    """The demo cannot continue."""


@dataclass(frozen=True, slots=True)
class Server:
    """A ``rollwire-server`` process, the HOST:PORT of its API, and its log file."""

    process: Process
    address: str
    log: Path

    async def died(self) -> str:
        """Waits for the end of the process; what happened, in one line."""
        code = await self.process.wait()
        if code < 0:
            return f"server {self.address} was killed by signal {-code}"
        return f"server {self.address} exited with code {code}{_last_line(self.log)}"


@contextlib.asynccontextmanager
async def rollout_servers(count: int, model: Path, folder: Path) -> AsyncIterator[list[Server]]:
    """Starts servers of a checkpoint at once, with their logs in ``folder``; ends them on exit."""
    command = Path(sys.executable).with_name("rollwire-server")
    if not command.exists():
        raise DemoError(f"{command} does not exist: pip install 'rollwire[demo]'")
    # Flags that are not given here must not come from the environment.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLWIRE_")}
    environment["OMP_NUM_THREADS"] = "1"
    processes: list[Process] = []

    async def start(number: int) -> Server:
        ready, log = folder / f"server-{number}.json", folder / f"server-{number}.log"
        ready.unlink(missing_ok=True)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                command,
                *("--model", str(model), "--listen", "127.0.0.1:0"),
                *("--ready-file", str(ready), "--drain-seconds", "0", "--log-format", "text"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )
        processes.append(process)
        return Server(process, await _address(process, ready, log), log)

    try:
        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(start(number)) for number in range(count)]
        yield [task.result() for task in starting]
    finally:
        await asyncio.gather(*(_end(process) for process in processes))


async def _address(process: Process, ready: Path, log: Path) -> str:
    """Waits until the server listens; its HOST:PORT."""
    try:
        async with asyncio.timeout(START_SECONDS):
            while not ready.exists():  # noqa: ASYNC240 - a local file
                if process.returncode is not None:
                    raise DemoError(f"a server did not start{_last_line(log)}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise DemoError(
            f"a server was not ready after {START_SECONDS:.0f} s{_last_line(log)}"
        ) from None
    address: str = json.loads(ready.read_text())["listen"]  # noqa: ASYNC240 - a local file
    return address


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"; its log, {log}, ends: {last[:300]}"


async def run_demo(
    display: Display, *, seed: int, servers: int, steps: int, minutes: float, output: Path
) -> tuple[TrainingHistory, CheckResult]:
    """Teaches a policy through rollout servers and a publisher, then checks the labels.

    It ends when the goal is held for some steps, or after ``steps`` or ``minutes``.
    """
    torch.set_num_threads(1)  # the servers share the cores
    model = make_policy(seed)
    save_policy(model, output / "checkpoint")
    save_tokenizer(output / "checkpoint")
    samples = output / "samples.jsonl"
    samples.unlink(missing_ok=True)
    loop = _TrainingLoop(model, seed, display, samples)
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
    return history, check


class _TrainingLoop:
    """Trains and publishes beside watching the servers."""

    def __init__(self, model: Any, seed: int, display: Display, samples: Path) -> None:
        self.history = TrainingHistory()
        # The policy by version; None is the initial checkpoint.
        self.weights: dict[int | None, dict[str, Tensor]] = {None: snapshot(model)}
        self._model = model
        self._seed = seed
        self._trainer = Trainer(model, seed)
        self._display = display
        self._samples = samples
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
            # The check at the end compares each token with a forward pass of its weights alone.
            publisher = Publisher(fleet, kv_policy=KvPolicy.RECOMPUTE)

            def collect() -> Coroutine[Any, Any, Batch]:
                return batcher.collect(prompts, GROUPS_PER_STEP, prefetch=PREFETCHED_GROUPS)

            self._display.phase("learning")
            self.history.begin()
            batch = await collect()
            for version in range(1, steps + 1):
                answers = cipher.score(batch.groups)
                groups = map(cipher.rewarded, batch.groups)
                await asyncio.to_thread(append_groups, self._samples, groups)
                await asyncio.to_thread(self._trainer.step, *_training_batch(answers))
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
        """Says that a server died; the others continue its sequences."""
        death = await server.died()
        self._alive.discard(server.address)
        if not self._alive:
            raise DemoError(f"{death}; none is left")
        self._display.note(f"{death}; the others continue its sequences")


def _training_batch(answers: Sequence[ScoredAnswer]) -> tuple[Tensor, Tensor, Tensor]:
    shape = (GROUPS_PER_STEP, GROUP_SIZE, -1)
    tensors = [answer.trajectory.to_tensors() for answer in answers]
    return (
        torch.stack([t.token_ids for t in tensors]).view(shape),
        torch.stack([t.logprobs[-LENGTH:] for t in tensors]).view(shape),
        torch.tensor([answer.rewards for answer in answers]).view(shape),
    )


def _clearest(errors: ExceptionGroup[Exception]) -> Exception:
    """The error to show: the demo's own, if there is one; the whole group if one is a bug."""
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
