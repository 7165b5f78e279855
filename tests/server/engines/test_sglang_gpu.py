"""The SGLang engine on CUDA devices: where updates wait, what sleep frees."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.v1 import rollout_pb2
from rollwire_server.engines.embedded.checkpoint import build
from rollwire_server.engines.loading import digests_of, fingerprinter
from rollwire_server.engines.memory import (
    PinnedMemory,
    allocate_on_devices,
    allocate_on_host,
    open_parts,
)
from rollwire_transport import TensorSpec, describe, tensor_digest
from support.calls import Generation, connected, generate
from support.calls import request as asked
from support.contract import flags
from support.executed import children, lines
from support.publishing import TERMS, DeltaUpdate, Update, next_version, publish, status
from support.reference import changed, logprobs, with_tensors
from support.servers import servers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from support.calls import Api
    from support.servers import ServerProcess
    from torch import Tensor
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
    fingerprint = fingerprinter(model)
    for _ in range(2):
        before = fingerprint()
        expected = {n: tensor_digest(describe(n, t), t) for n, t in model.state_dict().items()}
        with torch.no_grad():
            torch.cuda.synchronize()
            model.weight[3, 4] += 1
        after = fingerprint()
        assert digests_of(before) == expected
        assert digests_of(after)["bias"] == expected["bias"]
        assert digests_of(after)["weight"] != expected["weight"]


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
            generation = Generation(api, asked(prompt, 3000, seed=seed, request_id="crosses"))
            await generation.some(5)
            answer = await publish(api, tensors, max_kv_lag=0)
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


def partly_changed(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """One element in fifty is another one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.02, -tensor, tensor)
        for name, tensor in tensors.items()
    }


async def delta(api: Api, base: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> DeltaUpdate:
    return DeltaUpdate(api, tensors, await next_version(api), term=next(TERMS), base=base)


async def test_deltas_are_taken_on_one_device_alone(
    server: ServerProcess, request: pytest.FixtureRequest
) -> None:
    devices, _ = request.node.callspec.params["server"]
    async with connected(server.address) as api:
        assert (await api.info()).accepts_deltas == (devices == 1)
    assert ("deltas are not accepted" in server.log.read_text()) == (devices > 1)


async def test_a_policy_that_came_as_a_delta_samples(server: ServerProcess) -> None:
    """As after a full publish of it, and sequences go on."""
    prompt = tuple(range(40, 60))
    async with connected(server.address) as api:
        if not (await api.info()).accepts_deltas:
            pytest.skip("this server takes no deltas")
        base = changed(policy(), by=0.1)
        await publish(api, base)
        for seed in (1, 2):
            tensors = partly_changed(base, seed)
            update = await delta(api, base, tensors)
            assert 0 < update.delta.nbytes < update.full_bytes / 5
            generation = Generation(api, asked(prompt, 3000, seed=seed, request_id="crosses"))
            await generation.some(5)
            answer = await update.publish()
            await generation.crosses(100)
            await api.abort("crosses")
            output = await generation.all()
            new = [i for i, r in enumerate(output.revisions) if r == answer.weights.revision]
            assert 0 < len(new) < len(output.tokens)
            assert (await status(api, verify=True)).intact
            after = await generate(api, asked(prompt, 100, temperature=0.0))
            own = logprobs(with_tensors(policy(), tensors), prompt, after.tokens)
            assert after.logprobs == pytest.approx(own.tolist(), abs=NEAR)
            whole = await publish(api, tensors)
            assert whole.weights.digest == answer.weights.digest
            again = await generate(api, asked(prompt, 100, temperature=0.0))
            assert again.tokens == after.tokens
            assert again.logprobs == pytest.approx(after.logprobs, abs=1e-5)
            base = tensors
        await api.idle()


async def test_updates_that_are_committed_or_discarded_leave_memory_level(
    server: ServerProcess,
) -> None:
    tensors = changed(policy(), by=0.1)
    async with connected(server.address) as api:
        await publish(api, tensors)
        takes_deltas = (await api.info()).accepts_deltas
        before = free_bytes()
        for seed in range(3):
            dropped = Update(api, tensors, await next_version(api), term=next(TERMS))
            await dropped.stage()
            await dropped.discard()
            await publish(api, tensors)
            if takes_deltas:
                new = partly_changed(tensors, seed)
                await (await delta(api, tensors, new)).publish()
                tensors = new
        assert free_bytes() > before - (64 << 20)
        assert (await status(api, verify=True)).intact


async def test_memory_of_updates_is_taken_once(
    server: ServerProcess, request: pytest.FixtureRequest
) -> None:
    """And on the host it is page-locked, by the server and by SGLang's processes."""
    devices, staging = request.node.callspec.params["server"]
    schedulers = [pid for pid, name in children(server.process.pid).items() if "scheduler" in name]
    assert len(schedulers) == devices
    tensors = changed(policy(), by=0.1)

    def mapped() -> list[list[str]]:
        found = [lines(pid, STAGING) for pid in (server.process.pid, *schedulers)]
        assert [bool(some) for some in found] == [staging == "host"] * (1 + devices)
        return found

    before = mapped()
    async with connected(server.address) as api:
        for _ in range(2):
            await publish(api, tensors)
            dropped = Update(api, tensors, await next_version(api), term=next(TERMS))
            await dropped.stage()
            await dropped.discard()
        await publish(api, tensors)
    assert mapped() == before
    log = server.log.read_text()
    assert "cannot be page-locked" not in log
    assert "new memory is allocated" not in log


def test_pinned_memory_is_copied_to_and_from() -> None:
    spec = TensorSpec("all", "uint8", ((10 << 20) + 512,))
    device = torch.device("cuda")
    memory = allocate_on_host([spec])
    memory.pin(device)
    assert memory.pin_error is None
    staged = memory.lend([spec])["all"]
    assert staged.is_pinned()
    staged.copy_(torch.arange(spec.shape[0]) % 251)
    there = staged.cuda()
    assert torch.equal(there.cpu(), staged)
    staged.copy_(there.add_(1), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), staged)
    (other,) = open_parts(memory.lend([spec]).layout.parts)
    pinned = PinnedMemory(other, device)
    assert (pinned.error, other.is_pinned()) == (None, True)
    pinned.release()
    assert not other.is_pinned()
    assert PinnedMemory(torch.empty(0, dtype=torch.uint8), device).error is not None
    assert torch.ones(3, device="cuda").add_(1).sum().item() == 6  # that failure is not found again


def test_device_memory_is_lent_while_a_tensor_of_it_is_held() -> None:
    device = torch.device("cuda", 0)
    specs = [TensorSpec("a", "bfloat16", (3, 5)), TensorSpec("b", "float32", ())]
    memory = allocate_on_devices([device], specs, ranks=1)
    staged = memory.lend(specs)
    assert staged["a"].device == device
    held = staged["b"].fill_(7)
    del staged
    assert memory.in_use
    assert memory.regions[0].memory[64:68].view(torch.float32).item() == 7
    del held
    assert not memory.in_use


@pytest.mark.parametrize("kept", ["KEEP", "HOST_BACKUP"])
async def test_sleep_frees_device_memory_and_waking_brings_the_policy_back(
    tmp_path: Path, kept: str
) -> None:
    more = ["enable-memory-saver=true", "enable-weights-cpu-backup=true"]
    with servers(tmp_path) as start:
        server = start(*on_gpu(tmp_path, *more))
        async with connected(server.address) as api:
            await publish(api, changed(policy(), by=0.1))
            before = await generate(api, asked((4, 5), 30, seed=1))
            running = Generation(api, asked((1,), 3000))
            await running.some(2)
            assert await sleep(api, kept) > 0
            assert (await running.all()).reason == "INTERRUPTED"
            await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            after = await generate(api, asked((4, 5), 30, seed=1))
            assert after.tokens == before.tokens
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
            assert (await status(api, verify=True)).intact
