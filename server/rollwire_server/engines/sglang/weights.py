"""The weights of SGLang: read from a checkpoint, staged, put in place, verified.

SGLang fuses and shards what it loads, so its memory cannot be compared with a checkpoint. Each
process takes a fingerprint of its memory right after a commit, and compares with that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rollwire_transport import (
    Bucket,
    Manifest,
    ManifestError,
    Span,
    TensorSpec,
    describe,
    free_memory,
    sum_digests,
    tensor_digest,
)
from rollwire_transport._delta import full_size
from rollwire_transport._manifest import nbytes

from rollwire_server.engines.base import (
    ChangedWeightsError,
    EngineError,
    NoMemoryError,
    PreparedDelta,
    TornWeightsError,
)
from rollwire_server.engines.deltas import staged_specs
from rollwire_server.engines.memory import StagedTensors, allocate_on_devices, allocate_on_host
from rollwire_server.engines.sglang.processes import MemoryFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from rollwire_server.engines.base import StagedUpdate
    from rollwire_server.engines.memory import StagingLayout, StagingMemory
    from rollwire_server.engines.sglang.bridge import Bridge
    from rollwire_server.engines.sglang.launch import SglangInfo

logger = logging.getLogger(__name__)

# Commands, by what can go wrong and how long they may take.
CHANGING = ("apply", "apply_delta", "reload")
READING = ("trace", "reload")
READING_SECONDS = 600.0  # a large checkpoint takes minutes
SLOWEST_BYTES_A_SECOND = 1 << 29  # of the other commands, which pin, copy, load or compare

DELTA_FACTOR = 4
"""A delta takes up to so many times its size as it is read: positions, and bits in one piece."""
BESIDE_DELTA = 1 << 30
"""Device memory that is left to SGLang's steps."""

INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class _Prepared(NamedTuple):
    """A delta that SGLang's process has read. It refers to the staged memory."""

    number: int
    staged: Mapping[str, Tensor]


class SglangWeights:
    """The weights of one started SGLang."""

    def __init__(
        self, bridge: Bridge, info: SglangInfo, folder: Path, device: torch.device
    ) -> None:
        self._bridge = bridge
        self.info = info
        self._folder = folder
        self._device = device
        self._digests: dict[str, int] = {}
        self._on_devices: Sequence[torch.device] = ()
        self._memory: StagingMemory | None = None
        self._opened: StagingLayout | None = None  # by the processes
        self.specs: list[TensorSpec] = []
        self.nbytes = 0  # of a full update
        self.intact = True  # all of one policy; if not, only a full update helps
        self.takes_deltas = False
        self._prepared = 0  # deltas, so far
        self._kept_for_deltas = 0  # device memory that SGLang's process has taken for the largest

    @property
    def staged_on_devices(self) -> bool:
        return bool(self._on_devices)

    async def read(self) -> int:
        """Reads the checkpoint, and prepares SGLang's processes for commits; returns its digest."""
        self.specs, self._digests = await self._describe()
        self.nbytes = sum(nbytes(spec) for spec in self._sent())
        tensors = [(s.name, s.dtype, s.shape) for s in self._sent()]
        for answer in await self._command("trace", tensors=tensors):
            if answer["untraceable"] is not None:
                logger.warning(answer["untraceable"])
            if self.info.ranks > 1:
                logger.info("deltas are not accepted: SGLang's processes share the weights")
            elif (name := answer["out_of_reach"]) is not None:
                logger.info("deltas are not accepted: SGLang does not hold %s as it is sent", name)
            else:
                self.takes_deltas = True
        return sum_digests(self._digests.values())

    async def allocate_staging(self, devices: Sequence[torch.device] = ()) -> StagingMemory:
        """Allocates memory for updates, on ``devices`` or else on the host, and keeps it."""
        self._on_devices = devices
        await self.release_staging()
        memories: list[StagingMemory] = []  # a thread would keep its return value alive
        await asyncio.to_thread(lambda: memories.append(self._allocate()))
        memory = self._memory = memories.pop()
        answers = await self._open(memory.lend(self._sent()).layout)
        errors = [memory.pin_error, *(answer["pin_error"] for answer in answers)]
        if (error := next(filter(None, errors), None)) is not None:
            logger.warning(
                "staged updates cannot be page-locked (%s), so commits copy them at a fraction of "
                "a device's speed, and no token is sampled meanwhile: raise the limit of locked "
                "memory (ulimit -l unlimited; of a container LimitMEMLOCK=infinity of its runtime, "
                "or --ulimit memlock=-1), or leave room for --staging device",
                error,
            )
        return memory

    async def stage(self, specs: Sequence[TensorSpec]) -> StagedTensors:
        staged = (await self._unused_memory()).lend(specs)
        await self._open(staged.layout)
        return staged

    async def stage_delta(self, manifest: Manifest) -> StagedTensors:
        """Room for the deltas of its buckets, in the memory of full updates."""
        if not self.intact:
            raise EngineError("the weights are discarded or torn: send a full update, not a delta")
        self._check_room(manifest)
        return (await self._unused_memory()).lend(staged_specs(manifest))

    def _check_room(self, manifest: Manifest) -> None:
        """Raises NoMemoryError where a delta could take what SGLang's steps need."""
        if self._device.type != "cuda":
            return
        size = sum(bucket.size for bucket in manifest.buckets)
        changes = sum(bucket.size for bucket in manifest.buckets if bucket.size < full_size(bucket))
        needed = changes * DELTA_FACTOR + (0 if self.staged_on_devices else size)
        free = free_memory(self._device) + self._kept_for_deltas
        if needed + BESIDE_DELTA > free:
            raise NoMemoryError(
                f"a delta of {size >> 20} MiB needs {needed >> 20} MiB of the device, of which "
                f"SGLang leaves {free >> 20} MiB free: publish in full, or let it leave more with "
                "--engine-arg mem-fraction-static=…"
            )
        self._kept_for_deltas = max(self._kept_for_deltas, needed)

    async def _unused_memory(self) -> StagingMemory:
        if self._memory is not None and self._memory.in_use:
            logger.warning(
                "a transfer that failed may still write to the memory of updates, so new memory "
                "is allocated; work on the devices waits meanwhile"
            )
            await self.release_staging()
        return self._memory or await self.allocate_staging(self._on_devices)

    def _allocate(self) -> StagingMemory:
        if self._on_devices:
            return allocate_on_devices(self._on_devices, self._sent(), ranks=self.info.ranks)
        memory = allocate_on_host(self._sent())
        memory.pin(self._device)
        return memory

    async def _open(self, layout: StagingLayout) -> list[dict[str, Any]]:
        if layout == self._opened:
            return []
        self._opened = None
        answers = await self._command("open", staged=layout)
        self._opened = layout
        return answers

    async def release_staging(self) -> None:
        """Frees the memory here and in the processes, unless somebody still holds it."""
        self._opened = None
        if self._memory is not None:
            await self._command("close")
            self._memory = None
        if self._on_devices:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    async def prepare_delta(
        self, manifest: Manifest, staged: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> PreparedDelta:
        """Has SGLang's process read a staged delta; see ``Engine.prepare_delta``."""
        layout = self._layout_of(staged)
        self._prepared += 1
        (answer,) = await self._command(
            "prepare",
            number=self._prepared,
            staged=layout,
            manifest=manifest_to_json(manifest),
            before=before,
        )
        if answer["problems"]:
            raise ManifestError(answer["problems"])
        logger.info("a delta was prepared in %.1f ms", answer["prepared_ms"])
        return PreparedDelta(answer["digests"], _Prepared(self._prepared, staged))

    async def apply(self, update: StagedUpdate) -> None:
        """Puts an update in place; see ``Engine.commit`` for what it raises."""
        staged = update.tensors
        if not self.intact and (missing := self._digests.keys() - staged.keys()):
            raise EngineError(
                f"the weights are discarded or torn, and the update lacks {len(missing)} of "
                f"{len(self._digests)} tensors: send a full one"
            )
        if update.delta is not None:
            if not isinstance(prepared := update.delta.changes, _Prepared):
                raise EngineError("this delta was not prepared by this engine")
            answers = await self._replace("apply_delta", number=prepared.number)
        elif staged:
            await self._open(self._layout_of(staged))
            answers = await self._replace("apply")
        else:
            return
        for rank, answer in enumerate(answers):
            logger.info(
                "process %d put weights in place in %.1f ms, and began their fingerprint in %.1f",
                *(rank, answer["copied_ms"], answer["fingerprint_ms"]),
            )
        self._digests = {**self._digests, **update.digests}

    def _layout_of(self, staged: Mapping[str, Tensor]) -> StagingLayout:
        """Where tensors lie that ``stage`` returned and that are filled."""
        if not isinstance(staged, StagedTensors):
            raise EngineError("these tensors were not staged by this engine")
        for device in self._on_devices:  # received buckets may still be on their way there
            torch.cuda.synchronize(device)
        return staged.layout

    async def reload(self) -> None:
        await self._replace("reload", folder=str(self._folder))
        _, self._digests = await self._describe()

    async def digests(self) -> dict[str, int]:
        """The digest of each tensor; raises ChangedWeightsError if the memory has changed."""
        changed = {name for answer in await self._command("compare") for name in answer["changed"]}
        if changed:
            names = ", ".join(sorted(changed)[:3])
            raise ChangedWeightsError(f"the serving weights have changed: {names}")
        return dict(self._digests)

    def _sent(self) -> list[TensorSpec]:
        return [spec for spec in self.specs if spec.alias_of is None]

    async def _describe(self) -> tuple[list[TensorSpec], dict[str, int]]:
        return await asyncio.to_thread(
            describe_checkpoint, self._folder, self.info.dtype, self._device
        )

    async def _replace(self, do: str, **more: Any) -> list[dict[str, Any]]:
        before, self.intact = self.intact, False
        try:
            answers = await self._command(do, **more)
        except TornWeightsError:
            raise
        except EngineError:
            self.intact = before
            raise
        self.intact = True
        return answers

    async def _command(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Has every scheduler process execute a command; returns their answers.

        Raises TornWeightsError if it failed after weights may have been changed, else EngineError.
        """
        ranks, failure = self.info.ranks, ""
        seconds = READING_SECONDS if do in READING else self.nbytes / SLOWEST_BYTES_A_SECOND
        try:
            file = MemoryFile()
        except OSError as error:
            raise EngineError(f"no file for the answers of SGLang's processes: {error}") from error
        with contextlib.closing(file):
            command = json.dumps({"do": do, "answers": file.path, **more})
            try:
                await self._bridge.update(command, seconds)
            except EngineError as error:
                failure = str(error)
            answers = []
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError):  # of a process that was killed while it wrote
                    answers.append(json.loads(line))
        answers.sort(key=lambda answer: int(answer["rank"]))
        errors = [answer["error"] for answer in answers if answer["error"]]
        if not failure and not errors and len(answers) == ranks:
            return answers
        why = "; ".join(errors) or failure or f"{len(answers)} of {ranks} processes answered"
        touched = len(answers) < ranks or any(answer["touched"] for answer in answers)
        if do in CHANGING and touched:
            raise TornWeightsError(f"putting weights in place failed: {why}")
        no_memory = any(answer.get("no_memory") for answer in answers)
        kind = NoMemoryError if no_memory else EngineError
        raise kind(f"SGLang's processes could not execute: {why}")


def manifest_to_json(manifest: Manifest) -> list[Any]:
    """The tensors and buckets of a manifest."""
    return [[astuple(spec) for spec in manifest.tensors], [astuple(b) for b in manifest.buckets]]


def manifest_from_json(value: list[Any]) -> Manifest:
    tensors, buckets = value
    return Manifest(
        tuple(TensorSpec(name, dtype, tuple(shape), of) for name, dtype, shape, of in tensors),
        tuple(Bucket(size, tuple(Span(*s) for s in spans), n) for size, spans, n in buckets),
    )


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint's safetensors files, one after the other."""
    from safetensors import safe_open

    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                yield name, file.get_tensor(name)


def describe_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[list[TensorSpec], dict[str, int]]:
    """The tensors of a checkpoint in ``dtype``, and their digests, computed on ``device``."""
    specs: dict[str, TensorSpec] = {}
    digests: dict[str, int] = {}
    # Tied embeddings are an alias, whether the files contain them or not.
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    for name, stored in read_tensors(folder):
        if name == OUTPUT and tied:
            continue
        tensor = stored.to(device, dtype if stored.is_floating_point() else None)
        specs[name] = describe(name, tensor)
        digests[name] = tensor_digest(specs[name], tensor)
    if tied and INPUT in specs:
        of = specs[INPUT]
        specs[OUTPUT] = TensorSpec(OUTPUT, of.dtype, of.shape, alias_of=INPUT)
    return list(specs.values()), digests


def check_folder(folder: Path) -> None:
    """Raises EngineError with one line if this is not a checkpoint that SGLang can load."""
    if str(folder).startswith("builtin:"):
        raise EngineError(f"{folder} is a model of the embedded engine: SGLang takes a directory")
    if not folder.is_dir():
        raise EngineError(f"no model at {folder}: there is no such directory")
    if not (folder / "config.json").is_file():
        raise EngineError(f"no model at {folder}: it has no config.json")
    if not _files(folder):
        raise EngineError(f"no model at {folder}: it has no .safetensors files")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
