"""Puts weights in place inside SGLang's scheduler processes; SGLang calls ``load`` by its name.

A command is JSON in the place of a tensor's name. Each process answers with a line of JSON, in a
memory file that the command names. The weights themselves lie in staging memory.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwire_server.engines.loading import (
    UntraceableLoadError,
    digests_of,
    fingerprinter,
    grouped_copy,
    trace_load,
)
from rollwire_server.engines.memory import (
    PinnedMemory,
    StagingLayout,
    TensorPlacement,
    copy_tensors,
    open_parts,
    tensor_views,
)
from rollwire_server.engines.sglang.processes import append
from rollwire_server.engines.sglang.weights import read_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from rollwire_server.engines.loading import CopyPlan

WARM_UP_COPIES = 8
CPU = torch.device("cpu")


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Executes one command; answers with an error instead of raising."""
    command: dict[str, Any] = json.loads(named_tensors[0][0])
    if (loader := _loaders.get(model)) is None:
        loader = _loaders[model] = WeightLoader(model)
    loader.touched = False
    answer: dict[str, Any] = {"rank": _rank(), "error": None}
    try:
        _synchronize()  # running steps still read the weights
        with torch.no_grad():
            answer |= loader.execute(command) or {}
    except Exception as error:  # the server decides what follows from it
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["touched"] = loader.touched
    with contextlib.suppress(OSError):  # the server no longer waits for the answer
        append(command["answers"], f"{json.dumps(answer)}\n")


class WeightLoader:
    """Loads weights into the model of one process."""

    def __init__(self, model: nn.Module) -> None:
        self.touched = False  # whether the command under way has begun to change weights
        self._model = model
        self._plan: CopyPlan | None = None
        self._parts: list[dict[str, Any]] = []
        self._memories: list[Tensor] = []
        self._pinned: list[PinnedMemory] = []
        self._opened: dict[str, Tensor] = {}
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._fingerprint = fingerprinter(model)
        self._committed = self._fingerprint()

    def execute(self, command: dict[str, Any]) -> dict[str, Any] | None:
        match command["do"]:
            case "trace":  # where the tensors of updates go
                return self._trace(command["tensors"])
            case "open":  # staging memory, and the tensors of an update in it
                return self._open(*command["staged"])
            case "close":
                self._close()
            case "apply":  # the tensors that are open
                return self._apply()
            case "reload":  # the tensors of a checkpoint folder
                self._change(read_tensors(Path(command["folder"])))
            case "compare":  # the memory with the weights that were applied last
                now, then = digests_of(self._fingerprint()), digests_of(self._committed)
                return {"changed": sorted(n for n in now if now[n] != then.get(n))}
            case unknown:
                raise ValueError(f"no such command: {unknown}")
        return None

    def _trace(self, tensors: list[tuple[str, str, list[int]]]) -> dict[str, Any]:
        try:
            self._plan = trace_load(self._model, tensors)
        except UntraceableLoadError as error:
            return {"untraceable": f"each commit loads tensor by tensor: {error}"}
        # The first grouped copy of a process is slow. It runs here, not in the first commit.
        targets = [copy.target for copies in self._plan.values() for copy in copies]
        small = sorted(targets, key=lambda target: target.numel())[:WARM_UP_COPIES]
        copy_tensors([torch.empty_like(target) for target in small], small)
        return {"untraceable": None}

    def _open(self, parts: list[dict[str, Any]], places: list[list[Any]]) -> dict[str, Any]:
        layout = StagingLayout(parts, [TensorPlacement(*place) for place in places])
        if layout.parts != self._parts:
            self._close()
            self._memories = open_parts(layout.parts, _rank())
            self._parts = layout.parts
            device = next((parameter.device for parameter in self._model.parameters()), CPU)
            self._pinned = [PinnedMemory(memory, device) for memory in self._memories]
        self._opened = tensor_views(layout, self._memories)
        if self._plan is not None:
            self._copies = grouped_copy(self._plan, self._opened)
        return {"pin_error": next((pinned.error for pinned in self._pinned if pinned.error), None)}

    def _close(self) -> None:
        memories, pinned = self._memories, self._pinned
        self._opened, self._copies = {}, ([], [])
        self._pinned, self._memories, self._parts = [], [], []
        for memory in pinned:
            memory.release()
        del memories  # only after they are unpinned

    def _apply(self) -> dict[str, Any]:
        if not self._opened:  # the old weights would serve under the new version
            raise RuntimeError("no staged memory is open here")
        began = time.perf_counter()
        if self._plan is None:
            self._change(self._opened.items())
            return {"copied_ms": _ms(began), "fingerprint_ms": 0.0}
        self.touched = True
        copy_tensors(*self._copies)
        _synchronize()
        copied = time.perf_counter()
        self._committed = self._fingerprint()
        return {"copied_ms": round((copied - began) * 1e3, 1), "fingerprint_ms": _ms(copied)}

    def _change(self, tensors: Any) -> None:
        self.touched = True
        self._model.load_weights(tensors)  # type: ignore[operator]  # as SGLang's models have it
        _synchronize()
        self._committed = self._fingerprint()


def _ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1e3, 1)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


_loaders: dict[nn.Module, WeightLoader] = {}
