"""Buffers in files: what is carried survives the trainer."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import TYPE_CHECKING

import pytest
from client.batches.support import HeldServer, batcher_of, begun, fleet_of, ids, prompts
from client.scripted import until
from rollwire.v1 import buffer_pb2, rollout_pb2
from rollwire_client import (
    BufferFileError,
    Carry,
    Decision,
    Finish,
    FinishReason,
    Group,
    Prompt,
    Routing,
    RoutingReplay,
    RoutingSegment,
    Sampling,
    Segment,
    Trajectory,
    WeightTag,
)
from rollwire_client._batches.buffer_file import BufferContents, read, write
from rollwire_client._batches.group import GroupSampler, LiveGroup, LiveSample
from rollwire_client._batches.trainer_steps import TrainerStep
from rollwire_client._trajectory import TrajectoryBuilder
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


async def carried(path: Path, server: HeldServer) -> list[int]:
    """Saves a buffer with group 1 unfinished, and says how long its samples are by then."""
    async with fleet_of(server) as fleet, batcher_of(fleet, reward=lambda p, t: 1.0) as batcher:
        batch = await batcher.collect(prompts(), 1, version=3, over_sample=2.0, tail=Carry())
        await begun(batcher, "1")
        batcher.save(path)
        assert len(batch.carried.groups) == 1
    return list(batch.carried.lengths)


async def test_another_process_goes_on_from_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    async with HeldServer({2}, version=3) as server:
        lengths = await carried(path, server)
        await until(lambda: server.running == 0)
        server.let_go.add(1)
        asked = len(server.requests)
        async with fleet_of(server) as fleet, batcher_of(fleet, reward=lambda p, t: 2.0) as batcher:
            batcher.load(path)
            assert (batcher.version, batcher.handed_out, batcher.dropped) == (3, 1, 0)
            assert batcher.taken == 2
            batch = await batcher.collect(prompts(3), 1, version=4)
    (group,) = batch.groups
    assert (group.prompt.id, group.prompt.info) == ("1", {"answer": 1})
    assert group.rewards == (2.0, 2.0)
    again = sorted(len(request.output_token_ids) for request in server.requests[asked:])
    for got, length in zip(again, sorted(lengths), strict=True):  # they come in any order
        assert got >= length
    # What they have is of that version.
    assert {request.min_weight_version for request in server.requests[asked:]} == {3}
    for sample in group.samples:
        tokens = sample.trajectory.token_ids
        assert tokens[:-1] == tuple(range(100, 99 + len(tokens)))
        assert len(sample.trajectory.logprobs) == len(tokens)


async def test_seeded_samples_become_what_they_would_have(tmp_path: Path) -> None:
    sampling = Sampling(max_new_tokens=40)

    async def outputs(path: Path | None) -> list[tuple[int, ...]]:
        async with (
            FakeServer(tokens_per_second=500) as server,
            fleet_of(server) as fleet,
            batcher_of(fleet, sampling=sampling) as batcher,
        ):
            if path is not None:
                batcher.load(path)
            batch = await batcher.collect(prompts(), 1)
            return [sample.trajectory.token_ids for sample in batch.groups[0].samples]

    async with (
        FakeServer(tokens_per_second=500) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, sampling=sampling) as batcher,
    ):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await begun(batcher, "1")
        batcher.save(tmp_path / "buffer")
        collecting.cancel()
        await asyncio.wait([collecting])
    assert await outputs(tmp_path / "buffer") == await outputs(None)


async def test_a_batch_goes_on_while_it_is_saved(tmp_path: Path) -> None:
    """Also with a prompt that had arrived by then, and was not begun."""
    asked, decided = threading.Event(), asyncio.Event()

    def source() -> Iterator[Prompt]:
        yield Prompt("1", [1])
        asked.wait()
        yield Prompt("2", [2])

    async def decide(_: Group) -> Decision:
        asked.set()
        await decided.wait()
        return Decision.TAKE

    async with HeldServer({1, 2}) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet) as batcher:
            collecting = asyncio.create_task(batcher.collect(source(), 2, decide=decide))
            await until(asked.is_set)
            await until(lambda: batcher._buffer.prompts)
            batcher.save(tmp_path / "buffer")
            decided.set()
            assert len((await asyncio.wait_for(collecting, 60)).groups) == 2
        async with batcher_of(fleet) as batcher:
            batcher.load(tmp_path / "buffer")
            batch = await batcher.collect(prompts(3), 2)
    assert ids(batch.finished) == ["1", "2"]


async def test_what_is_complete_is_not_sampled_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def reward(prompt: Prompt, _: Trajectory) -> float:
        asked.append(prompt.id)
        return 1.0

    async with HeldServer({1, 2, 3}) as server:
        async with fleet_of(server) as fleet, batcher_of(fleet, reward=reward) as batcher:
            await batcher.collect(prompts(), 1, prefetch=2)
            groups = batcher._buffer.groups.values()
            await until(lambda: all(s.reward == 1.0 for group in groups for s in group.samples))
            assert len(asked) == 6
            batcher.save(tmp_path / "buffer")
        sampled = len(server.requests)
        async with fleet_of(server) as fleet, batcher_of(fleet, reward=lambda p, t: 2.0) as batcher:
            batcher.load(tmp_path / "buffer")
            batch = await batcher.collect(prompts(4), 2)
    assert ids(batch.finished) == ["2", "3"]
    assert batch.finished.rewards == (1.0,) * 4
    assert len(server.requests) == sampled


async def test_how_a_prompt_is_sampled_is_saved_too(tmp_path: Path) -> None:
    own = Sampling(0.7, 0.9, 5, 0.1, 500, 499, (3, 4), ignore_eos=True)
    async with HeldServer(set()) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet) as batcher:
            collecting = asyncio.create_task(batcher.collect([Prompt("a", [1], sampling=own)], 1))
            await until(lambda: server.running == 2)
            batcher.save(tmp_path / "buffer")
            collecting.cancel()
            await asyncio.wait([collecting])
        async with batcher_of(fleet) as batcher:
            batcher.load(tmp_path / "buffer")
            collecting = asyncio.create_task(batcher.collect([], 1))
            await until(lambda: len(server.requests) == 4)
            collecting.cancel()
            await asyncio.wait([collecting])
    sampled = sorted((r.sampling for r in server.requests), key=lambda s: s.seed)
    assert sampled[::2] == sampled[1::2]  # each twice, in any order


def test_what_a_sample_has_comes_back_as_it_was(tmp_path: Path) -> None:
    tags = WeightTag(1, 2, "a", 3), WeightTag(None, 0, "b", 2**64 - 1)
    routing = Routing(
        RoutingReplay.LAST_PASS, 0, 4, 2, 1, 2, bytes(range(16)),
        (RoutingSegment(0, 2, tags[0], 1), RoutingSegment(2, 4, tags[1])), ((2, 3),),
    )  # fmt: skip
    trajectory = Trajectory(
        "name", (5, 6), (7, 8, 9), (-0.5, -1.25, -3.0),
        (Segment(0, 2, tags[0], 1), Segment(2, 3, tags[1], 0)),
        Finish(FinishReason.STOP, 9, "done", 2, 3, 1), ("x:1", "y:2"), routing,
    )  # fmt: skip
    sampler = GroupSampler(None, 1, 2, Sampling(), {}, None, 0)
    samples = [
        LiveSample(0, TrajectoryBuilder.of(trajectory), 0.25, 3),
        LiveSample(1, TrajectoryBuilder((5, 6))),
    ]
    group = LiveGroup(Prompt("p", (5, 6), 4, info=["x", None]), samples)
    steps = [TrainerStep(3, None, 7), TrainerStep(4, 9, None), TrainerStep(8, 13, 2**64 - 1)]
    write(tmp_path / "buffer", sampler, BufferContents(None, 7, 8, steps, [group]))
    again = read(tmp_path / "buffer", sampler)
    assert (again.version, again.handed_out, again.dropped, again.steps) == (None, 7, 8, steps)
    assert [read_group.prompt for read_group in again.groups] == [group.prompt]
    first, second = again.groups[0].samples
    assert (first.output.trajectory(), first.reward, first.refills) == (trajectory, 0.25, 3)
    assert (second.output.trajectory().token_ids, second.reward, second.refills) == ((), None, 0)


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    async with HeldServer({2}, version=3) as server:
        await carried(tmp_path / "buffer", server)
    return tmp_path / "buffer"


def rewrite(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def content(path: Path) -> bytes:
    return path.read_bytes()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, "is damaged"),
        (lambda data: data[:-3], "is damaged"),
        (lambda data: data[:20], "is damaged"),
        (lambda data: data.replace(b"buffer 1", b"buffer 2", 1), "has the format '2'"),
        (lambda data: b"", "is not a buffer"),
        (lambda data: b"\x80\x04", "is not a buffer"),
    ],
)
async def test_a_damaged_file_is_told_and_changes_nothing(saved: Path, damage, told: str) -> None:
    rewrite(saved, damage)
    async with HeldServer({1}) as server, fleet_of(server) as fleet, batcher_of(fleet) as batcher:
        with pytest.raises(BufferFileError, match=told):
            batcher.load(saved)
        assert batcher.version is None
        assert len((await batcher.collect(prompts(), 1)).groups) == 1


def crafted(path: Path, **changed: object) -> None:
    """A buffer with the right digest, of which one group is what nobody saves."""
    sample = buffer_pb2.SavedSample(
        token_ids=[1, 2], logprobs=[-1, -1], segments=[buffer_pb2.SavedSegment(end=2)]
    )
    group = {"prompt_id": "a", "prompt_token_ids": [1], "info": "null"}
    group["samples"] = [sample, sample]
    copies = int(changed.pop("copies", 1))
    of_sample = {k: v for k, v in changed.items() if k in sample.DESCRIPTOR.fields_by_name}
    for name, value in of_sample.items():
        sample.ClearField(name)
        sample.MergeFrom(buffer_pb2.SavedSample(**{name: value}))
    group.update({k: v for k, v in changed.items() if k not in of_sample})
    message = buffer_pb2.SavedBuffer(seed=1, group_size=2)
    message.groups.extend([buffer_pb2.SavedGroup(**group)] * copies)
    content = message.SerializeToString()
    path.write_bytes(b"rollwire buffer 1\n" + hashlib.sha256(content).digest() + content)


ROUTING = {"replay": "as_sampled", "num_rows": 2, "num_layers": 1, "top_k": 1}
ROWS = [buffer_pb2.SavedSegment(end=2)]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"logprobs": [-1]}, "log-probabilities"),
        ({"segments": []}, "do not cover"),
        ({"segments": [buffer_pb2.SavedSegment(end=2**32 - 1)]}, "do not cover"),
        ({"segments": [buffer_pb2.SavedSegment(end=e) for e in (3, 2)]}, "out of order"),
        ({"samples": []}, "0 samples"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"info": "{"}, "JSON|Expecting"),
        ({"info": "[" * 100_000}, "recursion"),
        ({"finish": rollout_pb2.Finish(reason=99)}, "no known reason"),
        ({"sampling": rollout_pb2.SamplingParams(seed=1)}, "has a seed"),
        ({"copies": 2}, "twice"),
        ({"routing": buffer_pb2.SavedRouting(**ROUTING, bytes_per_expert=0)}, "another size"),
        (
            {
                "routing": buffer_pb2.SavedRouting(
                    **ROUTING, bytes_per_expert=1, experts=b"abc", segments=ROWS
                )
            },
            "another size",
        ),
        (
            {
                "routing": buffer_pb2.SavedRouting(
                    **{**ROUTING, "replay": "none"},
                    bytes_per_expert=1,
                    experts=b"ab",
                    segments=ROWS,
                )
            },
            "none",
        ),
    ],
)
async def test_a_buffer_that_nobody_saves_is_told_and_changes_nothing(
    tmp_path: Path, changed: dict, told: str
) -> None:
    crafted(tmp_path / "buffer", **changed)
    async with HeldServer({1}) as server, fleet_of(server) as fleet, batcher_of(fleet) as batcher:
        with pytest.raises(BufferFileError, match=told):
            batcher.load(tmp_path / "buffer")
        assert batcher.taken == 0
        assert len((await batcher.collect(prompts(), 1)).groups) == 1


async def test_the_crafted_buffer_is_one_without_its_flaw(tmp_path: Path) -> None:
    crafted(tmp_path / "buffer")
    async with HeldServer(set()) as server, fleet_of(server) as fleet:
        batcher = batcher_of(fleet)
        batcher.load(tmp_path / "buffer")
        assert batcher.taken == 1


@pytest.mark.parametrize("other", [{"seed": 2}, {"group_size": 3}])
async def test_the_buffer_of_another_run_is_refused(saved: Path, other: dict) -> None:
    async with HeldServer(set()) as server, fleet_of(server) as fleet:
        with pytest.raises(BufferFileError, match="another run"):
            batcher_of(fleet, **other).load(saved)


async def test_a_batcher_with_groups_of_its_own_loads_nothing(saved: Path) -> None:
    async with HeldServer({1}) as server, fleet_of(server) as fleet, batcher_of(fleet) as batcher:
        await batcher.collect(prompts(), 1, prefetch=1)
        with pytest.raises(RuntimeError, match="groups of its own"):
            batcher.load(saved)


async def test_versions_go_on_where_they_were(saved: Path) -> None:
    async with HeldServer({1}) as server, fleet_of(server) as fleet, batcher_of(fleet) as batcher:
        batcher.load(saved)
        with pytest.raises(ValueError, match="versions rise"):
            await batcher.collect(prompts(), 1, version=2)


async def test_a_save_that_fails_leaves_the_file_as_it_was(saved: Path) -> None:
    before = content(saved)
    async with HeldServer(set()) as server, fleet_of(server) as fleet, batcher_of(fleet) as batcher:
        strange = [Prompt("a", [1], info=object())]
        collecting = asyncio.create_task(batcher.collect(strange, 1))
        await until(lambda: server.running == 2)
        with pytest.raises(TypeError, match="the info of prompt 'a' cannot be JSON"):
            batcher.save(saved)
        collecting.cancel()
        await asyncio.wait([collecting])
    assert content(saved) == before
    assert names(saved.parent) == ["buffer"]


async def test_a_buffer_of_an_older_release_goes_on(saved: Path) -> None:
    """It says nothing of steps but the version of its latest batch."""

    def without_steps(data: bytes) -> bytes:
        message = buffer_pb2.SavedBuffer.FromString(data[data.index(b"\n") + 33 :])
        assert message.steps
        message.ClearField("steps")
        content = message.SerializeToString()
        return b"rollwire buffer 1\n" + hashlib.sha256(content).digest() + content

    rewrite(saved, without_steps)
    async with (
        HeldServer({1}, version=10) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, max_lag=1) as batcher,
    ):
        batcher.load(saved)
        batch = await batcher.collect(prompts(3), 1, version=10)
        assert ids(batch.finished) == ["1"]
        assert batch.groups[0].versions == {3, 10}
