"""What the contract does not show of the SGLang engine: its processes, its loader, its refusals."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import torch
from rollwire_server.engines.embedded.checkpoint import build
from rollwire_server.engines.sglang.processes import FailureHandler, MemoryFile
from support.calls import Generation, connected, generate, reason_of, request, until
from support.contract import flags
from support.executed import ExecutedCommand, children, lines
from support.publishing import TERMS, Update, next_version, publish, status
from support.reference import changed, logits, logprobs, of_tokens, with_tensors
from support.servers import EXECUTED_START_SECONDS, servers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from support.calls import Output
    from support.servers import ServerProcess, StartServer
    from transformers import PreTrainedModel

pytestmark = pytest.mark.timeout(600)

LONG = 3000
NOTICED_SECONDS = 60


def running(*, of: int) -> list[int]:
    """SGLang's processes of one server that is up."""
    return [pid for pid, name in children(of).items() if name.startswith("sglang::")]


def scheduler(server: ServerProcess) -> int:
    names = children(server.process.pid).items()
    (pid,) = (pid for pid, name in names if name.startswith("sglang::scheduler"))
    return pid


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("sglang")
    with servers(folder) as start:
        yield start("--engine", "sglang", *flags("sglang", folder))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
class TestServers:
    """Whole servers, with SGLang's processes."""

    async def test_an_abort_ends_no_sequence_whose_id_begins_alike(
        self, server: ServerProcess
    ) -> None:
        """SGLang ends every id that begins with the given one."""
        async with connected(server.address) as api:
            generations = [
                Generation(api, request((1 + i,), LONG, request_id=f"named-{i}")) for i in range(20)
            ]
            for generation in generations:
                await generation.some(1)
            assert await api.abort("named-0") == (1, [])
            assert (await generations[0].all()).reason == "ABORTED"
            for generation in generations[1:]:
                await generation.some(len(generation.output.tokens) + 10)
                assert generation.output.finish is None
            await api.abort(*(f"named-{i}" for i in range(1, 20)))
            await api.idle()

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"min_new_tokens": 2}, "sampling.min_new_tokens"),
            ({"min_p": 0.1}, "sampling.min_p"),
            ({"prompt_logprobs": True, "temperature": 0.5}, "prompt_logprobs"),
        ],
    )
    async def test_what_it_cannot_do_is_refused_and_not_ignored(
        self, server: ServerProcess, change: dict[str, object], field: str
    ) -> None:
        async with connected(server.address) as api:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(api, request((1, 2), 4, **change))
            assert reason_of(caught.value) == "BAD_SAMPLING"
            assert field.rpartition(".")[2] in (caught.value.details() or "")
            assert (await generate(api, request((1, 2), 4))).reason == "LENGTH"

    @pytest.mark.parametrize("temperature", [0.6, 1.7])
    async def test_logprobs_are_of_logits_divided_by_the_temperature(
        self, server: ServerProcess, temperature: float
    ) -> None:
        prompt = tuple(range(40, 60))
        async with connected(server.address) as api:
            output = await generate(
                api, request(prompt, 20, seed=5, temperature=temperature, top_logprobs=4)
            )
        model = build("builtin:tiny")
        intact = logits(model, [*prompt, *output.tokens])[len(prompt) - 1 : -1] / temperature
        expected = intact.log_softmax(-1)
        own = of_tokens(expected, output.tokens).tolist()
        assert output.logprobs == pytest.approx(own, abs=1e-4)
        for row, (ids, told) in zip(expected, output.top, strict=True):
            assert told == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
            assert told == pytest.approx(row[ids].tolist(), abs=1e-4)

    @pytest.mark.parametrize("max_kv_lag", [0, 1])
    async def test_under_load_every_token_is_labelled_with_the_policy_that_sampled_it(
        self, server: ServerProcess, max_kv_lag: int
    ) -> None:
        """Pauses, aborts and commits among 24 sequences; each token is then computed by itself."""
        shared = tuple(range(100, 140))
        base = build("builtin:tiny")
        policies: dict[int, PreTrainedModel] = {}
        async with connected(server.address) as api:
            first = changed(base, by=0.1, seed=100)
            answer = await publish(api, first)
            policies[answer.weights.revision] = with_tensors(base, first)
            generations = [
                Generation(api, request((*shared, i), 400, seed=i, request_id=f"load-{i}"))
                for i in range(24)
            ]
            reading = [asyncio.create_task(generation.all()) for generation in generations]
            for seed in range(101, 105):
                await grown(generations[5].output, 5)
                tensors = changed(base, by=0.1, seed=seed)
                await api.pause("p")
                await api.abort(f"load-{seed - 101}")
                await api.resume("p")
                answer = await publish(api, tensors, max_kv_lag)
                policies[answer.weights.revision] = with_tensors(base, tensors)
            outputs = [await task for task in reading]
            await api.idle()
        assert [output.reason for output in outputs] == ["ABORTED"] * 4 + ["LENGTH"] * 20
        assert all(len(set(output.revisions)) == 5 for output in outputs[4:])
        for i, output in enumerate(outputs):
            lags = [new - old for new, old in zip(output.revisions, output.oldest, strict=True)]
            assert {*lags} <= {*range(max_kv_lag + 1)}
            for revision in set(output.revisions):
                own = logprobs(policies[revision], (*shared, i), output.tokens)
                for told, computed, by, lag in zip(
                    output.logprobs, own.tolist(), output.revisions, lags, strict=True
                ):
                    assert by != revision or lag or told == pytest.approx(computed, abs=1e-4)

    async def test_a_policy_that_computes_nan_samples_nothing(self, server: ServerProcess) -> None:
        """SGLang would draw tokens all the same. The next policy cures it."""
        good = changed(build("builtin:tiny"), by=0.1)
        bad = {**good, "model.norm.weight": torch.full((64,), torch.nan)}
        async with connected(server.address) as api:
            await publish(api, bad)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(api, request((1, 2), 5))
            assert reason_of(caught.value) == "NOT_FINITE"
            await publish(api, good)
            assert (await generate(api, request((1, 2), 5))).reason == "LENGTH"
            await api.idle()

    async def test_memory_of_updates_is_taken_once(self, server: ServerProcess) -> None:
        """Whether they are committed or discarded."""
        tensors = changed(build("builtin:tiny"), by=0.1)
        pids = (server.process.pid, scheduler(server))

        def mapped() -> list[list[str]]:
            return [lines(pid, "rollwire-staging") for pid in pids]

        before = mapped()
        assert all(before)
        async with connected(server.address) as api:
            for _ in range(2):
                await publish(api, tensors)
                dropped = Update(api, tensors, await next_version(api), term=next(TERMS))
                await dropped.stage()
                await dropped.discard()
            await publish(api, tensors)
        assert mapped() == before
        assert "new memory is allocated" not in server.log.read_text()

    async def test_an_interrupt_from_the_terminal_is_the_servers_to_answer(
        self, server: ServerProcess
    ) -> None:
        """Ctrl-C goes to all processes of a terminal: SGLang's must not end by it."""
        for pid in running(of=server.process.pid):
            os.kill(pid, signal.SIGINT)
        async with connected(server.address) as api:
            assert (await generate(api, request((1, 2), 50))).reason == "LENGTH"

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    async def test_a_dead_or_frozen_scheduler_is_noticed(
        self, start_server: StartServer, tmp_path: Path, number: int
    ) -> None:
        """Its sequences end INTERRUPTED with their tokens; the server exits with a failure."""
        server = start_server(
            "--engine", "sglang", *flags("sglang", tmp_path),
            "--engine-arg", "unresponsive-seconds=3",
        )  # fmt: skip
        processes = running(of=server.process.pid)
        async with connected(server.address) as api:
            generation = Generation(api, request((1,), LONG))
            await generation.some(3)
            os.kill(scheduler(server), number)
            output = await generation.all()
        assert output.reason == "INTERRUPTED"
        assert output.finish is not None
        assert output.finish.output_tokens == len(output.tokens) >= 3
        assert server.process.wait(NOTICED_SECONDS) == 1
        assert not server.log.with_suffix(".json").exists()
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("rollwire-server: SGLang is dead: ")
        assert ("was ended by SIGKILL" in last) is (number == signal.SIGKILL)
        assert_ended(processes)

    @pytest.mark.slow
    async def test_a_scheduler_that_is_frozen_when_a_pause_comes_is_noticed(
        self, start_server: StartServer, tmp_path: Path
    ) -> None:
        server = start_server(
            "--engine", "sglang", *flags("sglang", tmp_path),
            "--engine-arg", "unresponsive-seconds=3",
        )  # fmt: skip
        async with connected(server.address) as api:
            generation = Generation(api, request((1,), LONG))
            await generation.some(3)
            os.kill(scheduler(server), signal.SIGSTOP)
            pausing = asyncio.create_task(api.pause())
            assert (await generation.all()).reason == "INTERRUPTED"
            assert server.process.wait(NOTICED_SECONDS) == 1
            await asyncio.gather(pausing, return_exceptions=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("ended", [False, True])
    async def test_a_scheduler_that_freezes_in_a_command_about_weights_is_noticed(
        self, start_server: StartServer, tmp_path: Path, *, ended: bool
    ) -> None:
        """The server exits with a failure, or by the SIGTERM that comes meanwhile."""
        server = start_server(
            "--engine", "sglang", *flags("sglang", tmp_path),
            "--engine-arg", f"unresponsive-seconds={600 if ended else 3}",
        )  # fmt: skip
        processes = running(of=server.process.pid)
        async with connected(server.address) as api:
            await api.pause()
            os.kill(scheduler(server), signal.SIGSTOP)
            verifying = asyncio.create_task(status(api, verify=True))
            if ended:
                await asyncio.wait([verifying], timeout=1)
                assert not verifying.done()
                server.process.terminate()
            assert server.process.wait(NOTICED_SECONDS) == (0 if ended else 1)
            await asyncio.gather(verifying, return_exceptions=True)
        assert ("SGLang is dead: its scheduler" in server.log.read_text()) is not ended
        assert_ended(processes)

    @pytest.mark.slow
    async def test_with_tensor_parallelism_each_process_puts_its_part_in_place(
        self, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # else it wants a NUMA node each
        server = start_server(
            "--engine", "sglang", *flags("sglang", tmp_path), "--engine-arg", "tp-size=2"
        )
        base, prompt = build("builtin:tiny"), tuple(range(40, 60))
        tensors = changed(base, by=0.1)
        async with connected(server.address) as api:
            assert not (await api.info()).accepts_deltas
            await publish(api, tensors)
            output = await generate(api, request(prompt, 20, seed=5))
            own = logprobs(with_tensors(base, tensors), prompt, output.tokens)
            assert output.logprobs == pytest.approx(own.tolist(), abs=1e-4)
            assert (await status(api, verify=True)).intact

    @pytest.mark.slow
    def test_a_killed_server_leaves_no_process(
        self, start_server: StartServer, tmp_path: Path
    ) -> None:
        server = start_server("--engine", "sglang", *flags("sglang", tmp_path))
        processes = running(of=server.process.pid)
        assert processes
        server.kill()
        assert_ended(processes)

    @pytest.mark.slow
    def test_a_server_killed_while_it_starts_leaves_no_process(self, tmp_path: Path) -> None:
        command = ["--engine", "sglang", *flags("sglang", tmp_path), "--listen", "127.0.0.1:0"]
        server = ExecutedCommand(command, tmp_path / "server.log", dict(os.environ))
        deadline = time.monotonic() + EXECUTED_START_SECONDS
        while len(processes := children(server.pid)) < 3:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server.kill()
        server.wait(NOTICED_SECONDS)
        assert_ended(processes)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("argument", "told"),
        [("no-such-thing=1", "no_such_thing"), ("attention-backend=odd", "odd")],
    )
    def test_a_wrong_argument_is_told_in_one_line(
        self, tmp_path: Path, argument: str, told: str
    ) -> None:
        """Whether SGLang finds it out at once, or one of its processes later."""
        log = tmp_path / "server.log"
        command = ["--engine", "sglang", *flags("sglang", tmp_path), "--listen", "127.0.0.1:0"]
        server = ExecutedCommand([*command, "--engine-arg", argument], log, dict(os.environ))
        assert server.wait(EXECUTED_START_SECONDS) == 1
        last = log.read_text().splitlines()[-1]
        assert last.startswith("rollwire-server: SGLang did not start: ")
        assert told in last


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_a_server_says_what_it_needs(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = ["--engine", "sglang", *flags("sglang", tmp_path), "--listen", "127.0.0.1:0"]
    server = ExecutedCommand(command, log, dict(os.environ))
    assert server.wait(EXECUTED_START_SECONDS) == 1
    last = log.read_text().splitlines()[-1]
    assert last == "rollwire-server: needs sglang: pip install 'rollwire[sglang]'"


def captures(graphs: dict[str, int]) -> int:
    try:
        return graphs["capture"]
    except KeyError as error:
        raise RuntimeError("no capture: memory\n 1. less\nSee there") from error


def format_exception(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_what_ends_a_process_is_told_in_one_line() -> None:
    """Of a traceback, and not the advice below it."""
    logger = logging.getLogger("a process of SGLang")
    with contextlib.closing(MemoryFile()) as note:
        logger.addHandler(FailureHandler(note.path))
        with pytest.raises(RuntimeError) as caught:
            captures({})
        logger.error("Scheduler hit an exception: %s", format_exception(caught.value))
        logger.error("something else")
        assert note.read() == "RuntimeError: no capture: memory\n"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def grown(output: Output, by: int) -> None:
    """Returns when so many more tokens have come."""
    before = len(output.tokens)

    async def has_grown() -> bool:
        return len(output.tokens) >= before + by

    await until(has_grown, NOTICED_SECONDS)


def assert_ended(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + NOTICED_SECONDS
    for pid in pids:
        while runs(pid):
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.05)
