"""One process of a sharded trainer, which publishes with the others, and fails as a test says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rollwire_client import Fleet, Publisher, PublishHandle, PublishTimeouts, Ranks, RollwireError
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUCKET_BYTES = 1 << 14
LET_GO_SECONDS = 30
DIED = 7  # exit code
Shapes = list[tuple[str, str, list[int]]]


@dataclass
class Setup:
    """What the processes do.

    ``layout`` is how the weights are spread: "fsdp" or "pipeline". At the tensor ``at`` that is
    gathered, the rank ``who`` does ``what``: "kill" a server's process, "die", "hang" or "raise".
    """

    store: str
    servers: list[str]
    shapes: Shapes
    layout: str
    world_size: int = 2
    versions: tuple[int, ...] = (1,)
    timeout: float = 60.0
    source_timeout: float = 60.0
    who: int = 0
    what: str = ""
    at: int = -1
    victim: int = 0  # a process id
    delta: bool = True


def weights(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """The unsharded weights; those of two seeds differ in a few elements."""
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(shape, generator=common) * 0.1 + (torch.rand(shape, generator=own) < 0.02)
        ).to(getattr(torch, dtype))
        for name, dtype, shape in shapes
    }


class Gathered:
    """Counts gathered tensors whose memory is still there, and misbehaves at one of them."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._setup = setup
        self._rank = rank
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.names: list[str] = []
        self.dtypes: set[str] = set()
        self.most = 0
        self.shards: dict[int, str] = {}  # names of DTensors by identity

    def watch_dtensors(self) -> None:
        from torch.distributed.tensor import DTensor

        gather = DTensor.full_tensor

        def full_tensor(tensor: DTensor) -> Tensor:
            self.before(self.shards.get(id(tensor), "a cast"))
            whole = gather(tensor)
            self.after(whole)
            return whole

        DTensor.full_tensor = full_tensor

    def before(self, name: str) -> None:
        setup = self._setup
        self.names.append(name)
        # Gloo's threads hold on to a tensor for a moment after they are done with it.
        deadline = time.monotonic() + LET_GO_SECONDS
        while self._count() and self.most < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        if len(self.names) - 1 != setup.at or self._rank != setup.who:
            return
        match setup.what:
            case "kill":
                os.kill(setup.victim, signal.SIGKILL)
            case "die":
                os._exit(DIED)
            case "hang":
                threading.Event().wait()
            case "raise":
                raise ZeroDivisionError("as scripted")

    def after(self, tensor: Tensor) -> None:
        self.dtypes.add(str(tensor.dtype))
        self._alive.append(weakref.ref(tensor.untyped_storage()))
        self.most = max(self.most, self._count())

    def _count(self) -> int:
        self._alive = [reference for reference in self._alive if reference() is not None]
        return len(self._alive)


def fsdp(setup: Setup, seed: int, gathered: Gathered) -> dict[str, Tensor]:
    """A state dict of DTensors."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    root = nn.Module()
    for name, tensor in weights(setup.shapes, seed).items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(tensor))
    mesh = init_device_mesh("cpu", (setup.world_size,))
    for layer in root.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    state = root.state_dict()
    gathered.shards = {id(tensor): name for name, tensor in state.items()}
    return state


class Pipeline:
    """Two stages, one layer each; what is not of a layer is split over both, row by row."""

    def __init__(self, setup: Setup, seed: int, rank: int, gathered: Gathered) -> None:
        self._shapes = setup.shapes
        self._gathered = gathered
        self._rank = rank
        self.shards = {
            name: tensor if _stage(name) == rank else tensor.chunk(2)[rank].clone()
            for name, tensor in weights(setup.shapes, seed).items()
            if _stage(name) in {rank, None}
        }

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in self._shapes:
            self._gathered.before(name)
            mine, stage = self.shards.get(name), _stage(name)
            if stage is None:
                halves = [torch.empty_like(mine) for _ in range(2)]
                dist.all_gather(halves, mine)
                tensor = torch.cat(halves)
                del halves
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                if mine is not None:
                    tensor.copy_(mine)
                dist.broadcast(tensor, src=stage)
            self._gathered.after(tensor)
            yield name, tensor
            del tensor


def _stage(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


async def work(setup: Setup, rank: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    gathered = Gathered(setup, rank)
    if setup.layout == "fsdp":
        gathered.watch_dtensors()
    with Ranks(dist.group.WORLD, host="127.0.0.1", timeout=setup.timeout) as ranks:
        try:
            if rank:
                await publish(ranks, None, setup, gathered)
            else:
                async with Fleet(setup.servers) as fleet:
                    timeouts = PublishTimeouts(source=setup.source_timeout)
                    publisher = Publisher(
                        fleet, bucket_bytes=BUCKET_BYTES, timeouts=timeouts, delta=setup.delta
                    )
                    handle = await publish(ranks, publisher, setup, gathered)
                    report = await handle.committed
                    told["digest"] = report.digest
                    told["encodings"] = list(report.encodings)
                    told["failed"] = [server.address for server in report.failed]
                    told["casts"] = [dataclasses.astuple(cast) for cast in report.casts]
        except RollwireError as error:
            told["error"] = f"{type(error).__name__}: {error}"
            told["cause"] = repr(error.__cause__)
    dtypes = sorted(gathered.dtypes)
    return {**told, "names": gathered.names, "dtypes": dtypes, "most": gathered.most}


async def publish(
    ranks: Ranks, publisher: Publisher | None, setup: Setup, gathered: Gathered
) -> PublishHandle | None:
    """The versions in turn, each with weights of its own; the shards change when they may."""
    handle = None
    for version in setup.versions:
        if handle is not None:
            await handle.committed
        if setup.layout == "fsdp":
            state = fsdp(setup, version, gathered)
            handle = await ranks.publish(publisher, version, state)
            shards = [tensor.to_local() for tensor in state.values()]
        else:
            export = Pipeline(setup, version, ranks.rank, gathered)
            handle = await ranks.publish(publisher, version, export)
            shards = list(export.shards.values())
        for shard in shards:
            shard.zero_()
    return handle


def run(setup: Setup, rank: int, told: Path) -> None:
    """Its whole life; ``told`` gets what it has to tell, as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{setup.store}", rank=rank, world_size=setup.world_size
    )
    told.write_text(json.dumps(asyncio.run(work(setup, rank))))
    os._exit(0)  # a gather that hangs would keep gloo's threads
