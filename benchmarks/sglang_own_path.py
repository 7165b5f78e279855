"""SGLang's own update path: broadcasts straight into a paused engine, for ``publish.py``."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from arrivals import FIRST_SECONDS, Arrivals
from sglang_alone import alone, answer

if TYPE_CHECKING:
    from argparse import Namespace
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
    device, window = torch.device(options.device), options.window
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = _meet(sglang, 1 + ranks, "nccl" if device.type == "cuda" else "gloo")
    generator = torch.Generator(device).manual_seed(1)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device).normal_(
            0, 0.02, generator=generator
        )
        for name, dtype, shape in specs
    }
    calls = _calls(specs, tensors)
    prompts = [options.prompts(i) for i in range(options.streams)]
    _ask(sglang, "decode", prompts, options.new_tokens)
    arrivals, rows = Arrivals(), []
    deadline = time.monotonic() + FIRST_SECONDS
    while not arrivals.flowing(options.streams):
        if time.monotonic() > deadline:
            raise SystemExit("SGLang alone samples nothing")
        time.sleep(0.1)
        arrivals.all += _ask(sglang, "arrivals")
    for policy in options.policies:
        for turn in range(options.publishes):
            time.sleep(window)
            sglang.send(("update", (calls, MODES[policy])))
            sent = [
                dist.broadcast(tensors[name], 0, group=group, async_op=True)
                for call in calls
                for name, _, _ in call
            ]
            for one in sent:
                one.wait()
            began, ended = answer(sglang)
            time.sleep(window)
            end = time.perf_counter()
            arrivals.all += _ask(sglang, "arrivals")
            gap, lost = arrivals.longest_gap(began, ended), arrivals.lost(began, end, window)
            rows.append((f"SGLang's own {MODES[policy]} {turn + 1}", ended - began, gap, lost))
    return rows


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
