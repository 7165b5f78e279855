"""The tensors of a checkpoint folder, for a publish."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollwire_client._errors import MissingDependencyError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor


@contextlib.contextmanager
def open_checkpoint(folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """The tensors of all safetensors files in a folder, each read when it is asked for.

    Raises:
        SourceError: There are none, or a file cannot be read.
        MissingDependencyError: safetensors or torch is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a checkpoint needs {error.name}: pip install 'rollwire[server]'"
        ) from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SourceError(f"{folder} has no .safetensors files: it is not a checkpoint folder")
    with contextlib.ExitStack() as stack:
        file_of: dict[str, Any] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise SourceError(f"{path} cannot be read: {error}") from error
            file_of |= dict.fromkeys(file.keys(), file)
        yield _LazyTensors(file_of)


class _LazyTensors(Mapping[str, "Tensor"]):
    def __init__(self, file_of: dict[str, Any]) -> None:
        self._file_of = file_of

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
