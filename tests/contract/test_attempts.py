"""Attempts at one sequence: superseding, picking up, what is kept and for how long."""

from __future__ import annotations

import uuid

import grpc
import pytest
from support.calls import Api, Generation, generate, reason_of, request

LONG = 2000


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


async def refused(api: Api, **fields: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(**fields))  # type: ignore[arg-type]
    return reason_of(caught.value)


async def test_a_cut_stream_is_picked_up_without_sampling_again(api: Api, name: str) -> None:
    whole = await generate(api, request((3, 1), 60, seed=4))
    fields = {"request_id": name, "seed": 4, "grace": 10.0}
    first = Generation(api, request((3, 1), 60, **fields))
    got = (await first.some(5)).tokens
    first.call.cancel()
    second = await generate(api, request((3, 1), 60, prefix=got, **fields))
    assert second.offset == len(got)
    assert got + second.tokens == whole.tokens
    again = await generate(api, request((3, 1), 60, prefix=whole.tokens[:2], **fields))
    assert again.tokens == whole.tokens[2:]
    assert again.finish == second.finish


async def test_a_newer_stream_of_the_same_attempt_takes_over(api: Api, name: str) -> None:
    first = Generation(api, request((3,), LONG, request_id=name, grace=5.0))
    got = list((await first.some(3)).tokens)
    second = Generation(api, request((3,), LONG, request_id=name, grace=5.0, prefix=got))
    await second.some(3)
    output = await first.all()
    assert output.reason == "SUPERSEDED"
    assert output.finish is not None
    assert output.finish.output_tokens == len(output.tokens)
    await api.abort(name)
    assert (await second.all()).reason == "ABORTED"


async def test_a_higher_attempt_supersedes_and_a_lower_one_is_stale(api: Api, name: str) -> None:
    first = Generation(api, request((3,), LONG, request_id=name, attempt=1))
    got = list((await first.some(3)).tokens)
    second = Generation(api, request((3,), LONG, request_id=name, attempt=2, prefix=got))
    await second.some(1)
    assert (await first.all()).reason == "SUPERSEDED"
    assert (await api.info()).running_sequences == 1
    assert await refused(api, request_id=name, attempt=1) == "STALE_ATTEMPT"
    assert await api.abort(name, attempt=1) == (0, [name])
    assert await api.abort(name, attempt=2) == (1, [])
    assert (await second.all()).reason == "ABORTED"
    assert await refused(api, request_id=name, attempt=0) == "STALE_ATTEMPT"


async def test_a_pick_up_with_a_prefix_that_is_not_the_servers_own(api: Api, name: str) -> None:
    first = Generation(api, request((3,), LONG, request_id=name, grace=5.0))
    got = list((await first.some(4)).tokens)
    wrong = [*got[:3], (got[3] + 1) % 500]
    fields = {"max_new_tokens": LONG, "request_id": name, "grace": 5.0}
    assert await refused(api, prompt=(3,), prefix=wrong, **fields) == "PREFIX_MISMATCH"
    assert await refused(api, prompt=(4,), prefix=got, **fields) == "REQUEST_MISMATCH"
    await first.some(len(got) + 3)
    await api.abort(name)
    assert (await first.all()).reason == "ABORTED"


async def test_a_pick_up_that_asks_for_something_else(api: Api, name: str) -> None:
    """It gets nothing of the other's stream, which goes on undisturbed."""
    whole = await generate(api, request((3, 1), 60, seed=1))
    asked = {"prompt": (3, 1), "max_new_tokens": 60, "seed": 1}
    first = Generation(api, request(request_id=name, grace=5.0, **asked))
    await first.some(1)
    for other in ({"seed": 2}, {"temperature": 0.5}, {"max_new_tokens": 50}):
        fields = {**asked, **other, "request_id": name}
        assert await refused(api, **fields) == "REQUEST_MISMATCH"
    assert (await first.all()).tokens == whole.tokens


async def test_what_is_lost_stays_for_its_grace_and_no_longer(api: Api, name: str) -> None:
    first = Generation(api, request((3,), LONG, request_id=name, grace=0.2))
    await first.some(2)
    first.call.cancel()
    await api.idle()
    fresh = await generate(api, request((3,), 5, request_id=name))
    assert fresh.offset == 0


async def test_a_detached_sequence_can_be_aborted(api: Api, name: str) -> None:
    first = Generation(api, request((3,), LONG, request_id=name, grace=30.0))
    got = list((await first.some(2)).tokens)
    first.call.cancel()
    assert await api.abort(name) == (1, [])
    output = await generate(api, request((3,), LONG, request_id=name, grace=0.0, prefix=got))
    assert output.reason == "ABORTED"
    assert output.finish is not None
    assert output.finish.output_tokens == len(got) + len(output.tokens)
