"""Errors cross the borders of processes, as trainers of many processes send them."""

from __future__ import annotations

import pickle
from typing import Any

from rollwire_client import (
    PublishFailedError,
    RolloutFailedError,
    ServerUnreachableError,
    StalenessError,
)


def sent(error: Exception) -> Any:
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - our own


def test_errors_can_be_pickled() -> None:
    cause = ServerUnreachableError("gone", server="a:1", reason="GONE", retry_after=2.0)
    for error in (
        cause,
        RolloutFailedError("given up", [cause]),
        PublishFailedError("none", {"a:1": cause}),
        StalenessError("old"),
    ):
        again = sent(error)
        assert (type(again), str(again)) == (type(error), str(error))
        assert again.metadata == error.metadata
    given_up = sent(RolloutFailedError("given up", [cause]))
    assert [str(c) for c in given_up.causes] == ["gone"]
    assert given_up.causes[0].server == "a:1"
    failed = sent(PublishFailedError("none", {"a:1": cause}))
    assert str(failed.errors["a:1"]) == "gone"
