"""What a caller asked for, and whether a later request asks for the same."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from rollwire.reasons import Reason

from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.errors import ServiceError, float_text

MAX_LISTED = 8  # tokens of a list in an error message


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request: the engine's part (``spec``) and the server's own.

    Attributes:
        seed: As asked; None where the server drew the one of ``spec``.
        detach_grace: Seconds that the sequence is kept without a stream.
        delivery_interval: Seconds between two messages about it; 0: one each engine step.
        timeout: Seconds until its last token; None: the server's limit.
    """

    request_id: str
    attempt: int
    spec: SequenceSpec
    seed: int | None = None
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    detach_grace: float = 0.0
    delivery_interval: float = 0.0
    timeout: float | None = None

    def needs_newer(self, version: int | None) -> bool:
        """Whether weights are too old for it; weights without a version are older than any."""
        minimum = self.min_weight_version
        return minimum is not None and (version is None or version < minimum)

    def needs_older(self, version: int | None) -> bool:
        maximum = self.max_weight_version
        return maximum is not None and version is not None and version > maximum

    def violated_bound(self, version: int | None) -> str:
        """The bound that keeps it from going on under ``version``; "" where none does."""
        if self.needs_older(version):
            return f"beyond max_weight_version {self.max_weight_version}"
        if self.needs_newer(version):
            return f"below min_weight_version {self.min_weight_version}"
        return ""


# A request that picks a sequence up may differ in these fields: they change nothing of what is
# sampled. A difference in any other field is refused, also in one that is added later. (The seed of
# SamplingParams may be the server's own; Request says which one was asked for.)
NOT_COMPARED = {
    Request: {"request_id", "attempt", "spec", "detach_grace", "delivery_interval", "timeout"},
    SequenceSpec: {"key", "prefix", "sampling"},
    SamplingParams: {"seed"},
}
_API_NAMES = {"prompt": "prompt_token_ids"}  # where the API calls a field otherwise


def check_same_request(first: Request, request: Request) -> None:
    """Raises ServiceError when ``request`` asks for something else than ``first`` did."""
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
