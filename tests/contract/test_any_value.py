"""No value of any field of a request harms an engine, or those that sample beside it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import grpc
import pytest
from rollwire.conversion import duration_to_proto
from support.calls import Generation, generate, reason_of, request
from support.fuzzing import changed

if TYPE_CHECKING:
    from rollwire.v1 import rollout_pb2
    from support.calls import Api

# Each field that every engine takes, set.
RIGHT = request(
    (1, 2), 3, prefix=(4,), temperature=1.0, top_p=0.9, top_k=5, seed=1, stop_token_ids=[7],
    ignore_eos=False, top_logprobs=1, prompt_logprobs=True, logprob_basis=0,
    max_weight_version=1 << 50, grace=0.01, timeout=20.0,
)  # fmt: skip
NAMED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def answered(api: Api, told: str, message: rollout_pb2.GenerateRequest) -> None:
    if not told.startswith("request_id"):
        message.request_id = uuid.uuid4().hex  # else it may pick the last one up
    if told.startswith("min_weight_version"):  # it waits for weights that do not come
        message.timeout.CopyFrom(duration_to_proto(0.05))
    if told.startswith("sampling.max_new_tokens"):
        message.sampling.stop_token_ids.extend(range(100))  # ends soon
    try:
        output = await generate(api, message)
    except grpc.aio.AioRpcError as error:
        assert error.code() in NAMED, (told, error.details())  # noqa: PT017
        assert reason_of(error) not in ("INTERNAL", "STEP_FAILED"), told  # noqa: PT017
    else:
        assert output.reason in ("STOP", "LENGTH"), told


@pytest.mark.slow
async def test_any_value_of_any_field_of_a_request(api: Api) -> None:
    await answered(api, "nothing", RIGHT)
    beside = Generation(api, request((3, 1), 1000, seed=1))
    await beside.some(1)
    for told, message in changed(RIGHT):
        await answered(api, told, message)
    assert (await beside.all()).reason == "LENGTH"


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 2**32 - 1, "top_p": 0.9},
        {"seed": 2**64 - 1, "temperature": 1e-6},
        {"temperature": 3.4e38, "top_k": 2**31},
    ],
)
async def test_extremes_together(api: Api, sampling: dict[str, float]) -> None:
    assert (await generate(api, request((1,), 5, **sampling))).reason == "LENGTH"
