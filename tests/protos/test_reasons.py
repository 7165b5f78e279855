"""Errors on the wire."""

from __future__ import annotations

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from rollwire.reasons import DETAILS_KEY, ErrorDetails, Reason, decode_details, encode_status


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_what_an_error_says_comes_back(reason: Reason) -> None:
    status = encode_status(reason, "what to do", field="sampling.top_p", metadata={"state": "X"})
    assert (status.code, status.message) == (reason.code.value[0], "what to do")
    told = decode_details([("other", "x"), (DETAILS_KEY, status.SerializeToString())])
    violations = {"sampling.top_p": "what to do"}
    assert told == ErrorDetails(reason.name, reason.retry_after, violations, {"state": "X"})


def test_what_does_not_apply_is_left_out() -> None:
    status = encode_status(Reason.INTERNAL, "a bug", metadata={})
    assert decode_details([(DETAILS_KEY, status.SerializeToString())]) == ErrorDetails("INTERNAL")


def test_what_is_not_of_a_rollwire_server_is_no_reason() -> None:
    foreign = any_pb2.Any()
    foreign.Pack(error_details_pb2.ErrorInfo(reason="DRAINING", domain="proxy.example"))
    status = status_pb2.Status(code=14, details=[foreign]).SerializeToString()
    for value in (status, b"\xff", "text"):
        assert decode_details([(DETAILS_KEY, value)]) == ErrorDetails()
