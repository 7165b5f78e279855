"""The layout of a weight update as plain data: its tensors, and where each lies in which bucket."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Encoding(enum.Enum):
    """What the bytes of a span are."""

    FULL = "full"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: As in the checkpoint.
        dtype: torch's name for it: "bfloat16", "float8_e4m3fn", …
        shape: Its dimensions; () is a scalar.
        alias_of: The tensor whose memory this one shares (tied embeddings). Only that one is sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one tensor's bytes in a bucket; ``tensor`` is an index into ``Manifest.tensors``."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent as one message: ``size`` bytes (for a delta: at most)."""

    size: int
    spans: tuple[Span, ...]
    sender: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of an update.

    Attributes:
        tensors: Those that are sent, then their aliases.
        buckets: In the order in which they are sent.
        encoding: Full bytes, or what changed.
        partial: Tensors that are not named keep their values.
        base_digest: For a delta: the digest of the weights that the receiver must hold.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    encoding: Encoding = Encoding.FULL
    partial: bool = False
    base_digest: int | None = None
