"""Puts weights in place inside SGLang's scheduler processes; SGLang calls ``load`` by its name.

A command is JSON in the place of a tensor's name, and so is the answer of each process, in a note
that the command names. The weights themselves lie in shared memory.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwire_server.engines.loading.copy_plan import NoRecipeError, copies, learn
from rollwire_server.engines.loading.fingerprint import Fingerprints
from rollwire_server.engines.loading.page_lock import PageLock, pages_of
from rollwire_server.engines.loading.shared_memory import Layout, opened, views
from rollwire_server.engines.memory import copy_tensors
from rollwire_server.engines.sglang.checkpoint import read_tensors
from rollwire_server.engines.sglang.notes import write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from rollwire_server.engines.loading.copy_plan import Recipe

WARM_UP_PIECES = 8
CPU = torch.device("cpu")


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Obeys one command; says how it went instead of raising."""
    command: dict[str, Any] = json.loads(named_tensors[0][0])
    if (loader := _loaders.get(model)) is None:
        loader = _loaders[model] = Loader(model)
    loader.touched = False
    answer: dict[str, Any] = {"error": None}
    try:
        # What the last steps read must not change under them.
        _finish_what_runs()
        with torch.no_grad():
            answer |= loader.obey(command) or {}
    except Exception as error:  # the server decides what follows from it
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["touched"] = loader.touched
    with contextlib.suppress(OSError):  # nobody waits for the answer any more
        write(command["answers"][_rank()], json.dumps(answer))


class Loader:
    """The weights of one model, as one process has them.

    Attributes:
        touched: The command under way has begun to change them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.touched = False
        self._model = model
        self._recipe: Recipe | None = None
        self._parts: list[dict[str, Any]] = []
        self._memories: list[Tensor] = []
        self._locks: list[PageLock] = []
        self._opened: dict[str, Tensor] = {}
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._fingerprints = Fingerprints(model)
        self._committed = self._fingerprints.begin()

    def obey(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """One command, by its ``do``; returns what it has to say."""
        match command["do"]:
            case "learn":  # how the tensors of updates get in place
                return self._learn(command["tensors"])
            case "open":  # staged memory, and the tensors of an update in it
                return self._open(command["staged"])
            case "close":
                self._close()
            case "put":  # what is open in place
                return self._put()
            case "reload":  # those of a checkpoint folder
                self._change(read_tensors(Path(command["folder"])))
            case "compare":  # with the weights that were last put in place
                now, then = self._fingerprints.begin().read(), self._committed.read()
                return {"changed": sorted(n for n in now if now[n] != then.get(n))}
            case unknown:
                raise ValueError(f"no such command: {unknown}")
        return None

    def _learn(self, tensors: list[tuple[str, str, list[int]]]) -> dict[str, Any]:
        try:
            self._recipe = learn(self._model, tensors)
        except NoRecipeError as error:
            return {"recipe": f"each commit loads tensor by tensor: {error}"}
        # What the first grouped copy of a process takes is not for the first commit to wait for.
        pieces = [piece.target for some in self._recipe.values() for piece in some]
        small = sorted(pieces, key=lambda piece: piece.numel())[:WARM_UP_PIECES]
        copy_tensors([torch.empty_like(piece) for piece in small], small)
        return {"recipe": None}

    def _open(self, staged: dict[str, Any]) -> dict[str, Any]:
        layout = Layout.read(staged)
        if layout.parts != self._parts:
            self._close()
            self._memories = opened(layout.parts, _rank())
            self._parts = layout.parts
            device = next((parameter.device for parameter in self._model.parameters()), CPU)
            if (pages := pages_of(device)) is not None:
                on_host = [memory for memory in self._memories if not memory.is_cuda]
                self._locks = [PageLock(memory, pages) for memory in on_host]
        self._opened = views(layout, self._memories)
        if self._recipe is not None:
            self._copies = copies(self._recipe, self._opened)
        return {"lock_error": next((lock.error for lock in self._locks if lock.error), None)}

    def _close(self) -> None:
        memories, locks = self._memories, self._locks
        self._opened, self._copies = {}, ([], [])
        self._locks, self._memories, self._parts = [], [], []
        for lock in locks:
            lock.release()
        del memories  # after they are unlocked

    def _put(self) -> dict[str, Any]:
        if not self._opened:  # or else the former weights would serve under the new ones' name
            raise RuntimeError("no staged memory is open here")
        began = time.perf_counter()
        if self._recipe is None:
            self._change(self._opened.items())
            return {"copied_ms": _ms(began), "fingerprint_ms": 0.0}
        self.touched = True
        copy_tensors(*self._copies)
        _finish_what_runs()
        copied = time.perf_counter()
        self._committed = self._fingerprints.begin()
        return {"copied_ms": round((copied - began) * 1e3, 1), "fingerprint_ms": _ms(copied)}

    def _change(self, tensors: Any) -> None:
        self.touched = True
        self._model.load_weights(tensors)  # type: ignore[operator]  # as SGLang's models have it
        _finish_what_runs()
        self._committed = self._fingerprints.begin()


def _ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1e3, 1)


def _finish_what_runs() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


_loaders: dict[nn.Module, Loader] = {}
