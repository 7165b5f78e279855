"""From bytes to a message: what is too long, of too many parts, or none at all is refused by name.

gRPC's own limit of length is one for all calls, and has to let manifests through. Parsing takes the
event loop, and each small message inside of one takes some 80 bytes in place of two: thirty
megabytes of nothing but those would take seconds, and gigabytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from rollwire.reasons import Reason

from rollwire_server.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.descriptor import Descriptor

LARGEST_BYTES = 32 << 20  # 10 MiB is the manifest of 100,000 tensors, or a prompt of 2 million
USUAL_BYTES = 4 << 20  # gRPC's default
OTHERS_BYTES = 1 << 16  # of health and reflection, which take names
LARGE = {"Generate", "StreamRollouts", "UpdateWeights"}

# Fields, of those calls that take messages in any number. What each may have of them its handler
# says, by their names; a little less strict, these bound the work until then.
MOST_FIELDS = {"Abort": 1 << 16, "UpdateWeights": 3 << 19}
FEW_BYTES = 1 << 16  # in so few there cannot be too many

Fields = dict[int, "Fields"]  # those that hold messages, by number, and what is in them


@dataclass(frozen=True, slots=True)
class Unparsed:
    """What a handler gets from a stream in place of a message: why."""

    error: ServiceError


def check_parsed(request: object) -> None:
    """Raises ServiceError for what is no message."""
    if isinstance(request, Unparsed):
        raise request.error


class Parser:
    """Makes messages of one method.

    Args:
        service: Its full name.
        method: Its name.
        parse: Makes a message of bytes.
        counting: Whose turn it is to count fields, of all methods: it takes a thread.
    """

    def __init__(
        self, service: str, method: str, parse: Callable[[bytes], Any], counting: asyncio.Lock
    ) -> None:
        self._method = method
        self._parse = parse
        self._counting = counting
        self._most_bytes, self._most_fields = OTHERS_BYTES, 0
        self._fields: Fields = {}
        if service.startswith("rollwire."):
            self._most_bytes = LARGEST_BYTES if method in LARGE else USUAL_BYTES
        if most := MOST_FIELDS.get(method):
            self._most_fields = most
            called = descriptor_pool.Default().FindMethodByName(f"{service}.{method}")
            self._fields = fields_of(called.input_type)

    async def read(self, data: bytes) -> Any:
        """A message; raises ServiceError when it is none, or too much of it."""
        self._check_length(data)
        if self._fields and len(data) > FEW_BYTES:
            async with self._counting:
                readable = await asyncio.to_thread(
                    has_at_most, self._most_fields, data, self._fields
                )
            if not readable:
                raise ServiceError(
                    Reason.BAD_REQUEST,
                    f"the message has more than {self._most_fields} parts, the most that "
                    f"{self._method} takes, or it cannot be read",
                )
        return self._read(data)

    def read_or_tell(self, data: bytes) -> Any:
        """A message of a stream, or Unparsed."""
        try:
            self._check_length(data)
            return self._read(data)
        except ServiceError as error:
            return Unparsed(error)

    def _check_length(self, data: bytes) -> None:
        if len(data) > self._most_bytes:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"the message has {len(data)} bytes, {self._method} takes {self._most_bytes} at "
                "most",
            )

    def _read(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError as error:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"the message cannot be read: it is not what {self._method} takes",
            ) from error


def fields_of(descriptor: Descriptor) -> Fields:
    """The fields of a message that hold messages, and those of what they hold. (The API has no
    message that holds its own kind.)
    """
    inner = {field.number: field.message_type for field in descriptor.fields}
    return {number: fields_of(type_) for number, type_ in inner.items() if type_ is not None}


def has_at_most(most: int, data: bytes, fields: Fields) -> bool:
    """Whether a message, as it goes over a wire, has so many fields at most, with those of messages
    inside that hold messages themselves. Not so of what cannot be read.
    """
    count = 0
    todo = [(0, len(data), fields)]
    try:
        while todo:
            at, end, fields = todo.pop()
            while at < end:
                count += 1
                if count > most:
                    return False
                tag, at = _varint(data, at)
                kind = tag & 7
                if kind == 2:
                    size, at = _varint(data, at)
                    if inner := fields.get(tag >> 3):
                        todo.append((at, at + size, inner))
                    at += size
                elif kind == 0:
                    _, at = _varint(data, at)
                elif kind in (1, 5):
                    at += 8 if kind == 1 else 4
                else:  # groups, which nobody sends
                    return False
            if at != end:
                return False
    except IndexError:
        return False
    return True


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; IndexError where the data ends before."""
    if (byte := data[at]) < 128:  # nearly always
        return byte, at + 1
    value = shift = 0
    while byte >= 128 and shift < 70:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        byte = data[at]
    return value | byte << shift, at + 1
