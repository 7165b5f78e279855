"""Between messages of the API and the types of ``rollwire.types``.

A value that the message leaves unspecified becomes its documented default. A number that this
release has no name for is missing from a ``…_FROM_PROTO`` table.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from rollwire.types import (
    CommittedUpdate,
    Finish,
    FinishReason,
    KvPolicy,
    LogprobBasis,
    ServerState,
    SleepingWeights,
    UpdatePhase,
    WeightTag,
)
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

E = TypeVar("E", bound=enum.Enum)


def _to_proto(
    members: type[E], wire: Any, prefix: str, *, local: E | None = None
) -> Mapping[E, Any]:
    """The number of each member but ``local``, which never goes over the wire."""
    return {m: wire.Value(prefix + m.name) for m in members if m is not local}


def _from_proto(to_proto: Mapping[E, Any], unspecified: E | None = None) -> Mapping[Any, E]:
    members = {number: member for member, number in to_proto.items()}
    return members if unspecified is None else {0: unspecified, **members}


LOGPROB_BASIS_TO_PROTO = _to_proto(LogprobBasis, rollout_pb2.LogprobBasis, "LOGPROB_BASIS_")
LOGPROB_BASIS_FROM_PROTO = _from_proto(LOGPROB_BASIS_TO_PROTO, LogprobBasis.TEMPERATURE)
FINISH_REASON_TO_PROTO = _to_proto(FinishReason, rollout_pb2.FinishReason, "FINISH_REASON_")
FINISH_REASON_FROM_PROTO = _from_proto(FINISH_REASON_TO_PROTO)
SERVER_STATE_TO_PROTO = _to_proto(
    ServerState, common_pb2.ServerState, "SERVER_STATE_", local=ServerState.UNKNOWN
)
SERVER_STATE_FROM_PROTO = _from_proto(SERVER_STATE_TO_PROTO, ServerState.UNKNOWN)
KV_POLICY_TO_PROTO = _to_proto(KvPolicy, common_pb2.KvPolicy, "KV_POLICY_")
KV_POLICY_FROM_PROTO = _from_proto(KV_POLICY_TO_PROTO, KvPolicy.KEEP)
SLEEPING_WEIGHTS_TO_PROTO = _to_proto(
    SleepingWeights, rollout_pb2.SleepingWeights, "SLEEPING_WEIGHTS_"
)
SLEEPING_WEIGHTS_FROM_PROTO = _from_proto(SLEEPING_WEIGHTS_TO_PROTO, SleepingWeights.HOST_BACKUP)
UPDATE_PHASE_TO_PROTO = _to_proto(UpdatePhase, weights_pb2.UpdatePhase, "UPDATE_PHASE_")
UPDATE_PHASE_FROM_PROTO = _from_proto(UPDATE_PHASE_TO_PROTO)


def duration_to_proto(seconds: float) -> Duration:
    """Raises ValueError or OverflowError for what no Duration can be."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def weight_tag_to_proto(tag: WeightTag) -> common_pb2.WeightTag:
    return common_pb2.WeightTag(
        version=tag.version, revision=tag.revision, server_id=tag.server_id, digest=tag.digest
    )


def weight_tag_from_proto(message: common_pb2.WeightTag) -> WeightTag:
    return WeightTag(
        version=message.version if message.HasField("version") else None,
        revision=message.revision,
        server_id=message.server_id,
        digest=message.digest,
    )


def committed_update_to_proto(update: CommittedUpdate) -> rollout_pb2.CommittedUpdate:
    return rollout_pb2.CommittedUpdate(
        encoding=weights_pb2.Encoding.Value(f"ENCODING_{update.encoding.upper()}"),
        received_bytes=update.received_bytes,
        changed_share=update.changed_share,
    )


def committed_update_from_proto(message: rollout_pb2.CommittedUpdate) -> CommittedUpdate:
    known = message.encoding in weights_pb2.Encoding.values()
    name = weights_pb2.Encoding.Name(message.encoding) if known else "unknown"
    return CommittedUpdate(
        name.removeprefix("ENCODING_").lower(),
        message.received_bytes,
        message.changed_share if message.HasField("changed_share") else None,
    )


def finish_to_proto(finish: Finish) -> rollout_pb2.Finish:
    return rollout_pb2.Finish(
        reason=FINISH_REASON_TO_PROTO[finish.reason],
        stop_token_id=finish.stop_token_id,
        message=finish.message,
        prompt_tokens=finish.prompt_tokens,
        output_tokens=finish.output_tokens,
        cached_prompt_tokens=finish.cached_prompt_tokens,
    )


def finish_from_proto(message: rollout_pb2.Finish) -> Finish | None:
    """None if its reason is not one of the API's."""
    reason = FINISH_REASON_FROM_PROTO.get(message.reason)
    if reason is None:
        return None
    return Finish(
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        message=message.message,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
    )
