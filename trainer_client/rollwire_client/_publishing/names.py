"""Which of the servers' tensors a trainer's tensor is, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import rollwire_transport as transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_transport import TensorSpec


@dataclass(frozen=True, slots=True)
class Match:
    """What a trainer's tensor is on the servers.

    Attributes:
        spec: What it has to be like, under the first of its ``names``.
        names: Its name there; if it packs experts and the servers do not, those of their matrices
            in the order in which they lie in it.
        packs: Whether it packs what the servers have by itself.
        part_of: The servers' tensor that packs it, under a name that ``matrices_in`` gives.
    """

    spec: TensorSpec
    names: tuple[str, ...]
    packs: bool = False
    part_of: str | None = None


class ServerNames:
    """The servers' schema, and what a trainer may call its tensors."""

    def __init__(self, schema: Sequence[TensorSpec]) -> None:
        self.schema = tuple(schema)
        self.specs = {spec.name: spec for spec in schema}
        self._matches: dict[str, Match | None] = {}
        self._matrices: dict[str, dict[str, TensorSpec]] = {}

    def find(self, local_name: str) -> Match | None:
        """What a tensor of this name is; None: it is unknown to the servers."""
        if local_name not in self._matches:
            self._matches[local_name] = self._find(local_name)
        return self._matches[local_name]

    def matrices(self, packed: str) -> dict[str, TensorSpec]:
        """By name, the matrices of one of the servers' tensors, in order; none if it packs none."""
        if (known := self._matrices.get(packed)) is None:
            found = transport.matrices_in(self.specs[packed])
            known = {spec.name: spec for spec in found.matrices} if found else {}
            self._matrices[packed] = known
        return known

    def _find(self, local_name: str) -> Match | None:
        if (spec := self.specs.get(local_name)) is not None:
            return Match(spec, (spec.name,))
        plain = transport.unwrapped(local_name)
        names = [plain, *transport.other_names(plain)]
        for name in names:
            if (spec := self.specs.get(name)) is not None:
                return Match(spec, (name,))
        for name in names:
            if (packed := transport.packed_from(name, self.specs)) is not None:
                matrices = tuple(spec.name for spec in packed.matrices)
                return Match(packed.packed, matrices, packs=True)
        for name in names:
            for around, known_as in transport.packed_around(name):
                if around in self.specs and (spec := self.matrices(around).get(known_as)):
                    return Match(spec, (spec.name,), part_of=around)
        return None
