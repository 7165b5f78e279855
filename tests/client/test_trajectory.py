"""What trajectories tell, and what they are made of."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_client import (
    MissingDependencyError,
    RoutingReplay,
    Segment,
    WeightTag,
)
from rollwire_client._routing_replay import Rows
from rollwire_client._trajectory import TrajectoryBuilder


def tag(version: int | None, server: str = "a") -> WeightTag:
    return WeightTag(version, 0 if version is None else version, server, 5)


def append(
    output: TrajectoryBuilder, count: int, weights: WeightTag, oldest: int = 0, server: str = "x"
) -> None:
    tokens = range(len(output.token_ids), len(output.token_ids) + count)
    if count:
        output.begin_run(weights, oldest, server)
    output.token_ids += tokens
    output.logprobs += [-t / 4 for t in tokens]


def test_a_tag_shows_its_digest_as_the_command_does() -> None:
    shown = repr(WeightTag(4, 2, "a", 0x00C0FFEE))
    assert "digest=0x0000000000c0ffee" in shown
    assert eval(shown) == WeightTag(4, 2, "a", 0x00C0FFEE)  # noqa: S307 - as of any dataclass


PARTS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, 1, 2]), st.sampled_from("ab")))


@given(PARTS)
def test_segments_cover_the_output(parts: list) -> None:
    output = TrajectoryBuilder([7])
    versions, offset = [], 0
    for count, version, server in parts:
        append(output, count, tag(version, server), server=server)
        versions += [version] * count
        offset += count
    trajectory = output.trajectory()
    assert trajectory.token_ids == tuple(range(offset))
    assert trajectory.versions == tuple(versions)
    ends = [0, *(segment.end for segment in trajectory.segments)]
    assert [segment.start for segment in trajectory.segments] == ends[:-1]
    assert ends[-1] == offset
    for one, next_one in zip(trajectory.segments, trajectory.segments[1:], strict=False):
        assert one.weights != next_one.weights
    assert (output.newest and output.newest.version) == (versions[-1] if versions else None)


@given(PARTS, st.integers(0, 50))
def test_chunks_bring_each_token_once_with_its_weights_also_of_a_cut_output(
    parts: list, end: int
) -> None:
    output, tags = TrajectoryBuilder([7]), []
    for count, version, server in parts:
        append(output, count, tag(version, server), server=server)
        tags += [tag(version, server)] * count
    output.cut(end)
    assert output.token_ids == list(range(min(end, len(tags))))
    append(output, 3, tag(9))
    tags = [*tags[:end], *[tag(9)] * 3]
    offset = 0
    while offset < len(tags):
        chunk = output.chunk(offset)
        assert chunk.token_ids == tuple(range(offset, offset + len(chunk.token_ids)))
        assert chunk.logprobs == tuple(-t / 4 for t in chunk.token_ids)
        assert {chunk.weights} == set(tags[offset : offset + len(chunk.token_ids)])
        offset += len(chunk.token_ids)
    trajectory = output.trajectory()
    assert trajectory.versions == tuple(weights.version for weights in tags)
    servers = [*(weights.server_id for weights in tags[:-3]), "x"]
    assert trajectory.servers == tuple(server for server, _ in itertools.groupby(servers))
    assert TrajectoryBuilder.of(trajectory).trajectory() == trajectory


def test_a_segment_keeps_its_oldest_revision() -> None:
    output = TrajectoryBuilder([7])
    append(output, 2, tag(3), oldest=1)
    append(output, 2, tag(3), oldest=2)
    assert [output.chunk(0).oldest_kv_revision, output.chunk(2).oldest_kv_revision] == [1, 2]
    assert output.trajectory().segments == (Segment(0, 4, tag(3), 1),)


def test_tensors_are_what_a_loss_needs() -> None:
    output = TrajectoryBuilder([7, 8])
    append(output, 1, tag(None))
    append(output, 2, tag(4), oldest=1)
    trajectory = output.trajectory()
    tensors = trajectory.to_tensors()
    assert tensors.token_ids.tolist() == [7, 8, 0, 1, 2]
    assert tensors.token_ids.dtype == tensors.versions.dtype == torch.int64
    assert tensors.kv_lags.dtype == torch.int64
    assert tensors.kv_lags.tolist() == [0, 0, 0, 3, 3]
    assert tensors.logprobs.tolist() == [0, 0, 0, -0.25, -0.5]
    assert tensors.logprobs.dtype == torch.float32
    assert tensors.versions.tolist() == [-1, -1, -1, 4, 4]
    assert tensors.mask.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("width", [1, 2])
def test_tensors_have_the_experts_of_every_token_that_was_an_input(width: int) -> None:
    experts = [[[1, 255], [0, 7]], [[2, 3], [4, 5]], [[6, 8], [9, 10]]]
    if width == 2:
        experts[1][0] = [256, 65535]
    flat = [e for row in experts for layer in row for e in layer]
    output = TrajectoryBuilder([7, 8])
    output.begin("id", RoutingReplay.AS_SAMPLED)
    packed = b"".join(e.to_bytes(width, "little") for e in flat)
    output.routing.add(Rows(0, 3, (2, 2, width), packed, tag(4)))
    append(output, 3, tag(4))
    trajectory = output.trajectory()
    assert (trajectory.routing.num_rows, trajectory.routing.bytes_per_expert) == (3, width)
    tensor = trajectory.to_tensors().routing
    assert tensor.dtype == torch.int32
    none = [[-1, -1], [-1, -1]]
    assert tensor.tolist() == [*experts, none, none]  # one did not come; the last was no input


def test_tensors_without_routing() -> None:
    assert TrajectoryBuilder([7]).trajectory().to_tensors().routing is None
    output = TrajectoryBuilder([7])
    output.begin("id", RoutingReplay.LAST_PASS)
    assert output.trajectory().to_tensors().routing is None


def test_tensors_of_no_tokens() -> None:
    tensors = TrajectoryBuilder([7]).trajectory().to_tensors()
    assert tensors.token_ids.tolist() == [7]
    assert tensors.mask.tolist() == [False]


def test_tensors_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'rollwire\[transport\]'"):
        TrajectoryBuilder([7]).trajectory().to_tensors()
