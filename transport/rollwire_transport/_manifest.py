"""The layout of a weight update as plain data: which tensors, in which buckets, where in them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Encoding(enum.Enum):
    """How the bytes of a span are told."""

    FULL = "full"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, as a checkpoint has it.

    Attributes:
        name: As in the checkpoint.
        dtype: As torch names it: "bfloat16", "float8_e4m3fn", …
        shape: Its dimensions; () is a scalar.
        alias_of: The tensor whose memory this one shares (tied embeddings), which alone is sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one tensor's bytes inside a bucket; ``tensor`` is an index into
    ``Manifest.tensors``.
    """

    tensor: int
    tensor_offset: int
    bucket_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels as one message: ``size`` bytes (of a delta: at most)."""

    size: int
    spans: tuple[Span, ...]
    sender: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of an update.

    Attributes:
        tensors: What is sent, then its aliases.
        buckets: In the order they travel.
        encoding: Full bytes, or what changed.
        partial: Tensors that are not named stay as they are.
        base_digest: Of a delta: what the receiver must hold.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    encoding: Encoding = Encoding.FULL
    partial: bool = False
    base_digest: int | None = None
