"""What a trainer publishes: a mapping of tensors, or a function that gives them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from rollwire_client._errors import SchemaMismatchError

# A function in place of a tensor is called when the tensor is needed.
TensorOrFunction = torch.Tensor | Callable[[], torch.Tensor]
TensorSource = Callable[[], Iterable[tuple[str, TensorOrFunction]]]


def check_tensors(tensors: Mapping[str, torch.Tensor] | TensorSource) -> None:
    """Raises SchemaMismatchError unless these are tensors by name, or a callable."""
    if isinstance(tensors, torch.nn.Module):  # which is callable, for something else
        raise SchemaMismatchError(
            f"nothing was sent: a {type(tensors).__name__} is a model, not its tensors: "
            "publish(version, model.state_dict())"
        )
    if callable(tensors):
        return
    if not isinstance(tensors, Mapping):
        raise SchemaMismatchError(
            f"nothing was sent: a {type(tensors).__name__} is neither a mapping of names to "
            "tensors nor a function that gives an iterator of (name, tensor)"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise SchemaMismatchError(
                f"nothing was sent: {name}: a {type(tensor).__name__} is not a torch tensor"
            )


def device_of(tensors: Mapping[str, torch.Tensor] | TensorSource) -> torch.device | None:
    """Where tensors lie; for a callable, the CUDA device that this thread uses is assumed."""
    if not callable(tensors):
        return next((tensor.device for tensor in tensors.values()), None)
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())
