"""Moves weights: tensors into buckets, buckets over links, verified by digests.

It knows tensors and links, neither gRPC nor engines. Everything blocks, with deadlines, and is
meant to be called from worker threads.

The trainer ``plan``s a ``Manifest`` of the tensors that it ``describe``s; a server ``validate``s it
and ``compare``s it with its schema. All members of a group ``open_link``, receivers give their
``Link.answer`` to the trainer, it gives each of them an offer, and all ``connect``. A ``Sender``
sends over the link, and a ``Receiver`` puts what arrives into its tensors. When a group fails, the
remaining members form another one and continue from the lowest bucket that one of them lacks. A
group that has moved an update can move the next one.
"""

from rollwire_transport._cast import castable
from rollwire_transport._concurrency import on_side_stream
from rollwire_transport._delta import delta_layout
from rollwire_transport._digest import sum_digests, tensor_digest, tensor_digests
from rollwire_transport._errors import (
    DigestMismatch,
    ManifestError,
    TensorSourceError,
    TransportError,
    TransportTimeout,
    UnsuitableDevices,
)
from rollwire_transport._layout import (
    MAX_DIMENSIONS,
    compare,
    packed_nbytes,
    packed_views,
    padded_nbytes,
    plan,
    validate,
)
from rollwire_transport._links import (
    PROTOCOL,
    Availability,
    Link,
    ListenOptions,
    Transfer,
    available_backends,
    open_link,
    warm_up,
)
from rollwire_transport._manifest import (
    Bucket,
    Encoding,
    Manifest,
    Span,
    TensorSpec,
    describe,
    describe_all,
)
from rollwire_transport._memory import free_memory
from rollwire_transport._names import (
    ExpertMatrices,
    matrices_in,
    matrices_per_expert,
    other_names,
    packed_around,
    packed_from,
    unwrapped,
)
from rollwire_transport._published_copy import Delta, PublishedCopy, Snapshot
from rollwire_transport._received_delta import ReceivedDelta
from rollwire_transport._receiver import Receiver
from rollwire_transport._sender import PackingStatus, Sender
from rollwire_transport._source import Gathered, close_source, materialize

__all__ = [
    "MAX_DIMENSIONS",
    "PROTOCOL",
    "Availability",
    "Bucket",
    "Delta",
    "DigestMismatch",
    "Encoding",
    "ExpertMatrices",
    "Gathered",
    "Link",
    "ListenOptions",
    "Manifest",
    "ManifestError",
    "PackingStatus",
    "PublishedCopy",
    "ReceivedDelta",
    "Receiver",
    "Sender",
    "Snapshot",
    "Span",
    "TensorSourceError",
    "TensorSpec",
    "Transfer",
    "TransportError",
    "TransportTimeout",
    "UnsuitableDevices",
    "available_backends",
    "castable",
    "close_source",
    "compare",
    "delta_layout",
    "describe",
    "describe_all",
    "free_memory",
    "materialize",
    "matrices_in",
    "matrices_per_expert",
    "on_side_stream",
    "open_link",
    "other_names",
    "packed_around",
    "packed_from",
    "packed_nbytes",
    "packed_views",
    "padded_nbytes",
    "plan",
    "sum_digests",
    "tensor_digest",
    "tensor_digests",
    "unwrapped",
    "validate",
    "warm_up",
]
