"""How requests end: clients that go away, time limits, drains; limits, tokens and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from rollwire_client import RolloutClient
from support.events import data_of
from support.synthetic import start_synthetic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.gateways import GatewayProcess, StartGateway
    from support.servers import ServerProcess, StartServer

LONG: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4000}
PATH = "/v1/completions"


@pytest.fixture
def slow(start_server: StartServer) -> ServerProcess:
    """Its long sequences take more than a minute."""
    return start_synthetic(start_server, 50)


@contextlib.asynccontextmanager
async def client_of(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


async def until_idle(server: ServerProcess) -> None:
    async with RolloutClient(server.address) as client, asyncio.timeout(30):
        while (info := await client.info()).running_sequences + info.waiting_sequences:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_running(server: ServerProcess, count: int) -> None:
    async with RolloutClient(server.address) as client, asyncio.timeout(30):
        while (await client.info()).running_sequences < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def metric(gateway: GatewayProcess, name: str) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{gateway.metrics_address}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_sequences(
    slow: ServerProcess, start_gateway: StartGateway, tokenizer_folder: Path, *, stream: bool
) -> None:
    gateway = start_gateway(
        slow.address, "--tokenizer", str(tokenizer_folder), "--metrics-listen", "127.0.0.1:0"
    )
    async with client_of(gateway) as client:
        body = {**LONG, "n": 3, "stream": stream}
        asking = asyncio.create_task(client.post(PATH, json=body))
        await until_running(slow, 3)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until_idle(slow)
        # Nothing of it is in the way of the next.
        answer = await client.post(PATH, json={**LONG, "max_tokens": 2})
        assert answer.status_code == 200
    assert (
        await metric(gateway, 'rollwire_gateway_requests_total{path="/v1/completions",status="4')
        == 1
    )


async def test_a_failure_after_the_200_is_an_event_before_done(
    slow: ServerProcess, start_gateway: StartGateway, tokenizer_folder: Path
) -> None:
    gateway = start_gateway(
        slow.address, "--tokenizer", str(tokenizer_folder), "--max-sequence-seconds", "0.5"
    )
    body = {**LONG, "stream": True}
    async with client_of(gateway) as client, client.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200
        *tokens, error, done = [event async for event in data_of(response)]
    assert done == "[DONE]"
    assert error["error"]["type"] == "timeout_error"
    assert "not finished within its timeout" in error["error"]["message"]
    assert tokens
    assert {choice["finish_reason"] for event in tokens for choice in event["choices"]} == {None}
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as api:
        stream = await api.completions.create(model="none", **LONG, stream=True)
        with pytest.raises(openai.APIError, match="not finished"):
            async for _ in stream:
                pass


async def test_a_client_that_stops_reading_loses_its_sequences(
    start_server: StartServer, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(
        start_synthetic(start_server, 100_000).address, "--stream-interval", "0",
        *("--max-sequence-seconds", "2", "--max-sequences", "16"),
        *("--metrics-listen", "127.0.0.1:0"),
    )  # fmt: skip
    ask = {"input_ids": [1], "stream": True, "sampling_params": {"n": 16, "max_new_tokens": 4000}}
    body = json.dumps(ask).encode()
    host, _, port = gateway.address.rpartition(":")
    with contextlib.closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert await asyncio.to_thread(client.recv, 12) == b"HTTP/1.1 200"
        async with asyncio.timeout(30):
            while await metric(gateway, "rollwire_gateway_sequences"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with client_of(gateway) as other:
            small = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            assert (await other.post("/generate", json=small)).status_code == 200


async def test_a_request_that_took_too_long_is_not_sent_again(
    slow: ServerProcess, start_gateway: StartGateway, tokenizer_folder: Path
) -> None:
    gateway = start_gateway(
        slow.address, "--tokenizer", str(tokenizer_folder), "--max-sequence-seconds", "0.5",
        "--metrics-listen", "127.0.0.1:0",
    )  # fmt: skip
    url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=3) as api:
        with pytest.raises(openai.InternalServerError) as raised:
            await api.completions.create(model="none", **LONG)
    assert raised.value.status_code == 504
    assert await metric(gateway, "rollwire_gateway_requests_total") == 1


async def test_a_client_that_gives_up_and_asks_again_leaves_one_sequence(
    slow: ServerProcess, start_gateway: StartGateway, tokenizer_folder: Path
) -> None:
    """OpenAI's client gives up after 600 s, and sends the request again twice."""
    gateway = start_gateway(
        slow.address, "--tokenizer", str(tokenizer_folder), "--metrics-listen", "127.0.0.1:0"
    )
    url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=1, max_retries=1) as api:
        with pytest.raises(openai.APITimeoutError):
            await api.completions.create(model="none", **LONG)
    await until_idle(slow)
    assert await metric(gateway, "rollwire_gateway_retried_requests_total") == 1
    assert "sends a request again" in gateway.log.read_text()


async def test_a_silent_stream_gets_heartbeats_and_no_proxy_holds_it_back(
    start_server: StartServer, start_gateway: StartGateway, tokenizer_folder: Path
) -> None:
    server = start_synthetic(start_server, 2)
    gateway = start_gateway(
        server.address, "--tokenizer", str(tokenizer_folder), "--heartbeat-seconds", "0.1"
    )
    body = {**LONG, "max_tokens": 3, "stream": True}
    async with client_of(gateway) as client, client.stream("POST", PATH, json=body) as response:
        lines = [line async for line in response.aiter_lines()]
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines.count(": heartbeat") > 3
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as api:
        stream = await api.completions.create(model="none", prompt=[1], max_tokens=3, stream=True)
        assert [e.choices[0].finish_reason async for e in stream][-1] == "length"


async def test_a_drain_lets_requests_end_and_takes_no_new_ones(
    slow: ServerProcess, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(slow.address)
    body: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 100}}
    async with client_of(gateway) as client:
        asking = asyncio.create_task(client.post("/generate", json=body))
        await until_running(slow, 1)
        gateway.terminate()
        while (health := await client.get("/health")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        refused = await client.post("/generate", json=body)
        answer = await asking
    assert health.json()["error"]["message"] == "the gateway shuts down"
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert len(answer.json()["output_ids"]) == 100
    assert gateway.ended() == 0


async def test_the_end_of_a_drain_ends_streams_with_an_error(
    slow: ServerProcess, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(slow.address, "--drain-seconds", "0")
    body: dict[str, Any] = {"input_ids": [1], "stream": True}
    async with client_of(gateway) as client:
        whole = asyncio.create_task(client.post("/generate", json={**body, "stream": False}))
        await until_running(slow, 1)
        events = []
        async with client.stream("POST", "/generate", json=body) as response:
            async for event in data_of(response):
                if not events:
                    gateway.terminate()
                events.append(event)
        answer = await whole
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "draining"
    assert answer.status_code == 503
    assert gateway.ended() == 0
    await until_idle(slow)


async def test_limits_are_refusals_in_openais_shape(
    slow: ServerProcess, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(slow.address, "--max-sequences", "2", "--max-body-bytes", "2000")
    body: dict[str, Any] = {"input_ids": [1], "sampling_params": {"n": 2}}
    async with client_of(gateway) as client:
        asking = asyncio.create_task(client.post("/generate", json=body))
        await until_running(slow, 2)
        full = await client.post("/generate", json={"input_ids": [1]})
        never = await client.post("/generate", json={"input_ids": [[1]] * 3})
        large = await client.post("/generate", json={"input_ids": [1] * 1000})
        unknown = await client.post("/v1/embeddings", json={})
        method = await client.get("/generate")
        broken = await client.post("/generate", content=b'{"input_ids": [1')
        listed = await client.post("/generate", json=[1])
        halves = [
            await client.post("/generate", content=body)
            for body in (
                rb'{"\ud83d": 1}',
                b'{"rid": "\xed\xa0\xbd"}',
                rb'{"text": "\ude00\ud83d"}',
            )
        ]
        nan = await client.post("/generate", content=b'{"sampling_params": {"temperature": NaN}}')
        text = await client.post(PATH, json=LONG)
        asking.cancel()
    assert full.status_code == 429
    assert full.json()["error"]["code"] == "too_many_sequences"
    assert "retry-after" in full.headers
    answers = [large, unknown, method, broken, listed, nan, text, never, *halves]
    codes = [r.status_code for r in answers]
    assert codes == [413, 404, 405, 400, 400, 400, 400, 400, 400, 400, 400]
    for answer in answers:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "'/v1/embeddings'" in unknown.json()["error"]["message"]
    assert "/v1/completions" in unknown.json()["error"]["message"]
    assert method.json()["error"]["message"].startswith("GET '/generate': ")
    assert text.json()["error"]["code"] == "no_tokenizer"
    assert never.json()["error"]["code"] == "too_many_sequences"
    assert {half.json()["error"]["code"] for half in halves} == {"invalid_json"}


async def test_tokens_open_what_they_are_for(
    server: ServerProcess, start_gateway: StartGateway, tmp_path: Path
) -> None:
    rollout, control = tmp_path / "rollout", tmp_path / "control"
    rollout.write_text("one\n")
    control.write_text("two\n")
    gateway = start_gateway(
        server.address, "--rollout-token-file", str(rollout), "--control-token-file", str(control)
    )
    body: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}

    async def status(path: str, token: str | None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with client_of(gateway) as client:
            if path in {"/health", "/v1/models"}:
                return (await client.get(path, headers=headers)).status_code
            return (await client.post(path, json=body, headers=headers)).status_code

    assert await status("/health", None) == 200
    assert await status("/v1/models", None) == 401
    assert await status("/generate", None) == 401
    assert await status("/generate", "three") == 401
    assert await status("/generate", "one") == 200
    assert await status("/generate", "two") == 200
    assert await status("/update_weights_from_disk", "one") == 403
    body = {"abort_all": True}
    assert [await status("/abort_request", token) for token in ("one", "two")] == [403, 200]
    body = {"rid": "mine"}
    assert await status("/abort_request", "one") == 200
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert await status("/update_weights_from_disk", "two") == 400  # it names no folder
    rollout.write_text("another")
    assert await status("/generate", "one") == 401
    assert await status("/generate", "another") == 200


async def test_metrics_count_requests_and_tokens(
    gateway: GatewayProcess, http: httpx.AsyncClient
) -> None:
    names = ("rollwire_gateway_prompt_tokens_total", "rollwire_gateway_output_tokens_total")
    before = [await metric(gateway, name) for name in names]
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5, "n": 2}}
    assert (await http.post("/generate", json=body)).status_code == 200
    after = [await metric(gateway, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [6, 10]
    assert await metric(gateway, "rollwire_gateway_sequences") == 0


async def test_the_sequences_of_a_session_go_to_one_server(
    start_server: StartServer, start_gateway: StartGateway
) -> None:
    servers = [start_synthetic(start_server, 100) for _ in range(2)]
    gateway = start_gateway(*(server.address for server in servers))

    async def sampled() -> list[int]:
        counts = []
        for server in servers:
            async with RolloutClient(server.address) as client:
                counts.append((await client.info()).sampled_tokens)
        return counts

    async with client_of(gateway) as client:
        for header in ("X-Session-ID", "X-SMG-Routing-Key"):
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 10}}
            long = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4000}}
            before = await sampled()
            await client.post("/generate", json=body, headers={header: header})
            first = [b > a for a, b in zip(before, await sampled(), strict=True)].index(True)
            # Its server is the busier one from now on.
            busy = asyncio.create_task(
                client.post("/generate", json={**long, "rid": header}, headers={header: header})
            )
            await until_running(servers[first], 1)
            other = (await sampled())[1 - first]
            for _ in range(3):
                await client.post("/generate", json=body, headers={header: header})
            assert (await sampled())[1 - first] == other
            await client.post("/abort_request", json={"rid": header})
            await busy


async def test_health_says_when_no_server_is_there(
    start_server: StartServer, start_gateway: StartGateway
) -> None:
    server = start_synthetic(start_server, 50)
    gateway = start_gateway(server.address)
    async with client_of(gateway) as client:
        assert (await client.get("/health")).status_code == 200
        server.kill()
        while (health := await client.get("/health")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert health.status_code == 503
        assert server.address in health.json()["error"]["message"]
        assert (await client.get("/ping")).status_code == 200


async def test_long_texts_do_not_stall_other_requests(http: httpx.AsyncClient) -> None:
    """They are tokenized beside the event loop."""
    loop = asyncio.get_running_loop()
    text = json.dumps({"text": "abc defg " * 400_000})
    began = loop.time()
    asking = asyncio.create_task(http.post("/generate", content=text))
    answered = 0
    while not asking.done():
        assert (await http.get("/ping")).status_code == 200
        answered += not asking.done()
    seconds = loop.time() - began
    assert (await asking).json()["error"]["code"] == "context_length_exceeded"
    assert answered > 10, seconds


@pytest.mark.slow  # it waits for longer than servers usually keep connections
async def test_connections_outlive_the_pauses_of_clients(gateway: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address.split(":"))
    request = b"GET /ping HTTP/1.1\r\nHost: gateway\r\n\r\n"
    for pause in (6, 0):
        writer.write(request)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(b'{"status":"ok"}'))
        await asyncio.sleep(pause)
    writer.close()
    await writer.wait_closed()
