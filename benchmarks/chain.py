"""What more servers cost a publish down the ucx chain, each on a line of the same limited speed.

    python benchmarks/chain.py --receivers 1 4 16 64 --mbit 25 --mib 64          as root, on Linux

Every member is a process in a network namespace of its own, joined by a bridge; what it sends and
what it gets is limited to ``--mbit`` (tc tbf). The chunks that are passed on are smaller than the
ones of the library, as the weights are: at 64 KiB of 64 MiB they are still coarser than 4 MiB of
the 15.2 GB of a 7B model. A publish is told as a multiple of the bare time of the line.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import secrets
import subprocess
import time
from typing import TYPE_CHECKING

os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="eth0", OMP_NUM_THREADS="1")

import torch
from common import staged
from rollwire_transport import (
    Receiver,
    Sender,
    describe_all,
    open_link,
    plan,
)
from rollwire_transport._links import ucx

from transport import answers, machine_line, make_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from rollwire_transport import Manifest

TIMEOUT = 300.0
CLONE_NEWNET = 0x40000000
PREFIX = f"rw{os.getpid() % 10000}"


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--mbit", type=float, default=25, help="of each member's line, each way")
    parser.add_argument("--mib", type=int, default=64, help="size of the weights")
    parser.add_argument("--bucket-mib", type=int, default=4)
    parser.add_argument("--chunk-kib", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ucx._HOST_CHUNK_BYTES = options.chunk_kib << 10  # noqa: SLF001 - rank 0 tells it to all
    weights = make_weights(options.mib << 20, torch.device("cpu"))
    manifest = plan(describe_all(weights), bucket_bytes=options.bucket_mib << 20)
    bare = (options.mib << 20) * 8 / (options.mbit * 1e6)
    print(machine_line("cpu"))
    print(f"{options.mib} MiB over lines of {options.mbit:g} Mbit/s: {bare:.1f} s bare")
    print(f"{'receivers':>10}{'seconds':>10}{'of bare':>10}{'of one':>10}")
    one = None
    for receivers in options.receivers:
        with namespaces(receivers + 1, options.mbit) as names:
            seconds = publish(names, manifest, weights)
        one = one or seconds
        print(f"{receivers:10}{seconds:10.1f}{seconds / bare:10.2f}{seconds / one:10.2f}")


@contextlib.contextmanager
def namespaces(count: int, mbit: float) -> Iterator[list[str]]:
    """Network namespaces with 10.77.0.1, 10.77.0.2, … behind a bridge in one more."""
    names = [f"{PREFIX}-{number}" for number in range(count)]
    hub = f"{PREFIX}-hub"
    limit = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "500ms"]
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"p{number}"
            ip("netns", "add", name)
            ip("-n", hub, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name)
            ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/16", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            for place, device in ((hub, port), (name, "eth0")):
                run("tc", "-n", place, "qdisc", "add", "dev", device, "root", *limit)
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def publish(names: list[str], manifest: Manifest, weights: dict[str, torch.Tensor]) -> float:
    """Seconds of a transfer to all but the first, bytes verified."""
    context = multiprocessing.get_context("fork")  # shares the memory of torch
    pipes = [context.Pipe() for _ in names]
    processes = [
        context.Process(target=member, args=(name, rank, len(names), theirs, manifest, weights))
        for rank, (name, (_, theirs)) in enumerate(zip(names, pipes, strict=True))
    ]
    for process in processes:
        process.start()
    trainer, *receivers = [ours for ours, _ in pipes]
    try:
        (epoch,) = answers([trainer], TIMEOUT)
        for pipe in receivers:
            pipe.send(epoch)
        trainer.send(dict(enumerate(answers(receivers, TIMEOUT), start=1)))
        (offers,) = answers([trainer], TIMEOUT)
        for rank, pipe in enumerate(receivers, start=1):
            pipe.send(offers[rank])  # type: ignore[index]
        answers(receivers, TIMEOUT)
        start = time.perf_counter()
        trainer.send("go")
        digests = answers(receivers, TIMEOUT)
        seconds = time.perf_counter() - start
        assert digests == answers([trainer], TIMEOUT) * len(receivers)
        for pipe in pipes:
            pipe[0].send("close")
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return seconds


def member(
    name: str,
    rank: int,
    world_size: int,
    pipe: Connection,
    manifest: Manifest,
    weights: dict[str, torch.Tensor],
) -> None:
    """One member, in a process and a namespace of its own."""
    enter(name)
    if rank == 0:
        pipe.send(epoch := secrets.token_hex())
    else:
        epoch = pipe.recv()
    link = open_link("ucx", epoch=epoch, rank=rank, world_size=world_size, host="10.77.0.1")
    if rank == 0:
        pipe.send(link.offers(pipe.recv()))
        link.connect(TIMEOUT)
        sender = Sender(manifest)
        pipe.recv()
        sender.send(link, weights.items, bucket_timeout=TIMEOUT)
        pipe.send(sender.digest)
    else:
        receiver = Receiver(manifest, staged(manifest, torch.device("cpu")))
        pipe.send(link.answer)
        link.connect(TIMEOUT, pipe.recv())
        pipe.send("connected")
        receiver.receive(link, first_bucket=0, bucket_timeout=TIMEOUT)
        pipe.send(receiver.digest)
    pipe.recv()
    link.close()


def enter(name: str) -> None:
    """Moves this thread, and those it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:  # noqa: PTH123
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def ip(*arguments: str) -> None:
    """Runs ip."""
    run("ip", *arguments)


def run(*arguments: str) -> None:
    """Runs a command that must not fail."""
    subprocess.run(arguments, check=True)


if __name__ == "__main__":
    main()
