"""One end of a transfer over NCCL in a process of its own, which a test may kill or stop.

python gpu_member.py receive DEVICE MIB RENDEZVOUS EPOCH RANK WORLD_SIZE    prints the digest
python gpu_member.py send DEVICE MIB EPOCH WORLD_SIZE                       prints the rendezvous
"""

from __future__ import annotations

import sys

import torch
from rollwire_transport import Receiver, Sender, describe_all, join_group, open_rendezvous, plan
from rollwire_transport._tensors import as_bytes

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


def receive(device: torch.device, mib: int, *group: str) -> None:
    rendezvous, epoch, rank, world_size = group
    wanted = weights(mib, device)
    manifest = plan(describe_all(wanted), bucket_bytes=BUCKET_BYTES)
    got = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    receiver = Receiver(manifest, got)
    link = join_group(
        "nccl",
        epoch=epoch,
        rank=int(rank),
        world_size=int(world_size),
        rendezvous=rendezvous,
        timeout=TIMEOUT,
        device=device,
    )
    try:
        receiver.receive(link, first_bucket=0, bucket_timeout=TIMEOUT)
    finally:
        link.close()
    for name, tensor in got.items():
        if not torch.equal(as_bytes(tensor), as_bytes(wanted[name])):
            sys.exit(f"{name} came with other bytes")
    print(receiver.digest, flush=True)  # noqa: T201 - for the test to read


def send(device: torch.device, mib: int, epoch: str, world_size: str) -> None:
    tensors = weights(mib, device)
    sender = Sender(plan(describe_all(tensors), bucket_bytes=BUCKET_BYTES))
    rendezvous = open_rendezvous("nccl", epoch=epoch, world_size=int(world_size), device=device)
    print(rendezvous.address, flush=True)  # noqa: T201 - as above
    link = rendezvous.form_group(TIMEOUT)
    try:
        sender.send(link, tensors.items, bucket_timeout=TIMEOUT)
    finally:
        link.close()


def main() -> None:
    role, device, mib, *group = sys.argv[1:]
    {"receive": receive, "send": send}[role](torch.device(device), int(mib), *group)


if __name__ == "__main__":
    main()
