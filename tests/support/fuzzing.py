"""Messages of any content, and messages of which one field is changed, by their descriptors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

U32, U64, I32, I64 = 2**32 - 1, 2**64 - 1, 2**31 - 1, 2**63 - 1


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [n for n in (low, -1, 0, 1, 2, 7, 64, 4096, high - 1, high) if low <= n <= high]
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


_TEXTS = st.one_of(
    st.sampled_from(["", "a", "gloo", "x" * 300, "é\u2028\U0001f600", "127.0.0.1:1", "../..\x00"]),
    st.text(max_size=40),
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    F.TYPE_BOOL: st.booleans(),
    F.TYPE_STRING: _TEXTS,
    F.TYPE_BYTES: st.binary(max_size=40),
    **dict.fromkeys((F.TYPE_FLOAT, F.TYPE_DOUBLE), st.floats(width=32)),
    **dict.fromkeys((F.TYPE_UINT32, F.TYPE_FIXED32), _integers(0, U32)),
    **dict.fromkeys((F.TYPE_UINT64, F.TYPE_FIXED64), _integers(0, U64)),
    **dict.fromkeys((F.TYPE_INT32, F.TYPE_SINT32, F.TYPE_SFIXED32), _integers(-I32 - 1, I32)),
    **dict.fromkeys((F.TYPE_INT64, F.TYPE_SINT64, F.TYPE_SFIXED64), _integers(-I64 - 1, I64)),
}


def messages(descriptor: Descriptor, depth: int = 4) -> st.SearchStrategy[Message]:
    """Messages of a type, each field absent or with any value that the wire can carry."""
    fields = [f for f in descriptor.fields if depth or f.type != F.TYPE_MESSAGE]
    one_of = {f.name: f.containing_oneof.name for f in fields if f.containing_oneof is not None}
    chosen = st.fixed_dictionaries({}, optional={f.name: _values(f, depth) for f in fields})

    def build(values: dict[str, Any]) -> Message:
        taken: set[str] = set()
        message = GetMessageClass(descriptor)()
        for name, value in values.items():
            if one_of.get(name) in taken:
                continue
            taken.add(one_of.get(name, name))
            field = getattr(message, name)
            if isinstance(value, list):
                field.extend(value)
            elif descriptor.fields_by_name[name].type == F.TYPE_MESSAGE:
                field.CopyFrom(value)
            else:
                setattr(message, name, value)
        return message

    return chosen.map(build)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type == F.TYPE_MESSAGE:
        one: st.SearchStrategy[Any] = messages(field.message_type, depth - 1)
    elif field.type == F.TYPE_ENUM:
        one = st.integers(-1, len(field.enum_type.values))
    else:
        one = _SCALARS[field.type]
    return st.lists(one, max_size=4) if field.is_repeated else one


_FLOATS = [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-45, 1e-6, 0.5, 1.0000001, 3e38]
_EDGES: dict[int, list[Any]] = {
    F.TYPE_BOOL: [False, True],
    F.TYPE_STRING: ["", "a", "x" * 257, "\x00", "\u2028"],
    F.TYPE_BYTES: [b"", b"\x00", b"\xff" * 257],
    F.TYPE_FLOAT: _FLOATS,
    F.TYPE_DOUBLE: _FLOATS,
    F.TYPE_UINT32: [0, 1, I32, I32 + 1, U32],
    F.TYPE_UINT64: [0, 1, U32 + 1, I64, I64 + 1, U64],
    F.TYPE_FIXED64: [0, 1, U64],
    F.TYPE_INT32: [-I32 - 1, -1, 0, 1, I32],
    F.TYPE_INT64: [-I64 - 1, -1, 0, 1, U32, I64],
}


def changed(message: Message) -> Iterator[tuple[str, Message]]:
    """Copies of a message, each with one field at an edge of what its type can hold, and which it
    is: "sampling.top_p = nan". Of repeated messages the first is changed.
    """
    for field in message.DESCRIPTOR.fields:
        for told, values in _edges(message, field):
            copy = GetMessageClass(message.DESCRIPTOR)()
            copy.CopyFrom(message)
            copy.ClearField(field.name)
            if field.is_repeated:
                getattr(copy, field.name).extend(values)
            elif field.type == F.TYPE_MESSAGE:
                getattr(copy, field.name).CopyFrom(values)
            else:
                setattr(copy, field.name, values)
            yield told, copy


def _edges(message: Message, field: FieldDescriptor) -> Iterator[tuple[str, Any]]:
    """What a field may become instead."""
    name, now = field.name, getattr(message, field.name)
    if field.type == F.TYPE_MESSAGE:
        first = (
            (now[0] if now else GetMessageClass(field.message_type)()) if field.is_repeated else now
        )
        for told, one in changed(first):
            yield f"{name}.{told}", [one, *now[1:]] if field.is_repeated else one
        if field.is_repeated:
            yield f"{name} = []", []
            yield f"{name} twice", [*now, *now]
        return
    if field.type == F.TYPE_ENUM:
        edges: list[Any] = [-1, *range(len(field.enum_type.values) + 1), I32]
    else:
        edges = _EDGES[field.type]
    for edge in edges:
        yield f"{name} = {edge!r}", [edge, *now[1:]] if field.is_repeated else edge
    if field.is_repeated:
        yield f"{name} = []", []
        yield f"{name} twice", [*now, *now]
