"""The processes of an FSDP2 trainer that trains, publishes with the others, and trains again.

Beside the model that is published each has another one, a critic, whose gradients are summed over
the ranks in a group of its own while the publish is under way: on rank 0 after each gather, on the
others before it, so that nobody asks its device for both in rank 0's order.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rollwire_client import PublishTimeouts, Ranks, RollwireError
from torch import Tensor

from support.fleets import open_fleet, publisher
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollwire_client import PublishHandle

WORLD_SIZE = 2
SECONDS = 60
END_SECONDS = 90  # for all of it
VERSION = 7


@dataclass(frozen=True)
class Order:
    """What the processes do. At the gather ``at`` rank 0 kills the process ``victim``, if named."""

    folder: Path
    servers: Sequence[str]
    device: str  # "cpu", or "cuda" for a GPU of its own for each rank, where there are two
    groups: str  # the backends of torch's process groups
    backend: str  # of the publish
    victim: int = 0
    at: int = 5


def run(order: Order, environments: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """What each rank tells in the end; ``environments`` has what each has beside this process's."""
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=_run, args=(order, rank, {**os.environ, **environments[rank]}), daemon=True
        )
        for rank in range(WORLD_SIZE)
    ]
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        assert [process.exitcode for process in processes] == [0] * WORLD_SIZE
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)
    return [json.loads(_told(order, rank).read_text()) for rank in range(WORLD_SIZE)]


def published(order: Order) -> dict[str, Tensor]:
    """The weights that were published, put together from the ranks' shards."""
    shards = [torch.load(_shards(order, rank)) for rank in range(WORLD_SIZE)]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


class Actor:
    """The model that is published, sharded over all ranks."""

    def __init__(self, device: torch.device, rank: int) -> None:
        from rollwire_server import builtin_model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (WORLD_SIZE,))
        self.model = builtin_model("builtin:tiny").to(device)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._device = device
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        generator = torch.Generator().manual_seed(rank)
        self._tokens = torch.randint(0, 512, (2, 16), generator=generator).to(device)

    def train(self) -> float:
        """A step; from any thread. Returns its loss."""
        _use(self._device)
        logits = self.model(self._tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), self._tokens[:, 1:].flatten()
        )
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def shards(self) -> dict[str, Tensor]:
        return {name: t.to_local().cpu().clone() for name, t in self.model.state_dict().items()}


class Critic:
    """Another model of the trainer's, and the thread that trains it."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._group = dist.new_group()
        self._weights = torch.zeros(1 << 16, device=device)
        self._asked: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.asked = 0

    def ask(self) -> None:
        """For a step; a device was told of it when this returns."""
        self.asked += 1
        told = threading.Event()
        self._asked.put(told)
        if self._device.type == "cuda" and not told.wait(SECONDS):
            raise TimeoutError("the critic's thread hangs")

    def end(self) -> float:
        """The mean of its weights, once it has done what it was asked for."""
        self._asked.put(None)
        self._thread.join(SECONDS)
        return self._weights.mean().item()

    def _work(self) -> None:
        _use(self._device)
        while (told := self._asked.get()) is not None:
            gradients = torch.full_like(self._weights, self._rank + 1)
            dist.all_reduce(gradients, group=self._group)
            self._weights += gradients
            told.set()


def _watch_gathers(order: Order, rank: int, critic: Critic) -> None:
    from torch.distributed.tensor import DTensor

    gather, gathers = DTensor.full_tensor, 0

    def full_tensor(tensor: DTensor) -> Tensor:
        nonlocal gathers
        if rank == 0 and gathers == order.at and order.victim:
            os.kill(order.victim, signal.SIGKILL)
        gathers += 1
        if rank:
            critic.ask()
        whole = gather(tensor)
        if not rank:
            critic.ask()
        return whole

    DTensor.full_tensor = full_tensor


def _run(order: Order, rank: int, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    device = torch.device(order.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
    _use(device)
    dist.init_process_group(
        order.groups,
        init_method=f"file://{order.folder / 'store'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=SECONDS),
    )
    told = asyncio.run(_work(order, rank, device))
    _told(order, rank).write_text(json.dumps(told))
    # Nobody leaves while another may still read what it has on its device.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank} has ended", "")
    store.wait([f"rank {r} has ended" for r in range(WORLD_SIZE)], timedelta(seconds=SECONDS))
    sys.stderr.flush()
    os._exit(0)  # a collective that hangs would keep torch's threads


async def _work(order: Order, rank: int, device: torch.device) -> dict[str, Any]:
    actor, critic = Actor(device, rank), Critic(device, rank)
    actor.train()
    critic.ask()
    torch.save(actor.shards(), _shards(order, rank))
    _watch_gathers(order, rank, critic)
    told: dict[str, Any] = {}
    with Ranks(dist.group.WORLD, host="127.0.0.1", timeout=SECONDS) as ranks:
        began = time.monotonic()
        try:
            if rank == 0:
                told |= await _lead(order, ranks, actor)
            else:
                await ranks.publish(None, VERSION, actor.model.state_dict())
        except RollwireError as error:
            told["error"] = f"{type(error).__name__}: {error}"
        told["seconds"] = time.monotonic() - began
        if "digest" not in told:  # rank 0 has trained before it committed
            told["loss"] = await asyncio.to_thread(actor.train)
    told["critic"], told["steps"] = critic.end(), critic.asked
    return told


async def _lead(order: Order, ranks: Ranks, actor: Actor) -> dict[str, Any]:
    """Publishes; no server is told to commit before the next step of training has ended."""
    trained, steps = asyncio.Event(), Steps()

    async def after_training(_address: str, _request: Any) -> None:
        await trained.wait()

    steps.before["CommitWeights"] = after_training
    async with open_fleet(list(order.servers), steps) as fleet:
        own = publisher(fleet, order.backend, timeouts=PublishTimeouts())
        handle = await ranks.publish(own, VERSION, actor.model.state_dict())
        assert handle is not None
        loss = await asyncio.to_thread(actor.train)
        trained.set()
        return {"loss": loss, **await _report(handle)}


async def _report(handle: PublishHandle) -> dict[str, Any]:
    report = await handle.committed
    return {"digest": report.digest, "failed": [server.address for server in report.failed]}


def _use(device: torch.device) -> None:
    """As the device of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _told(order: Order, rank: int) -> Path:
    return order.folder / f"told-{rank}.json"


def _shards(order: Order, rank: int) -> Path:
    return order.folder / f"shards-{rank}.pt"
