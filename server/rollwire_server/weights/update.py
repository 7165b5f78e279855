"""One weight update: what is asked for, how far it is, what came of it.

UpdateWeights ─▶ READY ─JoinTransport─▶ RECEIVING ─▶ STAGED ─CommitWeights─▶ committed
                                            │  ▲
                                            ▼  │ JoinTransport
                                          STALLED

In any of these phases: DiscardUpdate, a higher term, the UpdateWeights call ended before STAGED,
its lease over while it waits for its publisher, or the server goes to sleep or down ─▶ discarded
"""

from __future__ import annotations

import asyncio
import enum
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollwire.types import UpdatePhase, version_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    import rollwire_transport as transport
    from rollwire.patience import Timer
    from rollwire.types import WeightTag
    from torch import Tensor

    from rollwire_server.errors import ServiceError


class Outcome(enum.Enum):
    """What came of an update."""

    COMMITTED = "committed"
    ALREADY_CURRENT = "already_current"
    DISCARDED = "discarded"
    """Before its commit began, however far it was."""
    FAILED = "failed"
    """Its commit did."""


# It waits for its publisher: to name a group, to name the next one, to commit.
WAITING = {UpdatePhase.READY, UpdatePhase.STALLED, UpdatePhase.STAGED}


@dataclass(frozen=True, slots=True)
class Publisher:
    """One trainer's life; a higher term takes over."""

    id: str
    term: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """What UpdateWeights asks for."""

    publisher: Publisher
    update_id: str
    version: int | None
    allow_version_rollback: bool
    manifest: transport.Manifest
    stage_lease: float


@dataclass(frozen=True, slots=True)
class Membership:
    """A server's place in one transport group."""

    epoch: str
    backend: str
    rank: int
    world_size: int
    rendezvous: str
    first_bucket: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What UpdateWeights reports."""

    phase: UpdatePhase
    received_bytes: int
    forwarded_bytes: int
    next_bucket: int
    digest: int
    detail: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that happened: its answer, told again when asked again."""

    weights: WeightTag
    receive_ns: int = 0
    apply_ns: int = 0
    paused_ns: int = 0
    held_sequences: int = 0
    kv_tokens_to_recompute: int = 0
    already_current: bool = False


@dataclass(slots=True, eq=False)
class Update:
    """One announced update and all that it holds."""

    announcement: Announcement
    staged: Mapping[str, Tensor]
    receiver: transport.Receiver
    phase: UpdatePhase = UpdatePhase.READY
    detail: str = ""
    failure: ServiceError | None = None
    epoch: str = ""
    phase_epoch: str = ""  # of the group in which it came to the phase
    left: threading.Event = field(default_factory=threading.Event)  # the group, or its meeting
    link: transport.Link | None = None
    forwarded_bytes: int = 0  # in former groups
    joining: asyncio.Task[ServiceError | None] | None = None
    receiving: asyncio.Task[None] | None = None
    committing: asyncio.Task[Commit | ServiceError] | None = None
    receive_ns: int = 0
    lease: Timer | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def progress(self) -> Progress:
        """How far it is now."""
        staged = self.phase is UpdatePhase.STAGED
        return Progress(
            phase=self.phase,
            received_bytes=self.receiver.received_bytes,
            forwarded_bytes=self.forwarded_bytes + (self.link.forwarded_bytes if self.link else 0),
            next_bucket=self.receiver.next_bucket,
            digest=self.receiver.digest if staged else 0,
            detail=self.detail,
            epoch=self.phase_epoch,
        )

    def move(self, phase: UpdatePhase, detail: str = "") -> None:
        """Enters a phase and tells who watches."""
        self.phase, self.detail, self.phase_epoch = phase, detail, self.epoch
        self.changed.set()

    def let_go(self) -> None:
        """Gives its memory back, whoever still knows of it."""
        self.staged = {}
        self.receiver.release()

    def end_lease(self) -> None:
        """Its publisher is there, or it is gone itself."""
        if self.lease is not None:
            self.lease.cancel()
        self.lease = None


def named(update: Update) -> dict[str, object]:
    """What lines of the log call an update."""
    announcement = update.announcement
    return {"update_id": announcement.update_id, "version": announcement.version}


def told(weights: WeightTag) -> str:
    """The weights in an error's words."""
    return f"{version_text(weights.version)}, revision {weights.revision}"
