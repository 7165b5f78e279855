"""Nothing that a client chooses takes the server's memory or time."""

from __future__ import annotations

import math
import struct
import uuid
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2, weights_pb2
from rollwire_server.errors import ServiceError, float_text
from rollwire_server.rpc.validation import MAX_STOP_TOKENS, manifest_from_proto, read_request
from support.calls import Api, connected, generate, reason_of, request
from support.engine_room import serving

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from rollwire_server.engines.base import EngineInfo
    from support.servers import ServerProcess

LONG = "n" * 257
ME = weights_pb2.Publisher(id="me", term=1 << 60)
CONTEXT = 4096  # of builtin:tiny


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "t", "dtype": "float32", "shape": [1], **fields}


def update(**fields: Any) -> weights_pb2.UpdateWeightsRequest:
    """An announcement that would be right in all else."""
    manifest = {"tensors": [tensor()], **fields.pop("manifest", {})}
    right = {"publisher": ME, "update_id": uuid.uuid4().hex, "version": 1 << 60}
    return weights_pb2.UpdateWeightsRequest(**{**right, "manifest": manifest, **fields})


def join(**fields: Any) -> weights_pb2.JoinTransportRequest:
    right = {"publisher": ME, "update_id": "u", "epoch": "e", "backend": "gloo", "ranks": [1],
             "world_size": 2, "host": "127.0.0.1"}  # fmt: skip
    step = weights_pb2.JOIN_STEP_PREPARE
    return weights_pb2.JoinTransportRequest(**{"step": step, **right, **fields})


# A message for each field that has no length of its own: too much of it, and the refusal.
TOO_MUCH: dict[str, tuple[Any, str]] = {
    "Generate.request_id": (request(request_id=LONG), "BAD_REQUEST"),
    "Generate.session_id": (request(session_id=LONG), "BAD_REQUEST"),
    "Generate.prompt_token_ids": (request([600] * CONTEXT), "CONTEXT_EXCEEDED"),
    "Generate.output_token_ids": (request((1,), None, prefix=[600] * CONTEXT), "CONTEXT_EXCEEDED"),
    "Generate.sampling.stop_token_ids": (
        request(stop_token_ids=[600] * (MAX_STOP_TOKENS + 1)),
        "BAD_SAMPLING",
    ),
    "Abort.sequences": (
        rollout_pb2.AbortRequest(sequences=[rollout_pb2.SequenceKey()] * 65_537),
        "BAD_REQUEST",
    ),
    "Abort.sequences.request_id": (
        rollout_pb2.AbortRequest(sequences=[rollout_pb2.SequenceKey(request_id=LONG)]),
        "BAD_REQUEST",
    ),
    "Pause.pause_id": (rollout_pb2.PauseRequest(pause_id=LONG), "BAD_REQUEST"),
    "Resume.pause_id": (rollout_pb2.ResumeRequest(pause_id=LONG), "BAD_REQUEST"),
    "UpdateWeights.publisher.id": (update(publisher={"id": LONG}), "BAD_REQUEST"),
    "UpdateWeights.update_id": (update(update_id=LONG), "BAD_REQUEST"),
    "UpdateWeights.kept_group.epoch": (update(kept_group={"epoch": LONG}), "BAD_REQUEST"),
    "UpdateWeights.manifest.tensors": (
        update(manifest={"tensors": [weights_pb2.TensorSpec()] * 200_001}),
        "MANIFEST_MISMATCH",
    ),
    "UpdateWeights.manifest.tensors.name": (
        update(manifest={"tensors": [tensor(name="n" * 4097)]}),
        "MANIFEST_MISMATCH",
    ),
    "UpdateWeights.manifest.tensors.dtype": (
        update(manifest={"tensors": [tensor(dtype="n" * 100_000)]}),
        "MANIFEST_MISMATCH",
    ),
    "UpdateWeights.manifest.tensors.shape": (
        update(manifest={"tensors": [tensor(shape=[1 << 63] * 100_000)]}),
        "MANIFEST_MISMATCH",
    ),
    "UpdateWeights.manifest.tensors.alias_of": (
        update(manifest={"tensors": [tensor(alias_of="n" * 100_000)]}),
        "MANIFEST_MISMATCH",
    ),
    "UpdateWeights.manifest.buckets": (
        update(manifest={"buckets": [weights_pb2.Bucket()] * 200_001}),
        "MANIFEST_MISMATCH",
    ),
    "UpdateWeights.manifest.buckets.spans": (
        update(manifest={"buckets": [{"spans": [weights_pb2.Span()] * 400_001}]}),
        "MANIFEST_MISMATCH",
    ),
    "JoinTransport.publisher.id": (join(publisher={"id": LONG}), "BAD_REQUEST"),
    "JoinTransport.update_id": (join(update_id=LONG), "BAD_REQUEST"),
    "JoinTransport.epoch": (join(epoch=LONG), "BAD_REQUEST"),
    "JoinTransport.backend": (join(backend=LONG), "BAD_REQUEST"),
    "JoinTransport.ranks": (join(ranks=range(1, 1000)), "BAD_REQUEST"),
    "JoinTransport.host": (join(host=LONG), "BAD_REQUEST"),
    "JoinTransport.offer": (join(offer=bytes(4 << 20)), "BAD_REQUEST"),
    "CommitWeights.publisher.id": (
        weights_pb2.CommitWeightsRequest(publisher={"id": LONG}),
        "BAD_REQUEST",
    ),
    "CommitWeights.update_id": (
        weights_pb2.CommitWeightsRequest(publisher=ME, update_id=LONG),
        "BAD_REQUEST",
    ),
    "DiscardUpdate.publisher.id": (
        weights_pb2.DiscardUpdateRequest(publisher={"id": LONG}),
        "BAD_REQUEST",
    ),
    "DiscardUpdate.update_id": (
        weights_pb2.DiscardUpdateRequest(publisher=ME, update_id=LONG),
        "BAD_REQUEST",
    ),
}


def fields_without_length(descriptor: Descriptor, path: str) -> set[str]:
    found = set()
    for field in descriptor.fields:
        name = f"{path}.{field.name}"
        inner = field.message_type
        if inner is not None and inner.file.package != "google.protobuf":
            found |= fields_without_length(inner, name)
        if field.is_repeated or field.type in (
            FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES,
        ):  # fmt: skip
            found.add(name)
    return found


def test_every_field_without_a_length_of_its_own_has_its_bound() -> None:
    """A new one comes into the table above; commands of StreamRollouts are Generate's."""
    services = (
        rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
        weights_pb2.DESCRIPTOR.services_by_name["WeightService"],
    )
    fields = {
        name
        for service in services
        for method in service.methods
        if not method.client_streaming
        for name in fields_without_length(method.input_type, method.name)
    }
    assert fields == TOO_MUCH.keys()


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_too_much_is_refused_by_name(server: ServerProcess, name: str) -> None:
    message, expected = TOO_MUCH[name]
    method = name.partition(".")[0]
    async with connected(server.address) as api:
        call = getattr(stub_of(api, method), method)(message, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(caught.value) == expected


async def ended(call: Any) -> None:
    """Takes all that a call answers."""
    if not hasattr(call, "read"):
        await call
        return
    while await call.read():
        pass


def stub_of(api: Api, method: str) -> Any:
    return api.rollouts if hasattr(api.rollouts, method) else api.weights


SMALL_CALLS = ["Abort", "Pause", "GetServerInfo", "JoinTransport", "GetWeightStatus"]


@pytest.mark.parametrize("method", SMALL_CALLS)
async def test_a_message_of_many_parts_is_not_parsed(server: ServerProcess, method: str) -> None:
    """Two million empty messages of field 1 would take the event loop for seconds."""
    async with connected(server.address) as api:
        package = "Rollout" if hasattr(api.rollouts, method) else "Weight"
        call = api.channel.unary_unary(f"/rollwire.v1.{package}Service/{method}")
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"the limit of {method} is 4194304"
        ) as caught:
            await call(b"\x0a\x00" * ((4 << 20) // 2 + 1), timeout=60)
        assert reason_of(caught.value) == "BAD_REQUEST"
        assert (await generate(api, request((1,), 3))).reason == "LENGTH"


COMPRESSED = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@pytest.mark.parametrize("algorithm", COMPRESSED)
async def test_what_is_compressed_is_not_unpacked(server: ServerProcess, algorithm: str) -> None:
    """Zeros shrink a thousandfold, so a message within the limits could fill any memory."""
    async with connected(server.address) as api:
        call = api.channel.unary_unary("/rollwire.v1.RolloutService/Generate")
        with pytest.raises(grpc.aio.AioRpcError, match=f"'{algorithm}' is disabled") as caught:
            await call(bytes(1 << 20), compression=COMPRESSED[algorithm], timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await generate(api, request((1,), 3))).reason == "LENGTH"


# Requests.


async def engine_info() -> EngineInfo:
    async with serving() as (_, _, engine):
        return engine.describe()


async def test_lengths_are_looked_at_before_tokens_are() -> None:
    """Whoever sends millions of them does not have them looked through."""
    info = await engine_info()
    beyond = info.vocab_size
    for message, reason in (
        (request([beyond] * info.context_length), Reason.CONTEXT_EXCEEDED),
        (request((1,), prefix=[beyond] * info.context_length), Reason.CONTEXT_EXCEEDED),
        (request(stop_token_ids=[beyond] * (MAX_STOP_TOKENS + 1)), Reason.BAD_SAMPLING),
    ):
        with pytest.raises(ServiceError) as caught:
            read_request(message, info, 1)
        assert caught.value.reason is reason


async def test_what_nobody_knows_is_not_carried_along() -> None:
    """Fields of no meaning stay in memory with their message, for as long as its call goes on."""
    info = await engine_info()
    unknown = rollout_pb2.PauseRequest(pause_id="x" * (1 << 20)).SerializeToString()
    raw = request((1,), 3).SerializeToString() + b"\xa2\x06" + unknown[1:]
    message = rollout_pb2.GenerateRequest.FromString(raw)
    assert message.ByteSize() > 1 << 20
    with pytest.raises(ServiceError, match="more than a valid one can have") as caught:
        read_request(message, info, 1)
    assert caught.value.reason is Reason.BAD_REQUEST
    assert read_request(request([1] * (info.context_length - 1), 1), info, 1)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("top_p", 1.0000001, "top_p is 1.0000001, not above 0 and at most 1"),
        ("top_p", 0.0, "top_p is 0, not above 0 and at most 1"),
        ("top_p", 7.0, "top_p is 7, not above 0 and at most 1"),
        ("min_p", 1.0000001, "min_p is 1.0000001, not from 0 to 1"),
        ("min_p", -1e-45, "min_p is -1e-45, not from 0 to 1"),
        ("min_p", math.nan, "min_p is nan, not from 0 to 1"),
        ("temperature", 9.999998e-7, "temperature is 9.999998e-07, neither 0 nor at least 1e-06"),
        ("temperature", -math.inf, "temperature is -inf, neither 0 nor at least 1e-06"),
    ],
)
async def test_a_value_is_told_as_it_was_sent(field: str, value: float, told: str) -> None:
    """A refusal that rounds it may say that it is what is allowed."""
    with pytest.raises(ServiceError) as caught:
        read_request(request(**{field: value}), await engine_info(), 1)
    assert caught.value.message == told
    assert caught.value.reason is Reason.BAD_SAMPLING


@given(st.floats(width=32))
def test_any_float_is_told_so_that_it_is_no_other(value: float) -> None:
    told = float(float_text(value))
    assert struct.pack("f", told) == struct.pack("f", value) or math.isnan(value)


def test_a_part_of_a_manifest_that_is_too_much_is_not_looked_at() -> None:
    many = weights_pb2.Manifest(
        tensors=[weights_pb2.TensorSpec(name="t", dtype="float32", shape=[2] * 1000)]
    )
    (spec,) = manifest_from_proto(many).tensors
    assert len(spec.shape) == 65
