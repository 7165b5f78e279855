"""The library knows every reason that a server gives, and when to go elsewhere."""

from __future__ import annotations

import grpc
import pytest
from rollwire.v1 import rollout_pb2
from rollwire_client import RollwireError, errors
from rollwire_server.errors import Reason

# A server that is like this may be otherwise later, or another one is.
ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_every_reason_of_the_server_has_a_class(reason: Reason) -> None:
    told = rollout_pb2.SequenceError(
        code=reason.code.value[0], reason=reason.name, message="as told"
    )
    error = errors.from_sequence(told, "somewhere:1")
    by_code = errors.from_sequence(
        rollout_pb2.SequenceError(code=reason.code.value[0], message="as told"), "somewhere:1"
    )
    assert type(error) is not RollwireError
    assert str(error) == f"somewhere:1: as told ({reason.name})"
    if not isinstance(error, errors.PublishError):  # an update is not tried elsewhere
        # Of one server: another may do better.
        own_fault = reason in (Reason.INTERNAL, Reason.ENGINE_FAILED)
        assert error.elsewhere is (own_fault or reason.code in ELSEWHERE)
    assert reason.name in errors._BY_REASON, f"falls back to {type(by_code).__name__}"
