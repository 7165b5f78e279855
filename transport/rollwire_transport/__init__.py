"""Moves weights: tensors into buckets, buckets over links, verified by digests.

It knows tensors and links, neither gRPC nor engines. Everything blocks, with deadlines, and is
meant to be called from worker threads.

The trainer ``plan``s a ``Manifest`` of what it ``describe``s, opens a meeting, and a ``Sender``
sends over the link that it forms. A server ``validate``s the manifest, ``compare``s it with its
schema, ``join``s, and a ``Receiver`` puts what comes into its tensors. When a group fails, the
members that are left form another and go on from the lowest bucket that one of them misses.
"""

from rollwire_transport._bucket_layout import lay, padded, plan, room
from rollwire_transport._digest import sum_digests, tensor_digest, tensor_digests
from rollwire_transport._errors import (
    DigestMismatch,
    SharedDevice,
    SourceError,
    TransportError,
    TransportTimeout,
)
from rollwire_transport._links import (
    Availability,
    Link,
    Listening,
    Meeting,
    Transfer,
    available_backends,
    join,
    open_meeting,
)
from rollwire_transport._manifest import Bucket, Encoding, Manifest, Span, TensorSpec
from rollwire_transport._receiver import Receiver
from rollwire_transport._sender import Packing, Sender
from rollwire_transport._side_stream import beside
from rollwire_transport._tensors import close_source, describe, describe_all, whole
from rollwire_transport._validation import MAX_DIMENSIONS, ManifestError, compare, validate
from rollwire_transport._warmup import prepare

__all__ = [
    "MAX_DIMENSIONS",
    "Availability",
    "Bucket",
    "DigestMismatch",
    "Encoding",
    "Link",
    "Listening",
    "Manifest",
    "ManifestError",
    "Meeting",
    "Packing",
    "Receiver",
    "Sender",
    "SharedDevice",
    "SourceError",
    "Span",
    "TensorSpec",
    "Transfer",
    "TransportError",
    "TransportTimeout",
    "available_backends",
    "beside",
    "close_source",
    "compare",
    "describe",
    "describe_all",
    "join",
    "lay",
    "open_meeting",
    "padded",
    "plan",
    "prepare",
    "room",
    "sum_digests",
    "tensor_digest",
    "tensor_digests",
    "validate",
    "whole",
]
