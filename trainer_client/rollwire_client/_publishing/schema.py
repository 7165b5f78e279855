"""Checks a trainer's tensors against the schema of the servers, and maps names between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import rollwire_transport as transport

from rollwire_client._errors import SchemaMismatchError
from rollwire_client._publishing.name_hints import name_hints, shape_hint
from rollwire_client._publishing.tensor_source import check_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_client._publishing.change_detector import ChangeDetector
    from rollwire_client._publishing.sharded.coordinator import Coordinator
    from rollwire_client._publishing.tensor_source import TensorOrFunction, TensorSource

_SERVER_DTYPES = {"float32", "bfloat16", "float16"}  # that ``rollwire-server --dtype`` takes
_MAX_PROBLEMS = 20  # in an error's message


def match_schema(
    tensors: Mapping[str, Tensor] | TensorSource,
    schema: Sequence[TensorSpec],
    *,
    partial: bool,
    detector: ChangeDetector,
    coordinator: Coordinator | None = None,
) -> tuple[list[TensorSpec], TensorSource]:
    """The specs of what is sent, aliases included, and the source that gives it.

    A mapping is checked here. A callable is not called yet: it must give the tensors in the order
    of the schema, which the sender checks as they come. With a ``coordinator`` the other ranks of a
    sharded trainer iterate and gather in step.

    Raises:
        SchemaMismatchError: The mapping is not what the servers want, or it is no mapping.
    """
    if not isinstance(tensors, Mapping):
        check_tensors(tensors)
        source = detector.watch_source(tensors)
        return list(schema), source if coordinator is None else coordinator.iterate(source)
    snapshot = dict(tensors)  # read once: a mapping may read each tensor from a file
    if isinstance(tensors, dict):  # to which the trainer may assign other tensors meanwhile
        tensors = snapshot
    check_tensors(snapshot)
    selected = _select(snapshot, schema, partial=partial)
    specs = []
    for name, local_name in selected.items():
        detector.watch(local_name, snapshot[local_name])
        specs.append(transport.describe(name, snapshot[local_name]))
    specs += [spec for spec in schema if spec.alias_of in selected]

    def items() -> Iterator[tuple[str, TensorOrFunction]]:
        for name, local_name in selected.items():
            value = tensors[local_name]
            yield name, value if coordinator is None else coordinator.gather(local_name, value)

    return specs, items


def _select(
    tensors: Mapping[str, Tensor], schema: Sequence[TensorSpec], *, partial: bool
) -> dict[str, str]:
    """The tensors to send, each memory once: from the servers' names to the trainer's."""
    wanted = {spec.name: spec for spec in schema}
    alias_of = {spec.name: spec.alias_of for spec in schema if spec.alias_of is not None}
    try:
        described = transport.describe_all(tensors)
    except ValueError as error:
        raise SchemaMismatchError(f"nothing was sent: {error}") from error
    memory_of = {spec.name: spec.alias_of or spec.name for spec in described}
    selected: dict[str, str] = {}
    ties: list[str] = []
    shapes: list[str] = []
    miscast: dict[tuple[str, str], list[str]] = {}  # names by (dtype here, dtype on the servers)
    for local_name, tensor in tensors.items():
        if local_name not in wanted:
            continue
        name = alias_of.get(local_name, local_name)
        if name != local_name and name in tensors:
            if memory_of[local_name] != memory_of[name]:
                ties.append(
                    f"{local_name} is tied to {name} on the servers, and a tensor of its own here: "
                    "tie them, or leave it out"
                )
            continue
        got, want = replace(transport.describe(local_name, tensor), name=name), wanted[name]
        if got.shape != want.shape:
            shapes.append(
                f"{local_name} has shape {list(got.shape)}, the servers want {list(want.shape)}: "
                f"{shape_hint(got.shape, want.shape)}"
            )
        if got.dtype != want.dtype:
            miscast.setdefault((got.dtype, want.dtype), []).append(local_name)
        selected.setdefault(name, local_name)
    hints = name_hints(
        [spec for spec in described if spec.name not in wanted],
        [spec for spec in schema if spec.name not in tensors],
    )
    hinted = {name for hint in hints for name in hint.wanted}
    missing = [] if partial else [n for n in wanted if n not in tensors and n not in alias_of]
    problems = [
        *map(str, hints),
        *ties,
        *shapes,
        *(_miscast(names, *dtypes) for dtypes, names in miscast.items()),
        *(f"{n} is missing" for n in missing if n not in selected and n not in hinted),
    ]
    if problems:
        shown = problems[:_MAX_PROBLEMS]
        if more := len(problems) - len(shown):
            shown.append(f"and {more} more")
        raise SchemaMismatchError(
            "the tensors do not match the servers' schema; nothing was sent: " + "; ".join(shown)
        )
    return selected


def _miscast(names: list[str], got: str, want: str) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    option = f", or start the servers with --dtype {got}" if got in _SERVER_DTYPES else ""
    return f"{names[0]}{more} {got}, the servers want {want}: cast before publishing{option}"
