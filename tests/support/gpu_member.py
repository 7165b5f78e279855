"""One end of a transfer between GPUs in a process of its own, which a test may kill or stop.

python gpu_member.py receive BACKEND DEVICE MIB EPOCH RANK WORLD_SIZE
    writes its answer, reads the offer, writes the digest
python gpu_member.py send BACKEND DEVICE MIB EPOCH WORLD_SIZE
    reads the answer, writes the offer

Answers and offers are hex, a line each. Both close their link once they read another line; if that
is "again", the receiver first receives another update.
"""

from __future__ import annotations

import sys

import torch
from rollwire_transport import Receiver, Sender, describe_all, open_link, plan
from rollwire_transport._manifest import as_bytes

TIMEOUT = 60.0
BUCKET_BYTES = 1 << 20


def weights(mib: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The same bits on any device: odd sizes, several dtypes, one tensor as large as MIB says."""
    generator = torch.Generator().manual_seed(mib)
    bits = torch.randint(-(2**31), 2**31 - 1, (mib << 18,), dtype=torch.int32, generator=generator)
    return {
        "large": bits.view(torch.bfloat16).to(device),
        "small": torch.arange(7, dtype=torch.uint8, device=device),
        "scalar": torch.tensor(1.5, dtype=torch.float64, device=device),
        "matrix": torch.randn(33, 65, generator=generator).to(device),
    }


def receive(
    backend: str, device: torch.device, mib: int, epoch: str, rank: str, world_size: str
) -> None:
    wanted = weights(mib, device)
    manifest = plan(describe_all(wanted), bucket_bytes=BUCKET_BYTES)
    link = open_link(
        backend, epoch=epoch, rank=int(rank), world_size=int(world_size), device=device
    )
    tell(link.answer.hex())
    link.connect(TIMEOUT, bytes.fromhex(sys.stdin.readline()))
    try:
        again = True
        while again:
            got = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
            receiver = Receiver(manifest, got)
            receiver.receive(link, first_bucket=0, bucket_timeout=TIMEOUT)
            for name, tensor in got.items():
                if not torch.equal(as_bytes(tensor), as_bytes(wanted[name])):
                    sys.exit(f"{name} came with other bytes")
            tell(receiver.digest)
            again = sys.stdin.readline().strip() == "again"
    finally:
        link.close()


def send(backend: str, device: torch.device, mib: int, epoch: str, world_size: str) -> None:
    tensors = weights(mib, device)
    sender = Sender(plan(describe_all(tensors), bucket_bytes=BUCKET_BYTES))
    link = open_link(backend, epoch=epoch, rank=0, world_size=int(world_size), device=device)
    offers = link.offers({1: bytes.fromhex(sys.stdin.readline())})
    tell(offers[1].hex())
    link.connect(TIMEOUT)
    tell("connected")
    try:
        sender.send(link, tensors.items, bucket_timeout=TIMEOUT)
        sys.stdin.readline()
    finally:
        link.close()


def tell(what: object) -> None:
    print(what, flush=True)  # noqa: T201 - for the test to read


def main() -> None:
    role, backend, device, mib, *group = sys.argv[1:]
    {"receive": receive, "send": send}[role](backend, torch.device(device), int(mib), *group)


if __name__ == "__main__":
    main()
