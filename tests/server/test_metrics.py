"""What Prometheus sees."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import shutil
import subprocess
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rollwire.v1 import common_pb2
from rollwire_server import metrics
from rollwire_server.counters import ServerCounters, UpdateOutcome
from rollwire_server.metrics import MAX_CONNECTIONS, Metrics, MetricsServer
from rollwire_transport import Encoding
from support.calls import Generation, connected, generate, request
from support.engine_room import updating
from support.footprint import Footprint
from support.publishing import Update, random_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.servers import ServerProcess, StartServer

# All that can become of a sequence.
ENDS = (
    *("stop", "length", "aborted", "superseded", "interrupted"),
    *("weights_too_old", "timed_out", "not_finite", "step_failed"),
)

Samples = dict[tuple[str, tuple[str, ...]], float]


def page_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


async def scrape(server: ServerProcess) -> Samples:
    """Every sample by its name and the values of its labels."""
    address = server.listens("metrics_listen")
    text = await asyncio.to_thread(page_of, address)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_server_tells_what_it_does(start_server: StartServer) -> None:
    server = start_server("--metrics-listen", "127.0.0.1:0")
    async with connected(server.address) as api:
        began = time.time()
        before = await scrape(server)
        assert before["rollwire_state", ("serving",)] == 1
        assert sum(v for (name, _), v in before.items() if name == "rollwire_state") == 1
        for name in ("version", "announced_version", "committed_timestamp_seconds"):
            assert (f"rollwire_weights_{name}", ()) not in before
        ends = {end for name, end in before if name == "rollwire_ended_sequences_total"}
        assert ends == {(end,) for end in ENDS}
        assert before["rollwire_refusals_total", ("queue_full",)] == 0
        assert before["rollwire_updates_total", ("failed",)] == 0

        await generate(api, request((1,), 20))
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(api, request((), 20))
        change = Update(api, await random_weights(api, 1), 7)
        await change.publish()
        paused = await api.pause()
        held = Generation(api, request((2,), 9))
        await api.held(1)
        during = await scrape(server)
        assert during["rollwire_state", ("paused",)] == 1
        assert during["rollwire_sequences", ("held",)] == 1
        assert during["rollwire_sampled_tokens_total", ()] == 20
        await api.pause(paused.pause_id)  # renews it
        await api.resume(paused.pause_id)
        await held.all()

        after = await scrape(server)
        assert after["rollwire_sampled_tokens_total", ()] == 29
        assert after["rollwire_ended_sequences_total", ("length",)] == 2
        assert after.keys() >= before.keys()
        # Rates are known from the first event on, so every value of a label is there before it.
        first = {name for name, _ in after.keys() - before.keys()}
        assert first == {
            f"rollwire_weights_{name}"
            for name in ("version", "announced_version", "committed_timestamp_seconds")
        }
        assert after["rollwire_refusals_total", ("empty_prompt",)] == 1
        assert after["rollwire_updates_total", ("committed",)] == 1
        assert after["rollwire_committed_updates_total", ("full",)] == 1
        assert after["rollwire_committed_updates_total", ("delta",)] == 0
        assert after["rollwire_weights_version", ()] == 7
        assert after["rollwire_weights_announced_version", ()] == 7
        committed_at = after["rollwire_weights_committed_timestamp_seconds", ()]
        assert began <= committed_at <= time.time()
        assert after["rollwire_weights_revision", ()] == 1
        assert after["rollwire_pauses_total", ()] == 1
        assert after["rollwire_update_forwarded_bytes_total", ()] == 0
        assert after["rollwire_commit_paused_seconds_count", ()] == 1
        sent = sum(bucket.size for bucket in change.manifest.buckets)
        assert after["rollwire_update_received_bytes_total", ()] == sent
        assert after["rollwire_held_seconds_total", ()] > 0
        assert after["rollwire_sequences", ("running",)] == 0
        assert after["rollwire_kv_used_tokens", ()] == 0
        assert after["rollwire_kv_capacity_tokens", ()] == 64 * 4096
        assert ("rollwire_server_info", ("embedded", "builtin:tiny")) in {
            (name, labels[:2]) for name, labels in after
        }


async def test_every_counter_is_a_metric() -> None:
    async with updating() as room:
        counters = room.counters
        collector = Metrics(counters, room.engine, room.state, room.sequences, room.updates)
        labels = {"updates": UpdateOutcome.FAILED, "committed": Encoding.DELTA}
        for field in dataclasses.fields(ServerCounters):
            if field.name == "on_commit":
                continue
            before = generate_latest(collector.registry)
            if isinstance(counter := getattr(counters, field.name), Counter):
                counter[labels.get(field.name, "draining")] += 1
            else:
                setattr(counters, field.name, counter + 1)
            assert generate_latest(collector.registry) != before, field.name


async def test_lag_is_what_was_announced_and_is_not_served(start_server: StartServer) -> None:
    server = start_server("--metrics-listen", "127.0.0.1:0", "--engine", "synthetic")
    served, announced = ("rollwire_weights_version", ()), ("rollwire_weights_announced_version", ())

    def phases(samples: Samples) -> set[str]:
        return {
            labels[0] for (name, labels), value in samples.items()
            if name == "rollwire_update_phase" and value
        }  # fmt: skip

    async with connected(server.address) as api:
        tensors = await random_weights(api, 1)
        await Update(api, tensors, 3).publish()
        told = await scrape(server)
        assert (told[served], told[announced], phases(told)) == (3, 3, set())
        behind = Update(api, await random_weights(api, 2), 5)
        await behind.announce()
        told = await scrape(server)
        assert (told[served], told[announced], phases(told)) == (3, 5, {"ready"})
        await behind.transfer()
        assert phases(await scrape(server)) == {"staged"}
        await behind.discard()
        told = await scrape(server)
        assert (told[served], told[announced], phases(told)) == (3, 5, set())
        with pytest.raises(grpc.aio.AioRpcError):  # whoever may not publish moves nothing
            await Update(api, tensors, 900, publisher="another").announce()
        assert (await scrape(server))[announced] == 5
        back = Update(api, tensors, 1, rollback=True)
        await back.publish()
        told = await scrape(server)
        assert (told[served], told[announced]) == (1, 1)


async def test_names_and_types_are_as_prometheus_has_them(start_server: StartServer) -> None:
    """What promtool would say, where it is not installed."""
    server = start_server("--metrics-listen", "127.0.0.1:0", "--engine", "synthetic")
    async with connected(server.address) as api:
        await Update(api, await random_weights(api, 1), 3).publish()
    address = server.listens("metrics_listen")
    text = await asyncio.to_thread(page_of, address)
    if promtool := shutil.which("promtool"):
        checked = await asyncio.to_thread(
            subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True,
            text=True, timeout=30, check=False,
        )  # fmt: skip
        assert (checked.returncode, checked.stderr) == (0, "")
    for family in text_string_to_metric_families(text):
        assert re.fullmatch("rollwire(_[a-z]+)+", family.name), family.name
        assert family.documentation.endswith(".")
        assert family.type in {"counter", "gauge", "histogram"}
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names == {f"{family.name}_total"}
        for unit in ("milliseconds", "ms", "ns", "minutes", "kilobytes", "mib", "percent"):
            assert unit not in family.name.split("_")
        for sample in family.samples:
            assert set(sample.labels) <= {
                "state", "reason", "outcome", "phase", "encoding", "le", "version", "engine",
                "model",
            }  # fmt: skip


async def test_what_callers_choose_makes_no_new_series(start_server: StartServer) -> None:
    server = start_server("--metrics-listen", "127.0.0.1:0", "--engine", "synthetic")
    async with connected(server.address) as api:
        await generate(api, request((1,), 2))
        before = await scrape(server)
        for number in range(20):
            await generate(api, request((1,), 2, request_id=f"request {number}"))
            change = Update(api, await random_weights(api, number), number, publisher=f"p{number}",
                            term=number + 1)  # fmt: skip
            await change.publish()
        assert (await api.info()).state == common_pb2.SERVER_STATE_SERVING
        told_once = ("version", "announced_version", "committed_timestamp_seconds")
        first = {(f"rollwire_weights_{name}", ()) for name in told_once}
        assert (await scrape(server)).keys() == before.keys() | first


# The page.


@contextlib.asynccontextmanager
async def page() -> AsyncIterator[str]:
    """Where one of an empty registry is."""
    server = MetricsServer(CollectorRegistry())
    try:
        yield await server.open("127.0.0.1:0")
    finally:
        await server.close()


async def said(address: str, request: bytes) -> bytes:
    """What comes back until the other end hangs up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"200 OK"),
        (b"GET /metrics?name[]=a HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET /secrets HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"\xff\xfe\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\n" + b"a" * 100_000, b""),
    ],
)
async def test_what_is_asked_over_http(request_: bytes, status: bytes) -> None:
    async with page() as address:
        first = (await said(address, request_)).partition(b"\r\n")[0]
        assert first == (b"HTTP/1.1 " + status if status else b"")


async def test_prometheus_gets_the_format_that_it_prefers() -> None:
    accept = b"Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3"
    async with page() as address:
        answer = await said(address, b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/openmetrics-text" in head
    assert body == b"# EOF\n"


async def test_who_is_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 0.1)
    async with page() as address:
        assert await said(address, b"GET /metrics HTTP/1.1\r\nX: ") == b""


async def test_a_scrape_comes_through_among_many_who_are_silent(start_server: StartServer) -> None:
    server = start_server("--metrics-listen", "127.0.0.1:0", "--engine", "synthetic")
    host, _, port = server.listens("metrics_listen").rpartition(":")
    before = Footprint.of(server.process.pid)
    writers = []
    try:
        for _ in range(5 * MAX_CONNECTIONS):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(b"GET /metrics HTTP/1.1\r\nX: ")
        assert (await scrape(server))["rollwire_state", ("serving",)] == 1
        now = Footprint.of(server.process.pid)
        assert now.threads < before.threads + MAX_CONNECTIONS  # none for each
    finally:
        for writer in writers:
            writer.close()


def test_a_metrics_port_in_use(start_server: StartServer) -> None:
    server = start_server("--engine", "synthetic", "--metrics-listen", "127.0.0.1:0")
    address = server.listens("metrics_listen")
    with pytest.raises(pytest.fail.Exception, match=f"cannot listen on {address}"):
        start_server("--engine", "synthetic", "--metrics-listen", address)
