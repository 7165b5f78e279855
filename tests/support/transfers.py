"""Both ends of a transfer over a link that a test holds in its hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire_transport import Sender

from support.tensors import random_tensor

if TYPE_CHECKING:
    from rollwire_transport import Manifest, Receiver
    from torch import Tensor

    from support.memory_link import MemoryLink


def send(manifest: Manifest, tensors: dict[str, Tensor], link: MemoryLink) -> Sender:
    sender = Sender(manifest)
    sender.send(link, tensors.items, bucket_timeout=1)
    return sender


def receive(receiver: Receiver, link: MemoryLink, first_bucket: int = 0) -> None:
    receiver.receive(link, first_bucket=first_bucket, bucket_timeout=1)


def some_weights() -> dict[str, Tensor]:
    """Three tensors in nine buckets of 64 bytes."""
    return {
        "a": random_tensor(torch.bfloat16, (10, 12), 1),
        "b": random_tensor(torch.float32, (7,), 2),
        "c": random_tensor(torch.uint8, (200,), 3),
    }
