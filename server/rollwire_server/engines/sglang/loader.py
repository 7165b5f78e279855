"""Puts weights in place inside SGLang's scheduler processes; SGLang calls ``load`` by its name.

A command is JSON in the place of a tensor's name; the answer of each process is a file of JSON in a
folder that the command names. The weights themselves lie in shared memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rollwire_transport import describe, tensor_digest

from .checkpoint import read_tensors
from .shared_memory import Layout, views

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Obeys one command; says how it went instead of raising.

    "put": staged tensors in place. "reload": those of a checkpoint folder. "look": nothing. All of
    them end with the fingerprint of what the process holds then.
    """
    command: dict[str, Any] = json.loads(named_tensors[0][0])
    answer: dict[str, Any] = {"touched": False, "error": None, "fingerprint": {}}
    try:
        if command["do"] == "put":
            tensors: Iterable[tuple[str, Tensor]] = views(Layout(**command["staged"])).items()
        elif command["do"] == "reload":
            tensors = read_tensors(Path(command["folder"]))
        else:
            tensors = ()
        # What the last steps read must not change under them.
        _finish_what_runs()
        if command["do"] != "look":
            answer["touched"] = True
            with torch.no_grad():
                model.load_weights(tensors)  # type: ignore[operator]  # as SGLang's models have it
            _finish_what_runs()
        answer["fingerprint"] = fingerprint(model)
    except Exception as error:  # the server decides what follows from it
        answer["error"] = f"{type(error).__name__}: {error}"
    Path(command["answers"], f"{_rank()}.json").write_text(json.dumps(answer))


def fingerprint(model: nn.Module) -> dict[str, int]:
    """The digest of each parameter and persistent buffer as it lies in memory, however fused."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: tensor_digest(describe(name, t), t) for name, t in tensors.items()}


def _finish_what_runs() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
