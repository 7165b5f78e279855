"""Messages of the API and the types that both ends share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from rollwire import conversion
from rollwire.types import Finish, FinishReason, WeightTag, weights_text
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2

if TYPE_CHECKING:
    import enum
    from collections.abc import Mapping


@pytest.mark.parametrize(
    ("wire", "members"),
    [
        (rollout_pb2.LogprobBasis, conversion.LOGPROB_BASIS_FROM_PROTO),
        (rollout_pb2.FinishReason, conversion.FINISH_REASON_FROM_PROTO),
        (common_pb2.ServerState, conversion.SERVER_STATE_FROM_PROTO),
        (common_pb2.KvPolicy, conversion.KV_POLICY_FROM_PROTO),
        (rollout_pb2.SleepingWeights, conversion.SLEEPING_WEIGHTS_FROM_PROTO),
        (weights_pb2.UpdatePhase, conversion.UPDATE_PHASE_FROM_PROTO),
    ],
)
def test_every_value_of_the_api_has_a_member(wire: Any, members: Mapping[int, enum.Enum]) -> None:
    for name, number in wire.items():
        if number:
            assert name.endswith(f"_{members[number].name}")


@pytest.mark.parametrize("version", [None, 0, 7])
def test_weight_tags_come_back(version: int | None) -> None:
    tag = WeightTag(version, 3, "s", 0xFEED << 48)
    message = conversion.weight_tag_to_proto(tag)
    assert message.HasField("version") is (version is not None)
    assert conversion.weight_tag_from_proto(message) == tag
    assert repr(tag).endswith("digest=0xfeed000000000000)")
    names = {None: "weights without a version, revision 3", 7: "version 7, revision 3"}
    assert weights_text(tag) == names.get(version, "version 0, revision 3")


@pytest.mark.parametrize("stop", [None, 0, 5])
def test_finishes_come_back(stop: int | None) -> None:
    finish = Finish(FinishReason.STOP, stop, "why", 2, 9, 1)
    assert conversion.finish_from_proto(conversion.finish_to_proto(finish)) == finish


def test_a_finish_of_a_later_api_is_none() -> None:
    assert conversion.finish_from_proto(rollout_pb2.Finish(reason=99)) is None


def test_durations_are_rounded_to_nanoseconds() -> None:
    message = conversion.duration_to_proto(0.29)
    assert (message.seconds, message.nanos) == (0, 290_000_000)
    for seconds in (math.inf, math.nan):
        with pytest.raises((ValueError, OverflowError)):
            conversion.duration_to_proto(seconds)
