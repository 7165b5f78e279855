"""How fast weights move: rollwire's links between processes of this machine, beside the floor.

    python benchmarks/transport.py --mib 1024 --bucket-mib 64 --receivers 1 3
    python benchmarks/transport.py --mib 64 --bucket-mib 1 --busy   what buckets cost beside work
    python benchmarks/transport.py --mib 14000 --devices cuda:0 cuda:1 --backends nccl ucx

The floor is a plain TCP connection for each receiver, sendall from one buffer and recv_into
another, in the same run; between GPUs a bare broadcast over NCCL. The links' figures include
packing, and the digests on both ends. Those that this machine lacks are left out.
GB/s counts the weights once, however many receive them.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import secrets
import socket
import statistics
import threading
import time
from typing import TYPE_CHECKING

import torch
from bare import bare_broadcast, host
from common import machine, staged
from rollwire_transport import (
    Receiver,
    Sender,
    available_backends,
    describe_all,
    open_link,
    plan,
)
from rollwire_transport._digest import compile_sums

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from rollwire_transport import Manifest
    from torch import Tensor

TIMEOUT = 60.0


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description="How fast weights move on this machine.")
    parser.add_argument("--mib", type=int, default=512, help="size of the weights")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[64])
    parser.add_argument("--receivers", type=int, nargs="+", help="default: 1 3; with devices, all")
    parser.add_argument(
        "--devices", nargs="+", help="of the sender and each receiver; default: the CPU for all"
    )
    parser.add_argument("--backends", nargs="+", default=["gloo", "ucx"])
    parser.add_argument("--rounds", type=int, default=5, help="the median of these is told")
    parser.add_argument(
        "--busy", action="store_true", help="a thread computes beside each receiver"
    )
    arguments = parser.parse_args()
    devices = arguments.devices or ["cpu"]
    counts = arguments.receivers or ([len(devices) - 1] if arguments.devices else [1, 3])

    usable = available_backends()
    backends = [name for name in arguments.backends if usable[name].ok]
    weights = make_weights(arguments.mib << 20, torch.device(devices[0]))
    size = sum(t.nbytes for t in weights.values())
    print(machine_line(devices[0]))
    print(f"{size / 1e9:.2f} GB of bf16 in {len(weights)} tensors, torch {torch.__version__}")
    print(f"{'':28}{'receivers':>10}{'GB/s':>8}{'of floor':>10}")

    copied = torch.cat([*weights.values()][:32])  # more than caches hold
    rate = 2 * copied.nbytes / seconds_of(copied.clone().copy_, copied, arguments.rounds)
    print(f"{'bare copy, read and written':28}{'':>10}{rate / 1e9:8.2f}")
    sums = compile_sums(list(weights.values()))
    rate = size / seconds_of(lambda _: sums().tolist(), copied, arguments.rounds)
    print(f"{'digest of all':28}{'':>10}{rate / 1e9:8.2f}")
    for receivers in counts:
        places = [*devices[: receivers + 1], *devices[-1:] * receivers][: receivers + 1]
        if places[-1] == "cpu":
            bare, send = "plain TCP", functools.partial(send_raw, size)
            floor = run(places, arguments.rounds, send, receive_raw)
        else:
            bare, floor = "bare NCCL broadcast", bare_broadcast(places, size)
        print(f"{bare:28}{receivers:10}{size / floor / 1e9:8.2f}{1:10.0%}", flush=True)
        for mib in arguments.bucket_mib:
            manifest = plan(describe_all(weights), bucket_bytes=mib << 20)
            for backend in backends:
                send = functools.partial(send_weights, backend, manifest, weights)
                receive = functools.partial(receive_weights, busy=arguments.busy)
                elapsed = run(places, arguments.rounds, send, receive)
                row = f"{receivers:10}{size / elapsed / 1e9:8.2f}{floor / elapsed:10.0%}"
                print(f"{f'{backend}, buckets of {mib} MiB':28}{row}", flush=True)


def machine_line(device: str) -> str:
    """What the figures are from."""
    return f"{machine(device)}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def make_weights(size: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors of at most 32 MiB that add up to ``size`` bytes."""
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    while size > 0:
        count = min(size, 32 << 20) // 2
        bits = torch.randint(
            -(2**15), 2**15, (count,), dtype=torch.int16, device=device, generator=generator
        )
        weights[f"layer.{len(weights)}"] = bits.view(torch.bfloat16)
        size -= count * 2
    return weights


def seconds_of(do: Callable[[Tensor], object], tensor: Tensor, rounds: int) -> float:
    """The median seconds that something takes with a tensor, its device included."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        do(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first one warms up


def run(
    places: list[str],
    rounds: int,
    send: Callable[[list[Connection]], float],
    receive: Callable[[Connection, int, torch.device], None],
) -> float:
    """The median seconds of ``send`` to processes that run ``receive``, one on each device after
    the first.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in places[1:]]
    processes = [
        context.Process(target=receive, args=(theirs, rank, torch.device(place)))
        for rank, ((_, theirs), place) in enumerate(zip(pipes, places[1:], strict=True), start=1)
    ]
    before = dict(os.environ)
    for rank, process in enumerate(processes, start=1):
        os.environ.update(host(places, rank))
        process.start()
    os.environ.clear()
    os.environ.update(before)
    ours = [pipe for pipe, _ in pipes]
    try:
        seconds = [send(ours) for _ in range(rounds + 1)][1:]  # the first one warms up
    finally:
        for pipe in ours:
            pipe.send(None)
        for process in processes:
            process.join(TIMEOUT)
    return statistics.median(seconds)


def answers(pipes: list[Connection], timeout: float = TIMEOUT) -> list[object]:
    """What each process says next."""
    assert all(pipe.poll(timeout) for pipe in pipes), "a process is silent"
    return [pipe.recv() for pipe in pipes]


def send_raw(size: int, pipes: list[Connection]) -> float:
    """Sends ``size`` bytes over a connection to each receiver."""
    data = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        for pipe in pipes:
            pipe.send((server.getsockname(), size))
        connections = [server.accept()[0] for _ in pipes]
    answers(pipes)
    start = time.perf_counter()
    threads = [threading.Thread(target=c.sendall, args=(data,)) for c in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers(pipes)
    elapsed = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return elapsed


def receive_raw(pipe: Connection, *_: object) -> None:
    """The other end of ``send_raw``, in a process of its own."""
    while (order := pipe.recv()) is not None:
        address, size = order
        data = memoryview(bytearray(size))
        with socket.create_connection(address) as connection:
            pipe.send("ready")
            while data:
                data = data[connection.recv_into(data) :]
        pipe.send("done")


def send_weights(
    backend: str, manifest: Manifest, weights: dict[str, Tensor], pipes: list[Connection]
) -> float:
    """Sends the weights in a group of their own, and compares the digests."""
    epoch, world_size = secrets.token_hex(), len(pipes) + 1
    device = next(iter(weights.values())).device
    link = open_link(backend, epoch=epoch, rank=0, world_size=world_size, device=device)
    for pipe in pipes:
        pipe.send((backend, manifest, epoch, world_size))
    offers = link.offers(dict(enumerate(answers(pipes), start=1)))  # type: ignore[arg-type]
    for rank, pipe in enumerate(pipes, start=1):
        pipe.send(offers[rank])
    link.connect(TIMEOUT)
    answers(pipes)
    sender = Sender(manifest)
    start = time.perf_counter()
    sender.send(link, weights.items, bucket_timeout=TIMEOUT)
    digests = answers(pipes)
    elapsed = time.perf_counter() - start
    assert digests == [sender.digest] * len(pipes)
    link.close()
    for pipe in pipes:
        pipe.send("close")
    return elapsed


def receive_weights(pipe: Connection, rank: int, device: torch.device, *, busy: bool) -> None:
    """The other end of ``send_weights``, in a process of its own."""
    if busy:
        threading.Thread(target=compute, daemon=True).start()
    destination: dict[str, Tensor] = {}
    while (order := pipe.recv()) is not None:
        backend, manifest, epoch, world_size = order
        if not destination:
            destination = staged(manifest, device)
        receiver = Receiver(manifest, destination)
        link = open_link(backend, epoch=epoch, rank=rank, world_size=world_size, device=device)
        pipe.send(link.answer)
        link.connect(TIMEOUT, pipe.recv())
        pipe.send("ready")
        receiver.receive(link, first_bucket=0, bucket_timeout=TIMEOUT)
        pipe.send(receiver.digest)
        pipe.recv()
        link.close()


def compute() -> None:
    """Keeps the interpreter for as long as it may, as an engine does between its steps."""
    while True:
        sum(i for i in range(1000))


if __name__ == "__main__":
    main()
