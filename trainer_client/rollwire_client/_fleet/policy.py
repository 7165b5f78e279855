"""Which weights the servers of a fleet are to serve: those that were committed last."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollwire.types import WeightTag

_HISTORY = 1000


@dataclass(frozen=True, slots=True)
class _PendingCommit:
    """Weights that servers were told to commit; ``digest`` is None where it is not known yet."""

    version: int | None
    digest: int | None
    rollback: bool

    def is_same(self, weights: WeightTag) -> bool:
        return weights.version == self.version and self.digest in {None, weights.digest}


class Policy:
    """What was published last through a fleet.

    Two weights are the same if version and digest are. The order of commits says which are newer,
    not the versions: a trainer that goes back to a checkpoint publishes a lower version, and
    servers that missed this are behind, though their version is higher.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        # The tag of one of the servers that serve it; before the first publish any weights will do.
        self.current: WeightTag | None = None
        self.rolled_back = False  # whether a publish was allowed to lower the version
        self._published: deque[WeightTag] = deque(maxlen=_HISTORY)
        self._count = 0  # how many publishes there were
        self._on_change = on_change  # called when other weights are to be served
        self._pending: _PendingCommit | None = None  # may have been committed
        self._committing = False
        self._before: WeightTag | None = None

    @contextlib.contextmanager
    def committing(
        self, version: int | None, digest: int | None, *, rollback: bool
    ) -> Iterator[None]:
        """While servers are told to commit ``version``, after which their weights have ``digest``
        (None if it is not known).
        """
        self._pending = _PendingCommit(version, digest, rollback)
        # Meanwhile servers with the policy before are accepted; but not in a rollback, where a
        # sequence must not go from a server that has committed to one that has not.
        self._before, self._committing = self.current, not rollback
        try:
            yield
        finally:
            self._before, self._committing = None, False
            self._on_change()

    def committed(self, weights: WeightTag) -> None:
        pending, self._pending = self._pending, None
        if pending is None:  # another server was first
            return
        if self.current is None or not _same(weights, self.current):
            self.rolled_back = self.rolled_back or pending.rollback
            self._published.append(weights)
            self._count += 1
        self.current = weights
        self._on_change()

    def observed(self, weights: WeightTag) -> None:
        """A server serves these weights, or did: its answer to the commit may have been lost."""
        pending = self._pending
        if pending is not None and pending.digest is not None and pending.is_same(weights):
            self.committed(weights)

    def published_since(self, count: int) -> tuple[list[WeightTag], int]:
        """What was published after the first ``count`` publishes, and how many there were."""
        new = max(self._count - count, 0)
        return list(self._published)[max(len(self._published) - new, 0) :], self._count

    def accepts(self, weights: WeightTag) -> bool:
        """Whether a server with these weights may get sequences."""
        if self.current is None or _same(weights, self.current):
            return True
        return self._committing and (self._before is None or _same(weights, self._before))

    def missed_rollback(self, weights: WeightTag) -> bool:
        """Whether a server with these weights may be brought to a lower version."""
        return self.rolled_back and not self.accepts(weights)

    def next_publish_is_refused_by(self, weights: WeightTag) -> bool:
        """Whether its version is higher, though nothing was rolled back here."""
        policy, version = self.current, weights.version
        if policy is None or policy.version is None or version is None or self.rolled_back:
            return False
        return version > policy.version

    def min_version(self, after: WeightTag) -> int | None:
        """The oldest version under which a sequence may continue whose last token ``after``
        sampled; None: any. There must be a policy.
        """
        policy = self.current
        is_pending = self._pending is not None and self._pending.is_same(after)
        if policy is None or is_pending or _same(after, policy):
            return after.version
        if after.version is None or policy.version is None:
            return None
        return min(after.version, policy.version)


def _same(one: WeightTag, other: WeightTag) -> bool:
    return (one.version, one.digest) == (other.version, other.digest)
