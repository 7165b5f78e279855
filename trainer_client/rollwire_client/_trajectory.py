"""The tokens of a sequence, and the weights that sampled each: while it is sampled, and after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollwire.types import Finish, FinishReason, WeightTag

from rollwire_client._errors import MissingDependencyError
from rollwire_client._routing_replay import RoutingBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rollwire_client._detokenizer import TextBuilder
    from rollwire_client._routing_replay import Routing, RoutingReplay


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that follow ``offset``, all sampled under the same weights.

    Attributes:
        offset: Number of output tokens before these.
        token_ids: The tokens; may be empty in the last chunk.
        logprobs: One for each token.
        weights: The weights that sampled them.
        oldest_kv_revision: The lowest revision that computed a key or value to which these tokens
            attended. Below ``weights.revision`` only after a commit with ``KvPolicy.KEEP``.
        finish: How the sequence ended, in its last chunk; None in the others.
        routing: If requested: the rows that no earlier chunk had. With
            ``RoutingReplay.LAST_PASS``, rows that were computed again are sent again, and replace
            all earlier rows from their start on.
        text: With a ``Detokenizer``: the text that no earlier chunk had, and that is certain. It
            lags behind the tokens, by the last token, an incomplete character, and what may be the
            beginning of a stop string. The chunks' texts add up to ``Trajectory.text``.
    """

    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weights: WeightTag
    oldest_kv_revision: int
    finish: Finish | None = None
    routing: Routing | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Output tokens ``start`` to ``end`` (exclusive), all sampled under the same weights.

    Attributes:
        start: Index of the first token in the output.
        end: Index after the last token.
        weights: The weights that sampled them.
        oldest_kv_revision: The lowest revision that computed a key or value to which any of them
            attended.
    """

    start: int
    end: int
    weights: WeightTag
    oldest_kv_revision: int

    @property
    def kv_lag(self) -> int:
        """How many commits older than ``weights`` that revision is."""
        return self.weights.revision - self.oldest_kv_revision


@dataclass(frozen=True, slots=True)
class TrajectoryTensors:
    """A trajectory or conversation as tensors, for a loss. The tokens of a trajectory are its
    prompt and output. All tensors except ``routing`` have the shape [tokens].

    Attributes:
        token_ids: int64; given and sampled tokens, in order.
        logprobs: float32; log-probability under the policy that sampled the token, 0 for given
            tokens.
        versions: int64; the weight version that sampled the token, -1 for given tokens and for
            weights without a version.
        kv_lags: int64; how many commits older than the weights that sampled the token the keys and
            values may be to which it attended: 0 if all are of these weights, and for given tokens.
        mask: bool; whether the token was sampled.
        routing: int32 [tokens, layers, top_k]; the experts of each token. -1 for the last token,
            which was never an input, and for rows that did not arrive. None if no row arrived.
    """

    token_ids: Tensor
    logprobs: Tensor
    versions: Tensor
    kv_lags: Tensor
    mask: Tensor
    routing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence, however often it was interrupted and wherever it ran.

    Attributes:
        request_id: Id of the sequence on the servers.
        prompt_ids: The prompt.
        token_ids: The output.
        logprobs: One for each output token.
        segments: The output as consecutive runs of equal WeightTag.
        finish: How it ended; None if an error ended it (see ``RollwireError.trajectory``).
        servers: Addresses of the servers that sampled it, in order.
        routing: If requested: the experts of its tokens, by position.
        text: With a ``Detokenizer``: the text of the output, up to a stop string or stop token.
        stop_string: The stop string that ended it, which the last token completes.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish: Finish | None
    servers: tuple[str, ...]
    routing: Routing | None = None
    text: str | None = None
    stop_string: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it ended with a stop token or stop string, or at the length limit."""
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

    @property
    def kv_lags(self) -> tuple[int, ...]:
        """The ``kv_lag`` of each output token's segment."""
        return tuple(
            segment.kv_lag for segment in self.segments for _ in range(segment.start, segment.end)
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
            (0,) * prompt + self.kv_lags,
            (False,) * prompt + (True,) * len(self.token_ids),
            self.routing,
        )


def shortened(trajectory: Trajectory, end: int) -> Trajectory:
    """Its first ``end`` output tokens; without its finish and its text, unless that is all."""
    if end >= len(trajectory.token_ids):
        return trajectory
    builder = TrajectoryBuilder.of(replace(trajectory, finish=None, text=None, stop_string=None))
    builder.cut(end)
    return builder.trajectory()


def tensors(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int | None],
    kv_lags: Sequence[int],
    mask: Sequence[bool],
    routing: Routing | None,
) -> TrajectoryTensors:
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
        kv_lags=torch.tensor(kv_lags, dtype=torch.int64),
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


class TrajectoryBuilder:
    """A sequence while it is sampled: attempts append to it, and its reader takes chunks from it.

    Whoever appends tokens calls ``begin_run`` where the weights change.
    """

    def __init__(self, prompt_ids: Sequence[int], *, after: WeightTag | None = None) -> None:
        """``after`` is what sampled the last token of the prompt, in a conversation."""
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids: list[int] = []  # the output so far
        self.logprobs: list[float] = []
        self.run_weights: WeightTag | None = None  # of the run that is appended to
        self.run_oldest = 0  # its oldest KV revision
        self.finish: Finish | None = None  # once its reader knows
        self.routing: RoutingBuilder | None = None
        self.text: TextBuilder | None = None
        self._saved_text: tuple[str | None, str | None] = None, None  # and the stop string
        self._request_id = ""
        self._after = after
        # Where each run of equal weights begins, the weights, and its oldest KV revision.
        self._runs: list[tuple[int, WeightTag, int]] = []
        self._servers: list[tuple[int, str]] = []  # where each begins, its address

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryBuilder:
        made = cls(trajectory.prompt_ids)
        made.token_ids += trajectory.token_ids
        made.logprobs += trajectory.logprobs
        made.finish = trajectory.finish
        made._request_id = trajectory.request_id
        made._runs += [(s.start, s.weights, s.oldest_kv_revision) for s in trajectory.segments]
        made._servers += [(0, server) for server in trajectory.servers]
        made._saved_text = trajectory.text, trajectory.stop_string
        if trajectory.routing is not None:
            made.routing = RoutingBuilder(trajectory.routing.replay, len(made.prompt_ids))
            made.routing.load(trajectory.routing)
        return made

    def begin(
        self, request_id: str, replay: RoutingReplay | None, text: TextBuilder | None = None
    ) -> None:
        """The sequence begins, or continues, under this request; ``text`` has no tokens yet."""
        self._request_id, self.finish = request_id, None
        self.text = text
        if text is not None:
            text.skip(self.token_ids)
        known = self._routing()
        self.routing = RoutingBuilder(replay, len(self.prompt_ids)) if replay is not None else None
        if self.routing is not None and known is not None:
            self.routing.load(known)

    def begin_attempt(self) -> None:
        if self.routing is not None:
            self.routing.begin_attempt(len(self.token_ids))

    def begin_run(self, weights: WeightTag, oldest_kv_revision: int, server: str) -> None:
        """What is appended from now on was sampled by ``server`` under these weights."""
        if not self._runs or self._runs[-1][1:] != (weights, oldest_kv_revision):
            self._runs.append((len(self.token_ids), weights, oldest_kv_revision))
        if not self._servers or self._servers[-1][1] != server:
            self._servers.append((len(self.token_ids), server))
        self.run_weights, self.run_oldest = weights, oldest_kv_revision

    def chunk(self, offset: int) -> Chunk:
        """The tokens from ``offset`` on, as far as they were sampled under the same weights."""
        run = len(self._runs) - 1
        end = len(self.token_ids)
        while self._runs[run][0] > offset:
            end = self._runs[run][0]
            run -= 1
        tokens, logprobs = self.token_ids[offset:end], self.logprobs[offset:end]
        _, weights, oldest_kv_revision = self._runs[run]
        return Chunk(offset, tuple(tokens), tuple(logprobs), weights, oldest_kv_revision)

    def with_routing(self, chunk: Chunk) -> Chunk:
        """The chunk with the routing up to its last token that no chunk before it had."""
        if self.routing is None:
            return chunk
        end = chunk.offset + len(chunk.token_ids)
        return replace(chunk, routing=self.routing.take(self._ends(end)))

    def with_text(self, chunk: Chunk) -> Chunk:
        """The next chunk with its text; it ends with a stop string, if it has one."""
        if self.text is None:
            return chunk
        finish = chunk.finish
        kept = self.text.append(chunk.token_ids)
        if self.text.stop_string is not None and (
            finish is None or finish.reason is not FinishReason.STOP or kept < len(chunk.token_ids)
        ):
            finish = Finish(
                FinishReason.STOP,
                prompt_tokens=len(self.prompt_ids),
                output_tokens=chunk.offset + kept,
            )
        if finish is not None:
            self.text.end(hides_last=finish.stop_token_id is not None)
        return replace(
            chunk,
            token_ids=chunk.token_ids[:kept],
            logprobs=chunk.logprobs[:kept],
            finish=finish,
            text=self.text.take(),
        )

    def cut(self, end: int) -> None:
        if end >= len(self.token_ids):
            return
        del self.token_ids[end:], self.logprobs[end:]
        self._runs = [run for run in self._runs if run[0] < end]
        self._servers = [server for server in self._servers if server[0] < end]
        self.run_weights = None

    @property
    def weights(self) -> list[WeightTag]:
        return [weights for _, weights, _ in self._runs]

    @property
    def newest(self) -> WeightTag | None:
        """The weights that sampled its last token, or the last one before it."""
        return self._runs[-1][1] if self._runs else self._after

    def trajectory(self) -> Trajectory:
        text, stop_string = self._saved_text
        if self.text is not None:
            text, stop_string = self.text.text, self.text.stop_string
        return Trajectory(
            request_id=self._request_id,
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            segments=self._segments(),
            finish=self.finish,
            servers=tuple(server for _, server in self._servers),
            routing=self._routing(),
            text=text,
            stop_string=stop_string,
        )

    def _segments(self) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        ends = [*(start for start, _, _ in self._runs[1:]), len(self.token_ids)]
        for (start, weights, oldest), end in zip(self._runs, ends, strict=False):
            if segments and segments[-1].weights == weights:
                last = segments.pop()
                start, oldest = last.start, min(oldest, last.oldest_kv_revision)
            segments.append(Segment(start, end, weights, oldest))
        return tuple(segments)

    def _routing(self) -> Routing | None:
        return self.routing.routing(self._ends()) if self.routing is not None else None

    def _ends(self, end: int | None = None) -> list[tuple[int, WeightTag]]:
        """Where each segment ends in prompt + output, and its weights; of the output before
        ``end``, by default of all.
        """
        prompt, end = len(self.prompt_ids), len(self.token_ids) if end is None else end
        return [
            (prompt + min(segment.end, end), segment.weights)
            for segment in self._segments()
            if segment.start < end
        ]
