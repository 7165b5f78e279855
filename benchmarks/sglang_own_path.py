"""SGLang's own update paths, straight into a paused engine, for ``publish.py``.

"distributed": a broadcast a tensor, between two devices. "tensor": flattened buckets by CUDA IPC.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from arrivals import FIRST_SECONDS, SETTLE_SECONDS, Arrivals
from sglang_alone import alone, answer

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from multiprocessing.connection import Connection

CALL_BYTES = 2 << 30
MODES = {"keep": "in_place", "recompute": "retract"}  # what does the same as a KV policy

Spec = tuple[str, str, list[int]]  # name, dtype, shape
Row = tuple[str, float, float, float]  # what, seconds, longest gap, decode lost


def own_path(given: dict[str, Any], specs: list[Spec], ranks: int, options: Namespace) -> list[Row]:
    """Measures it between the trainer's device and one SGLang with the arguments ``given``."""
    here, there = mp.get_context("spawn").Pipe()
    # A process of its own: NCCL reads its environment once, and SGLang wants another.
    process = mp.get_context("spawn").Process(
        target=_trainer, args=(there, given, specs, ranks, options)
    )
    process.start()
    there.close()
    try:
        rows: list[Row] = answer(here, 900)
    finally:
        process.join(60)
        process.kill()
    return rows


def _trainer(
    pipe: Connection, given: dict[str, Any], specs: list[Spec], ranks: int, options: Namespace
) -> None:
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # SGLang sets it for its own processes
    with alone(given) as sglang:
        answer(sglang)
        pipe.send(_measure(sglang, specs, ranks, options))


def _measure(sglang: Connection, specs: list[Spec], ranks: int, options: Namespace) -> list[Row]:
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    generator = torch.Generator(device).manual_seed(1)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device).normal_(
            0, 0.02, generator=generator
        )
        for name, dtype, shape in specs
    }
    calls = _calls(specs, tensors)
    ways: dict[str, Callable[[str], tuple[float, float]]] = {}
    if device.type == "cpu" or device != torch.device(options.servers[0]):
        group = _meet(sglang, 1 + ranks, "nccl" if device.type == "cuda" else "gloo")
        ways["distributed"] = partial(_broadcast, sglang, group, calls, tensors)
    if device.type == "cuda":
        ways["tensor"] = partial(_hand_over, sglang, ranks, calls, tensors)
    prompts = [options.prompts(i) for i in range(options.streams)]
    _ask(sglang, "decode", prompts, options.new_tokens)
    arrivals = Arrivals()
    deadline = time.monotonic() + FIRST_SECONDS
    while not arrivals.flowing(options.streams):
        if time.monotonic() > deadline:
            raise SystemExit("SGLang alone samples nothing")
        time.sleep(0.1)
        arrivals.all += _ask(sglang, "arrivals")
    return [
        _one(
            sglang,
            f"{way} {MODES[policy]} {turn}",
            policy,
            partial(update, MODES[policy]),
            arrivals,
            options,
        )
        for way, update in ways.items()
        for policy, _ in options.policies
        if policy in MODES
        for turn in range(1, options.publishes + 1)
    ]


def _one(
    sglang: Connection,
    name: str,
    policy: str,
    update: Callable[[], tuple[float, float]],
    arrivals: Arrivals,
    options: Namespace,
) -> Row:
    time.sleep(options.window)
    asked = time.perf_counter()
    began, ended = update()
    time.sleep(SETTLE_SECONDS[policy])
    end = time.perf_counter()
    time.sleep(options.window)
    arrivals.all += _ask(sglang, "arrivals")
    gap, lost = arrivals.longest_gap(began, ended), arrivals.lost(asked, end, options.window)
    return f"SGLang's own {name}", ended - asked, gap, lost


def _broadcast(
    sglang: Connection,
    group: dist.ProcessGroup,
    calls: list[list[Spec]],
    tensors: dict[str, torch.Tensor],
    mode: str,
) -> tuple[float, float]:
    sglang.send(("update", ("distributed", calls, mode)))
    sent = [
        dist.broadcast(tensors[name], 0, group=group, async_op=True)
        for call in calls
        for name, _, _ in call
    ]
    for one in sent:
        one.wait()
    began, ended = answer(sglang)
    return began, ended


def _hand_over(
    sglang: Connection,
    ranks: int,
    calls: list[list[Spec]],
    tensors: dict[str, torch.Tensor],
    mode: str,
) -> tuple[float, float]:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    handles = []
    for call in calls:
        bucket = FlattenedTensorBucket(named_tensors=[(name, tensors[name]) for name, _, _ in call])
        flat = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        # Each rank opens a handle of its own: one stands for one opening.
        handles.append([MultiprocessingSerializer.serialize(flat) for _ in range(ranks)])
    torch.cuda.synchronize()
    began, ended = _ask(sglang, "update", "tensor", handles, mode)
    return began, ended


def _ask(sglang: Connection, name: str, *values: Any) -> Any:
    sglang.send((name, values))
    return answer(sglang)


def _meet(sglang: Connection, world_size: int, backend: str) -> dist.ProcessGroup:
    from sglang.srt.utils import init_custom_process_group

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sglang.send(("meet", ("127.0.0.1", port, world_size, backend)))
    group: dist.ProcessGroup = init_custom_process_group(
        backend=backend,
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=world_size,
        rank=0,
        group_name="weights",
    )
    answer(sglang)
    return group


def _calls(specs: list[Spec], tensors: dict[str, torch.Tensor]) -> list[list[Spec]]:
    """In pieces: SGLang takes memory for all tensors of a call beside its weights."""
    calls: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        nbytes = tensors[spec[0]].nbytes
        if calls[-1] and size + nbytes > CALL_BYTES:
            calls.append([])
            size = 0
        calls[-1].append(spec)
        size += nbytes
    return calls
