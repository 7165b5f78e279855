"""Which sequence belongs to a request: one a request id, live or kept to be picked up."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

from rollwire.reasons import Reason

from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.errors import ServiceError, float_text
from rollwire_server.sequences.sequence import Request

if TYPE_CHECKING:
    from rollwire_server.sequences.sequence import Sequence

MAX_ATTEMPTS = 100_000  # remembered, of requests that may be gone
MAX_KEPT = 10_000  # sequences that wait to be picked up
MAX_UNREAD = 10_000  # sequences that have ended and are still being read
MAX_BYTES = 1 << 29  # of either
MAX_LISTED = 8  # tokens of a list in an error message


class EndedSequences:
    """Ended sequences, oldest first, and the memory that they take."""

    def __init__(self, max_sequences: int, max_bytes: int) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._sizes: dict[Sequence, int] = {}
        self._bytes = 0

    @property
    def full(self) -> bool:
        return len(self._sizes) > self._max_sequences or self._bytes > self._max_bytes

    @property
    def oldest(self) -> Sequence:
        return next(iter(self._sizes))

    def add(self, sequence: Sequence) -> None:
        if sequence not in self._sizes:
            self._sizes[sequence] = size = sequence.memory_bytes()
            self._bytes += size

    def discard(self, sequence: Sequence) -> None:
        self._bytes -= self._sizes.pop(sequence, 0)


class SequenceRegistry:
    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._kept = EndedSequences(MAX_KEPT, MAX_BYTES)
        self.unread = EndedSequences(MAX_UNREAD, MAX_BYTES)  # by their streams

    def __contains__(self, sequence: Sequence) -> bool:
        return self._by_id.get(sequence.request.request_id) is sequence

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self._by_id.values() if sequence.end is None]

    def find(self, request: Request) -> Sequence | None:
        """The sequence of the request's id, of the same attempt or an earlier one."""
        sequence = self._by_id.get(request.request_id)
        newest = self._attempts.get(request.request_id, 0)
        if sequence is not None:
            newest = max(newest, sequence.request.attempt)
        if request.attempt < newest:
            raise ServiceError(
                Reason.STALE_ATTEMPT,
                f"attempt {request.attempt} of {request.request_id} comes after attempt {newest}: "
                "the newer one owns the sequence",
                metadata={"attempt_seen": str(newest)},
            )
        return sequence

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        self._by_id[request.request_id] = sequence
        self._attempts[request.request_id] = request.attempt
        self._attempts.move_to_end(request.request_id)
        if len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)

    def keep(self, sequence: Sequence) -> None:
        """Keeps an ended sequence to be picked up; the oldest make room for it."""
        self._kept.add(sequence)
        while self._kept.full:
            self.forget(self._kept.oldest)

    def forget(self, sequence: Sequence) -> None:
        self._kept.discard(sequence)
        sequence.cancel_timers()
        if sequence in self:
            del self._by_id[sequence.request.request_id]


# A request that picks a sequence up may differ in these fields: they change nothing of what is
# sampled. A difference in any other field is refused, also in one that is added later. (The seed of
# SamplingParams may be the server's own; Request says which one was asked for.)
NOT_COMPARED = {
    Request: {"request_id", "attempt", "spec", "detach_grace", "delivery_interval", "timeout"},
    SequenceSpec: {"key", "prefix", "sampling"},
    SamplingParams: {"seed"},
}
_API_NAMES = {"prompt": "prompt_token_ids"}  # where the API calls a field otherwise


def check_pick_up(sequence: Sequence, request: Request) -> int:
    """After how many output tokens ``request`` picks ``sequence`` up."""
    _check_same_request(sequence.request, request)
    given, sampled = request.spec.prefix, sequence.tokens
    if len(given) > len(sampled) or list(given) != list(sampled[: len(given)]):
        raise ServiceError(
            Reason.PREFIX_MISMATCH,
            f"the given {len(given)} output tokens are not the first of the {len(sampled)} that "
            f"attempt {request.attempt} of {request.request_id} has: start a new attempt",
        )
    if len(given) < sequence.prefix_length:
        raise ServiceError(
            Reason.PREFIX_MISMATCH,
            f"this attempt began after {sequence.prefix_length} output tokens and cannot send "
            f"earlier ones: pick it up from there, not from {len(given)}",
        )
    return len(given)


def _check_same_request(first: Request, request: Request) -> None:
    asked, before = _compared_fields(request), _compared_fields(first)
    different = [name for name in asked if asked[name] != before[name]]
    if not different:
        return
    name = different[0]
    listed = "; ".join(f"{n} is {_format(asked[n])}, not {_format(before[n])}" for n in different)
    raise ServiceError(
        Reason.REQUEST_MISMATCH,
        f"attempt {request.attempt} of {request.request_id} is another request here: {listed}; "
        "nothing was changed: send the same request to pick it up, or choose a new request_id",
        metadata={"field": name, "asked": _format(asked[name]), "first": _format(before[name])},
    )


def _compared_fields(request: Request) -> dict[str, object]:
    """All that decides what is sampled and reported, by the API's names."""
    values = {
        field.name: getattr(part, field.name)
        for part in (request.spec.sampling, request.spec, request)
        for field in dataclasses.fields(part)
        if field.name not in NOT_COMPARED[type(part)]
    }
    return {_API_NAMES.get(name, name): value for name, value in values.items()}


def _format(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, frozenset | tuple):
        items = sorted(value) if isinstance(value, frozenset) else list(value)
        more = f", … ({len(items)} in all)" if len(items) > MAX_LISTED else ""
        return f"[{', '.join(map(str, items[:MAX_LISTED]))}{more}]"
    return str(value)
