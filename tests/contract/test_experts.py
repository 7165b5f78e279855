"""Mixture of experts: the routing of every input token, by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from rollwire.v1 import common_pb2, rollout_pb2
from support.calls import Api, Generation, Output, Stream, connected, generate, reason_of
from support.calls import request as asked
from support.contract import flags
from support.publishing import TERMS, Update, random_weights
from support.servers import ServerProcess, servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PROMPT = tuple(range(1, 20))
WHOLE = 1500  # tokens, of which an update comes among the first
# SGLang's kernels for prompts round in another way than those for single tokens.
ROUNDS_PROMPTS_APART = {"sglang"}
REPORTING = {"embedded": [], "sglang": ["--engine-arg", "enable-return-routed-experts=true"]}


@pytest.fixture(scope="module")
def moe_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    engine = request.config.getoption("--engine")
    folder = tmp_path_factory.mktemp("moe")
    told = [*flags(engine, folder, "builtin:tiny-moe"), *REPORTING[engine]]
    with servers(folder) as start:
        yield start("--engine", engine, *told)


@pytest_asyncio.fixture
async def moe(moe_server: ServerProcess) -> AsyncIterator[Api]:
    async with connected(moe_server.address) as api:
        yield api
        await api.idle()


def rows(output: Output) -> dict[int, list[tuple[bytes, int]]]:
    """For each position the expert ids and the revision that chose them, in the order they came."""
    found: dict[int, list[tuple[bytes, int]]] = {}
    for part in output.routed:
        width = part.num_layers * part.top_k * part.bytes_per_expert
        assert len(part.experts) == part.num_tokens * width
        for i in range(part.num_tokens):
            row = part.experts[i * width : (i + 1) * width]
            found.setdefault(part.start_position + i, []).append((row, part.weights.revision))
    return found


def is_whole(output: Output, prompt: int) -> bool:
    return sorted(rows(output)) == list(range(prompt + len(output.tokens) - 1))


async def test_every_input_token_has_its_row(moe: Api) -> None:
    output = await generate(moe, asked(PROMPT, 12, seed=1, routed_experts=True))
    assert is_whole(output, len(PROMPT))
    assert {len(row) for row in rows(output).values()} == {1}
    stream = Stream(moe)
    await stream.start(1, asked(PROMPT, 12, seed=1, routed_experts=True))
    together = (await stream.all())[1]
    assert together.tokens == output.tokens
    assert rows(together) == rows(output)


async def test_a_prefix_brings_the_rows_of_its_tokens(moe: Api) -> None:
    whole = await generate(moe, asked(PROMPT, 12, seed=2, routed_experts=True))
    rest = await generate(
        moe, asked(PROMPT, 12, seed=2, routed_experts=True, prefix=whole.tokens[:5])
    )
    assert whole.tokens[:5] + rest.tokens == whole.tokens
    assert rows(rest) == rows(whole)


@pytest.mark.slow
async def test_rows_that_are_computed_again_are_sent_again(
    moe: Api, request: pytest.FixtureRequest
) -> None:
    output, new = await crossing(moe, common_pb2.KV_POLICY_RECOMPUTE)
    old, before = output.revisions[0], output.revisions.index(new)
    for position, passes in rows(output).items():
        again = position < len(PROMPT) + before - 1
        assert [revision for _, revision in passes] == ([old, new] if again else [new]), position
    fresh = await generate(moe, asked((*PROMPT, *output.tokens[:-1]), 1, routed_experts=True))
    now = rows(fresh)
    latest = {position: passes[-1][0] for position, passes in rows(output).items()}
    same = sum(now[position][-1][0] == latest[position] for position in latest)
    rounds_apart = request.config.getoption("--engine") in ROUNDS_PROMPTS_APART
    assert same >= len(latest) * (0.9 if rounds_apart else 1)


@pytest.mark.slow
async def test_rows_that_are_kept_name_the_weights_that_computed_them(moe: Api) -> None:
    output, _ = await crossing(moe, common_pb2.KV_POLICY_KEEP)
    told = rows(output)
    assert {len(passes) for passes in told.values()} == {1}
    for i, revision in enumerate(output.revisions):
        assert told[len(PROMPT) + i - 1][0][1] == revision
    assert len(set(output.revisions)) == 2


async def crossing(moe: Api, policy: common_pb2.KvPolicy) -> tuple[Output, int]:
    """A sequence whole with its rows that an update came across, and the update's revision."""
    number = next(TERMS)
    change = Update(moe, await random_weights(moe, number), number, term=number)
    await change.stage()
    generation = Generation(moe, asked(PROMPT, WHOLE, seed=3, routed_experts=True))
    await generation.some(10)
    answer = await change.commit(policy)
    output = await generation.all()
    assert output.reason == "LENGTH"
    assert is_whole(output, len(PROMPT))
    return output, answer.weights.revision


async def test_dense_models_have_none(api: Api) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, asked(PROMPT, 4, routed_experts=True))
    assert reason_of(caught.value) == "UNSUPPORTED_ROUTING"


async def test_an_abort_keeps_what_was_told(moe: Api) -> None:
    generation = Generation(moe, asked(PROMPT, 3000, routed_experts=True))
    await generation.some(10)
    await moe.rollouts.Abort(rollout_pb2.AbortRequest(all=True), timeout=60)
    output = await generation.all()
    assert output.reason == "ABORTED"
    assert is_whole(output, len(PROMPT))
