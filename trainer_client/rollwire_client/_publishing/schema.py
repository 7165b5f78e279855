"""Checks a trainer's tensors against the schema of the servers, and gives them under its names."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch
from rollwire_transport import TensorSpec

from rollwire_client._errors import SchemaMismatchError
from rollwire_client._publishing.experts import unpack
from rollwire_client._publishing.problems import (
    dtype_problem,
    mismatch,
    shape_problem,
    unknown_names,
)
from rollwire_client._publishing.tensors import check_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from rollwire_client._publishing.names import Match, ServerNames
    from rollwire_client._publishing.sharded.coordination import Coordinator
    from rollwire_client._publishing.tensors import ChangeDetector, TensorOrFunction, TensorSource

_MAX_PROBLEMS = 20  # in an error's message


def match_schema(
    tensors: Mapping[str, Tensor],
    names: ServerNames,
    *,
    partial: bool,
    cast: bool = True,
    detector: ChangeDetector,
    on_untied: Callable[[str, str, TensorOrFunction], None] | None = None,
    coordinator: Coordinator | None = None,
) -> tuple[list[TensorSpec], TensorSource]:
    """The specs of what is sent, aliases included, and the source that gives it, in the trainer's
    dtypes. As it is read, ``on_untied`` gets each tensor that is tied on the servers only: its
    name, the name of the one that is sent, and itself.

    With a ``coordinator`` the other ranks of a sharded trainer gather in step.
    """
    snapshot = dict(tensors)  # read once: a mapping may read each tensor from a file
    if isinstance(tensors, dict):  # to which the trainer may assign other tensors meanwhile
        tensors = snapshot
    check_tensors(snapshot)
    try:
        described = tuple(transport.describe_all(snapshot))
    except ValueError as error:
        raise SchemaMismatchError(f"nothing was sent: {error}") from error
    selected = _select(described, names, partial=partial, cast=cast)
    for local_name in selected.local_names():
        detector.watch(local_name, snapshot[local_name])
    del snapshot

    def value_of(local_name: str, dtype: str) -> TensorOrFunction:
        value = tensors[local_name]
        if coordinator is None:
            return value
        return coordinator.gather(local_name, value, dtype if cast else None)

    def items() -> Iterator[tuple[str, TensorOrFunction]]:
        for local_name, name, match in selected.sent:
            value = value_of(local_name, match.spec.dtype)
            if match.packs:
                yield from unpack(local_name, value, match)
            else:
                yield name, value
            del value
        for local_name, name, sent_as in selected.untied:
            if on_untied is not None:
                on_untied(name, sent_as, value_of(local_name, names.specs[name].dtype))

    return selected.specs, items


@dataclass(slots=True)
class _Selected:
    """What is sent, each memory once; what servers have in one place after the other.

    Attributes:
        specs: The servers' tensors that get new values, aliases last.
        sent: For each tensor of the trainer that is sent its name, the servers' name of what it is
            or of the first that it packs, and how it matches.
        untied: For each that is tied on the servers only its name, the servers' name of it, and
            the servers' name under which the trainer has what is sent in its place.
    """

    specs: list[TensorSpec] = field(default_factory=list)
    sent: list[tuple[str, str, Match]] = field(default_factory=list)
    untied: list[tuple[str, str, str]] = field(default_factory=list)

    def local_names(self) -> Iterator[str]:
        return itertools.chain((n for n, *_ in self.sent), (n for n, *_ in self.untied))


# The trainer's tensors by the servers' names.
_Owners = dict[str, tuple[TensorSpec, "Match"]]


@functools.lru_cache(maxsize=1)  # it runs on the event loop, and publishes are alike
def _select(
    described: tuple[TensorSpec, ...], names: ServerNames, *, partial: bool, cast: bool
) -> _Selected:
    owners = _find_owners(described, names, partial=partial, cast=cast)
    selected = _Selected()
    sent_as: dict[str, str] = {}  # the servers' names of what is sent, under which it is given
    for name, (got, match) in owners.items():
        if (packed := match.part_of) is not None:
            if packed not in sent_as:
                sent_as[packed] = packed
                selected.specs.append(names.specs[packed])
                for part in names.matrices(packed):
                    owner, its_match = owners[part]
                    selected.sent.append((owner.name, part, its_match))
            continue
        source = names.specs[name].alias_of or name
        if source not in sent_as:
            sent_as[source] = source if source in owners else name
            owner, its_match = owners[sent_as[source]]
            selected.specs.append(names.specs[source])
            if name == match.names[0]:
                selected.sent.append((owner.name, source, its_match))
        owner, _ = owners[sent_as[source]]
        if (got.alias_of or got.name) != (owner.alias_of or owner.name):
            selected.untied.append((got.name, name, sent_as[source]))
    selected.specs += [spec for spec in names.schema if spec.alias_of in sent_as]
    return selected


def _find_owners(
    described: Sequence[TensorSpec], names: ServerNames, *, partial: bool, cast: bool
) -> _Owners:
    """Raises SchemaMismatchError unless all tensors fit and none is missing. A ``partial`` update
    may lack tensors, but no part of one that the servers have packed.
    """
    owners: _Owners = {}
    unknown: list[TensorSpec] = []
    shapes: list[str] = []
    miscast: dict[tuple[str, str], list[str]] = {}  # names by (dtype here, dtype on the servers)
    missing = names.specs.copy()
    for got in described:
        if (match := names.find(got.name)) is None:
            unknown.append(got)
            continue
        if got.shape != match.spec.shape:
            shapes.append(shape_problem(got, match.spec))
        if not _dtype_fits(got, match.spec, cast=cast):
            miscast.setdefault((got.dtype, match.spec.dtype), []).append(got.name)
        for name in match.names:
            if (other := owners.setdefault(name, (got, match))[0]) is not got:
                raise _both(other.name, got.name, name)
            missing.pop(name, None)
    parts = {match.part_of: got for got, match in owners.values() if match.part_of is not None}
    lacking: list[str] = []
    for packed, part in parts.items():
        if packed in owners:
            raise _both(owners[packed][0].name, part.name, packed)
        del missing[packed]
        lacking += [name for name in names.matrices(packed) if name not in owners]
    problems, hinted = unknown_names(unknown, missing.values())
    problems += shapes
    problems += [dtype_problem(locals_, *dtypes) for dtypes, locals_ in miscast.items()]
    problems += [f"{name} is missing" for name in lacking]
    if not partial:
        sources = {names.specs[name].alias_of for name in owners if name in names.specs}
        problems += [
            f"{name} is missing"
            for name, spec in missing.items()
            if name not in hinted and name not in sources and spec.alias_of is None
        ]
    if problems:
        shown = problems[:_MAX_PROBLEMS]
        if more_problems := len(problems) - len(shown):
            shown.append(f"and {more_problems} more")
        raise SchemaMismatchError(
            "the tensors do not match the servers' schema; nothing was sent: " + "; ".join(shown)
        )
    return owners


def _both(one: str, other: str, name: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"nothing was sent: {one} and {other} are both {name} on the servers: leave one out"
    )


def check_given(
    local_name: str, value: TensorOrFunction, names: ServerNames, *, cast: bool
) -> Match:
    """What a tensor is that a source gave. What a function gives is checked when it is called.

    Raises:
        SchemaMismatchError: The servers want no such tensor, nor one that it is ``cast`` to.
    """
    got = None
    if isinstance(value, torch.Tensor) or not callable(value):
        try:
            got = transport.describe(local_name, value)
        except ValueError as error:
            raise mismatch(str(error)) from error
    if (match := names.find(local_name)) is None:
        unknown = got or TensorSpec(local_name, "", ())
        problems, _ = unknown_names([unknown], names.schema)
        raise mismatch(problems[0])
    if got is not None and got.shape != match.spec.shape:
        raise mismatch(shape_problem(got, match.spec))
    if got is not None and not _dtype_fits(got, match.spec, cast=cast):
        raise mismatch(dtype_problem([local_name], got.dtype, match.spec.dtype))
    return match


def _dtype_fits(got: TensorSpec, want: TensorSpec, *, cast: bool) -> bool:
    return got.dtype == want.dtype or (cast and transport.castable(got.dtype, want.dtype))
