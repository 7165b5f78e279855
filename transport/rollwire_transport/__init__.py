"""Moves weights: tensors into buckets, buckets over links, verified by digests.

It knows tensors and links, neither gRPC nor engines. Everything blocks, with deadlines, and is
meant to be called from worker threads.

The trainer ``plan``s a ``Manifest`` of the tensors that it ``describe``s and opens a
``Rendezvous``; a ``Sender`` sends over the ``Link`` that it forms. A server ``validate``s the
manifest, ``compare``s it with its schema and ``join_group``s; a ``Receiver`` puts what arrives into
its tensors. When a group fails, the remaining members form another one and go on from the lowest
bucket that one of them misses.
"""

from rollwire_transport._bucket_layout import packed_nbytes, packed_views, padded_nbytes, plan
from rollwire_transport._digest import sum_digests, tensor_digest, tensor_digests
from rollwire_transport._errors import (
    DigestMismatch,
    ManifestError,
    SharedDevice,
    TensorSourceError,
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
    warm_up,
)
from rollwire_transport._manifest import Bucket, Encoding, Manifest, Span, TensorSpec
from rollwire_transport._receiver import Receiver
from rollwire_transport._sender import PackingStatus, Sender
from rollwire_transport._source import close_source, materialize
from rollwire_transport._streams import on_side_stream
from rollwire_transport._tensors import describe, describe_all
from rollwire_transport._validation import MAX_DIMENSIONS, compare, validate

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
    "Span",
    "TensorSourceError",
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
