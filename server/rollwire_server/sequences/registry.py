"""Which sequence is whose: one a request id, live or kept to be picked up."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

from rollwire.reasons import Reason

from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.errors import ServiceError, float_text
from rollwire_server.sequences.retained import Retained
from rollwire_server.sequences.sequence import Request

if TYPE_CHECKING:
    from rollwire_server.sequences.sequence import Sequence

ATTEMPTS_REMEMBERED = 100_000
MOST_KEPT = 10_000  # to be picked up
MOST_UNREAD = 10_000  # by streams that are there
MOST_BYTES = 1 << 29  # of either
MOST_TOLD = 8  # tokens, in a message


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


# A pick-up may differ in these fields: they change nothing of what is sampled. (The seed of a
# SamplingParams may be the server's own: a Request says which one was asked for.) It is refused
# where any other field of a request differs, also one that is added later.
NOT_COMPARED = {
    Request: {"request_id", "attempt", "spec", "detach_grace", "delivery_interval", "timeout"},
    SequenceSpec: {"key", "prefix", "sampling"},
    SamplingParams: {"seed"},
}
# Where the API calls a field otherwise.
API_NAMES = {"prompt": "prompt_token_ids"}


def check_pick_up(record: Sequence, request: Request) -> int:
    """After how many output tokens ``request`` picks ``record`` up.

    Raises ServiceError when it asks for something else, or when its prefix is not what was sampled.
    """
    _check_same(record.request, request)
    given, have = request.spec.prefix, record.tokens
    offset = len(given)
    if offset > len(have) or list(given) != list(have[:offset]):
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


def _check_same(first: Request, request: Request) -> None:
    asked, before = _asked(request), _asked(first)
    different = [name for name in asked if asked[name] != before[name]]
    if not different:
        return
    name = different[0]
    told = "; ".join(f"{n} is {_told(asked[n])}, not {_told(before[n])}" for n in different)
    raise ServiceError(
        Reason.REQUEST_MISMATCH,
        f"attempt {request.attempt} of {request.request_id} is another request here: {told}; "
        "nothing was changed: ask for the same to pick it up, or choose a request_id of its own",
        metadata={"field": name, "asked": _told(asked[name]), "first": _told(before[name])},
    )


def _asked(request: Request) -> dict[str, object]:
    """All that decides what is sampled and told, by the API's names."""
    parts = (request.spec.sampling, request.spec, request)
    values = {
        field.name: getattr(part, field.name)
        for part in parts
        for field in dataclasses.fields(part)
        if field.name not in NOT_COMPARED[type(part)]
    }
    return {API_NAMES.get(name, name): value for name, value in values.items()}


def _told(value: object) -> str:
    """A field's value in a message, cut where it is long."""
    if value is None:
        return "absent"
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, frozenset | tuple):
        value = sorted(value) if isinstance(value, frozenset) else list(value)
        told = ", ".join(map(str, value[:MOST_TOLD]))
        more = f", … ({len(value)} in all)" if len(value) > MOST_TOLD else ""
        return f"[{told}{more}]"
    return str(value)
