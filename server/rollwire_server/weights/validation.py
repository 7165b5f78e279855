"""What is asked of weight updates, looked at before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.reasons import Reason
from rollwire.types import ServerState, UpdatePhase

from rollwire_server.errors import ServiceError
from rollwire_server.weights.update import told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.types import WeightTag

    from rollwire_server.weights.update import Announcement, Membership, Publisher, Update


def check_publisher(publisher: Publisher, known: Publisher | None) -> None:
    """Raises ServiceError when ``known`` has taken over from a publisher."""
    if known is None or publisher == known or publisher.term > known.term:
        return
    raise ServiceError(
        Reason.STALE_PUBLISHER,
        f"publisher {publisher.id!r} with term {publisher.term} is refused: "
        f"{known.id!r} with term {known.term} took over: a publisher that is to take the "
        "server back needs a higher term, which one that is made now has",
        metadata={"publisher_id": known.id, "term": str(known.term)},
    )


def check_kind(manifest: transport.Manifest, state: ServerState) -> None:
    """Raises ServiceError when a server in this state has no use for such an update."""
    if manifest.encoding is not transport.Encoding.FULL:
        raise ServiceError(
            Reason.UNSUPPORTED_ENCODING,
            "deltas are not supported: publish a full update",
            field="manifest.encoding",
        )
    if manifest.partial and state in (ServerState.QUARANTINED, ServerState.AWAITING_WEIGHTS):
        raise ServiceError(
            Reason.BASE_MISMATCH,
            f"a partial update cannot stand on what a server holds that is {state.value}: publish "
            "a full one",
        )


def check_manifest(manifest: transport.Manifest, schema: Sequence[transport.TensorSpec]) -> None:
    """Raises ServiceError when a manifest makes no sense, or is not of these tensors."""
    try:
        transport.validate(manifest)
        transport.compare(manifest, schema)
    except transport.ManifestError as error:
        raise ServiceError(Reason.MANIFEST_MISMATCH, str(error), field="manifest") from error


def check_commit(update: Update, expected_digest: int, serves: WeightTag) -> None:
    """Raises ServiceError when an update is not staged, or is not what was sent."""
    update_id = update.announcement.update_id
    if update.phase is not UpdatePhase.STAGED:
        raise ServiceError(
            Reason.NOT_STAGED,
            f"update {update_id} is {update.phase.value}, not staged; the server serves "
            f"{told(serves)}",
        )
    if (digest := update.receiver.digest) != expected_digest:
        raise ServiceError(
            Reason.DIGEST_MISMATCH,
            f"update {update_id} has digest {digest:016x} here and {expected_digest:016x} at "
            f"the trainer: discard it and publish again; the server serves {told(serves)}",
        )


def in_progress(current: Update) -> ServiceError:
    """The refusal of another update while this one is under way."""
    announcement = current.announcement
    return ServiceError(
        Reason.UPDATE_IN_PROGRESS,
        f"update {announcement.update_id} of publisher {announcement.publisher.id!r} is "
        f"{current.phase.value}: commit or discard it first",
        metadata={"update_id": announcement.update_id},
    )


def picks_up(announcement: Announcement, current: Update) -> bool:
    """Whether this is a staged update announced again: its answer was lost."""
    return announcement == current.announcement and current.phase is UpdatePhase.STAGED


def check_membership(
    update: Update, membership: Membership, listening: transport.ListenOptions
) -> None:
    """Raises ServiceError when a group makes no sense for an update."""
    backends = transport.available_backends(listening)
    backend = backends.get(membership.backend)
    if backend is None or not backend.ok:
        usable = ", ".join(name for name, backend in backends.items() if backend.ok) or "none"
        why = f" ({backend.reason})" if backend is not None else ""
        raise ServiceError(
            Reason.BAD_REQUEST,
            f"this server cannot use backend {membership.backend!r}{why}, only {usable}",
            field="backend",
        )
    if not 0 < membership.rank < membership.world_size:
        raise ServiceError(
            Reason.BAD_REQUEST,
            f"rank {membership.rank} is no receiver's in a group of {membership.world_size}: "
            "the trainer has rank 0",
            field="ranks",
        )
    if membership.first_bucket > update.receiver.next_bucket:
        raise ServiceError(
            Reason.BAD_REQUEST,
            f"a group that begins with bucket {membership.first_bucket} leaves a gap: bucket "
            f"{update.receiver.next_bucket} has not come yet",
            field="first_bucket",
        )
