"""The SGLang engine on CUDA devices: where updates wait, what sleep frees."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.v1 import rollout_pb2
from rollwire_server.engines.embedded.builtin import build
from rollwire_server.engines.sglang import page_lock
from rollwire_server.engines.sglang.fingerprint import Fingerprints
from rollwire_server.engines.sglang.page_lock import CudaPages, PageLock, pages_of
from rollwire_server.engines.sglang.shared_memory import allocate, opened
from rollwire_transport import TensorSpec, describe, tensor_digest
from support.calls import Generation, connected, generate, request, until
from support.contract import flags
from support.executed import children, maps
from support.publishing import TERMS, Update, next_version, publish, status
from support.reference import changed, logprobs, with_tensors
from support.servers import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.calls import Api
    from support.servers import ServerProcess
    from transformers import PreTrainedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang here"),
]

# What any GPU runs, and what starts quickly.
ARGUMENTS = [
    "attention-backend=triton",
    "sampling-backend=pytorch",
    "disable-cuda-graph=true",
    "max-total-tokens=16384",
    "mem-fraction-static=0.3",
]
STAGING = "rollwire-staging"
NEAR = 1e-2  # fp32, of which Triton's attention multiplies in tf32; policies are ten times apart


@functools.cache
def policy() -> PreTrainedModel:
    """The built-in tiny model, but such that half of each layer is aligned for a GPU's kernels."""
    model = build("builtin:tiny")
    model.config.intermediate_size = 128
    torch.manual_seed(0)
    return type(model)(model.config).eval()


def on_gpu(folder: Path, *more: str, staging: str = "device") -> list[str]:
    arguments = [f"--engine-arg={text}" for text in [*ARGUMENTS, *more]]
    started = ["--engine", "sglang", *flags("sglang", folder), "--staging", staging, *arguments]
    policy().save_pretrained(folder / "model")
    return started


@pytest.fixture(
    scope="module",
    params=[(1, "device"), (2, "device"), (1, "host"), (2, "host")],
    ids=["on-1-device", "on-2-device", "on-1-host", "on-2-host"],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """On one device, and on two by tensor parallelism; updates wait there or in host memory."""
    devices, staging = request.param
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    folder = tmp_path_factory.mktemp("sglang")
    with servers(folder) as start:
        yield start(*on_gpu(folder, f"tp-size={devices}", staging=staging))


def test_fingerprints_are_digests_of_what_was_there_when_they_began() -> None:
    model = torch.nn.Linear(33, 7, device="cuda")
    fingerprints = Fingerprints(model)
    for _ in range(2):
        before = fingerprints.begin()
        expected = {n: tensor_digest(describe(n, t), t) for n, t in model.state_dict().items()}
        with torch.no_grad():
            torch.cuda.synchronize()
            model.weight[3, 4] += 1
        after = fingerprints.begin()
        assert before.read() == expected
        assert after.read()["bias"] == expected["bias"]
        assert after.read()["weight"] != expected["weight"]


def free_bytes() -> int:
    return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


async def sleep(api: Api, weights: str) -> int:
    how = rollout_pb2.SleepingWeights.Value(f"SLEEPING_WEIGHTS_{weights}")
    asked = rollout_pb2.SleepRequest(weights=how)
    return (await api.rollouts.Sleep(asked, timeout=60)).freed_bytes


async def test_a_policy_that_was_staged_samples(server: ServerProcess) -> None:
    base = policy()
    prompt = tuple(range(40, 60))
    async with connected(server.address) as api:
        for seed in (1, 2):
            tensors = changed(base, by=0.1, seed=seed)
            generation = Generation(api, request(prompt, 3000, seed=seed, request_id="crosses"))
            await generation.some(5)
            answer = await publish(api, tensors)
            await generation.crosses(100)
            await api.abort("crosses")
            output = await generation.all()
            new = [i for i, r in enumerate(output.revisions) if r == answer.weights.revision]
            assert 100 <= len(new) < len(output.tokens)
            told = [output.logprobs[i] for i in new]
            own = logprobs(with_tensors(base, tensors), prompt, output.tokens)[new]
            assert told == pytest.approx(own.tolist(), abs=NEAR)
            assert (await status(api, verify=True)).intact
        await api.idle()


async def test_updates_that_are_committed_or_discarded_leave_memory_level(
    server: ServerProcess,
) -> None:
    tensors = changed(policy(), by=0.1)
    async with connected(server.address) as api:
        await publish(api, tensors)
        before = free_bytes()
        for _ in range(3):
            dropped = Update(api, tensors, await next_version(api), term=next(TERMS))
            await dropped.stage()
            await dropped.discard()
            await publish(api, tensors)
        assert free_bytes() > before - (64 << 20)
        assert (await status(api, verify=True)).intact


async def test_host_memory_of_updates_is_page_locked_and_let_go_of(
    server: ServerProcess, request: pytest.FixtureRequest
) -> None:
    """By SGLang's processes: once an update is committed, or discarded."""
    devices, staging = request.node.callspec.params["server"]
    schedulers = [pid for pid, name in children(server.process.pid).items() if "scheduler" in name]
    assert len(schedulers) == devices
    tensors = changed(policy(), by=0.1)

    async def let_go() -> bool:
        return not any(maps(pid, STAGING) for pid in schedulers)

    async with connected(server.address) as api:
        await publish(api, tensors)
        await until(let_go, 60)
        dropped = Update(api, tensors, await next_version(api), term=next(TERMS))
        await dropped.stage()
        assert [maps(pid, STAGING) for pid in schedulers] == [staging == "host"] * devices
        await dropped.discard()
        await until(let_go, 60)
    assert "cannot be page-locked" not in server.log.read_text()


async def test_pages_are_locked_in_pieces_copied_across_them_and_unlocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_lock, "PIECE", 1 << 20)
    size = (10 << 20) + 512
    staged = allocate([TensorSpec("all", "uint8", (size,))])
    (memory,) = opened(staged.layout)
    memory.copy_(torch.arange(size) % 251)
    pages = pages_of(torch.device("cuda"))
    assert pages is not None
    lock = PageLock(memory, pages)

    async def locked() -> bool:
        return lock.missing == 0

    await until(locked, 60)
    assert memory.is_pinned()
    assert memory[-1:].is_pinned()
    for begin, end in [(0, size), (1, size - 1), ((1 << 20) - 3, (3 << 20) + 5)]:
        assert torch.equal(memory[begin:end].cuda().cpu(), memory[begin:end])
    lock.release()

    async def unlocked() -> bool:
        return not any(memory[i:].is_pinned() for i in range(0, size, 1 << 20))

    await until(unlocked, 60)
    assert torch.equal(memory.cuda().cpu(), memory)


async def test_what_is_locked_in_part_is_known_and_all_else_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_lock, "PIECE", 1 << 20)
    staged = allocate([TensorSpec("all", "uint8", (8 << 20,))])
    (memory,) = opened(staged.layout)

    class Limited(CudaPages):
        """Of which only three pieces can be locked."""

        def lock(self, address: int, nbytes: int) -> None:
            inside = address + nbytes <= memory.data_ptr() + (3 << 20)
            super().lock(address, nbytes if inside else 0)  # which CUDA refuses

    pages = Limited(torch.device("cuda"))
    lock = PageLock(memory, pages)

    async def refused() -> bool:
        return lock.error is not None

    await until(refused, 60)
    lock.stop()
    assert lock.locked == (0 if pages.piece is None else 3 << 20)
    assert (lock.error or "").startswith("cudaHostRegister: ")
    inside, outside = memory[: lock.locked], memory[lock.locked :]
    assert not outside.is_pinned()
    assert inside.is_pinned() == lock.cuts(memory) == (lock.locked > 0)
    for tensor in (inside, outside, memory.clone()):
        assert not lock.cuts(tensor)
        assert torch.equal(tensor.cuda().cpu(), tensor)
    lock.release()


@pytest.mark.parametrize("kept", ["KEEP", "HOST_BACKUP"])
async def test_sleep_frees_device_memory_and_waking_brings_the_policy_back(
    tmp_path: Path, kept: str
) -> None:
    more = ["enable-memory-saver=true", "enable-weights-cpu-backup=true"]
    with servers(tmp_path) as start:
        server = start(*on_gpu(tmp_path, *more))
        async with connected(server.address) as api:
            await publish(api, changed(policy(), by=0.1))
            before = await generate(api, request((4, 5), 30, seed=1))
            running = Generation(api, request((1,), 3000))
            await running.some(2)
            assert await sleep(api, kept) > 0
            assert (await running.all()).reason == "INTERRUPTED"
            await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            after = await generate(api, request((4, 5), 30, seed=1))
            assert after.tokens == before.tokens
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
            assert (await status(api, verify=True)).intact
