"""A pick-up asks for the same as what it picks up, in every field that changes the result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rollwire.reasons import Reason
from rollwire.types import LogprobBasis
from rollwire.v1 import rollout_pb2
from rollwire_server.engines.base import EngineInfo, SamplingParams, SequenceSpec
from rollwire_server.errors import ServiceError
from rollwire_server.rpc.validation import read_request
from rollwire_server.sequences.registry import NOT_COMPARED, check_pick_up
from rollwire_server.sequences.sequence import ReadyQueue, Request, Sequence
from support.calls import request
from support.engine_room import serving
from support.sampling import PARAMETERS

# Each field of a request but its names: another value, and what the refusal calls it.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "prompt_token_ids": ({"prompt": (3, 2)}, "prompt_token_ids is [3, 2], not [3, 1]"),
    "logprob_basis": (
        {"logprob_basis": rollout_pb2.LOGPROB_BASIS_MODEL},
        "logprob_basis is MODEL, not TEMPERATURE",
    ),
    "top_logprobs": ({"top_logprobs": 1}, "top_logprobs is 1, not 0"),
    "prompt_logprobs": ({"prompt_logprobs": True}, "prompt_logprobs is True, not False"),
    "routed_experts": ({"routed_experts": True}, "routed_experts is True, not False"),
    "min_weight_version": ({"min_weight_version": 0}, "min_weight_version is 0, not absent"),
    "max_weight_version": ({"max_weight_version": 9}, "max_weight_version is 9, not absent"),
    "sampling.temperature": ({"temperature": 0.7}, "temperature is 0.7, not 1"),
    "sampling.top_p": ({"top_p": 0.5}, "top_p is 0.5, not 1"),
    "sampling.top_k": ({"top_k": 5}, "top_k is 5, not 0"),
    "sampling.min_p": ({"min_p": 0.5}, "min_p is 0.5, not 0"),
    "sampling.max_new_tokens": ({"max_new_tokens": 50}, "max_new_tokens is 50, not 400"),
    "sampling.min_new_tokens": ({"min_new_tokens": 1}, "min_new_tokens is 1, not 0"),
    "sampling.stop_token_ids": ({"stop_token_ids": [8]}, "stop_token_ids is [7, 8], not [7]"),
    "sampling.ignore_eos": ({"ignore_eos": True}, "stop_token_ids is [], not [7]"),
    "sampling.seed": ({"seed": 2}, "seed is 2, not 1"),
}
# They change nothing of what is sampled.
FREE: dict[str, dict[str, Any]] = {
    "session_id": {"session_id": "s"},
    "detach_grace": {"grace": 9.0},
    "timeout": {"timeout": 9.0},
    "delivery_interval": {"interval": 9.0},
}
# These say what is picked up, and from where on.
NAMES = {"request_id", "attempt", "output_token_ids", "sampling"}

BASE: dict[str, Any] = {"prompt": (3, 1), "max_new_tokens": 400, "request_id": "r", "seed": 1}


async def able() -> EngineInfo:
    async with serving() as (_, _, engine):
        return dataclasses.replace(
            engine.describe(), eos_token_ids=(7,), routed_experts=True,
            logprob_bases=frozenset(LogprobBasis), sampling_parameters=frozenset(PARAMETERS),
        )  # fmt: skip


async def picked_up(first: dict[str, Any], second: dict[str, Any]) -> int:
    info = await able()
    live = Sequence(read_request(request(**first), info, 1))
    return check_pick_up(live, read_request(request(**second), info, 2))


def test_every_field_of_a_request_is_decided() -> None:
    own = {f.name for f in rollout_pb2.GenerateRequest.DESCRIPTOR.fields}
    sampling = {f"sampling.{f.name}" for f in rollout_pb2.SamplingParams.DESCRIPTOR.fields}
    assert own | sampling == CHANGES.keys() | FREE.keys() | NAMES


def test_what_is_not_compared_is_there() -> None:
    for part, names in NOT_COMPARED.items():
        assert part in (Request, SequenceSpec, SamplingParams)
        assert names <= {field.name for field in dataclasses.fields(part)}


@pytest.mark.parametrize("name", CHANGES)
async def test_another_request_is_refused_and_the_field_named(name: str) -> None:
    change, told = CHANGES[name]
    with pytest.raises(ServiceError) as caught:
        await picked_up(BASE, BASE | change)
    assert caught.value.reason is Reason.REQUEST_MISMATCH
    assert f"is another request here: {told};" in caught.value.message
    assert told.startswith(caught.value.metadata["field"])


@pytest.mark.parametrize("name", FREE)
async def test_what_changes_no_token_may_differ(name: str) -> None:
    assert await picked_up(BASE, BASE | FREE[name]) == 0


async def test_what_means_the_same_is_the_same() -> None:
    unseeded = {**BASE, "seed": None}
    spelled_out = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [7]}
    assert await picked_up(unseeded, unseeded | spelled_out) == 0
    with pytest.raises(ServiceError, match="seed is absent, not 1"):
        await picked_up(BASE, unseeded)


async def test_all_that_differs_is_told_and_long_lists_are_cut() -> None:
    first = BASE | {"prompt": range(100)}
    with pytest.raises(ServiceError) as caught:
        await picked_up(first, first | {"prompt": range(1, 99), "temperature": 0.5, "seed": 2})
    assert (
        "temperature is 0.5, not 1; "
        "prompt_token_ids is [1, 2, 3, 4, 5, 6, 7, 8, … (98 in all)], "
        "not [0, 1, 2, 3, 4, 5, 6, 7, … (100 in all)]; "
        "seed is 2, not 1; nothing was changed"
    ) in caught.value.message


async def test_a_newer_attempt_may_ask_for_something_else() -> None:
    """It takes nothing over: its stream is its own from its prefix on."""
    info = await able()
    async with serving() as (sequences, _, _):
        old = sequences.start(read_request(request(**BASE), info, 1), ReadyQueue())
        with pytest.raises(ServiceError, match="another request"):
            sequences.start(read_request(request(**BASE | {"seed": 2}), info, 2), ReadyQueue())
        assert old.sequence.end is None
        assert old.sequence.cursor is old
        other = BASE | {"attempt": 1, "seed": 2, "max_new_tokens": 5}
        new = sequences.start(read_request(request(**other), info, 3), ReadyQueue())
        assert new.sequence.request.spec.sampling.max_new_tokens == 5
        assert old.behind
