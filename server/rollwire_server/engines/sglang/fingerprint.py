"""Whether memory is still what it was."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from rollwire_transport import describe
from rollwire_transport.digest import digest_of_sum, tensor_sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import TensorSpec
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


class Fingerprints:
    """Of a model whose parameters and persistent buffers stay where they are, however fused."""

    def __init__(self, model: nn.Module) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach()
        self._parts = [
            _OnDevice(tensors) if device.type == "cuda" else _Part(tensors)
            for device, tensors in by_device.items()
        ]

    def begin(self) -> Fingerprint:
        """Of what is there now; on a device, computed beside what comes next there."""
        return Fingerprint([(part.specs, part.sums()) for part in self._parts])


class Fingerprint:
    """The digest of each tensor at one moment."""

    def __init__(self, begun: list[tuple[list[TensorSpec], Tensor]]) -> None:
        self._begun = begun
        self._digests: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """By name; waits until they are known."""
        for specs, sums in self._begun:
            if sums.is_cuda:
                torch.cuda.synchronize(sums.device)
            for spec, total in zip(specs, sums.tolist(), strict=True):
                self._digests[spec.name] = digest_of_sum(spec, total)
        self._begun = []
        return self._digests


class _Part:
    """The tensors of one device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.specs = [describe(name, tensor) for name, tensor in tensors.items()]
        self._tensors = list(tensors.values())

    def sums(self) -> Tensor:
        """The sum of each."""
        return tensor_sums(self._tensors)


class _OnDevice(_Part):
    """Recorded once as a graph: hundreds of launches would take longer than what they do."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._device = self._tensors[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.cuda.stream(self._stream):
            tensor_sums(self._tensors)  # compiles
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, stream=self._stream, capture_error_mode="thread_local"
                ):
                    self._sums = tensor_sums(self._tensors)
                self._graph = graph
            except RuntimeError as error:
                logger.warning("fingerprints are launched one by one: %s", error)
        torch.cuda.synchronize(self._device)

    def sums(self) -> Tensor:
        """See ``_Part``; known once what was begun beside is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if self._graph is None:
                return super().sums()
            self._graph.replay()
            return self._sums.clone()
