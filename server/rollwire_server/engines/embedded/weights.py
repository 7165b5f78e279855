"""The weights that serve: their schema and digests, how an update replaces them, how they sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire.types import SleepingWeights
from rollwire_transport import describe_all, tensor_digests

from rollwire_server.engines.allocating import allocating
from rollwire_server.engines.base import EngineError, TornWeightsError
from rollwire_server.engines.embedded.staging import StagingPlace, memory_like
from rollwire_server.engines.embedded.tensors import checkpoint_tensors
from rollwire_server.engines.grouped_copy import copy_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor
    from transformers import PreTrainedModel


class Weights:
    """A model's parameters and persistent buffers, as its checkpoint names them.

    Of tensors that share memory the first name counts; the others are its aliases.

    Attributes:
        whole: They are those of one policy. If not, only a full update cures it.
    """

    def __init__(self, hf: PreTrainedModel, place: StagingPlace = StagingPlace.AUTO) -> None:
        self._hf = hf
        self._place = place
        tensors = checkpoint_tensors(hf)
        self._specs = describe_all(tensors)
        self._serving = {s.name: tensors[s.name] for s in self._specs if s.alias_of is None}
        self._backup: list[Tensor] | None = None
        self._shapes: list[torch.Size] = []
        self.whole = True

    def schema(self) -> list[TensorSpec]:
        """All tensors, aliases included."""
        return list(self._specs)

    @property
    def nbytes(self) -> int:
        """Of the memory that serves; what a full update takes."""
        return sum(tensor.nbytes for tensor in self._serving.values())

    def digests(self) -> dict[str, int]:
        """The digest of each tensor, aliases left out, of the memory that serves."""
        sent = [spec for spec in self._specs if spec.alias_of is None]
        return tensor_digests(sent, {spec.name: self._target(spec.name) for spec in sent})

    def stage(self, manifest: Manifest) -> dict[str, Tensor]:
        """Memory beside the serving weights for what a manifest sends."""
        sent = [spec.name for spec in manifest.tensors if spec.alias_of is None]
        return memory_like({name: self._target(name) for name in sent}, self._place)

    def replace(self, staged: Mapping[str, Tensor]) -> None:
        """Copies staged tensors over the serving ones, all or none of them.

        Raises EngineError when they do not fit, before anything is touched, and TornWeightsError
        when the copy itself failed.
        """
        targets = [self._target(name) for name in staged]
        sources = list(staged.values())
        for name, target, source in zip(staged, targets, sources, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype:
                raise EngineError(
                    f"{name} is staged as {source.dtype} {tuple(source.shape)}, and served as "
                    f"{target.dtype} {tuple(target.shape)}"
                )
        if not self.whole and (missing := self._serving.keys() - staged.keys()):
            raise EngineError(
                f"the weights are discarded or torn, and the update lacks {len(missing)} of "
                f"{len(self._serving)} tensors: send a full one"
            )
        self.whole = False
        try:
            with torch.no_grad():
                copy_all(targets, sources)
                for device in {target.device for target in targets if target.is_cuda}:
                    torch.cuda.synchronize(device)
        except Exception as error:
            raise TornWeightsError(f"copying staged weights into place failed: {error}") from error
        self.whole = True

    def sleep(self, how: SleepingWeights) -> int:
        """Frees the weights' memory as asked; returns its bytes.

        Raises EngineError, with nothing freed, when the host has no memory for a backup.
        """
        tensors = list(self._owned())
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        if how is SleepingWeights.KEEP or (how is SleepingWeights.HOST_BACKUP and on_host):
            return 0
        freed = sum(tensor.nbytes for tensor in tensors)
        if how is SleepingWeights.HOST_BACKUP:
            with allocating(
                f"{freed >> 20} MiB of weights cannot be kept in pinned host memory",
                "leave the server more of it, or let it sleep with weights KEEP or DISCARD",
            ):
                self._backup = [tensor.detach().to("cpu").pin_memory() for tensor in tensors]
        else:
            self.whole = False
        self._serving.clear()
        self._shapes = [tensor.shape for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)
        return freed

    def wake(self) -> None:
        """Takes the memory back that ``sleep`` freed, and the weights if there is a backup.

        Raises what torch raises when there is none, with nothing taken.
        """
        if not self._shapes:
            return
        owned = list(self._owned())
        taken = [tensor.new_zeros(shape) for tensor, shape in zip(owned, self._shapes, strict=True)]
        for source, target in zip(self._backup or [], taken, strict=False):
            target.copy_(source)
        for tensor, memory in zip(owned, taken, strict=True):
            tensor.data = memory
        self._backup = None
        self._shapes = []
        tensors = checkpoint_tensors(self._hf)
        self._serving = {s.name: tensors[s.name] for s in self._specs if s.alias_of is None}

    def reload(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over all of another model's tensors, named as these."""
        self.replace({name: tensors[name] for name in self._serving})

    def _target(self, name: str) -> Tensor:
        if not self._serving:
            raise EngineError("the weights' memory is given back: wake the engine up first")
        if name not in self._serving:
            raise EngineError(f"{name} is not a tensor of this model, or an alias of one")
        return self._serving[name]

    def _owned(self) -> Iterator[Tensor]:
        """Each tensor of the model once, as the model itself holds it."""
        return iter({id(t): t for t in self._hf.state_dict(keep_vars=True).values()}.values())
