"""rollwire.v1.WeightService over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from rollwire.conversion import (
    KV_POLICY_FROM_PROTO,
    SERVER_STATE_TO_PROTO,
    UPDATE_PHASE_TO_PROTO,
    duration_to_proto,
    weight_tag_to_proto,
)
from rollwire.reasons import Reason
from rollwire.types import KvPolicy
from rollwire.v1 import weights_pb2, weights_pb2_grpc
from rollwire_transport import PROTOCOL

from rollwire_server.errors import ServiceError, bad_request
from rollwire_server.rpc.validation import (
    check_id,
    check_manifest_size,
    manifest_from_proto,
    read_duration,
)
from rollwire_server.state import Rpc
from rollwire_server.weights.transport_group import JoinRequest, JoinStep
from rollwire_server.weights.update import PublisherId, UpdateAnnouncement

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc
    import rollwire_transport as transport

    from rollwire_server.engines.base import Engine
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.manager import UpdateManager

    Context = grpc.aio.ServicerContext[Any, Any]

JOIN_SECONDS = 30.0  # where the caller sets no deadline
STAGE_LEASE_SECONDS = 60.0
JOIN_STEPS = {
    weights_pb2.JOIN_STEP_PREPARE: JoinStep.PREPARE,
    weights_pb2.JOIN_STEP_CONNECT: JoinStep.CONNECT,
}
MAX_ANNOUNCEMENTS = 16  # UpdateWeights calls at once, each with its manifest in memory


class WeightService(weights_pb2_grpc.WeightServiceServicer):
    """See weights.proto."""

    def __init__(self, engine: Engine, state: StateMachine, updates: UpdateManager) -> None:
        self._engine = engine
        self._state = state
        self._updates = updates
        self._announcements = 0
        self._converting = asyncio.Lock()  # one manifest at a time: it takes much memory

    async def GetWeightSchema(  # noqa: N802
        self, _request: weights_pb2.GetWeightSchemaRequest, _context: Context
    ) -> weights_pb2.GetWeightSchemaResponse:
        self._state.check(Rpc.GET_WEIGHT_SCHEMA)
        schema = self._engine.schema()
        # In a thread: the schema may have a hundred thousand tensors.
        return await asyncio.to_thread(_schema_to_proto, schema)

    async def UpdateWeights(  # type: ignore[override]  # noqa: N802  writes by itself
        self, request: weights_pb2.UpdateWeightsRequest, context: Context
    ) -> None:
        lease = read_duration(request, "stage_lease")
        publisher, update_id = _publisher(request.publisher), _update_id(request.update_id)
        version = _version(request)
        check_id("kept_group.epoch", request.kept_group.epoch)
        changed_share = request.changed_share if request.HasField("changed_share") else None
        if changed_share is not None and not 0 <= changed_share <= 1:
            raise bad_request("changed_share", f"is {changed_share}, not from 0 to 1")
        self._updates.check_can_announce(publisher)
        check_manifest_size(request.manifest)
        if self._announcements >= MAX_ANNOUNCEMENTS:
            raise ServiceError(
                Reason.UPDATE_IN_PROGRESS,
                f"{self._announcements} announcements are under way on this server: try again",
            )
        self._announcements += 1
        try:
            await context.write(
                weights_pb2.UpdateWeightsResponse(
                    phase=weights_pb2.UPDATE_PHASE_ANNOUNCED,
                    transport_protocol=PROTOCOL,
                    transports=self._updates.transports,
                )
            )
            async with self._converting:
                manifest = await asyncio.to_thread(manifest_from_proto, request.manifest)
            announcement = UpdateAnnouncement(
                publisher=publisher,
                update_id=update_id,
                version=version,
                allow_version_rollback=request.allow_version_rollback,
                manifest=manifest,
                stage_lease=STAGE_LEASE_SECONDS if lease is None else lease,
                kept_epoch=request.kept_group.epoch,
                kept_transfers=request.kept_group.transfers,
                changed_share=changed_share,
            )
            await self._announce(announcement, context)
        finally:
            self._announcements -= 1

    async def _announce(self, announcement: UpdateAnnouncement, context: Context) -> None:
        async with contextlib.aclosing(self._updates.announce(announcement)) as reports:
            async for progress in reports:
                await context.write(
                    weights_pb2.UpdateWeightsResponse(
                        phase=UPDATE_PHASE_TO_PROTO[progress.phase],
                        received_bytes=progress.received_bytes,
                        forwarded_bytes=progress.forwarded_bytes,
                        next_bucket=progress.next_bucket,
                        digest=progress.digest,
                        detail=progress.detail,
                        epoch=progress.epoch,
                        peer=progress.peer,
                        timed_out=progress.timed_out,
                        transport_protocol=PROTOCOL,
                    )
                )

    async def JoinTransport(  # noqa: N802
        self, request: weights_pb2.JoinTransportRequest, context: Context
    ) -> weights_pb2.JoinTransportResponse:
        if (step := JOIN_STEPS.get(request.step)) is None:
            raise bad_request(
                "step",
                f"unknown step {request.step}: the trainer runs another version of rollwire, and "
                "must run the server's",
            )
        if len(request.ranks) != 1:
            raise bad_request(
                "ranks",
                f"this server receives on one device and needs one rank, not {len(request.ranks)}",
            )
        for field in ("epoch", "backend", "host"):
            check_id(field, getattr(request, field))
        if not request.epoch:
            raise bad_request("epoch", "epoch is empty: a group needs a name")
        left = context.time_remaining()
        answer, next_bucket = await self._updates.join(
            _publisher(request.publisher),
            _update_id(request.update_id),
            JoinRequest(
                step=step,
                epoch=request.epoch,
                backend=request.backend,
                rank=request.ranks[0],
                world_size=request.world_size,
                host=request.host,
                offer=request.offer,
                first_bucket=request.first_bucket,
            ),
            timeout=JOIN_SECONDS if left is None else min(left, JOIN_SECONDS),
        )
        return weights_pb2.JoinTransportResponse(answer=answer, next_bucket=next_bucket)

    async def CommitWeights(  # noqa: N802
        self, request: weights_pb2.CommitWeightsRequest, _: Context
    ) -> weights_pb2.CommitWeightsResponse:
        commit = await self._updates.commit(
            _publisher(request.publisher),
            _update_id(request.update_id),
            request.expected_digest,
            _max_kv_lag(request),
        )
        return weights_pb2.CommitWeightsResponse(
            weights=weight_tag_to_proto(commit.weights),
            timing=weights_pb2.CommitTiming(
                receive_ns=commit.receive_ns,
                apply_ns=commit.apply_ns,
                paused_ns=commit.paused_ns,
                held_sequences=commit.held_sequences,
                kv_tokens_to_recompute=commit.kv_tokens_to_recompute,
            ),
            already_current=commit.already_current,
        )

    async def DiscardUpdate(  # noqa: N802
        self, request: weights_pb2.DiscardUpdateRequest, _: Context
    ) -> weights_pb2.DiscardUpdateResponse:
        await self._updates.discard(_publisher(request.publisher), _update_id(request.update_id))
        return weights_pb2.DiscardUpdateResponse(
            weights=weight_tag_to_proto(self._updates.weights.current)
        )

    async def GetWeightStatus(  # noqa: N802
        self, request: weights_pb2.GetWeightStatusRequest, _: Context
    ) -> weights_pb2.GetWeightStatusResponse:
        self._state.check(Rpc.GET_WEIGHT_STATUS)
        intact = await self._updates.verify() if request.verify else None
        updates = self._updates
        response = weights_pb2.GetWeightStatusResponse(
            weights=weight_tag_to_proto(updates.weights.current),
            state=SERVER_STATE_TO_PROTO[self._state.current],
            committed_update_id=updates.weights.committed_update_id,
            intact=intact,
            history=[weight_tag_to_proto(tag) for tag in updates.weights.history],
        )
        if (publisher := updates.publisher) is not None:
            response.publisher.id, response.publisher.term = publisher.id, publisher.term
        if (update := updates.current) is not None:
            response.update_id = update.announcement.update_id
            if update.announcement.version is not None:
                response.update_version = update.announcement.version
            response.update_phase = UPDATE_PHASE_TO_PROTO[update.phase]
            if update.lease is not None:
                response.stage_lease_left.CopyFrom(duration_to_proto(update.lease.left))
        return response


def _schema_to_proto(specs: Iterable[transport.TensorSpec]) -> weights_pb2.GetWeightSchemaResponse:
    return weights_pb2.GetWeightSchemaResponse(
        tensors=[
            weights_pb2.TensorSpec(
                name=spec.name, dtype=spec.dtype, shape=spec.shape, alias_of=spec.alias_of or ""
            )
            for spec in specs
        ]
    )


def _publisher(message: weights_pb2.Publisher) -> PublisherId:
    check_id("publisher.id", message.id)
    if not message.id:
        raise bad_request("publisher.id", "a publisher needs an id")
    return PublisherId(message.id, message.term)


def _version(request: weights_pb2.UpdateWeightsRequest) -> int | None:
    if not request.HasField("version"):
        return None
    if request.version < 0:
        raise bad_request(
            "version",
            f"version {request.version} is negative: a version is the trainer's step, from 0 on; "
            "leave it out for an update without a version",
        )
    return request.version


def _max_kv_lag(request: weights_pb2.CommitWeightsRequest) -> int | None:
    """None keeps all keys and values, 0 keeps none."""
    policy = KV_POLICY_FROM_PROTO.get(request.kv_policy)
    if policy is None:
        raise bad_request("kv_policy", f"unknown KV policy {request.kv_policy}")
    given = request.max_kv_lag if request.HasField("max_kv_lag") else None
    if policy is KvPolicy.KEEP:
        return given
    if given is not None:
        raise bad_request(
            "max_kv_lag",
            f"max_kv_lag is {given}, but RECOMPUTE keeps no keys and values: set kv_policy to "
            "KEEP, or leave max_kv_lag out",
        )
    return 0


def _update_id(update_id: str) -> str:
    check_id("update_id", update_id)
    if not update_id:
        raise bad_request("update_id", "an update needs an update_id")
    return update_id
