"""What a request may be made of, and how it is told what may not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from rollwire_client import InvalidRequestError, RolloutOptions, Sampling
from rollwire_client._rpc import conversion
from rollwire_client._rpc.conversion import generate_request, sampling_to_proto
from support.sampling import NOT_DEFAULT, PARAMETERS


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("hello", "prompt_token_ids is 'hello', not a sequence of integers"),
        (b"hello", "prompt_token_ids is b'hello', not a sequence"),
        (5, "prompt_token_ids is 5, not a sequence"),
        (None, "prompt_token_ids is None, not a sequence"),
        (torch.tensor(5), "not a sequence"),
        ([1, -1], r"prompt_token_ids\[1\] is -1, not an integer from 0 to 2\^32 - 1"),
        ([2**32], r"prompt_token_ids\[0\] is 4294967296"),
        ([1, 1.5], r"prompt_token_ids\[1\] is 1.5"),
        (["1"], r"prompt_token_ids\[0\] is '1'"),
        ({"input_ids": [1]}, r"prompt_token_ids\[0\] is 'input_ids'"),
        (torch.tensor([[1, 2]]), r"prompt_token_ids\[0\] is \[1, 2\]"),
        (np.array([1.0]), r"prompt_token_ids\[0\] is 1.0"),
    ],
)
def test_a_prompt_that_is_none(prompt, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        generate_request(prompt, Sampling(), {})
    assert list(caught.value.violations) == ["prompt_token_ids"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("top_p", [1]),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 10**400),
        ("max_new_tokens", 2**32),
        ("min_new_tokens", -1),
        ("stop_token_ids", "</s>"),
        ("stop_token_ids", [-4]),
        ("stop_token_ids", 4),
        ("ignore_eos", "no"),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_sampling_value_that_does_not_fit_is_named(field: str, value) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^sampling\.{field}(\[0\])? is ") as caught:
        generate_request([1], Sampling(**{field: value}), {})
    assert list(caught.value.violations) == [f"sampling.{field}"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("request_id", 5),
        ("logprob_basis", "model"),
        ("logprob_basis", ["model"]),
        ("min_weight_version", 1.5),
        *(("min_weight_version", value) for value in (-1, 2**63, True, "1")),
        *(("max_weight_version", value) for value in (-1, 2**63, False, 0.0)),
        ("routed_experts", True),
        ("routed_experts", "as_sampled"),
        ("timeout", "soon"),
        ("timeout", -1),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
    ],
)
def test_an_option_that_does_not_fit_is_named(option: str, value) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{option} is ") as caught:
        generate_request([1], Sampling(), {option: value})
    assert list(caught.value.violations) == [option]


def test_scalars_of_numpy_fit() -> None:
    sampling = Sampling(seed=np.int64(4), temperature=np.float32(0.5), ignore_eos=np.bool_(True))
    sent = generate_request([1], sampling, {"min_weight_version": np.int32(3)})
    assert (sent.sampling.seed, sent.sampling.temperature) == (4, 0.5)
    assert (sent.sampling.ignore_eos, sent.min_weight_version) == (True, 3)


def test_an_option_that_there_is_not_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no option best_of; its options are delivery_interval"):
        generate_request([1], Sampling(), {"best_of": 4})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Sampling)])
def test_how_to_sample_is_said_in_one_place_alone(field: str) -> None:
    assert field not in RolloutOptions.__annotations__
    with pytest.raises(TypeError, match=rf"use Sampling\({field}="):
        generate_request([1], Sampling(), {field: 5})


def test_every_parameter_of_the_api_can_be_said_and_is_read_back() -> None:
    values = {**NOT_DEFAULT, "stop_token_ids": tuple(NOT_DEFAULT["stop_token_ids"])}
    assert list(values) == PARAMETERS
    said = Sampling(**values)
    assert conversion.sampling_from_proto(sampling_to_proto(said)) == said


@pytest.mark.parametrize("sampling", [{"max_new_tokens": 5}, None, 5])
def test_sampling_is_a_sampling(sampling) -> None:
    with pytest.raises(TypeError, match="not a Sampling"):
        generate_request([1], sampling, {})
