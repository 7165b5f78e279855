"""Routing replay: which experts a mixture of experts chose for each token, merged by position.

Row i is the routing of token i of prompt + output, as an input. The last token was never an input
and has no row. A server sends the rows of a pass in order. After a commit that recomputes, and on
the next server, a new pass begins at row 0.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollwire.types import WeightTag


class RoutingReplay(enum.Enum):
    """Which routing of a token is kept if it was computed more than once."""

    AS_SAMPLED = "as_sampled"
    """That of the pass that sampled the token after it (for the prompt: the first token)."""
    LAST_PASS = "last_pass"  # noqa: S105 - no password
    """That of the newest pass, once it has as many rows as any pass before it."""


@dataclass(frozen=True, slots=True)
class RoutingSegment:
    """Rows ``start`` to ``end`` (exclusive), all computed by the same weights.

    Attributes:
        start: Position of the first row's token.
        end: Position after the last row's token.
        weights: The weights that computed them.
        oldest_kv_revision: The lowest revision that computed a key or value to which any of them
            attended; 0 if the server did not say.
    """

    start: int
    end: int
    weights: WeightTag
    oldest_kv_revision: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of consecutive tokens of prompt + output, one row per token.

    Attributes:
        replay: Which routing is kept if a row was computed more than once.
        start: Position of the first row's token; 0 except in a ``Chunk``.
        num_rows: prompt + output - 1 for a whole sequence; fewer if the sequence ended before they
            arrived.
        num_layers: Number of layers with experts.
        top_k: Experts that each layer chose for a token.
        bytes_per_expert: 1 or 2.
        experts: Expert ids [num_rows, num_layers, top_k], little-endian.
        segments: Consecutive runs of rows with equal WeightTag, which cover all rows.
        recomputed: Ranges (start, end) of rows whose weights or server are not those that sampled
            the token after them (for the prompt's rows: the first token). With AS_SAMPLED these are
            rows that a server had not sent before it died, and the rows of a prompt whose prefill
            was under way during a commit with KEEP.
    """

    replay: RoutingReplay
    start: int
    num_rows: int
    num_layers: int
    top_k: int
    bytes_per_expert: int
    experts: bytes = field(repr=False)
    segments: tuple[RoutingSegment, ...]
    recomputed: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """Position after the last row's token."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one pass as a server sends them, at least one, computed by one set of weights."""

    start: int
    count: int
    shape: tuple[int, int, int]  # layers, experts a layer, bytes an expert
    experts: bytes  # as ``Routing`` has them
    weights: WeightTag
    oldest_kv_revision: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count


# The output in runs of equal weights: where each ends in prompt + output, and the weights.
Tokens: TypeAlias = "Sequence[tuple[int, WeightTag]]"


class RoutingBuilder:
    """The routing of a sequence while it is sampled.

    It holds every row once, and with LAST_PASS twice while a pass computes them again.
    """

    def __init__(self, replay: RoutingReplay, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self._replay = replay
        self._next_row = 0  # of the pass under way
        self._rows = _RowStore()
        self._longer_pass: _RowStore | None = None  # an older pass that has more rows
        self._settled = 0  # rows that led to tokens of earlier attempts
        self._taken = 0  # rows that chunks have

    def load(self, routing: Routing) -> None:
        self._rows.load(routing)
        self.begin_attempt(self._rows.end - self.prompt_length + 1)

    def begin_attempt(self, sampled: int) -> None:
        """Rows come from the first on again. Those that led to none of the ``sampled`` output
        tokens are dropped.
        """
        useful = self.prompt_length + sampled - 1 if sampled > 0 else 0
        self._rows.cut(useful)
        self._settled = self._rows.end
        if self._longer_pass is not None:
            self._longer_pass.cut(useful)
            self._drop_longer_pass()
        if self._replay is RoutingReplay.LAST_PASS:
            self._begin_pass(0)
        self._next_row = 0

    def add(self, rows: Rows) -> None:
        """Takes the next rows; raises ValueError if they contradict those before."""
        shape = self._rows.shape
        if shape is not None and rows.shape != shape:
            raise ValueError(
                f"a token's routing is {_describe(rows.shape)}, and was {_describe(shape)}"
            )
        if rows.start > self._next_row:
            raise ValueError(
                f"the routing of tokens {self._next_row} to {rows.start - 1} never came"
            )
        if rows.start < self._next_row:
            self._begin_pass(rows.start)
        self._next_row = rows.end
        self._rows.append(rows)
        self._drop_longer_pass()

    def take(self, tokens: Tokens) -> Routing | None:
        """The rows that led to a token of the output and were not taken yet; None if there are
        none. With LAST_PASS, those of a new pass are not taken yet.
        """
        end = min(self._final, tokens[-1][0] - 1) if tokens else 0
        if self._taken >= end:
            return None
        start, self._taken = self._taken, end
        return self._routing(self._rows, start, end, tokens)

    def routing(self, tokens: Tokens) -> Routing | None:
        """All of it as it is now; None if nothing came."""
        most = max((tokens[-1][0] if tokens else self.prompt_length) - 1, 0)
        store = self._rows
        if self._longer_pass is not None and store.end < most:
            store = self._longer_pass
        return self._routing(store, 0, min(store.end, most), tokens)

    @property
    def _final(self) -> int:
        """Rows that no later rows replace, except by a new pass with LAST_PASS."""
        if self._replay is RoutingReplay.AS_SAMPLED and self._rows.end < self.prompt_length:
            return self._settled
        return self._rows.end

    def _drop_longer_pass(self) -> None:
        """Once the newest pass has caught up, the longer one is of no use."""
        if self._longer_pass is not None and self._rows.end >= self._longer_pass.end:
            self._longer_pass = None

    def _begin_pass(self, start: int) -> None:
        """The rows from ``start`` on are computed again."""
        if self._replay is RoutingReplay.LAST_PASS:
            self._longer_pass = self._longer_pass or self._rows
            self._rows = self._rows.copy(start)
            self._taken = min(self._taken, start)
        else:
            self._rows.cut(max(start, self._final))

    def _routing(self, store: _RowStore, start: int, end: int, tokens: Tokens) -> Routing | None:
        recomputed = _recomputed_ranges(store.segments(start, end), tokens)
        return store.routing(self._replay, start, end, recomputed)


def joined(turns: Iterable[Routing]) -> Routing | None:
    """The routing of a conversation from that of its turns; None if there are none.

    Each row is of the first turn that has it, or with LAST_PASS of the last.
    """
    whole: Routing | None = None
    for turn in turns:
        if whole is None or (turn.replay is RoutingReplay.LAST_PASS and turn.end >= whole.end):
            whole = turn
        elif turn.end > whole.end:
            store = _RowStore()
            store.load(whole)
            store.load(turn)
            at = whole.end
            later = [(max(start, at), end) for start, end in turn.recomputed if end > at]
            whole = store.routing(whole.replay, 0, turn.end, [*whole.recomputed, *later])
    return whole


class _RowStore:
    """The rows of a sequence from the first on, each once."""

    def __init__(self) -> None:
        self.end = 0
        self.shape: tuple[int, int, int] | None = None  # known once there was a row
        self._experts = bytearray()
        self._segments: list[RoutingSegment] = []

    def append(self, rows: Rows) -> None:
        self.shape = rows.shape
        if rows.end <= self.end:
            return
        self._experts += memoryview(rows.experts)[(self.end - rows.start) * self._row_bytes :]
        start, oldest = self.end, rows.oldest_kv_revision
        if self._segments and self._segments[-1].weights == rows.weights:
            last = self._segments.pop()
            start, oldest = last.start, min(oldest, last.oldest_kv_revision)
        self._segments.append(RoutingSegment(start, rows.end, rows.weights, oldest))
        self.end = rows.end

    def load(self, routing: Routing) -> None:
        """Appends the rows of a sequence, from its first on, that it does not have yet."""
        self.shape = shape = routing.num_layers, routing.top_k, routing.bytes_per_expert
        size = math.prod(shape)
        for s in routing.segments:
            experts = routing.experts[s.start * size : s.end * size]
            oldest = s.oldest_kv_revision
            self.append(Rows(s.start, s.end - s.start, shape, experts, s.weights, oldest))

    def cut(self, end: int) -> None:
        if end < self.end:
            self._segments = self.segments(0, end)
            del self._experts[end * self._row_bytes :]
            self.end = end

    def copy(self, end: int) -> _RowStore:
        made = _RowStore()
        made.end = min(end, self.end)
        made.shape = self.shape
        made._segments = self.segments(0, end)
        made._experts = self._experts[: end * self._row_bytes]
        return made

    def segments(self, start: int, end: int) -> list[RoutingSegment]:
        return [
            replace(segment, start=max(segment.start, start), end=min(segment.end, end))
            for segment in self._segments
            if segment.start < end and segment.end > start
        ]

    def routing(
        self, replay: RoutingReplay, start: int, end: int, recomputed: Iterable[tuple[int, int]]
    ) -> Routing | None:
        """Rows ``start`` to ``end``; None if there was never a row."""
        if self.shape is None:
            return None
        layers, top_k, width = self.shape
        return Routing(
            replay=replay,
            start=start,
            num_rows=end - start,
            num_layers=layers,
            top_k=top_k,
            bytes_per_expert=width,
            experts=bytes(self._experts[start * self._row_bytes : end * self._row_bytes]),
            segments=tuple(self.segments(start, end)),
            recomputed=tuple(recomputed),
        )

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape or ())


def _recomputed_ranges(rows: Iterable[RoutingSegment], tokens: Tokens) -> list[tuple[int, int]]:
    """Ranges of rows whose weights are not those of the token after them."""
    found: list[tuple[int, int]] = []
    for row in rows:
        at = 0
        for stop, weights in tokens:
            start, end = max(at, row.start), min(stop - 1, row.end)
            at = stop - 1
            if start >= end or weights == row.weights:
                continue
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
    return found


def _describe(shape: tuple[int, int, int]) -> str:
    layers, top_k, width = shape
    return f"{top_k} experts of {width} bytes in each of {layers} layers"
