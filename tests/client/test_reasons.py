"""The library knows every reason that a server gives, whom it concerns, when to go elsewhere."""

from __future__ import annotations

import grpc
import pytest
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2
from rollwire_client import ErrorScope, PublishError, RollwireError
from rollwire_client._rpc.status import error_from_sequence

# A server that is like this may be otherwise later, or another one is.
ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}


def told_as(reason: Reason) -> RollwireError:
    told = rollout_pb2.SequenceError(
        code=reason.code.value[0], reason=reason.name, message="as told"
    )
    return error_from_sequence(told, "somewhere:1")


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_every_reason_has_a_class_that_fits_its_scope(reason: Reason) -> None:
    error = told_as(reason)
    assert type(error) is not RollwireError
    assert str(error) == f"somewhere:1: as told ({reason.name})"
    assert isinstance(error, PublishError) is (error.scope is ErrorScope.UPDATE)
    if error.scope is not ErrorScope.UPDATE:  # an update is not tried elsewhere
        # Of one server: another may do better.
        own_fault = reason in (Reason.INTERNAL, Reason.ENGINE_FAILED)
        assert error.elsewhere is (own_fault or reason.code in ELSEWHERE)


def test_reasons_that_would_end_every_sequence_alike() -> None:
    everybody = {r.name for r in Reason if told_as(r).scope is ErrorScope.CONFIGURATION}
    assert everybody == {
        *("UNAUTHENTICATED", "PERMISSION_DENIED", "UNSUPPORTED_LOGPROB_BASIS"),
        *("UNSUPPORTED_ROUTING", "UNSUPPORTED_SLEEP", "WEIGHTS_TOO_OLD", "WEIGHTS_TOO_NEW"),
    }


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_a_reason_of_a_later_release_is_of_the_sequence_unless_its_code_says_otherwise(
    code: grpc.StatusCode,
) -> None:
    told = rollout_pb2.SequenceError(code=code.value[0], reason="LATER", message="as told")
    scope = error_from_sequence(told, "somewhere:1").scope
    closed = {"PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"}
    assert (scope is ErrorScope.CONFIGURATION) is (code.name in closed)
