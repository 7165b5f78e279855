"""A model's weights: schema, digests, staging an update, replacing them, and their sleep."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Literal

import rollwire_transport as transport
import torch
from rollwire.types import SleepingWeights

from rollwire_server.engines import deltas
from rollwire_server.engines.base import (
    EngineError,
    NoMemoryError,
    TornWeightsError,
)
from rollwire_server.engines.embedded.checkpoint import checkpoint_tensors
from rollwire_server.engines.memory import allocating, copy_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from rollwire_server.engines.base import PreparedDelta

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
        self._generation = 0  # of the serving memory; a delta was prepared for one
        self.consistent = True  # all of one policy; if not, only a full update cures that

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._serving.values())

    def digests(self) -> dict[str, int]:
        """The digest of each tensor that serves, aliases left out."""
        specs = [spec for spec in self.specs if spec.alias_of is None]
        return transport.tensor_digests(specs, {s.name: self._target(s.name) for s in specs})

    @property
    def device(self) -> torch.device:
        device: torch.device = self._hf.device
        return device

    @property
    def takes_deltas(self) -> bool:
        """A delta is of the bytes of tensors, which must lie as they are sent."""
        return all(tensor.is_contiguous() for tensor in self._serving.values())

    def stage(self, manifest: transport.Manifest) -> dict[str, Tensor]:
        for spec in manifest.tensors:
            self._target(spec.alias_of or spec.name)
        return allocate_staging(deltas.staged_specs(manifest), self.device, self._staging)

    def prepare_delta(
        self, manifest: transport.Manifest, staged: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> PreparedDelta:
        """See ``Engine.prepare_delta``; for another thread than that which replaces weights."""
        sent = [spec.name for spec in manifest.tensors if spec.alias_of is None]
        with allocating(
            "a delta cannot be prepared",
            "publish in full encoding, or leave more device memory free",
        ):
            here = {n: d.to(self.device, non_blocking=True) for n, d in staged.items()}
            serving = {name: self._target(name) for name in sent}
            return deltas.prepare(manifest, here, serving, before, self._generation)

    def apply_delta(self, delta: PreparedDelta) -> None:
        """Puts a delta in place; see ``Engine.commit`` for what it raises."""
        received = deltas.prepared(delta, self._generation)
        if not self.consistent:
            raise EngineError("the weights are discarded or torn: send a full update")
        with self._replacing():
            received.apply()

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
        with self._replacing():
            copy_tensors(targets, sources)

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        self.consistent = False
        self._generation += 1
        try:
            with torch.no_grad():
                yield
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
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
        self._generation += 1
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


def allocate_staging(
    specs: Sequence[transport.TensorSpec], device: torch.device, staging: Staging
) -> dict[str, Tensor]:
    """Uninitialized tensors for the device of the weights, laid out as in an update's buckets."""
    needed = transport.packed_nbytes(specs)

    def allocate(where: str, max_bytes: float = math.inf, **options: Any) -> dict[str, Tensor]:
        with allocating(
            f"an update of {needed >> 20} MiB cannot be staged {where}",
            "start the server with another --staging, or give it more memory",
        ):
            return allocate_slabs(specs, max_bytes, **options)

    if device.type != "cuda":
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
    specs: Sequence[transport.TensorSpec], max_bytes: float, **options: Any
) -> dict[str, Tensor]:
    """Tensors in as few allocations of up to ``max_bytes`` as possible, with torch's ``options``; a
    larger tensor has one of its own.
    """
    slabs: list[list[transport.TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        padded = transport.packed_nbytes([spec])
        if slabs[-1] and size + padded > max_bytes:
            slabs.append([])
            size = 0
        slabs[-1].append(spec)
        size += padded
    staged: dict[str, Tensor] = {}
    for slab in slabs:
        memory = torch.empty(transport.packed_nbytes(slab), dtype=torch.uint8, **options)
        staged |= transport.packed_views(slab, memory)
    return staged
