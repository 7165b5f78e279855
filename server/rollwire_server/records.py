"""Which sequence is whose: one a request id, live or kept to be picked up."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from rollwire_server.errors import Reason, ServiceError
from rollwire_server.retained import Retained

if TYPE_CHECKING:
    from rollwire_server.sequences import Request, Sequence

ATTEMPTS_REMEMBERED = 100_000
MOST_KEPT = 10_000  # to be picked up
MOST_UNREAD = 10_000  # by streams that are there
MOST_BYTES = 1 << 29  # of either


class Records:
    """The sequences that a request finds by its id.

    Attributes:
        unread: Those that have ended and whose streams have not read all of it.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._kept = Retained(MOST_KEPT, MOST_BYTES)
        self.unread = Retained(MOST_UNREAD, MOST_BYTES)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._by_id.get(sequence.request.request_id) is sequence

    def get(self, request_id: str) -> Sequence | None:
        """The sequence of this id."""
        return self._by_id.get(request_id)

    def live(self) -> list[Sequence]:
        """Those that have not ended."""
        return [sequence for sequence in self._by_id.values() if sequence.end is None]

    def find(self, request: Request) -> Sequence | None:
        """The sequence of a request's id: of its own attempt, or of one before.

        Raises ServiceError when a newer attempt was here.
        """
        record = self._by_id.get(request.request_id)
        seen = self._attempts.get(request.request_id, 0)
        if record is not None:
            seen = max(seen, record.request.attempt)
        if request.attempt < seen:
            raise ServiceError(
                Reason.STALE_ATTEMPT,
                f"attempt {request.attempt} of {request.request_id} comes after attempt {seen}: "
                "the newer one owns the sequence",
                metadata={"attempt_seen": str(seen)},
            )
        return record

    def add(self, sequence: Sequence) -> None:
        """Takes a new one, of the newest attempt."""
        request = sequence.request
        self._by_id[request.request_id] = sequence
        self._attempts[request.request_id] = request.attempt
        self._attempts.move_to_end(request.request_id)
        if len(self._attempts) > ATTEMPTS_REMEMBERED:
            self._attempts.popitem(last=False)

    def keep(self, sequence: Sequence) -> None:
        """One that has ended stays to be picked up, until it is forgotten; the oldest make room."""
        self._kept.add(sequence)
        while self._kept.full:
            self.forget(self._kept.oldest)

    def forget(self, sequence: Sequence) -> None:
        """Nobody finds it any more."""
        self._kept.discard(sequence)
        for name in list(sequence.timers):
            sequence.disarm(name)
        if sequence in self:
            del self._by_id[sequence.request.request_id]


def check_prefix(record: Sequence, request: Request) -> int:
    """After how many output tokens ``request`` picks ``record`` up.

    Raises ServiceError when its prefix is not what was sampled.
    """
    spec, have = request.spec, record.tokens
    offset = len(spec.prefix)
    same = list(spec.prompt) == list(record.request.spec.prompt)
    if not same or offset > len(have) or list(spec.prefix) != list(have[:offset]):
        raise ServiceError(
            Reason.PREFIX_MISMATCH,
            f"the given {offset} output tokens are not the first of the {len(have)} that "
            f"attempt {request.attempt} of {request.request_id} has: start a new attempt",
        )
    if offset < record.prefix_length:
        raise ServiceError(
            Reason.PREFIX_MISMATCH,
            f"this attempt began after {record.prefix_length} output tokens and cannot tell "
            f"again what came before: pick it up from there, not from {offset}",
        )
    return offset
