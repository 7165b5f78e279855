"""The weights that serve: what updates bring, how they get in place, whether they are still those.

SGLang fuses and shards what it loads, so its memory cannot be compared with a checkpoint. It is
compared with itself: each process takes a fingerprint right after a commit, and keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import torch
from rollwire_transport import sum_digests
from rollwire_transport._tensors import nbytes

from rollwire_server.engines.base import ChangedWeightsError, EngineError, TornWeightsError
from rollwire_server.engines.loading.page_lock import pages_of
from rollwire_server.engines.loading.shared_memory import Staged, on_devices, on_host
from rollwire_server.engines.sglang.checkpoint import describe_checkpoint
from rollwire_server.engines.sglang.notes import Note

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollwire_transport import TensorSpec

    from rollwire_server.engines.base import StagedUpdate
    from rollwire_server.engines.loading.shared_memory import Layout, SharedMemory
    from rollwire_server.engines.sglang.bridge import Bridge
    from rollwire_server.engines.sglang.messages import Facts


logger = logging.getLogger(__name__)

CHANGE = ("put", "reload")
READ = ("learn", "reload")
READING_SECONDS = 600.0
"""A command that reads a large checkpoint takes minutes."""
SLOWEST = 1 << 29
"""Bytes a second that any other gets through: locked, copied, loaded one by one or compared."""


class Weights:
    """The weights of one started SGLang.

    Attributes:
        specs: The tensors that an update brings.
        nbytes: What a full update takes.
        whole: They are those of one policy. If not, only a full update cures it.
    """

    def __init__(self, bridge: Bridge, facts: Facts, folder: Path, device: torch.device) -> None:
        self._bridge = bridge
        self._facts = facts
        self._folder = folder
        self._device = device
        self._digests: dict[str, int] = {}
        self._on_devices: Sequence[torch.device] = ()
        self._memory: SharedMemory | None = None
        self._opened: Layout | None = None  # by the processes
        self.specs: list[TensorSpec] = []
        self.nbytes = 0
        self.whole = True

    @property
    def on_devices(self) -> bool:
        """Whether updates wait on devices for their commit."""
        return bool(self._on_devices)

    async def read(self) -> int:
        """Learns what the checkpoint holds, which SGLang has loaded; returns its digest.

        Warms up what commits use.
        """
        self.specs, self._digests = await self._describe()
        self.nbytes = sum(nbytes(spec) for spec in self._sent())
        tensors = [(s.name, s.dtype, s.shape) for s in self._sent()]
        for answer in await self._run("learn", tensors=tensors):
            if answer["recipe"] is not None:
                logger.warning(answer["recipe"])
        return sum_digests(self._digests.values())

    async def take_memory(self, devices: Sequence[torch.device] = ()) -> SharedMemory:
        """Takes memory for updates, on ``devices`` or else on the host, and keeps it.

        Raises NoMemoryError when there is no room for it.
        """
        self._on_devices = devices
        await self.let_go()
        memories: list[SharedMemory] = []  # what a thread returns it would hold on to
        await asyncio.to_thread(lambda: memories.append(self._take()))
        memory = self._memory = memories.pop()
        answers = await self._open(memory.lend(self._sent()).layout)
        errors = [memory.lock_error, *(answer["lock_error"] for answer in answers)]
        if (error := next(filter(None, errors), None)) is not None:
            logger.warning(
                "staged updates cannot be page-locked (%s), so commits copy them at a fraction of "
                "a device's speed, and no token is sampled meanwhile: raise the limit of locked "
                "memory (ulimit -l unlimited; of a container LimitMEMLOCK=infinity of its runtime, "
                "or --ulimit memlock=-1), or leave room for --staging device",
                error,
            )
        return memory

    async def stage(self, specs: Sequence[TensorSpec]) -> Staged:
        """Memory for an update, which the processes have open then."""
        if self._memory is not None and self._memory.lent:
            logger.warning(
                "a transfer that failed may still write to the memory of updates, so other "
                "memory is taken; what is asked of devices waits meanwhile"
            )
            await self.let_go()
        memory = self._memory or await self.take_memory(self._on_devices)
        staged = memory.lend(specs)
        await self._open(staged.layout)
        return staged

    def _take(self) -> SharedMemory:
        if self._on_devices:
            return on_devices(self._on_devices, self._sent(), ranks=self._facts.ranks)
        memory = on_host(self._sent())
        if (pages := pages_of(self._device)) is not None:
            memory.lock(pages)
        return memory

    async def _open(self, layout: Layout) -> list[dict[str, Any]]:
        if layout == self._opened:
            return []
        self._opened = None
        answers = await self._run("open", staged=layout.told())
        self._opened = layout
        return answers

    async def let_go(self) -> None:
        """Lets go of the memory, as far as nobody else holds it, and has the processes do so."""
        self._opened = None
        if self._memory is not None:
            await self._run("close")
            self._memory = None
        if self._on_devices:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    async def put(self, update: StagedUpdate) -> None:
        """Puts an update in place; see ``Engine.commit`` for what it raises."""
        staged = update.tensors
        if not self.whole and (missing := self._digests.keys() - staged.keys()):
            raise EngineError(
                f"the weights are discarded or torn, and the update lacks {len(missing)} of "
                f"{len(self._digests)} tensors: send a full one"
            )
        if not staged:
            return
        if not isinstance(staged, Staged):
            raise EngineError("these tensors were not staged by this engine")
        for device in self._on_devices:  # what was received there has arrived
            torch.cuda.synchronize(device)
        await self._open(staged.layout)
        for rank, answer in enumerate(await self._replace("put")):
            logger.info(
                "process %d put weights in place in %.1f ms, and began their fingerprint in %.1f",
                *(rank, answer["copied_ms"], answer["fingerprint_ms"]),
            )
        self._digests = {**self._digests, **update.digests}

    async def reload(self) -> None:
        """Puts the checkpoint in place again."""
        await self._replace("reload", folder=str(self._folder))
        _, self._digests = await self._describe()

    async def digests(self) -> dict[str, int]:
        """Of each tensor; raises ChangedWeightsError when the memory is not what it was."""
        changed = {name for answer in await self._run("compare") for name in answer["changed"]}
        if changed:
            names = ", ".join(sorted(changed)[:3])
            raise ChangedWeightsError(f"the serving weights have changed: {names}")
        return dict(self._digests)

    def _sent(self) -> list[TensorSpec]:
        return [spec for spec in self.specs if spec.alias_of is None]

    async def _describe(self) -> tuple[list[TensorSpec], dict[str, int]]:
        return await asyncio.to_thread(
            describe_checkpoint, self._folder, self._facts.dtype, self._device
        )

    async def _replace(self, do: str, **more: Any) -> list[dict[str, Any]]:
        before, self.whole = self.whole, False
        try:
            answers = await self._run(do, **more)
        except TornWeightsError:
            raise
        except EngineError:
            self.whole = before
            raise
        self.whole = True
        return answers

    async def _run(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Has every scheduler process obey; returns what each says.

        Raises TornWeightsError when weights may have been touched before it failed, else
        EngineError.
        """
        ranks, failure = self._facts.ranks, ""
        seconds = READING_SECONDS if do in READ else self.nbytes / SLOWEST
        with _notes(ranks) as notes:
            try:
                asked = {"do": do, "answers": [note.path for note in notes], **more}
                await self._bridge.update(json.dumps(asked), seconds)
            except EngineError as error:
                failure = str(error)
            answers = _answers(notes)
        errors = [answer["error"] for answer in answers if answer["error"]]
        if not failure and not errors and len(answers) == ranks:
            return answers
        why = "; ".join(errors) or failure or f"{len(answers)} of {ranks} processes answered"
        touched = len(answers) < ranks or any(answer["touched"] for answer in answers)
        if do in CHANGE and touched:
            raise TornWeightsError(f"putting weights in place failed: {why}")
        raise EngineError(f"SGLang's processes could not obey: {why}")


@contextlib.contextmanager
def _notes(count: int) -> Iterator[list[Note]]:
    with contextlib.ExitStack() as stack:
        notes = []
        try:
            for _ in range(count):
                notes.append(Note())
                stack.callback(notes[-1].close)
        except OSError as error:
            raise EngineError(f"nothing can be asked of SGLang's processes: {error}") from error
        yield notes


def _answers(notes: Sequence[Note]) -> list[dict[str, Any]]:
    """What each process wrote, in the order of their ranks; half of an answer is none."""
    answers = []
    for note in notes:
        with contextlib.suppress(ValueError):
            answers.append(json.loads(note.read()))
    return answers
