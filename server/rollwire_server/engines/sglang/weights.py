"""The weights that serve: what updates bring, how they get in place, whether they are still those.

SGLang fuses and shards what it loads, so its memory cannot be compared with a checkpoint. It is
compared with itself: with the fingerprint that each process took right after the last commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rollwire_transport import sum_digests, tensor_digest

from rollwire_server.engines.base import EngineError, TornWeightsError

from .checkpoint import describe_checkpoint
from .shared_memory import Staged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import TensorSpec
    from torch import Tensor

    from .bridge import Bridge
    from .messages import Facts


class Weights:
    """The weights of one started SGLang.

    Attributes:
        specs: The tensors that an update brings.
        whole: They are those of one policy. If not, only a full update cures it.
    """

    def __init__(self, bridge: Bridge, facts: Facts, folder: Path) -> None:
        self._bridge = bridge
        self._facts = facts
        self._folder = folder
        self._digests: dict[str, int] = {}
        self._digesting: asyncio.Task[None] | None = None
        self._fingerprints: list[dict[str, int]] = []
        self.specs: list[TensorSpec] = []
        self.whole = True

    @property
    def nbytes(self) -> int:
        """What a full update takes."""
        return sum(_nbytes(spec) for spec in self.specs if spec.alias_of is None)

    async def read(self) -> int:
        """Learns what the checkpoint holds, which SGLang has loaded; returns its digest."""
        self.specs, self._digests = await asyncio.to_thread(
            describe_checkpoint, self._folder, self._facts.dtype
        )
        self._fingerprints = await self._run("look")
        return sum_digests(self._digests.values())

    async def close(self) -> None:
        """Ends what is still computed of the last update."""
        if self._digesting is not None:
            self._digesting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._digesting

    async def put(self, staged: Mapping[str, Tensor]) -> None:
        """Puts staged tensors in place; see ``Engine.commit`` for what it raises."""
        if not self.whole and (missing := self._digests.keys() - staged.keys()):
            raise EngineError(
                f"the weights are discarded or torn, and the update lacks {len(missing)} of "
                f"{len(self._digests)} tensors: send a full one"
            )
        if not staged:
            return
        if not isinstance(staged, Staged):
            raise EngineError("these tensors were not staged by this engine")
        await self._settle()
        await self._replace("put", staged=staged.layout.told())
        # The commit need not wait for it; it keeps the staged memory until it is over.
        self._digesting = asyncio.create_task(self._digest(staged), name="sglang digests")

    async def reload(self) -> None:
        """Puts the checkpoint in place again."""
        await self._settle()
        await self._replace("reload", folder=str(self._folder))
        _, self._digests = await asyncio.to_thread(
            describe_checkpoint, self._folder, self._facts.dtype
        )

    async def digests(self) -> dict[str, int]:
        """Of each tensor; raises EngineError when the memory is not what it was."""
        await self._settle()
        now = await self._run("look")
        changed = [
            name
            for old, new in zip(self._fingerprints, now, strict=True)
            for name in old.keys() | new.keys()
            if old.get(name) != new.get(name)
        ]
        if changed:
            raise EngineError(f"the serving weights have changed: {', '.join(sorted(changed)[:3])}")
        return dict(self._digests)

    async def _settle(self) -> None:
        if self._digesting is not None:
            await self._digesting
            self._digesting = None

    async def _digest(self, staged: Staged) -> None:
        specs = {spec.name: spec for spec in self.specs}

        def compute() -> dict[str, int]:
            return {name: tensor_digest(specs[name], tensor) for name, tensor in staged.items()}

        self._digests = {**self._digests, **await asyncio.to_thread(compute)}

    async def _replace(self, do: str, **more: Any) -> None:
        before, self.whole = self.whole, False
        try:
            self._fingerprints = await self._run(do, **more)
        except TornWeightsError:
            raise
        except EngineError:
            self.whole = before
            raise
        self.whole = True

    async def _run(self, do: str, **more: Any) -> list[dict[str, int]]:
        """Has every scheduler process obey; returns the fingerprint of each.

        Raises TornWeightsError when weights may have been touched before it failed, else
        EngineError.
        """
        ranks, failure = self._facts.ranks, ""
        with tempfile.TemporaryDirectory(prefix="rollwire-") as folder:
            try:
                await self._bridge.update(json.dumps({"do": do, "answers": folder, **more}))
            except (EngineError, TimeoutError) as error:
                failure = str(error) or "no answer in time"
            answers = await asyncio.to_thread(_answers, Path(folder))
        errors = [answer["error"] for answer in answers if answer["error"]]
        if not failure and not errors and len(answers) == ranks:
            return [answer["fingerprint"] for answer in answers]
        why = "; ".join(errors) or failure or f"{len(answers)} of {ranks} processes answered"
        touched = len(answers) < ranks or any(answer["touched"] for answer in answers)
        if do != "look" and touched:
            raise TornWeightsError(f"putting weights in place failed: {why}")
        raise EngineError(f"SGLang's processes could not obey: {why}")


def _answers(folder: Path) -> list[dict[str, Any]]:
    """What each process wrote, in the order of their ranks."""
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in paths]


def _nbytes(spec: TensorSpec) -> int:
    elements = torch.Size(spec.shape).numel()
    return elements * torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size()
