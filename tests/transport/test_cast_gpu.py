"""Casts of master weights on a GPU: bit for bit what torch gives, without a second copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_transport import Receiver, Sender, TensorSpec, describe_all, plan
from rollwire_transport._digest import triton_kernels
from support.memory_link import MemoryLink
from support.tensors import content, random_tensor, room_for
from support.transfers import receive

if TYPE_CHECKING:
    from rollwire_transport import Manifest, Transfer
    from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MIB = 1 << 20
SHAPES = {"matrix": (65, 33), "vector": (1000,), "scalar": (), "large": (100, 96)}
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.bfloat16),
]


class LinkOf(MemoryLink):
    """One whose buckets lie on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class NoLink(LinkOf):
    """One that keeps nothing of what is sent."""

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._begin(lambda: None)


def finite(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits of what every dtype can represent as a finite number."""
    tensor = random_tensor(dtype, shape, seed)
    return torch.where(tensor.abs() < 60000, tensor, -0.0)


def arrived(manifest: Manifest, link: MemoryLink) -> dict[str, Tensor]:
    """What a receiver on a CPU has of what was sent."""
    on_cpu, destination = MemoryLink(), room_for(manifest)
    on_cpu.messages.extend((header.cpu(), payload.cpu()) for header, payload in link.messages)
    receive(Receiver(manifest, destination), on_cpu)
    return destination


@pytest.mark.parametrize("bucket_words", [1, 7, 5000])
@pytest.mark.parametrize("link_device", ["cuda", "cpu"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("dtype", "to"), DTYPES)
def test_what_arrives_is_what_tensor_to_gives(
    dtype: torch.dtype, to: torch.dtype, link_device: str, bucket_words: int, *, strided: bool
) -> None:
    masters = {
        name: finite(dtype, shape, seed).cuda() for seed, (name, shape) in enumerate(SHAPES.items())
    }
    if strided:
        masters = {
            name: t.mT if t.ndim == 2 else t.reshape(-1, 1).repeat(1, 2)[:, 0].view(t.shape)
            for name, t in masters.items()
        }
    want = {name: tensor.to(to) for name, tensor in masters.items()}
    manifest = plan(describe_all(want), bucket_bytes=64 * bucket_words)
    link, sender = LinkOf(torch.device(link_device)), Sender(manifest)
    sender.send(link, masters.items, bucket_timeout=60)
    got = arrived(manifest, link)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert content(got[name]) == content(tensor.cpu()), name
    assert sender.casts == dict.fromkeys(want, str(dtype).removeprefix("torch."))


def test_a_gpu_rounds_masters_as_a_cpu_does() -> None:
    masters = finite(torch.float32, (1 << 20,), 0)
    assert content(masters.cuda().to(torch.bfloat16).cpu()) == content(masters.to(torch.bfloat16))


def test_only_buckets_are_beside_the_masters() -> None:
    if triton_kernels("cuda") is None:
        pytest.skip("without Triton, digests take memory of their own")
    device = torch.device("cuda", torch.cuda.current_device())
    masters = {f"t{i}": torch.full((16 * MIB,), float(i), device=device) for i in range(8)}
    specs = [TensorSpec(name, "bfloat16", tuple(t.shape)) for name, t in masters.items()]
    manifest = plan(specs, bucket_bytes=16 * MIB)

    def peak() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        sender = Sender(manifest)
        sender.send(NoLink(device), masters.items, bucket_timeout=60)
        assert len(sender.casts) == len(masters)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak()  # kernels are compiled
    # Three buckets are under way. The rest is for headers and digests; a copy of the weights in
    # bfloat16 takes 256 MiB, and one of a single tensor another 32.
    assert peak() <= (3 * 16 + 4) * MIB


def test_overflows_on_a_gpu_are_told_by_name() -> None:
    tensors = {"a": torch.zeros(64).cuda(), "b": torch.full((64,), -70000.0).cuda()}
    manifest = plan([TensorSpec(name, "float16", (64,)) for name in tensors], bucket_bytes=64)
    with pytest.raises(ValueError, match=r"^b has finite values that float16 cannot represent"):
        Sender(manifest).send(LinkOf(torch.device("cuda")), tensors.items, bucket_timeout=60)
