"""Deltas of weights that an engine holds as they are sent: staged, prepared, checked, applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_transport import Encoding, ReceivedDelta, delta_layout

from rollwire_server.engines.base import EngineError, PreparedDelta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _DeltaOf:
    """A delta that was prepared for a generation of the serving memory."""

    generation: int
    received: ReceivedDelta


def staged_specs(manifest: Manifest) -> list[TensorSpec]:
    """The tensors that ``Engine.stage`` returns for a manifest."""
    layout = delta_layout(manifest) if manifest.encoding is Encoding.DELTA else manifest
    return [spec for spec in layout.tensors if spec.alias_of is None]


def prepare(
    manifest: Manifest,
    deltas: Mapping[str, Tensor],
    serving: Mapping[str, Tensor],
    before: Mapping[str, int],
    generation: int,
) -> PreparedDelta:
    """See ``Engine.prepare_delta``; ``generation`` counts how often the serving memory changed."""
    received = ReceivedDelta(manifest, deltas, serving)
    return PreparedDelta(received.digests(before), _DeltaOf(generation, received))


def prepared(delta: PreparedDelta, generation: int) -> ReceivedDelta:
    """What to apply; raises EngineError if it was prepared for another generation."""
    changes = delta.changes
    if not isinstance(changes, _DeltaOf) or changes.generation != generation:
        raise EngineError(
            "the weights have changed since the delta was prepared: publish in full encoding"
        )
    return changes.received
