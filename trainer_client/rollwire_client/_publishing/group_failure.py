"""Why a transport group failed, and because of whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.deadlines import elapsed
from rollwire.types import UpdatePhase

from rollwire_client._errors import RollwireError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire_client._publishing.publish_target import PublishTarget

_SILENT_SECONDS = 1.0  # without a report, of which there are four a second


class GroupError(Exception):
    """A group failed; ``culprit`` is the server to blame, where it is known."""

    def __init__(self, error: RollwireError, culprit: PublishTarget | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.culprit = culprit


def unstaged(targets: Sequence[PublishTarget]) -> list[PublishTarget]:
    return [target for target in targets if target.error is None and not target.staged]


def one_failed(targets: Sequence[PublishTarget]) -> bool:
    return any(t.error is not None or t.phase is UpdatePhase.STALLED for t in targets)


def explain_failure(
    targets: Sequence[PublishTarget],
    error: transport.TransportError | None,
    waits_for: int | None,
) -> GroupError:
    """Why a group failed, and because of whom.

    Args:
        targets: The group, by rank from 1 on.
        error: Of this end, if it failed by itself.
        waits_for: The rank that this end was waiting for.
    """
    for target in targets:
        if target.error is not None:
            return GroupError(target.error, target)
    stalled = [t for t in targets if t.phase is UpdatePhase.STALLED]
    late = next((t for t in stalled if t.timed_out), None)
    if late is not None or isinstance(error, transport.TransportTimeout):
        rank = who_is_behind(targets, waits_for or (late.peer if late is not None else None))
    else:  # a connection was lost
        rank = waits_for or (stalled[0].peer or targets.index(stalled[0]) + 1 if stalled else 0)
        rank = _follow(targets, rank, lambda target: target.phase is UpdatePhase.STALLED)
    culprit = targets[rank - 1] if 0 < rank <= len(targets) else None
    address = None if culprit is None else culprit.address
    where = "" if address is None else f"{address}: "
    why = str(error or "; ".join(f"{t.address} stalled: {t.detail}" for t in stalled))
    return GroupError(TransferError(f"{where}{why}", server=address), culprit)


def who_is_behind(targets: Sequence[PublishTarget], waits_for: int | None) -> int:
    """The rank that a group waits for, or 0 if it is not known.

    Args:
        targets: The group, by rank from 1 on.
        waits_for: The rank that one member waits for.
    """
    # One that has everything reports no more.
    waiting = [(elapsed(t.reported_at), -r) for r, t in enumerate(targets, start=1) if not t.staged]
    silence, rank = max(waiting, default=(0.0, 0))
    if silence > _SILENT_SECONDS:
        return -rank
    return _follow(targets, waits_for or 0, lambda _: True)


def _follow(
    targets: Sequence[PublishTarget], rank: int, blames: Callable[[PublishTarget], bool]
) -> int:
    """The last of the ranks that wait for, or have lost, one another, beginning with ``rank``."""
    seen: set[int] = set()
    while 0 < rank <= len(targets) and blames(targets[rank - 1]):
        seen.add(rank)
        following = targets[rank - 1].peer or 0
        if following in seen:  # of two, the second does not take what the first forwards
            return max(rank, following)
        if following == 0:
            return rank
        rank = following
    return rank
