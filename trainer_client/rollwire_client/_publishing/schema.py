"""Whether a trainer's tensors are what the servers want, and how they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch

from rollwire_client._errors import SchemaMismatchError
from rollwire_client._publishing.name_hints import hints, shape_hint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_client._publishing.change_detector import Changes
    from rollwire_client._publishing.sharded.coordinator import Lead

Given = torch.Tensor | Callable[[], torch.Tensor]
_SERVED = {"float32", "bfloat16", "float16"}

Source = Callable[[], Iterable[tuple[str, Given]]]

_SHOWN = 20  # of the problems, in an error's message


def fit(
    tensors: Mapping[str, Tensor] | Source,
    schema: Sequence[TensorSpec],
    *,
    partial: bool,
    changes: Changes,
    lead: Lead | None = None,
) -> tuple[list[TensorSpec], Source]:
    """What is sent, aliases included, and where it comes from.

    A mapping is checked here. A callable is not asked for anything yet: it must give the tensors in
    the order of the schema, which the sender checks as they come. From here on, or from when they
    come, ``changes`` notices what changes them. With ``lead`` the other ranks of a sharded trainer
    do their part.

    Raises:
        SchemaMismatchError: The mapping is not what the servers want, or it is none.
    """
    if not isinstance(tensors, Mapping):
        require_tensors(tensors)
        source = changes.noting(tensors)
        return list(schema), source if lead is None else lead.iterated(source)
    held = dict(tensors)  # read once: a mapping may take each tensor out of a file
    if isinstance(tensors, dict):  # which may get others meanwhile
        tensors = held
    require_tensors(held)
    sent = _chosen(held, schema, partial=partial)
    aliases = [s for s in schema if s.alias_of in sent]
    specs = []
    for name, mine in sent.items():
        changes.note(mine, held[mine])
        specs.append(transport.describe(name, held[mine]))

    def given() -> Iterator[tuple[str, Given]]:
        for name, mine in sent.items():
            yield name, tensors[mine] if lead is None else lead.gathered(mine, tensors[mine])

    return specs + aliases, given


def require_tensors(tensors: Mapping[str, Tensor] | Source) -> None:
    """Raises SchemaMismatchError unless these are tensors by name, or a callable."""
    if isinstance(tensors, torch.nn.Module):  # which is callable, for something else
        raise SchemaMismatchError(
            f"nothing was sent: a {type(tensors).__name__} is a model, not its tensors: "
            "publish(version, model.state_dict())"
        )
    if callable(tensors):
        return
    if not isinstance(tensors, Mapping):
        raise SchemaMismatchError(
            f"nothing was sent: a {type(tensors).__name__} is neither a mapping of names to "
            "tensors nor a function that gives an iterator of (name, tensor)"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise SchemaMismatchError(
                f"nothing was sent: {name}: a {type(tensor).__name__} is no tensor of torch's"
            )


def device_of(tensors: Mapping[str, Tensor] | Source) -> torch.device | None:
    """Where tensors lie; of a callable's the guess is the CUDA device that this thread uses."""
    if not callable(tensors):
        return next((tensor.device for tensor in tensors.values()), None)
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _chosen(
    tensors: Mapping[str, Tensor], schema: Sequence[TensorSpec], *, partial: bool
) -> dict[str, str]:
    """The tensors to send, each memory once: the servers' names, and the trainer's for them."""
    wanted = {spec.name: spec for spec in schema}
    alias_of = {spec.name: spec.alias_of for spec in schema if spec.alias_of is not None}
    try:
        given = transport.describe_all(tensors)
    except ValueError as error:
        raise SchemaMismatchError(f"nothing was sent: {error}") from error
    same_memory = {spec.name: spec.alias_of or spec.name for spec in given}
    missing = [] if partial else [n for n in wanted if n not in tensors and n not in alias_of]
    sent: dict[str, str] = {}
    problems: list[str] = []
    miscast: dict[tuple[str, str], list[str]] = {}  # names, by the dtypes here and on the servers
    advice = hints(
        [spec for spec in given if spec.name not in wanted],
        [spec for spec in schema if spec.name not in tensors],
    )
    for name, tensor in tensors.items():
        if name not in wanted:
            continue
        source = alias_of.get(name, name)
        if source != name and source in tensors:
            if same_memory[name] != same_memory[source]:
                problems.append(
                    f"{name} is tied to {source} on the servers, and a tensor of its own here: "
                    "tie them, or leave it out"
                )
            continue
        got = replace(transport.describe(name, tensor), name=source)
        want = wanted[source]
        if got.shape != want.shape:
            problems.append(
                f"{name} has shape {list(got.shape)}, the servers want {list(want.shape)}: "
                f"{shape_hint(got.shape, want.shape)}"
            )
        if got.dtype != want.dtype:
            miscast.setdefault((got.dtype, want.dtype), []).append(name)
        sent.setdefault(source, name)
    problems += [_miscast(names, *dtypes) for dtypes, names in miscast.items()]
    told = set().union(*(hint.instead for hint in advice))
    problems[:0] = map(str, advice)
    problems += [f"{n} is missing" for n in missing if n not in sent and n not in told]
    if problems:
        shown = problems[:_SHOWN]
        if more := len(problems) - len(shown):
            shown.append(f"and {more} more")
        raise SchemaMismatchError(
            "the tensors are not those that the servers want; nothing was sent: " + "; ".join(shown)
        )
    return sent


def _miscast(names: list[str], got: str, want: str) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    served = f", or start the servers with --dtype {got}" if got in _SERVED else ""
    return f"{names[0]}{more} {got}, the servers want {want}: cast before publishing{served}"
