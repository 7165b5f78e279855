"""Limits on messages: what is too long, has too many parts, or is no message is refused by name.

gRPC's own limit of length is one for all methods, and has to let manifests through. Parsing takes
the event loop, and each empty message inside of a message takes some 80 bytes in place of two:
thirty megabytes of nothing but those would take seconds, and gigabytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from rollwire.reasons import Reason

from rollwire_server.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.descriptor import Descriptor

LARGE_BYTES = 32 << 20  # 10 MiB is the manifest of 100,000 tensors, or a prompt of 2 million
DEFAULT_BYTES = 4 << 20  # gRPC's default
SMALL_BYTES = 1 << 16  # of health and reflection, which take names
LARGE_METHODS = {"Generate", "StreamRollouts", "UpdateWeights"}

# Fields of the methods that take messages in any number. Their handlers check the number of each by
# its name; this bound is a little less strict, and limits the work until then.
MAX_FIELDS = {"Abort": 1 << 16, "UpdateWeights": 3 << 19}
UNCOUNTED_BYTES = 1 << 16  # in so few there cannot be too many

MessageFields = dict[int, "MessageFields"]  # the fields that hold messages, by number


class MessageParser:
    """Parses the messages of one method.

    Args:
        service: Its full name.
        deserialize: Makes a message of bytes.
        counting: Held while fields are counted, which takes a thread; shared by all methods.
    """

    def __init__(
        self, service: str, method: str, deserialize: Callable[[bytes], Any], counting: asyncio.Lock
    ) -> None:
        self._method = method
        self._deserialize = deserialize
        self._counting = counting
        self._max_bytes, self._max_fields = SMALL_BYTES, 0
        self._fields: MessageFields = {}
        if service.startswith("rollwire."):
            self._max_bytes = LARGE_BYTES if method in LARGE_METHODS else DEFAULT_BYTES
        if max_fields := MAX_FIELDS.get(method):
            self._max_fields = max_fields
            descriptor = descriptor_pool.Default().FindMethodByName(f"{service}.{method}")
            self._fields = message_fields(descriptor.input_type)

    async def parse(self, data: bytes) -> Any:
        """The message; raises ServiceError when it is none, or too large."""
        self._check_length(data)
        if self._fields and len(data) > UNCOUNTED_BYTES:
            async with self._counting:
                readable = await asyncio.to_thread(
                    has_at_most, self._max_fields, data, self._fields
                )
            if not readable:
                raise ServiceError(
                    Reason.BAD_REQUEST,
                    f"the message has more than {self._max_fields} parts, the limit of "
                    f"{self._method}, or it cannot be parsed",
                )
        return self._parse(data)

    def parse_or_error(self, data: bytes) -> Any:
        """The message of a stream, or the ServiceError in place of one. (What a deserializer raises
        ends the call without a reason.)
        """
        try:
            self._check_length(data)
            return self._parse(data)
        except ServiceError as error:
            return error

    def _check_length(self, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"the message has {len(data)} bytes, the limit of {self._method} is "
                f"{self._max_bytes}",
            )

    def _parse(self, data: bytes) -> Any:
        try:
            return self._deserialize(data)
        except DecodeError as error:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"the message cannot be parsed: it is not a request of {self._method}",
            ) from error


def message_fields(descriptor: Descriptor) -> MessageFields:
    """The fields of a message that hold messages, and those inside them. (The API has no message
    that holds its own kind.)
    """
    inner = {field.number: field.message_type for field in descriptor.fields}
    return {number: message_fields(kind) for number, kind in inner.items() if kind is not None}


def has_at_most(limit: int, data: bytes, fields: MessageFields) -> bool:
    """Whether a serialized message has at most ``limit`` fields, with those of messages inside that
    hold messages themselves. False for what cannot be read.
    """
    count = 0
    pending = [(0, len(data), fields)]
    try:
        while pending:
            at, end, fields = pending.pop()
            while at < end:
                count += 1
                if count > limit:
                    return False
                tag, at = _varint(data, at)
                wire_type = tag & 7
                if wire_type == 2:
                    size, at = _varint(data, at)
                    if inner := fields.get(tag >> 3):
                        pending.append((at, at + size, inner))
                    at += size
                elif wire_type == 0:
                    _, at = _varint(data, at)
                elif wire_type in (1, 5):
                    at += 8 if wire_type == 1 else 4
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
