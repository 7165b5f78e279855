"""What a publish did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollwire.types import WeightTag

    from rollwire_client._errors import RollwireError


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a publish did to one server.

    Attributes:
        address: Of the server.
        weights: What it serves now; None if it did not commit.
        error: Why it did not.
        received_bytes: Of the update.
        staging_seconds: From the announcement until it had everything, verified.
        apply_seconds: Spent on putting the weights in place.
        paused_seconds: Without any sampling.
        held_sequences: How many waited meanwhile.
        kv_tokens_to_recompute: Cache entries that the new policy computes again.
        already_current: It held these weights before.
    """

    address: str
    weights: WeightTag | None
    error: RollwireError | None
    received_bytes: int
    staging_seconds: float
    apply_seconds: float = 0.0
    paused_seconds: float = 0.0
    held_sequences: int = 0
    kv_tokens_to_recompute: int = 0
    already_current: bool = False


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish did.

    Attributes:
        version: As given to ``publish``.
        update_id: Names it on the servers.
        digest: Of the content that was sent.
        bytes: Sent to each server.
        seconds: From ``publish`` to the last commit.
        servers: One entry a server, in the fleet's order; after ``catch_up`` those that were
            behind.
    """

    version: int | None
    update_id: str
    digest: int
    bytes: int
    seconds: float
    servers: tuple[ServerReport, ...]

    @property
    def failed(self) -> tuple[ServerReport, ...]:
        """Servers that did not commit; they get no sequences until a publish, or ``catch_up``,
        brings them up.
        """
        return tuple(server for server in self.servers if server.weights is None)
