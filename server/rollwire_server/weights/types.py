"""What the weight RPCs ask for and answer, as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollwire.types import UpdatePhase, WeightTag
    from rollwire_transport import Manifest


class UpdateOutcome(enum.Enum):
    """How an update ended."""

    COMMITTED = "committed"
    ALREADY_CURRENT = "already_current"
    DISCARDED = "discarded"
    """Before its commit began."""
    FAILED = "failed"
    """Its commit failed."""


@dataclass(frozen=True, slots=True)
class PublisherId:
    """Who publishes: one run of a trainer. A higher term takes the server over."""

    id: str
    term: int


@dataclass(frozen=True, slots=True)
class UpdateAnnouncement:
    """What UpdateWeights asks for; ``stage_lease`` is in seconds."""

    publisher: PublisherId
    update_id: str
    version: int | None
    allow_version_rollback: bool
    manifest: Manifest
    stage_lease: float


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """A server's place in one transport group."""

    epoch: str
    backend: str
    rank: int
    world_size: int
    rendezvous: str
    first_bucket: int


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    """What UpdateWeights reports."""

    phase: UpdatePhase
    received_bytes: int
    forwarded_bytes: int
    next_bucket: int
    digest: int
    detail: str
    epoch: str


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit; a repeated CommitWeights gets the same one."""

    weights: WeightTag
    receive_ns: int = 0
    apply_ns: int = 0
    paused_ns: int = 0
    held_sequences: int = 0
    kv_tokens_to_recompute: int = 0
    already_current: bool = False
