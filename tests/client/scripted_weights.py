"""A weight service in this process that receives real transfers, and fails as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import grpc
import rollwire_transport as transport
import torch
from client.scripted import ScriptedServer, refuse
from rollwire.v1 import weights_pb2, weights_pb2_grpc

SCHEMA = (
    transport.TensorSpec("embed.weight", "float32", (16, 8)),
    transport.TensorSpec("layer.weight", "float32", (8, 8)),
    transport.TensorSpec("layer.bias", "bfloat16", (8,)),
    transport.TensorSpec("head.weight", "float32", (16, 8), "embed.weight"),
)
BUCKET_BYTES = 128  # so that the tensors above take seven buckets


def policy(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors as the schema wants them, the alias tied."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in SCHEMA
    }
    tensors["head.weight"] = tensors["embed.weight"]
    return tensors


@dataclass
class Update:
    request: weights_pb2.UpdateWeightsRequest
    manifest: transport.Manifest
    tensors: dict[str, torch.Tensor]  # received
    receiver: transport.Receiver
    serves: dict[str, torch.Tensor]  # once committed, those of the update
    digest: int = 0
    digests: dict[str, int] = field(default_factory=dict)
    phase: int = weights_pb2.UPDATE_PHASE_READY
    link: transport.Link | None = None
    receiving: asyncio.Task[None] | None = None
    joined: str = ""  # the epoch of the group
    epoch: str = ""  # of the group in which it came to the phase
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, phase: int) -> None:
        self.phase, self.epoch = phase, self.joined
        self.changed.set()


class PublishableServer(ScriptedServer, weights_pb2_grpc.WeightServiceServicer):
    """Takes updates; the attributes say how it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.schema = SCHEMA
        self.committed: dict[str, torch.Tensor] = {}
        self.digests: dict[str, int] = {}
        self.commits: list[str] = []
        self.encodings: list[str] = []  # of what was committed
        self.discards: list[str] = []
        self.joins: list[weights_pb2.JoinTransportRequest] = []  # to prepare for a group
        self.first_buckets: list[int] = []
        self.resumed = 0
        self.announced = 0
        self.manifests: list[transport.Manifest] = []  # of the announced updates
        self.schema_calls = 0
        self.update: Update | None = None
        self.kept: tuple[str, transport.Link] | None = None  # the group of the last update
        self.kv_retention: tuple[int, int | None] | None = None  # policy and lag of the last commit
        self.protocol = transport.PROTOCOL
        # Faults.
        self.no_room_for_deltas = False
        self.cannot_read_deltas: tuple[grpc.StatusCode, str] | None = None  # once they are there
        self.breaks_deltas = False  # it holds other bits than it says
        self.hangs_in = ""  # the method that never answers
        self.checks_for = 0.0  # seconds between its first report and the next
        self.refuse_update: tuple[str, dict[str, str]] | None = None
        self.silent_after: int | None = None  # the phase after which it reports nothing more
        self.late_reports = 0  # that its first group failed, which come when all is there
        self.stop_receiving_at: int | None = None  # the bucket before which its link breaks, once
        self.die_at: int | None = None  # the bucket at which the whole server dies
        self.refuse_joins = 0
        self.never_staged = False  # it stalls once it has everything
        self.lie_about_digest = False
        self.lose_commit_answers = 0
        self.mute_once_committed = False
        self.refuse_commit = False

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        weights_pb2_grpc.add_WeightServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        await super().stop()
        if self.update is not None:
            await self._leave(self.update)
        await self._close_kept()

    async def _close_kept(self) -> None:
        if self.kept is not None:
            await asyncio.to_thread(self.kept[1].close)
            self.kept = None

    async def GetWeightSchema(self, request, context):  # noqa: N802
        self.schema_calls += 1
        return weights_pb2.GetWeightSchemaResponse(
            tensors=[
                weights_pb2.TensorSpec(
                    name=s.name, dtype=s.dtype, shape=s.shape, alias_of=s.alias_of or ""
                )
                for s in self.schema
            ]
        )

    async def UpdateWeights(self, request, context):  # noqa: N802
        self.announced += 1
        if self.hangs_in == "UpdateWeights":
            await asyncio.Event().wait()
        yield weights_pb2.UpdateWeightsResponse(
            phase=weights_pb2.UPDATE_PHASE_ANNOUNCED,
            transport_protocol=self.protocol,
            transports=["gloo"],
        )
        await asyncio.sleep(self.checks_for)
        if self.refuse_update is not None:
            reason, metadata = self.refuse_update
            self.refuse_update = None if reason == "UPDATE_IN_PROGRESS" else self.refuse_update
            await refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                reason,
                "as scripted",
                metadata=metadata,
            )
        manifest = transport.Manifest(
            tuple(
                transport.TensorSpec(t.name, t.dtype, tuple(t.shape), t.alias_of or None)
                for t in request.manifest.tensors
            ),
            tuple(
                transport.Bucket(
                    b.size,
                    tuple(
                        transport.Span(s.tensor, s.tensor_offset, s.bucket_offset, s.length)
                        for s in b.spans
                    ),
                )
                for b in request.manifest.buckets
            ),
            encoding=transport.Encoding(
                weights_pb2.Encoding.Name(request.manifest.encoding)
                .removeprefix("ENCODING_")
                .lower()
            ),
            partial=request.manifest.partial,
            base_digest=(
                request.manifest.base_digest if request.manifest.HasField("base_digest") else None
            ),
        )
        self.manifests.append(manifest)
        transport.compare(manifest, self.schema)
        layout, serves = manifest, {}
        if manifest.encoding is transport.Encoding.DELTA:
            await self._check_base(manifest, context)
            layout = transport.delta_layout(manifest)
            serves = {
                t.name: self.committed[t.name].clone()
                for t in manifest.tensors
                if t.alias_of is None
            }
        tensors = {
            t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype))
            for t in layout.tensors
            if t.alias_of is None
        }
        update = self.update = Update(
            request, manifest, tensors, transport.Receiver(layout, tensors), serves or tensors
        )
        kept = request.kept_group
        if self.kept is not None and self.kept[0] == kept.epoch:
            self.resumed += 1
            update.joined, update.link = self.kept
            self.kept = None
            assert update.link.transfers == kept.transfers
            self._begin(update, 0)
        try:
            while True:
                update.changed.clear()
                phase = update.phase
                is_staged = phase == weights_pb2.UPDATE_PHASE_STAGED
                if is_staged and layout is not manifest and self.cannot_read_deltas is not None:
                    code, reason = self.cannot_read_deltas
                    update.phase = weights_pb2.UPDATE_PHASE_STALLED
                    await refuse(context, code, reason, "as scripted")
                if is_staged and self.late_reports:
                    self.late_reports -= 1
                    phase = weights_pb2.UPDATE_PHASE_STALLED
                    yield weights_pb2.UpdateWeightsResponse(
                        phase=phase, epoch=self.joins[0].epoch, transport_protocol=self.protocol
                    )
                else:
                    yield self._report(update)
                if phase == self.silent_after:
                    await asyncio.Event().wait()
                if phase == weights_pb2.UPDATE_PHASE_STAGED:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await update.changed.wait()
        finally:
            if update.phase != weights_pb2.UPDATE_PHASE_STAGED:
                self.discards.append(request.update_id)

    async def _check_base(self, manifest: transport.Manifest, context) -> None:
        sent = [spec.name for spec in manifest.tensors if spec.alias_of is None]
        code = grpc.StatusCode.FAILED_PRECONDITION
        if not self.accepts_deltas:
            await refuse(context, code, "UNSUPPORTED_ENCODING", "as scripted")
        if self.no_room_for_deltas:
            await refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FAILED", "as scripted"
            )
        if (
            not self.digests.keys() >= set(sent)
            or transport.sum_digests(self.digests[name] for name in sent) != manifest.base_digest
        ):
            await refuse(context, code, "BASE_MISMATCH", "as scripted")

    def _finish(self, update: Update) -> None:
        """Once all is received."""
        digests = update.receiver.digests
        if update.manifest.encoding is transport.Encoding.DELTA:
            if self.breaks_deltas:
                next(iter(update.serves.values())).view(-1)[0] += 1
            received = transport.ReceivedDelta(update.manifest, update.tensors, update.serves)
            received.apply()
            digests = transport.tensor_digests(
                [s for s in update.manifest.tensors if s.alias_of is None], update.serves
            )
        update.digests = digests
        update.digest = transport.sum_digests(digests.values())

    def _report(self, update: Update) -> weights_pb2.UpdateWeightsResponse:
        staged = update.phase == weights_pb2.UPDATE_PHASE_STAGED
        return weights_pb2.UpdateWeightsResponse(
            phase=update.phase,
            received_bytes=update.receiver.received_bytes,
            next_bucket=update.receiver.next_bucket,
            epoch=update.epoch,
            transport_protocol=self.protocol,
            digest=(update.digest ^ self.lie_about_digest) if staged else 0,
        )

    async def JoinTransport(self, request, context):  # noqa: N802
        update = self.update
        assert update is not None
        if request.step == weights_pb2.JOIN_STEP_PREPARE:
            self.joins.append(request)
        if self.hangs_in == "JoinTransport":
            await asyncio.Event().wait()
        if request.step == weights_pb2.JOIN_STEP_PREPARE:
            await self._leave(update)
            await self._close_kept()
            update.joined = request.epoch
            if self.refuse_joins:
                self.refuse_joins -= 1
                await refuse(context, grpc.StatusCode.ABORTED, "TRANSPORT_FAILED", "as scripted")
            # Here and now: a caller that goes away must not lose it.
            update.link = transport.open_link(
                request.backend,
                epoch=request.epoch,
                rank=request.ranks[0],
                world_size=request.world_size,
                host=request.host,
            )
            return weights_pb2.JoinTransportResponse(
                answer=update.link.answer, next_bucket=update.receiver.next_bucket
            )
        assert update.link is not None
        try:
            await asyncio.to_thread(update.link.connect, 1, request.offer)
        except transport.TransportError as error:
            await refuse(context, grpc.StatusCode.ABORTED, "TRANSPORT_FAILED", str(error))
        self._begin(update, request.first_bucket)
        return weights_pb2.JoinTransportResponse()

    def _begin(self, update: Update, first_bucket: int) -> None:
        self.first_buckets.append(first_bucket)
        update.move(weights_pb2.UPDATE_PHASE_RECEIVING)
        update.receiving = asyncio.create_task(self._receive(update, update.link, first_bucket))

    async def _receive(self, update: Update, link: transport.Link, first_bucket: int) -> None:
        loop = asyncio.get_running_loop()

        def receive() -> None:
            digest = update.receiver._digest_and_unpack
            stop_at, self.stop_receiving_at = self.stop_receiving_at, None

            def digest_until_it_dies(batch, *rest) -> object:
                indices = {slot.index for slot in batch}
                if self.die_at in indices:
                    loop.call_soon_threadsafe(lambda: loop.create_task(ScriptedServer.stop(self)))
                if indices & {stop_at, self.die_at}:
                    raise transport.TransportError("as scripted")
                return digest(batch, *rest)

            update.receiver._digest_and_unpack = digest_until_it_dies
            try:
                update.receiver.receive(link, first_bucket=first_bucket, bucket_timeout=5)
            finally:
                update.receiver._digest_and_unpack = digest

        try:
            await asyncio.to_thread(receive)
        except transport.TransportError:
            await asyncio.to_thread(link.close)
            update.move(weights_pb2.UPDATE_PHASE_STALLED)
        else:
            self.kept = update.joined, link
            update.link = None
            self._finish(update)
            staged, stalled = weights_pb2.UPDATE_PHASE_STAGED, weights_pb2.UPDATE_PHASE_STALLED
            update.move(stalled if self.never_staged else staged)

    async def _leave(self, update: Update) -> None:
        if update.link is not None:
            update.link.abort()
        if update.receiving is not None:
            await update.receiving
        if update.link is not None:
            await asyncio.to_thread(update.link.close)

    async def CommitWeights(self, request, context):  # noqa: N802
        update = self.update
        assert update is not None
        if self.refuse_commit:
            await refuse(context, grpc.StatusCode.INTERNAL, "COMMIT_FAILED", "nothing was changed")
        partial = update.manifest.partial
        if request.update_id not in self.commits:
            assert request.expected_digest == update.digest
            self.committed = {**(self.committed if partial else {}), **update.serves}
            self.digests = {**(self.digests if partial else {}), **update.digests}
            self.encodings.append(update.manifest.encoding.value)
            self.commits.append(request.update_id)
            lag = request.max_kv_lag if request.HasField("max_kv_lag") else None
            self.kv_retention = request.kv_policy, lag
            self.weights.revision += 1
            self.weights.digest = request.expected_digest
            self.weights.ClearField("version")
            if update.request.HasField("version"):
                self.weights.version = update.request.version
        self.mute = self.mute or self.mute_once_committed
        if self.lose_commit_answers:
            self.lose_commit_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return weights_pb2.CommitWeightsResponse(
            weights=self.weights,
            timing=weights_pb2.CommitTiming(apply_ns=10**6, paused_ns=2 * 10**6, held_sequences=3),
        )

    async def DiscardUpdate(self, request, context):  # noqa: N802
        self.discards.append(request.update_id)
        return weights_pb2.DiscardUpdateResponse(weights=self.weights)

    async def GetWeightStatus(self, request, context):  # noqa: N802
        return weights_pb2.GetWeightStatusResponse(weights=self.weights)
