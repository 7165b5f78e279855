"""One client of one server, against a scripted one."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
import torch
from client.scripted import CONTEXT, ScriptedServer, Sequence, expected_token, until
from rollwire.v1 import common_pb2
from rollwire_client import (
    ClosedError,
    FinishReason,
    Fleet,
    InvalidRequestError,
    LogprobBasis,
    NotFiniteError,
    ProtocolError,
    RolloutClient,
    RollwireError,
    Sampling,
    ServerNotReadyError,
    ServerState,
    ServerUnreachableError,
    StaleAttemptError,
    Timeouts,
)

PROMPT = [1, 2, 3]


def tokens(count: int, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    return tuple(expected_token(prompt, i) for i in range(count))


async def test_generates(server: ScriptedServer) -> None:
    async with RolloutClient(server.address) as client:
        trajectory = await client.generate(PROMPT, Sampling(max_new_tokens=10))
    assert trajectory.prompt_ids == (1, 2, 3)
    assert trajectory.token_ids == tokens(10)
    assert trajectory.logprobs == pytest.approx([-t / 1000 for t in tokens(10)])
    assert trajectory.finish.reason is FinishReason.LENGTH
    assert trajectory.complete
    assert trajectory.servers == (server.address,)


async def test_streams_tokens_as_they_come(server: ScriptedServer) -> None:
    go = asyncio.Event()

    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        await go.wait()
        await sequence.rest()

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        stream = client.stream(PROMPT, Sampling(max_new_tokens=6))
        first = await anext(stream)
        assert (first.offset, first.token_ids, first.finish) == (0, tokens(2), None)
        go.set()
        rest = [chunk async for chunk in stream]
    assert sum((chunk.token_ids for chunk in rest), ()) == tokens(6)[2:]
    assert [chunk.finish is not None for chunk in rest][-1]
    assert [chunk.finish for chunk in rest[:-1]] == [None] * (len(rest) - 1)


async def test_many_sequences_share_one_stream(server: ScriptedServer) -> None:
    prompts = [[n, n + 1] for n in range(50)]
    async with RolloutClient(server.address) as client:
        trajectories = await asyncio.gather(
            *(client.generate(p, Sampling(max_new_tokens=20)) for p in prompts)
        )
    assert [t.token_ids for t in trajectories] == [tokens(20, p) for p in prompts]
    assert server.streams == 1


async def test_a_slow_reader_gets_few_chunks(server: ScriptedServer) -> None:
    server.default = lambda sequence: sequence.rest(step=1)
    async with RolloutClient(server.address) as client:
        stream = client.stream(PROMPT, Sampling(max_new_tokens=100))
        chunks = [await anext(stream)]
        await until(lambda: client.outstanding_tokens == 0)
        chunks += [chunk async for chunk in stream]
    assert sum((chunk.token_ids for chunk in chunks), ()) == tokens(100)
    assert len(chunks) <= 3  # the first, what came meanwhile, and the end


async def test_pieces_of_other_weights_are_other_chunks(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(3)
        server.weights.version, server.weights.revision = 7, 1
        await sequence.rest()

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        trajectory = await client.generate(PROMPT, Sampling(max_new_tokens=8))
    assert [(s.start, s.end, s.weights.version) for s in trajectory.segments] == [
        (0, 3, None),
        (3, 8, 7),
    ]
    assert trajectory.versions == (None,) * 3 + (7,) * 5
    assert trajectory.token_ids == tokens(8)


async def test_no_tokens_is_a_result(server: ScriptedServer) -> None:
    server.scripts = [lambda sequence: sequence.finish("ABORTED")]
    async with RolloutClient(server.address) as client:
        trajectory = await client.generate(PROMPT)
    assert trajectory.token_ids == ()
    assert trajectory.segments == ()
    assert trajectory.finish.reason is FinishReason.ABORTED
    assert not trajectory.complete


async def test_an_overlap_is_dropped(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(4)
        await sequence.send(4, offset=2)
        await sequence.send(3, offset=1)
        sequence.offset = 6
        await sequence.rest()

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        trajectory = await client.generate(PROMPT, Sampling(max_new_tokens=9))
        assert client.outstanding_tokens == 0
    assert trajectory.token_ids == tokens(9)
    assert len(trajectory.logprobs) == 9


async def test_a_gap_is_an_error_with_what_came(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(3)
        await sequence.send(3, offset=5)
        await asyncio.Event().wait()

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        with pytest.raises(ProtocolError, match="tokens 3 to 4") as caught:
            await client.generate(PROMPT, Sampling(max_new_tokens=9), request_id="gap")
        assert await server.aborted.get() == "gap"
        assert client.outstanding_tokens == 0
        # The link and other sequences on it go on.
        assert (await client.generate(PROMPT, Sampling(max_new_tokens=2))).complete
    assert caught.value.trajectory.token_ids == tokens(3)
    assert caught.value.trajectory.finish is None


async def test_a_finish_that_counts_more_tokens_is_a_gap(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(3)
        await sequence.finish(output_tokens=5)

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        with pytest.raises(ProtocolError, match="5 tokens, of which 3"):
            await client.generate(PROMPT)


async def test_missing_logprobs_are_an_error(server: ScriptedServer) -> None:
    server.scripts = [lambda sequence: sequence.send(3, logprobs=2)]
    async with RolloutClient(server.address) as client:
        with pytest.raises(ProtocolError, match="3 token ids, 2 log-probabilities"):
            await client.generate(PROMPT)


async def test_a_cut_stream_is_an_error_with_what_came(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(5)
        await sequence.cut()

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        with pytest.raises(ServerUnreachableError, match=server.address) as caught:
            await client.generate(PROMPT)
        assert caught.value.trajectory.token_ids == tokens(5)
        # The next sequence opens a stream again.
        assert (await client.generate(PROMPT, Sampling(max_new_tokens=4))).complete
    assert server.streams == 2


@pytest.mark.parametrize(
    ("code", "reason", "kind", "elsewhere"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", InvalidRequestError, False),
        (grpc.StatusCode.ABORTED, "STALE_ATTEMPT", StaleAttemptError, False),
        (grpc.StatusCode.INTERNAL, "NOT_FINITE", NotFiniteError, False),
        (grpc.StatusCode.UNAVAILABLE, "SLEEPING", ServerNotReadyError, True),
        (grpc.StatusCode.INVALID_ARGUMENT, "NEW_IN_A_LATER_SERVER", InvalidRequestError, False),
    ],
)
async def test_a_refusal_has_its_own_type(
    server: ScriptedServer, code: grpc.StatusCode, reason: str, kind: type, elsewhere: bool
) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        await sequence.fail(code, reason, "this is why")

    server.scripts = [script]
    async with RolloutClient(server.address) as client:
        with pytest.raises(kind, match="this is why") as caught:
            await client.generate(PROMPT)
    assert caught.value.reason == reason
    assert caught.value.server == server.address
    assert caught.value.elsewhere is elsewhere
    assert caught.value.trajectory.token_ids == tokens(2)


async def test_error_details_of_a_call_are_told(server: ScriptedServer) -> None:
    server.refusals["Pause"] = {
        "code": grpc.StatusCode.INVALID_ARGUMENT,
        "reason": "BAD_REQUEST",
        "message": "no pauses here",
        "fields": {"pause_id": "is not wanted"},
    }
    async with RolloutClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match=r"pause_id: is not wanted") as caught:
            await client.pause("mine")
    assert caught.value.violations == {"pause_id": "is not wanted"}


async def test_leaving_a_stream_aborts_it(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        await asyncio.Event().wait()

    server.default = script
    async with RolloutClient(server.address) as client:
        async with contextlib.aclosing(client.stream(PROMPT, request_id="left")) as stream:
            async for _ in stream:
                break
        assert await server.aborted.get() == "left"

        task = asyncio.create_task(client.generate(PROMPT, request_id="cancelled"))
        await until(lambda: len(server.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await server.aborted.get() == "cancelled"


async def test_closing_aborts_what_is_under_way(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        await asyncio.Event().wait()

    server.scripts = [script]
    client = RolloutClient(server.address)
    async with client:
        task = asyncio.create_task(client.generate(PROMPT, request_id="last"))
        await until(lambda: client.outstanding_tokens == CONTEXT - len(PROMPT) - 2)
    trajectory = await task
    assert trajectory.finish.reason is FinishReason.ABORTED
    assert trajectory.token_ids == tokens(2)
    assert server.aborted.get_nowait() == "last"
    with pytest.raises(ClosedError):
        await client.info()


async def test_closing_does_not_wait_for_a_server_that_does_not_answer(
    server: ScriptedServer,
) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        server.mute = True
        await asyncio.Event().wait()

    server.scripts = [script]
    client = RolloutClient(server.address, timeouts=Timeouts(close=0.1))
    async with client:
        task = asyncio.create_task(client.generate(PROMPT))
        await until(lambda: client.outstanding_tokens == CONTEXT - len(PROMPT) - 2)
    with pytest.raises(ClosedError) as caught:
        await task
    assert caught.value.trajectory.token_ids == tokens(2)


async def test_a_silent_server_is_found(server: ScriptedServer) -> None:
    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        server.mute = True
        await asyncio.Event().wait()

    server.scripts = [script]
    timeouts = Timeouts(silence=0.1, probe=1, close=0.1)
    async with RolloutClient(server.address, timeouts=timeouts) as client:
        with pytest.raises(ServerUnreachableError, match="no answer within") as caught:
            await client.generate(PROMPT)
    assert caught.value.trajectory.token_ids == tokens(2)


async def test_a_held_sequence_is_not_silence(server: ScriptedServer) -> None:
    asked = 0
    go = asyncio.Event()
    answer = server.GetServerInfo

    async def counting(request, context):
        nonlocal asked
        asked += 1
        if asked == 4:
            go.set()
        return await answer(request, context)

    async def script(sequence: Sequence) -> None:
        await sequence.send(2)
        await go.wait()
        await sequence.rest()

    server.GetServerInfo = counting
    await server.stop()
    await server.start()
    server.scripts = [script]
    timeouts = Timeouts(silence=0.05, probe=5)
    async with RolloutClient(server.address, timeouts=timeouts) as client:
        assert (await client.generate(PROMPT, Sampling(max_new_tokens=9))).complete


async def test_an_unreachable_server_is_named() -> None:
    async with RolloutClient("127.0.0.1:9") as client:
        for call in (client.info(), client.generate(PROMPT), client.abort(["x"])):
            with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9: cannot be reached"):
                await call


async def test_a_server_that_does_not_answer_is_named_in_time(server: ScriptedServer) -> None:
    server.mute = True
    async with RolloutClient(server.address, timeouts=Timeouts(call=0.1)) as client:
        with pytest.raises(ServerUnreachableError, match=r"no answer within 0\.1 s"):
            await client.generate(PROMPT)


async def test_bad_values_are_refused_before_anything_is_sent(server: ScriptedServer) -> None:
    async with RolloutClient(server.address) as client:
        for prompt, options in [([1, -2], {}), (["one"], {}), (PROMPT, {"timeout": "soon"})]:
            with pytest.raises(InvalidRequestError):
                await client.generate(prompt, **options)
            with pytest.raises(InvalidRequestError):
                client.stream(prompt, **options)
        with pytest.raises(InvalidRequestError, match="max_new_tokens"):
            await client.generate(PROMPT, Sampling(max_new_tokens=-1))
        for call in (client.pause(5), client.pause(lease=-1), client.resume(5), client.abort([5])):
            with pytest.raises(InvalidRequestError, match=r"(pause_id|lease|request_id) is (5|-1)"):
                await call
        with pytest.raises(TypeError, match="a list of ids"):
            await client.abort("one")
    assert server.requests == []


async def test_an_option_that_there_is_not_is_no_option(server: ScriptedServer) -> None:
    async with RolloutClient(server.address) as client, Fleet([server.address]) as fleet:
        for where in (client, fleet):
            with pytest.raises(TypeError, match="no option min_weight_versoin"):
                await where.generate(PROMPT, min_weight_versoin=3)
            with pytest.raises(TypeError, match="no option min_weight_versoin"):
                where.stream(PROMPT, min_weight_versoin=3)
    assert server.requests == []


@pytest.mark.parametrize(
    "prompt",
    [
        (1, 2, 3),
        range(1, 4),
        np.array(PROMPT, np.uint16),
        torch.tensor(PROMPT),
        list(np.array(PROMPT)),
    ],
)
async def test_the_prompt_of_a_trajectory_is_of_integers(server: ScriptedServer, prompt) -> None:
    async with RolloutClient(server.address) as client, Fleet([server.address]) as fleet:
        for where in (client, fleet):
            trajectory = await where.generate(prompt, Sampling(max_new_tokens=1))
            assert trajectory.prompt_ids == (1, 2, 3)
            assert {type(token) for token in trajectory.prompt_ids} == {int}


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(ClosedError, match="async with"):
        await RolloutClient("127.0.0.1:9").info()


async def test_everything_asked_for_reaches_the_server(server: ScriptedServer) -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.01, max_new_tokens=3, min_new_tokens=1,
        stop_token_ids=(7, 8), ignore_eos=True, seed=2**63,
    )  # fmt: skip
    async with RolloutClient(server.address) as client:
        await client.generate(
            PROMPT,
            sampling,
            request_id="mine",
            logprob_basis=LogprobBasis.SAMPLED,
            min_weight_version=3,
            max_weight_version=4,
            timeout=1.5,
        )
        await client.generate(PROMPT, Sampling(max_new_tokens=1))
    request, plain = server.requests
    assert request.request_id == "mine"
    assert list(request.prompt_token_ids) == PROMPT
    assert request.sampling.temperature == 0.5
    assert request.sampling.top_p == pytest.approx(0.9)
    assert (request.sampling.top_k, request.sampling.max_new_tokens) == (5, 3)
    assert (request.sampling.min_new_tokens, request.sampling.ignore_eos) == (1, True)
    assert list(request.sampling.stop_token_ids) == [7, 8]
    assert request.sampling.seed == 2**63
    assert request.logprob_basis == 3
    assert (request.min_weight_version, request.max_weight_version) == (3, 4)
    assert request.timeout.ToTimedelta().total_seconds() == 1.5
    for field in ("min_weight_version", "max_weight_version", "timeout"):
        assert not plain.HasField(field)
    assert not plain.sampling.HasField("seed")
    assert plain.request_id
    assert plain.attempt == 0


async def test_info_is_plain_data(server: ScriptedServer) -> None:
    server.weights.version = 5
    async with RolloutClient(server.address) as client:
        info = await client.info()
        assert (info.address, info.state) == (server.address, ServerState.SERVING)
        assert (info.weights.version, info.weights.server_id) == (5, info.server_id)
        assert info.context_length == CONTEXT
        server.state = common_pb2.SERVER_STATE_DRAINING
        assert (await client.info()).state is ServerState.DRAINING


def test_every_error_is_one_of_the_tree() -> None:
    import rollwire_client

    errors = [
        value
        for name, value in vars(rollwire_client).items()
        if name.endswith("Error") and isinstance(value, type)
    ]
    assert len(errors) > 20
    assert all(issubclass(error, RollwireError) for error in errors)
