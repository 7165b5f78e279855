"""Moves weights: tensors into buckets, buckets over links, verified by digests.

It knows tensors and links, neither gRPC nor engines. Everything blocks, with deadlines, and is
meant to be called from worker threads.

The trainer ``plan``s a ``Manifest`` of what it ``describe``s, opens a meeting, and a ``Sender``
sends over the link that it forms. A server ``validate``s the manifest, ``compare``s it with its
schema, ``join``s, and a ``Receiver`` puts what comes into its tensors. When a group fails, the
members that are left form another and go on from the lowest bucket that one of them misses.
"""

from rollwire_transport._bucket_layout import packed_nbytes, packed_views, padded_nbytes, plan
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
    ListenOptions,
    Rendezvous,
    Transfer,
    available_backends,
    join_group,
    open_rendezvous,
)
from rollwire_transport._manifest import Bucket, Encoding, Manifest, Span, TensorSpec
from rollwire_transport._receiver import Receiver
from rollwire_transport._sender import PackingStatus, Sender
from rollwire_transport._side_stream import on_side_stream
from rollwire_transport._tensors import close_source, describe, describe_all, materialize
from rollwire_transport._validation import MAX_DIMENSIONS, ManifestError, compare, validate
from rollwire_transport._warmup import warm_up

__all__ = [
    "MAX_DIMENSIONS",
    "Availability",
    "Bucket",
    "DigestMismatch",
    "Encoding",
    "Link",
    "ListenOptions",
    "Manifest",
    "ManifestError",
    "PackingStatus",
    "Receiver",
    "Rendezvous",
    "Sender",
    "SharedDevice",
    "SourceError",
    "Span",
    "TensorSpec",
    "Transfer",
    "TransportError",
    "TransportTimeout",
    "available_backends",
    "close_source",
    "compare",
    "describe",
    "describe_all",
    "join_group",
    "materialize",
    "on_side_stream",
    "open_rendezvous",
    "packed_nbytes",
    "packed_views",
    "padded_nbytes",
    "plan",
    "sum_digests",
    "tensor_digest",
    "tensor_digests",
    "validate",
    "warm_up",
]
