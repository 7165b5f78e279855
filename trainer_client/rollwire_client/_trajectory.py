"""What a sequence became: its tokens, and which weights sampled each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollwire.types import Finish, FinishReason, WeightTag

from rollwire_client._errors import MissingDependencyError
from rollwire_client._routing_replay import RoutingBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rollwire_client._data import Chunk
    from rollwire_client._routing_replay import Routing, RoutingReplay


@dataclass(frozen=True, slots=True)
class Segment:
    """Output tokens ``start`` to ``end`` (exclusive), all sampled under the same weights.

    Attributes:
        start: Index of the first one in the output.
        end: Index after the last one.
        weights: What sampled them.
        oldest_kv_revision: The lowest revision that computed a key or value which any of them
            attended to.
    """

    start: int
    end: int
    weights: WeightTag
    oldest_kv_revision: int


@dataclass(frozen=True, slots=True)
class TrajectoryTensors:
    """A trajectory or conversation as a loss takes it; every tensor but the last has the shape
    [tokens], which is [prompt + output] of a trajectory.

    Attributes:
        token_ids: int64; what was given and what was sampled, in order.
        logprobs: float32; of each token as its policy gave it, 0 where it was given.
        versions: int64; the weight version that sampled each token, -1 where there is none (where
            it was given, and under weights without a version).
        mask: bool; true where a token was sampled, false where it was given.
        routing: int32 [tokens, layers, top_k]; the experts of each token, -1 of the last, which was
            never an input, and of rows that did not come. None if nothing came.
    """

    token_ids: Tensor
    logprobs: Tensor
    versions: Tensor
    mask: Tensor
    routing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence, however often it was interrupted and wherever it ran.

    Attributes:
        request_id: Its name on the servers.
        prompt_ids: The prompt.
        token_ids: The output.
        logprobs: One for each output token.
        segments: The output in runs of equal WeightTag; they touch, and cover it.
        finish: How it ended; None where an error ended it (see ``RollwireError.trajectory``).
        servers: Addresses of the servers that sampled it, in order.
        routing: If it was asked for: the experts of its tokens, by position.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish: Finish | None
    servers: tuple[str, ...]
    routing: Routing | None = None

    @property
    def complete(self) -> bool:
        """Whether it came to its own end: a stop token or the length limit."""
        return self.finish is not None and self.finish.reason in {
            FinishReason.STOP,
            FinishReason.LENGTH,
        }

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The weight version that sampled each output token."""
        return tuple(
            segment.weights.version
            for segment in self.segments
            for _ in range(segment.start, segment.end)
        )

    def to_tensors(self) -> TrajectoryTensors:
        """The trajectory as CPU tensors.

        Raises:
            MissingDependencyError: torch is not installed.
        """
        prompt = len(self.prompt_ids)
        return tensors(
            self.prompt_ids + self.token_ids,
            (0.0,) * prompt + self.logprobs,
            (None,) * prompt + self.versions,
            (False,) * prompt + (True,) * len(self.token_ids),
            self.routing,
        )


def tensors(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int | None],
    mask: Sequence[bool],
    routing: Routing | None,
) -> TrajectoryTensors:
    """What a loss takes, on the CPU; each argument but the last has an entry for every token.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "tensors need torch: pip install 'rollwire[transport]'"
        ) from error
    return TrajectoryTensors(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        versions=torch.tensor([-1 if v is None else v for v in versions], dtype=torch.int64),
        mask=torch.tensor(mask, dtype=torch.bool),
        routing=_routing_tensor(routing, len(token_ids)) if routing is not None else None,
    )


def _routing_tensor(routing: Routing, tokens: int) -> Tensor:
    import torch

    shape = routing.num_layers, routing.top_k
    made = torch.full((tokens, *shape), -1, dtype=torch.int32)
    if routing.num_rows:
        octets = torch.frombuffer(bytearray(routing.experts), dtype=torch.uint8).to(torch.int32)
        low, *high = octets.view(-1, *shape, routing.bytes_per_expert).unbind(-1)
        made[routing.start : routing.end] = low + (high[0] << 8) if high else low
    return made


@dataclass(slots=True)
class _Run:
    """A segment that may still grow; it starts where the one before it ends."""

    end: int
    weights: WeightTag
    oldest_kv_revision: int


class TrajectoryBuilder:
    """A trajectory that is still being sampled.

    Attributes:
        request_id: Its name on the servers.
        prompt_ids: The prompt.
        token_ids: The output so far.
        routing: If it was asked for: what attempts are to merge it into.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        replay: RoutingReplay | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._runs: list[_Run] = []
        self._servers: list[str] = []
        self._finish: Finish | None = None
        self.routing = RoutingBuilder(replay, len(self.prompt_ids)) if replay is not None else None

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryBuilder:
        """One that has all of that."""
        routing = trajectory.routing
        draft = cls.after(
            trajectory, trajectory.request_id, routing.replay if routing is not None else None
        )
        draft._finish = trajectory.finish  # noqa: SLF001 - its own
        return draft

    @classmethod
    def after(
        cls, prefix: Trajectory, request_id: str, replay: RoutingReplay | None
    ) -> TrajectoryBuilder:
        """One that goes on, under another name, from what was sampled before."""
        draft = cls(request_id, prefix.prompt_ids, replay)
        draft.token_ids += prefix.token_ids
        draft._logprobs += prefix.logprobs
        draft._runs += [_Run(s.end, s.weights, s.oldest_kv_revision) for s in prefix.segments]
        draft._servers += prefix.servers
        if draft.routing is not None and prefix.routing is not None:
            draft.routing.go_on_from(prefix.routing)
        return draft

    def begin_attempt(self) -> None:
        """What comes now is of another attempt."""
        if self.routing is not None:
            self.routing.begin_attempt(len(self.token_ids))

    def with_rows(self, chunk: Chunk) -> Chunk:
        """The chunk, which was just added, with the routing that no chunk before it had."""
        if self.routing is None:
            return chunk
        return replace(chunk, routing=self.routing.take(self._tokens()))

    def add(self, chunk: Chunk, server: str) -> None:
        """Appends what ``server`` sampled."""
        self._finish = chunk.finish
        if not chunk.token_ids:
            return
        if not self._servers or self._servers[-1] != server:
            self._servers.append(server)
        self.token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        weights, oldest = chunk.weights, chunk.oldest_kv_revision
        last = self._runs[-1] if self._runs else None
        if last is None or (last.weights is not weights and last.weights != weights):
            self._runs.append(_Run(len(self.token_ids), weights, oldest))
        else:
            last.end = len(self.token_ids)
            last.oldest_kv_revision = min(last.oldest_kv_revision, oldest)

    @property
    def weights(self) -> list[WeightTag]:
        """What sampled it, in order."""
        return [run.weights for run in self._runs]

    @property
    def newest(self) -> WeightTag | None:
        """The weights that sampled its last token."""
        return self._runs[-1].weights if self._runs else None

    def trajectory(self) -> Trajectory:
        """As it is now."""
        starts = [0, *(run.end for run in self._runs)]
        segments = [
            Segment(start, run.end, run.weights, run.oldest_kv_revision)
            for start, run in zip(starts, self._runs, strict=False)
        ]
        return Trajectory(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            segments=tuple(segments),
            finish=self._finish,
            servers=tuple(self._servers),
            routing=self.routing.routing(self._tokens()) if self.routing is not None else None,
        )

    def _tokens(self) -> list[tuple[int, WeightTag]]:
        """As routing counts them."""
        prompt = len(self.prompt_ids)
        return [(prompt + run.end, run.weights) for run in self._runs]
