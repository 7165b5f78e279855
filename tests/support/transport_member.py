"""A server's end of a transfer in a process of its own, which a test may kill or stop.

python transport_member.py EPOCH RANK WORLD_SIZE BYTES BUCKET_BYTES

Writes its answer to standard output, and reads the offer from standard input, both as hex.
"""

from __future__ import annotations

import sys

import torch
from rollwire_transport import Receiver, TensorSpec, open_link, plan


def main() -> None:
    epoch, *numbers = sys.argv[1:]
    rank, world_size, size, bucket_bytes = map(int, numbers)
    manifest = plan([TensorSpec("w", "uint8", (size,))], bucket_bytes=bucket_bytes)
    receiver = Receiver(manifest, {"w": torch.zeros(size, dtype=torch.uint8)})
    link = open_link("gloo", epoch=epoch, rank=rank, world_size=world_size)
    print(link.answer.hex(), flush=True)  # noqa: T201 - for the test to read
    link.connect(60, bytes.fromhex(sys.stdin.readline()))
    try:
        receiver.receive(link, first_bucket=0, bucket_timeout=60)
    finally:
        link.close()


if __name__ == "__main__":
    main()
