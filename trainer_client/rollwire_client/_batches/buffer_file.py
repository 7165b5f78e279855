"""A batcher's buffer in a file, which names its format and digest. Nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError
from rollwire.conversion import (
    finish_from_proto,
    finish_to_proto,
    weight_tag_from_proto,
    weight_tag_to_proto,
)
from rollwire.v1.buffer_pb2 import (
    SavedBuffer,
    SavedGroup,
    SavedRouting,
    SavedSample,
    SavedSegment,
    SavedStep,
)

from rollwire_client._arguments import checked_version
from rollwire_client._batches.batch import Prompt
from rollwire_client._batches.group import LiveGroup, LiveSample, checked_prompt
from rollwire_client._batches.trainer_steps import TrainerStep
from rollwire_client._errors import BufferFileError, RollwireError
from rollwire_client._routing_replay import Routing, RoutingReplay, RoutingSegment
from rollwire_client._rpc.conversion import sampling_from_proto, sampling_to_proto
from rollwire_client._trajectory import Segment, Trajectory, TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rollwire.types import WeightTag

    from rollwire_client._batches.group import GroupSampler

T = TypeVar("T")

NAME, _FORMAT = b"rollwire buffer ", b"1"
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class BufferContents:
    """What a file holds: of a batcher, its buffer and the trainer's steps."""

    version: int | None
    handed_out: int
    dropped: int
    steps: Sequence[TrainerStep]
    groups: Sequence[LiveGroup]


def write(path: Path, sampler: GroupSampler, contents: BufferContents) -> None:
    message = SavedBuffer(
        seed=sampler.run_seed,
        group_size=sampler.group_size,
        version=contents.version,
        handed_out=contents.handed_out,
        dropped=contents.dropped,
        groups=[_group_message(group) for group in contents.groups],
        steps=[SavedStep(**step._asdict()) for step in contents.steps],
    )
    content = message.SerializeToString()
    digest = hashlib.sha256(content).digest()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(NAME + _FORMAT + b"\n" + digest + content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path, sampler: GroupSampler | None = None) -> BufferContents:
    """The file's contents; of any run without ``sampler``, else of its run only."""
    content = _content(path)
    try:
        message = SavedBuffer.FromString(content)
    except DecodeError as error:
        raise BufferFileError(f"{path}: no buffer, though its digest is right: {error}") from error
    size = message.group_size
    if sampler is not None and (message.seed, size) != (sampler.run_seed, sampler.group_size):
        raise BufferFileError(
            f"{path} is of seed {message.seed} and groups of {size}, this batcher of seed "
            f"{sampler.run_seed} and groups of {sampler.group_size}: it belongs to another run"
        )
    version = message.version if message.HasField("version") else None
    try:
        checked_version("its version", version)
        steps = [_step(step) for step in message.steps]
        _check(all(a.number < b.number for a, b in pairwise(steps)), "steps out of order")
        groups = [_group(group, size) for group in message.groups]
        keys = {(group.prompt.id, group.prompt.epoch) for group in groups}
        _check(len(keys) == len(groups), "a prompt occurs twice")
    except (ValueError, TypeError, RollwireError, RecursionError) as error:
        raise BufferFileError(f"{path} cannot be what a Batcher saved: {error}") from error
    return BufferContents(version, message.handed_out, message.dropped, steps, groups)


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    line, _, rest = data.partition(b"\n")
    if not line.startswith(NAME):
        raise BufferFileError(f"{path} is not a buffer that a Batcher saved")
    if line != NAME + _FORMAT:
        raise BufferFileError(
            f"{path} has the format {line[len(NAME) :].decode(errors='replace')!r}, and this "
            f"release of rollwire reads {_FORMAT.decode()}"
        )
    digest, content = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise BufferFileError(
            f"{path} is damaged: its content does not match the digest in the file; use the "
            f"file of an older checkpoint, or continue without one"
        )
    return content


def _group_message(group: LiveGroup) -> SavedGroup:
    prompt = group.prompt
    try:
        info = json.dumps(prompt.info)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the info of prompt {prompt.id!r} cannot be JSON: {error}") from error
    return SavedGroup(
        prompt_id=prompt.id,
        prompt_token_ids=prompt.token_ids,
        epoch=prompt.epoch,
        info=info,
        sampling=None if prompt.sampling is None else sampling_to_proto(prompt.sampling),
        samples=[_sample_message(sample) for sample in group.samples],
    )


def _step(message: SavedStep) -> TrainerStep:
    return TrainerStep(
        message.number,
        checked_version("a step", message.version if message.HasField("version") else None),
        message.digest if message.HasField("digest") else None,
    )


def _check(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as an assertion
    if not holds:
        raise ValueError(otherwise)


def _group(message: SavedGroup, size: int) -> LiveGroup:
    _check(bool(message.prompt_token_ids), "a prompt has no tokens")
    _check(len(message.samples) == size, f"{len(message.samples)} samples in a group of {size}")
    prompt = checked_prompt(
        Prompt(
            id=message.prompt_id,
            token_ids=tuple(message.prompt_token_ids),
            epoch=message.epoch,
            info=json.loads(message.info),
            sampling=sampling_from_proto(message.sampling)
            if message.HasField("sampling")
            else None,
        )
    )
    samples = enumerate(message.samples)
    return LiveGroup(prompt, [_sample(index, prompt.token_ids, s) for index, s in samples])


def _sample_message(sample: LiveSample) -> SavedSample:
    if sample.session is not None:  # a conversation begins again
        return SavedSample(refills=sample.refills)
    trajectory = sample.output.trajectory()
    return SavedSample(
        request_id=trajectory.request_id,
        token_ids=trajectory.token_ids,
        logprobs=trajectory.logprobs,
        segments=[_segment_message(segment) for segment in trajectory.segments],
        finish=None if trajectory.finish is None else finish_to_proto(trajectory.finish),
        servers=trajectory.servers,
        reward=sample.reward,
        refills=sample.refills,
        routing=None if trajectory.routing is None else _routing_message(trajectory.routing),
        text=trajectory.text,
        stop_string=trajectory.stop_string,
    )


def _segment_message(segment: Segment | RoutingSegment) -> SavedSegment:
    return SavedSegment(
        end=segment.end,
        weights=weight_tag_to_proto(segment.weights),
        oldest_kv_revision=segment.oldest_kv_revision,
    )


def _routing_message(routing: Routing) -> SavedRouting:
    return SavedRouting(
        replay=routing.replay.value,
        num_rows=routing.num_rows,
        num_layers=routing.num_layers,
        top_k=routing.top_k,
        bytes_per_expert=routing.bytes_per_expert,
        experts=routing.experts,
        segments=[_segment_message(segment) for segment in routing.segments],
    )


def _sample(index: int, prompt_ids: Sequence[int], message: SavedSample) -> LiveSample:
    tokens = len(message.token_ids)
    _check(len(message.logprobs) == tokens, "not as many log-probabilities as tokens")
    finish = None
    if message.HasField("finish"):
        finish = finish_from_proto(message.finish)
        _check(finish is not None, "a sequence that ended for no known reason")
    routing = _routing(message.routing) if message.HasField("routing") else None
    _check(
        routing is None or routing.num_rows <= max(len(prompt_ids) + tokens - 1, 0),
        "routing of more tokens than there are",
    )
    trajectory = Trajectory(
        request_id=message.request_id,
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        segments=_segments(Segment, message.segments, tokens),
        finish=finish,
        servers=tuple(message.servers),
        routing=routing,
        text=message.text if message.HasField("text") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
    )
    reward = message.reward if message.HasField("reward") else None
    return LiveSample(index, TrajectoryBuilder.of(trajectory), reward, message.refills)


def _routing(message: SavedRouting) -> Routing:
    width = message.bytes_per_expert
    size = message.num_rows * message.num_layers * message.top_k * width
    _check(width in {1, 2} and len(message.experts) == size > 0, "routing of another size")
    return Routing(
        replay=RoutingReplay(message.replay),
        start=0,
        num_rows=message.num_rows,
        num_layers=message.num_layers,
        top_k=message.top_k,
        bytes_per_expert=width,
        experts=message.experts,
        segments=_segments(RoutingSegment, message.segments, message.num_rows),
    )


def _segments(
    kind: Callable[[int, int, WeightTag, int], T], messages: Sequence[SavedSegment], last: int
) -> tuple[T, ...]:
    """They must cover all before ``last``."""
    bounds = [0, *(message.end for message in messages)]
    _check(bounds[-1] == last, "segments that do not cover the tokens")
    _check(all(a < b for a, b in pairwise(bounds)), "segments out of order")
    return tuple(
        kind(start, s.end, weight_tag_from_proto(s.weights), s.oldest_kv_revision)
        for start, s in zip(bounds, messages, strict=False)
    )
