"""A sampling parameter reaches the engine, or is refused by name: none is ignored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2
from rollwire_client import Sampling
from rollwire_client._rpc.conversion import sampling_to_proto
from rollwire_server.errors import ServiceError
from rollwire_server.rpc.validation import SAMPLING_DEFAULTS, read_request
from support.calls import request
from support.engine_room import serving
from support.sampling import NOT_DEFAULT, PARAMETERS

if TYPE_CHECKING:
    from rollwire_server.engines.base import EngineInfo

FLOATS = [
    field.name
    for field in rollout_pb2.SamplingParams.DESCRIPTOR.fields
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
]


@pytest_asyncio.fixture
async def info() -> EngineInfo:
    """An engine that supports all that the API has."""
    async with serving() as (_, _, engine):
        described = engine.describe()
    return replace(described, sampling_parameters=frozenset(PARAMETERS), eos_token_ids=(0,))


def asked(**sampling: Any) -> rollout_pb2.GenerateRequest:
    return request(**{"max_new_tokens": None, **sampling})


def refusal(message: rollout_pb2.GenerateRequest, info: EngineInfo) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read_request(message, info, 1)
    return caught.value


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_is_handed_to_an_engine_that_supports_it(name: str, info: EngineInfo) -> None:
    plain, other = (
        read_request(asked(**sampling), info, 1).spec.sampling
        for sampling in ({}, {name: NOT_DEFAULT[name]})
    )
    assert replace(other, seed=0) != replace(plain, seed=0) or other.seed == NOT_DEFAULT["seed"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_is_refused_where_the_engine_does_not_support_it(name: str, info: EngineInfo) -> None:
    without = replace(info, sampling_parameters=info.sampling_parameters - {name})
    error = refusal(asked(**{name: NOT_DEFAULT[name]}), without)
    assert (error.reason, error.field) == (Reason.BAD_SAMPLING, f"sampling.{name}")
    assert error.message == f"{name} is not supported by the {info.engine} engine: leave it out"


def test_defaults_that_are_set_need_no_support(info: EngineInfo) -> None:
    read_request(asked(**SAMPLING_DEFAULTS), replace(info, sampling_parameters=frozenset()), 1)


def test_what_a_client_sends_unasked_needs_no_support(info: EngineInfo) -> None:
    message = asked()
    message.sampling.CopyFrom(sampling_to_proto(Sampling()))
    read_request(message, replace(info, sampling_parameters=frozenset()), 1)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_finite_number_is_refused(
    name: str, value: float, info: EngineInfo
) -> None:
    error = refusal(asked(**{name: value}), info)
    assert (error.reason, error.field) == (Reason.BAD_SAMPLING, f"sampling.{name}")


def test_one_of_a_later_api_is_refused(info: EngineInfo) -> None:
    message = asked()
    message.sampling.MergeFromString(b"\xa2\x06\x01x")  # field 100
    error = refusal(message, info)
    assert (error.reason, error.field) == (Reason.BAD_SAMPLING, "sampling")
    assert "field 100 that this server does not know" in error.message
