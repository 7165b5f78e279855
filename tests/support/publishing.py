"""A trainer by hand: every step of a weight update as its own call."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import rollwire_transport as transport
import torch
from rollwire.conversion import duration_to_proto
from rollwire.v1 import weights_pb2
from rollwire_client._rpc import conversion
from torch import Tensor

from support.calls import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from support.calls import Api

SECONDS = 60
TERMS = itertools.count(1)  # each update of a shared server takes over from those before


async def random_weights(api: Api, seed: int) -> dict[str, Tensor]:
    """Weights that fit the server's schema, aliases left out."""
    schema = await api.weights.GetWeightSchema(weights_pb2.GetWeightSchemaRequest(), timeout=60)
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: (torch.randn(list(spec.shape), generator=generator) * 0.1).to(
            getattr(torch, spec.dtype)
        )
        for spec in schema.tensors
        if not spec.alias_of
    }


async def next_version(api: Api) -> int:
    """Above every version that the server has committed, whatever it serves now."""
    return (await api.info()).highest_version + 1


@dataclass
class Update:
    """One update of one server, step by step: announce → transfer → commit."""

    api: Api
    tensors: Mapping[str, Tensor]
    version: int | None = None
    partial: bool = False
    publisher: str = "trainer"
    term: int = 1
    lease: float = 30.0
    rollback: bool = False
    kept: tuple[str, int] = ("", 0)  # the epoch of a group, and how many updates it has moved
    bucket_bytes: int = 65536
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.manifest = transport.plan(
            transport.describe_all(self.tensors),
            bucket_bytes=self.bucket_bytes,
            partial=self.partial,
        )
        self.sender = transport.Sender(self.manifest)
        self.sent: Mapping[str, Tensor | Callable[[], Tensor]] = self.tensors
        self.who = weights_pb2.Publisher(id=self.publisher, term=self.term)
        self.last = weights_pb2.UpdateWeightsResponse()

    @property
    def digest(self) -> int:
        """Of the tensors, once they are sent."""
        return self.sender.digest

    async def announce(self, manifest: weights_pb2.Manifest | None = None) -> None:
        """Until READY, or RECEIVING in the group that was kept."""
        self.call = self.api.weights.UpdateWeights(
            weights_pb2.UpdateWeightsRequest(
                publisher=self.who,
                update_id=self.update_id,
                version=self.version,
                allow_version_rollback=self.rollback,
                manifest=manifest or conversion.manifest_to_proto(self.manifest),
                stage_lease=duration_to_proto(self.lease),
                kept_group=weights_pb2.KeptGroup(epoch=self.kept[0], transfers=self.kept[1]),
            ),
            timeout=60,
        )
        await self.read()
        assert self.last.phase == weights_pb2.UPDATE_PHASE_ANNOUNCED
        await self.read()

    async def read(self) -> bool:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.last = message
        return True

    async def until(self, phase: weights_pb2.UpdatePhase.ValueType) -> None:
        while self.last.phase != phase:
            assert await self.read(), f"ended in {self.last}"

    async def transfer(self, first_bucket: int = 0, backend: str = "gloo") -> None:
        """A group, and every bucket over it; until STAGED."""
        link = await self.form(first_bucket, backend=backend)
        try:
            await self.send(link, first_bucket)
            await self.until(weights_pb2.UPDATE_PHASE_STAGED)
        finally:
            await asyncio.to_thread(link.close)
        assert self.last.digest == self.digest

    async def form(
        self, first_bucket: int = 0, backend: str = "gloo", host: str = "127.0.0.1"
    ) -> transport.Link:
        """The trainer's end of a group with the server."""
        epoch = uuid.uuid4().hex
        link = transport.open_link(backend, epoch=epoch, rank=0, world_size=2, host=host)
        answer = await self.prepare(epoch, backend=backend, host=host)
        offers = link.offers({1: answer.answer})
        connecting = asyncio.create_task(
            self.join(
                weights_pb2.JOIN_STEP_CONNECT, epoch, offer=offers[1], first_bucket=first_bucket
            )
        )
        await asyncio.to_thread(link.connect, SECONDS)
        await connecting
        return link

    async def send(self, link: transport.Link, first_bucket: int = 0) -> None:
        await asyncio.to_thread(
            self.sender.send,
            link,
            self.sent.items,
            first_bucket=first_bucket,
            bucket_timeout=SECONDS,
        )

    async def prepare(self, epoch: str, **change: object) -> weights_pb2.JoinTransportResponse:
        fields = {"backend": "gloo", "world_size": 2, "host": "127.0.0.1", **change}
        return await self.join(fields.pop("step", weights_pb2.JOIN_STEP_PREPARE), epoch, **fields)

    async def join(
        self, step: object, epoch: str, **change: object
    ) -> weights_pb2.JoinTransportResponse:
        fields: dict[str, object] = {
            "publisher": self.who,
            "update_id": self.update_id,
            "epoch": epoch,
            "step": step,
            "ranks": [1],
            **change,
        }
        return await self.api.weights.JoinTransport(
            weights_pb2.JoinTransportRequest(**fields), timeout=SECONDS
        )

    async def stage(self) -> None:
        await self.announce()
        await self.transfer()

    async def commit(
        self, kv_policy: int = 0, digest: int | None = None, max_kv_lag: int | None = None
    ) -> weights_pb2.CommitWeightsResponse:
        return await self.api.weights.CommitWeights(
            weights_pb2.CommitWeightsRequest(
                publisher=self.who,
                update_id=self.update_id,
                expected_digest=self.digest if digest is None else digest,
                kv_policy=kv_policy,
                max_kv_lag=max_kv_lag,
            ),
            timeout=SECONDS,
        )

    async def publish(self, max_kv_lag: int | None = None) -> weights_pb2.CommitWeightsResponse:
        await self.stage()
        return await self.commit(max_kv_lag=max_kv_lag)

    async def discard(self) -> weights_pb2.DiscardUpdateResponse:
        return await self.api.weights.DiscardUpdate(
            weights_pb2.DiscardUpdateRequest(publisher=self.who, update_id=self.update_id),
            timeout=SECONDS,
        )


@dataclass
class DeltaUpdate(Update):
    """What has changed since ``base`` was published."""

    base: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        device = torch.device("cpu")
        copy = transport.PublishedCopy(device)
        copy.take(self.manifest, self.base.items, device=device)
        self.snapshot = copy.take(self.manifest, self.tensors.items, device=device)
        assert self.snapshot.delta is not None
        self.delta = self.snapshot.delta
        self.full_bytes = sum(bucket.size for bucket in self.manifest.buckets)
        self.manifest = self.delta.manifest
        self.sender = transport.Sender(transport.delta_layout(self.manifest))
        self.sent = dict(self.delta.tensors)

    @property
    def digest(self) -> int:
        return self.snapshot.digest


def changed(tensors: Mapping[str, Tensor], seed: int, share: float = 0.01) -> dict[str, Tensor]:
    """The same tensors, in which a share of the elements has another lowest bit."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in new.values():
        bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        bits ^= (torch.rand(bits.shape, generator=generator) < share).to(bits.dtype)
    return new


async def publish(
    api: Api, tensors: Mapping[str, Tensor], max_kv_lag: int | None = None
) -> weights_pb2.CommitWeightsResponse:
    """A full update of a publisher that takes over from all before, above every version."""
    change = Update(api, tensors, await next_version(api), term=next(TERMS))
    return await change.publish(max_kv_lag)


async def status(api: Api, *, verify: bool = False) -> weights_pb2.GetWeightStatusResponse:
    return await api.weights.GetWeightStatus(
        weights_pb2.GetWeightStatusRequest(verify=verify), timeout=SECONDS
    )


async def no_update(api: Api, seconds: float = 30) -> None:
    """Returns when no update is under way."""

    async def is_none() -> bool:
        return not (await status(api)).update_id

    await until(is_none, seconds)
