"""Trainers of several processes, which gather and publish together to real servers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import rollwire_transport as transport
import torch
from rollwire_client import Fleet, Publisher, ServerInfo
from support import sharded_trainer
from support.calls import connected
from support.publishing import no_update, status
from support.servers import ServerProcess, servers
from support.sharded_trainer import Setup, weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import StartServer

pytestmark = pytest.mark.slow

SECONDS = 240
VERSIONS = itertools.count(1)  # each publish to a shared server takes the next


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with servers(tmp_path_factory.mktemp("sharded")) as start:
        yield [start(), start()]


async def setup(folder: Path, targets: list[ServerProcess], layout: str, **more: Any) -> Setup:
    addresses = [server.address for server in targets]
    async with Fleet(addresses) as fleet:
        schema = await Publisher(fleet).schema()
    shapes = [(s.name, s.dtype, list(s.shape)) for s in schema if s.alias_of is None]
    return Setup(str(folder / "store"), addresses, shapes, layout, **more)


def run(folder: Path, doing: Setup) -> list[dict[str, Any] | int]:
    """Runs the processes to their end: what each tells, or the code with which it died."""
    context = multiprocessing.get_context("forkserver")  # which has torch (see support.forked)
    told = [folder / f"told-{rank}.json" for rank in range(doing.world_size)]
    processes = [
        context.Process(target=sharded_trainer.run, args=(doing, rank, path), daemon=True)
        for rank, path in enumerate(told)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert None not in codes, "they have not ended"
    return [code or json.loads(path.read_text()) for code, path in zip(codes, told, strict=True)]


def digest(doing: Setup, dtype: torch.dtype | None = None) -> int:
    """Of the unsharded weights of the last version, in this dtype."""
    tensors = {
        name: tensor.to(dtype) for name, tensor in weights(doing.shapes, doing.versions[-1]).items()
    }
    return transport.sum_digests(
        transport.tensor_digest(transport.describe(name, tensor), tensor)
        for name, tensor in tensors.items()
    )


async def served(server: ServerProcess) -> tuple[int | None, int]:
    async with Fleet([server.address]) as fleet:
        info = (await fleet.info())[server.address]
    assert isinstance(info, ServerInfo)
    return info.weights.version, info.weights.digest


@pytest.mark.parametrize("layout", ["fsdp", "pipeline"])
async def test_shards_are_gathered_one_tensor_at_a_time(
    tmp_path: Path, both: list[ServerProcess], layout: str
) -> None:
    versions = next(VERSIONS), next(VERSIONS)
    doing = await setup(tmp_path, both, layout, versions=versions)
    leader, other = run(tmp_path, doing)
    assert leader["digest"] == digest(doing)
    assert (leader["failed"], leader["encodings"]) == ([], ["delta"])
    assert [await served(server) for server in both] == [(versions[1], digest(doing))] * 2
    for told in (leader, other):
        assert "error" not in told
        assert told["most"] == 1
        # Every tensor is gathered once a publish, not again for the manifest or the digest.
        assert sorted(told["names"]) == sorted([name for name, _, _ in doing.shapes] * 2)
    assert leader["names"] == other["names"]


async def test_master_weights_are_cast_shard_by_shard_and_gathered_once(
    tmp_path: Path, start_server: StartServer
) -> None:
    server = start_server("--dtype", "bfloat16")
    doing = await setup(tmp_path, [server], "fsdp")
    doing.shapes = [(name, "float32", shape) for name, _, shape in doing.shapes]
    leader, other = run(tmp_path, doing)
    assert leader["casts"] == [["float32", "bfloat16", len(doing.shapes)]]
    assert await served(server) == (1, digest(doing, torch.bfloat16))
    for told in (leader, other):
        assert "error" not in told
        assert told["dtypes"] == ["torch.bfloat16"]
        assert (len(told["names"]), told["most"]) == (len(doing.shapes), 1)


@pytest.mark.parametrize(
    ("layout", "delta"), [("fsdp", False), ("pipeline", False), ("fsdp", True)]
)
async def test_a_server_that_dies_makes_all_ranks_gather_again_unless_there_is_a_copy(
    tmp_path: Path,
    both: list[ServerProcess],
    start_server: StartServer,
    layout: str,
    *,
    delta: bool,
) -> None:
    victim = start_server()
    doing = await setup(
        tmp_path,
        [victim, both[0]],
        layout,
        versions=(next(VERSIONS),),
        what="kill",
        at=12,
        victim=victim.process.pid,
        delta=delta,
    )
    leader, other = run(tmp_path, doing)
    assert leader["failed"] == [victim.address]
    assert await served(both[0]) == (doing.versions[0], digest(doing))
    names = [name for name, _, _ in doing.shapes]
    assert leader["names"] == other["names"]
    assert set(leader["names"]) == set(names)
    assert (len(leader["names"]) == len(names)) == delta
    assert (leader["most"], other["most"]) == (1, 1)
    if layout == "fsdp":  # what the server has already is not gathered again
        assert leader["names"].count(leader["names"][0]) == 1


class Fault(NamedTuple):
    who: int
    what: str
    leader: str
    other: str


FAULTS = {
    "a rank dies": Fault(1, "die", "rank 1 of the trainer is gone", "died"),
    "rank 0 dies": Fault(0, "die", "died", "rank 0 of the trainer is gone"),
    "a rank raises": Fault(1, "raise", "rank 1 failed: ZeroDivisionError", "ZeroDivisionError"),
    "a rank hangs": Fault(
        1, "hang", "the source did not provide", "has not finished rank 0's request"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_a_rank_that_fails_ends_the_publish_and_costs_the_servers_nothing(
    tmp_path: Path, both: list[ServerProcess], fault: Fault
) -> None:
    before = [await served(server) for server in both]
    doing = await setup(
        tmp_path,
        both,
        "fsdp",
        versions=(next(VERSIONS),),
        who=fault.who,
        what=fault.what,
        at=12,
        **({"timeout": 10, "source_timeout": 3} if fault.what == "hang" else {}),
    )
    leader, other = run(tmp_path, doing)
    for told, wanted in ((leader, fault.leader), (other, fault.other)):
        if wanted == "died":
            assert told == sharded_trainer.DIED
        else:
            assert wanted in told["error"]
    assert [await served(server) for server in both] == before
    for server in both:
        async with connected(server.address) as api:
            await no_update(api)
            assert (await status(api, verify=True)).intact
