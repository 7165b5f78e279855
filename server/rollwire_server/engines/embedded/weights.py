"""The tensors of a model by name: their schema, their digests, and how an update replaces them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire_transport import describe_all, tensor_digest

from rollwire_server.engines.base import EngineError, TornWeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor, nn


class Weights:
    """A model's parameters and persistent buffers, as its state dict names them.

    Of tensors that share memory the first name counts; the others are its aliases.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = model.state_dict(keep_vars=True)
        self._specs = describe_all(tensors)
        self._tensors = {s.name: tensors[s.name] for s in self._specs if s.alias_of is None}

    def schema(self) -> list[TensorSpec]:
        """All tensors, aliases included."""
        return list(self._specs)

    def digests(self) -> dict[str, int]:
        """The digest of each tensor, aliases left out, of the memory that serves."""
        return {
            spec.name: tensor_digest(spec, self._tensors[spec.name].detach())
            for spec in self._specs
            if spec.alias_of is None
        }

    def stage(self, manifest: Manifest) -> dict[str, Tensor]:
        """Memory beside the serving weights for what a manifest sends."""
        staged = {}
        for spec in manifest.tensors:
            if spec.alias_of is None:
                serving = self._serving(spec.name)
                staged[spec.name] = torch.empty(
                    spec.shape, dtype=getattr(torch, spec.dtype), device=serving.device
                )
        return staged

    def replace(self, staged: Mapping[str, Tensor]) -> None:
        """Copies staged tensors over the serving ones, all or none of them.

        Raises EngineError when they do not fit, before anything is touched, and TornWeightsError
        when the copy itself failed.
        """
        targets = [self._serving(name) for name in staged]
        sources = list(staged.values())
        for name, target, source in zip(staged, targets, sources, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype:
                raise EngineError(
                    f"{name} is staged as {source.dtype} {tuple(source.shape)}, and served as "
                    f"{target.dtype} {tuple(target.shape)}"
                )
        if not targets:
            raise EngineError("nothing is staged")
        try:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
                if targets[0].is_cuda:
                    torch.cuda.synchronize(targets[0].device)
        except Exception as error:
            raise TornWeightsError(f"copying staged weights into place failed: {error}") from error

    def _serving(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise EngineError(f"{name} is not a tensor of this model, or an alias of one")
        return self._tensors[name]
