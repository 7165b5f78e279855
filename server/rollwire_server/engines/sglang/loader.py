"""Puts weights in place inside SGLang's scheduler processes; SGLang calls ``load`` by its name.

A command is JSON in the place of a tensor's name. Each process answers with a line of JSON, in a
memory file that the command names. The weights themselves lie in staging memory.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rollwire_transport import (
    ManifestError,
    PublishedCopy,
    ReceivedDelta,
    TensorSpec,
    describe_all,
    plan,
)
from rollwire_transport._manifest import nbytes
from torch.autograd.graph import increment_version

from rollwire_server.engines.loading import (
    UntraceableLoadError,
    can_gather,
    digests_of,
    fingerprinter,
    gather,
    grouped_copy,
    tensor_in_place,
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
from rollwire_server.engines.sglang.weights import manifest_from_json, read_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from rollwire_server.engines.loading import CopyPlan

WARM_UP_COPIES = 8
BESIDE_STEPS = ("prepare",)  # commands that change nothing, on a stream of their own
GATHERED_BYTES = 256 << 20  # most that a delta takes of tensors that do not lie in one piece
CPU = torch.device("cpu")


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Executes one command; answers with an error instead of raising."""
    command: dict[str, Any] = json.loads(named_tensors[0][0])
    if (loader := _loaders.get(model)) is None:
        loader = _loaders[model] = WeightLoader(model)
    loader.touched = False
    answer: dict[str, Any] = {"rank": _rank(), "error": None}
    try:
        if command["do"] not in BESIDE_STEPS:
            _synchronize()  # running steps still read the weights
        with torch.no_grad():
            answer |= loader.execute(command) or {}
    except Exception as error:  # the server decides what follows from it
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["no_memory"] = isinstance(error, MemoryError | torch.OutOfMemoryError)
    answer["touched"] = loader.touched
    with contextlib.suppress(OSError):  # the server no longer waits for the answer
        append(command["answers"], f"{json.dumps(answer)}\n")


class _ReadyDelta(NamedTuple):
    number: int
    delta: ReceivedDelta
    copies: tuple[list[Tensor], list[Tensor]]  # of the tensors that were gathered for it

    def apply(self) -> None:
        self.delta.apply()
        copy_tensors(*self.copies)


class WeightLoader:
    """Loads weights into the model of one process."""

    def __init__(self, model: nn.Module) -> None:
        self.touched = False  # whether the command under way has begun to change weights
        self._model = model
        self._device = next((parameter.device for parameter in model.parameters()), CPU)
        self._stream = _side_stream(self._device)
        self._plan: CopyPlan | None = None
        self._in_place: dict[str, Tensor] = {}  # the tensors of updates, where they serve
        self._prepared: _ReadyDelta | None = None
        self._parts: list[dict[str, Any]] = []
        self._memories: list[Tensor] = []
        self._pinned: list[PinnedMemory] = []
        self._opened: dict[str, Tensor] = {}
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._versioned = [*model.parameters(), *model.buffers()]
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
            case "prepare":  # a delta in staging memory
                return self._prepare(command)
            case "apply_delta":  # the one that was prepared last
                return self._apply_delta(command["number"])
            case "reload":  # the tensors of a checkpoint folder
                tensors = read_tensors(Path(command["folder"]))
                self._change(lambda: self._load(tensors))
            case "compare":  # the memory with the weights that were applied last
                now, then = digests_of(self._fingerprint()), digests_of(self._committed)
                return {"changed": sorted(n for n in now if now[n] != then.get(n))}
            case unknown:
                raise ValueError(f"no such command: {unknown}")
        return None

    def _trace(self, tensors: list[tuple[str, str, list[int]]]) -> dict[str, Any]:
        """Answers why there is no plan, and which tensor is the first that deltas cannot reach."""
        first = tensors[0][0] if tensors else None
        try:
            self._plan = trace_load(self._model, tensors)
        except UntraceableLoadError as error:
            why = f"each commit loads tensor by tensor: {error}"
            return {"untraceable": why, "out_of_reach": first}
        out_of_reach, room = None, GATHERED_BYTES
        for name, dtype, shape in tensors:
            spec = TensorSpec(name, dtype, tuple(shape))
            if (tensor := tensor_in_place(self._plan[name], spec)) is not None:
                self._in_place[name] = tensor
                continue
            room -= nbytes(spec)
            if room < 0 or not can_gather(self._plan[name], spec):
                out_of_reach = out_of_reach or name
        # The first grouped copy of a process is slow, and so is its first delta, for which kernels
        # are compiled. They run here, not in the first commit or beside decoding.
        targets = [copy.target for copies in self._plan.values() for copy in copies]
        small = sorted(targets, key=lambda target: target.numel())[:WARM_UP_COPIES]
        copy_tensors([torch.empty_like(target) for target in small], small)
        if out_of_reach is None:
            _take_some_delta(self._device)
        return {"untraceable": None, "out_of_reach": out_of_reach}

    def _open(self, parts: list[dict[str, Any]], places: list[list[Any]]) -> dict[str, Any]:
        self._opened = self._staged(parts, places)
        if self._plan is not None:
            self._copies = grouped_copy(self._plan, self._opened)
        return {"pin_error": next((pinned.error for pinned in self._pinned if pinned.error), None)}

    def _staged(self, parts: list[dict[str, Any]], places: list[list[Any]]) -> dict[str, Tensor]:
        """Tensors in staging memory, which is opened unless it is open."""
        if parts != self._parts:
            self._close()
            self._memories = open_parts(parts, _rank())
            self._parts = parts
            self._pinned = [PinnedMemory(memory, self._device) for memory in self._memories]
        layout = StagingLayout(parts, [TensorPlacement(*place) for place in places])
        return tensor_views(layout, self._memories)

    def _close(self) -> None:
        memories, pinned = self._memories, self._pinned
        self._opened, self._copies, self._prepared = {}, ([], []), None
        self._pinned, self._memories, self._parts = [], [], []
        for memory in pinned:
            memory.release()
        del memories  # only after they are unpinned

    def _apply(self) -> dict[str, Any]:
        if not self._opened:  # the old weights would serve under the new version
            raise RuntimeError("no staged memory is open here")
        if self._plan is None:
            return self._change(lambda: self._load(self._opened.items()))
        return self._change(lambda: copy_tensors(*self._copies))

    def _prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        self._prepared = None  # its memory comes first
        staged = self._staged(*command["staged"])
        manifest = manifest_from_json(command["manifest"])
        plan = self._plan or {}
        with torch.cuda.stream(self._stream):  # None: nothing happens
            deltas = {n: t.to(self._device, non_blocking=True) for n, t in staged.items()}
            gathered = {
                spec.name: gather(plan[spec.name], spec)
                for spec in manifest.tensors
                if spec.alias_of is None and spec.name not in self._in_place
            }
            try:
                delta = ReceivedDelta(manifest, deltas, {**self._in_place, **gathered})
                digests = delta.digests(command["before"])
            except ManifestError as error:
                return {"problems": error.problems}
        if self._stream is not None:
            self._stream.synchronize()
        self._prepared = _ReadyDelta(command["number"], delta, grouped_copy(plan, gathered))
        return {"problems": [], "digests": digests, "prepared_ms": _ms(began)}

    def _apply_delta(self, number: int) -> dict[str, Any]:
        if self._prepared is None or self._prepared.number != number:
            raise RuntimeError(
                "the weights have changed since the delta was prepared: publish in full encoding"
            )
        return self._change(self._prepared.apply)

    def _load(self, tensors: Any) -> None:
        self._model.load_weights(tensors)  # type: ignore[operator]  # as SGLang's models have it

    def _change(self, change: Callable[[], None]) -> dict[str, Any]:
        began = time.perf_counter()
        self.touched = True
        try:
            change()
            _synchronize()
        finally:
            self._prepared = None  # it was made for the weights as they were
        changed = time.perf_counter()
        # SGLang keeps some of what it derives from weights, by their version.
        increment_version(self._versioned)
        self._committed = self._fingerprint()
        return {"copied_ms": round((changed - began) * 1e3, 1), "fingerprint_ms": _ms(changed)}


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _take_some_delta(device: torch.device) -> None:
    tensors = {"all": torch.zeros(4096, dtype=torch.int16, device=device)}
    manifest = plan(describe_all(tensors))
    copy = PublishedCopy(device)
    before = copy.take(manifest, tensors.items, device=device)
    tensors["all"][7] = 1
    after = copy.take(manifest, tensors.items, device=device)
    if (sent := after.delta) is not None:
        deltas = {n: t if isinstance(t, torch.Tensor) else t() for n, t in sent.tensors.items()}
        delta = ReceivedDelta(sent.manifest, deltas, {"all": torch.zeros_like(tensors["all"])})
        delta.digests(before.digests)
        delta.apply()


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
