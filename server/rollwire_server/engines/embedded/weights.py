"""A model's weights: schema, digests, staging an update, replacing them, and their sleep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import rollwire_transport as transport
import torch
from rollwire.types import SleepingWeights

from rollwire_server.engines.base import EngineError, NoMemoryError, TornWeightsError
from rollwire_server.engines.embedded.checkpoint import checkpoint_tensors
from rollwire_server.engines.memory import allocating, copy_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

PINNED_BYTES = 1 << 30
"""Pinned memory is allocated in pieces of this size: torch rounds each up to a power of two."""

Staging = Literal["auto", "device", "host"]


def choose_staging(staging: Staging, device: torch.device, needed: int, free: int) -> Staging:
    """What ``staging`` means for ``needed`` bytes on a device that has ``free`` bytes left."""
    # "auto" stays where the device has room: if that is taken when an update comes, the update goes
    # to host memory.
    if device.type == "cpu" or (staging == "auto" and free <= needed):
        return "host"
    return staging


class ModelWeights:
    """A model's parameters and persistent buffers, as its checkpoint names them.

    Of tensors that share memory the first name counts; the others are its aliases.
    """

    def __init__(self, hf: PreTrainedModel, staging: Staging = "auto") -> None:
        self._hf = hf
        self._staging = staging
        tensors = checkpoint_tensors(hf)
        self.specs = transport.describe_all(tensors)
        self._serving = self._unaliased(tensors)
        self._backup: list[Tensor] | None = None
        self._freed_shapes: list[torch.Size] = []
        self.consistent = True  # all of one policy; if not, only a full update cures that

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._serving.values())

    def digests(self) -> dict[str, int]:
        """The digest of each tensor that serves, aliases left out."""
        specs = [spec for spec in self.specs if spec.alias_of is None]
        return transport.tensor_digests(specs, {s.name: self._target(s.name) for s in specs})

    def stage(self, manifest: transport.Manifest) -> dict[str, Tensor]:
        sent = [spec.name for spec in manifest.tensors if spec.alias_of is None]
        return allocate_staging({name: self._target(name) for name in sent}, self._staging)

    def replace(self, staged: Mapping[str, Tensor]) -> None:
        """Copies staged tensors over the serving ones; see ``Engine.commit`` for what it raises."""
        targets = [self._target(name) for name in staged]
        sources = list(staged.values())
        for name, target, source in zip(staged, targets, sources, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype:
                raise EngineError(
                    f"{name} is staged as {source.dtype} {tuple(source.shape)}, and served as "
                    f"{target.dtype} {tuple(target.shape)}"
                )
        if not self.consistent and (missing := self._serving.keys() - staged.keys()):
            raise EngineError(
                f"the weights are discarded or torn, and the update lacks {len(missing)} of "
                f"{len(self._serving)} tensors: send a full one"
            )
        self.consistent = False
        try:
            with torch.no_grad():
                copy_tensors(targets, sources)
                for device in {target.device for target in targets if target.is_cuda}:
                    torch.cuda.synchronize(device)
        except Exception as error:
            raise TornWeightsError(f"copying staged weights into place failed: {error}") from error
        self.consistent = True

    def sleep(self, how: SleepingWeights) -> int:
        """Frees the weights' memory as asked; returns the bytes freed."""
        tensors = list(self._owned())
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        if how is SleepingWeights.KEEP or (how is SleepingWeights.HOST_BACKUP and on_host):
            return 0
        freed = sum(tensor.nbytes for tensor in tensors)
        if how is SleepingWeights.HOST_BACKUP:
            with allocating(
                f"{freed >> 20} MiB of weights cannot be kept in pinned host memory",
                "give the server more host memory, or let it sleep with weights KEEP or DISCARD",
            ):
                self._backup = [tensor.detach().to("cpu").pin_memory() for tensor in tensors]
        else:
            self.consistent = False
        self._serving.clear()
        self._freed_shapes = [tensor.shape for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)
        return freed

    def wake(self) -> None:
        """Allocates what ``sleep`` freed; nothing of it if torch raises for lack of memory."""
        if not self._freed_shapes:
            return
        owned = list(self._owned())
        taken = [
            tensor.new_zeros(shape) for tensor, shape in zip(owned, self._freed_shapes, strict=True)
        ]
        for source, target in zip(self._backup or [], taken, strict=False):
            target.copy_(source)
        for tensor, memory in zip(owned, taken, strict=True):
            tensor.data = memory
        self._backup = None
        self._freed_shapes = []
        self._serving = self._unaliased(checkpoint_tensors(self._hf))

    def reload(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over all tensors of another copy of the model."""
        self.replace({name: tensors[name] for name in self._serving})

    def _target(self, name: str) -> Tensor:
        if not self._serving:
            raise EngineError("the weights' memory is freed: wake the engine up first")
        if name not in self._serving:
            raise EngineError(f"{name} is not a tensor of this model, or an alias of one")
        return self._serving[name]

    def _unaliased(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {spec.name: tensors[spec.name] for spec in self.specs if spec.alias_of is None}

    def _owned(self) -> Iterator[Tensor]:
        """Each tensor of the model once, as the model itself holds it."""
        return iter({id(t): t for t in self._hf.state_dict(keep_vars=True).values()}.values())


def allocate_staging(targets: Mapping[str, Tensor], staging: Staging) -> dict[str, Tensor]:
    """An uninitialized tensor like each of ``targets``, laid out as in an update's buckets."""
    needed = sum(target.nbytes for target in targets.values())

    def allocate(where: str, max_bytes: float = math.inf, **options: Any) -> dict[str, Tensor]:
        with allocating(
            f"an update of {needed >> 20} MiB cannot be staged {where}",
            "start the server with another --staging, or give it more memory",
        ):
            return allocate_slabs(targets, max_bytes, **options)

    device = next((target.device for target in targets.values() if target.is_cuda), None)
    if device is None:
        return allocate("in host memory")
    if staging != "host":
        try:
            return allocate("on the device", device=device)
        except NoMemoryError:
            torch.cuda.empty_cache()
            if staging == "device":
                raise
    return allocate("in pinned host memory", PINNED_BYTES, pin_memory=True)


def allocate_slabs(
    targets: Mapping[str, Tensor], max_bytes: float, **options: Any
) -> dict[str, Tensor]:
    """Tensors in as few allocations of up to ``max_bytes`` as possible, with torch's ``options``; a
    larger tensor has one of its own.
    """
    slabs: list[list[transport.TensorSpec]] = [[]]
    size = 0
    for name, target in targets.items():
        if slabs[-1] and size + target.nbytes > max_bytes:
            slabs.append([])
            size = 0
        slabs[-1].append(transport.describe(name, target))
        size += transport.padded_nbytes(target.nbytes)
    staged: dict[str, Tensor] = {}
    for slab in slabs:
        memory = torch.empty(transport.packed_nbytes(slab), dtype=torch.uint8, **options)
        staged |= transport.packed_views(slab, memory)
    return staged
