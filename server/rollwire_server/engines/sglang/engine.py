"""The SGLang engine: the server's interface over a bridge to SGLang's processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollwire.types import KvPolicy, LogprobBasis, SleepingWeights, WeightTag

from rollwire_server.engines.base import (
    CommitStats,
    EngineError,
    EngineInfo,
    EngineLoad,
    SequenceSpec,
    Step,
)
from rollwire_server.engines.sglang.bridge import Bridge
from rollwire_server.engines.sglang.checkpoint import check_folder
from rollwire_server.engines.sglang.sequences import Sequences
from rollwire_server.engines.sglang.warmup import WarmUp
from rollwire_server.engines.sglang.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor

    from rollwire_server.engines.base import Sink, StagedUpdate
    from rollwire_server.engines.sglang.config import SglangConfig
    from rollwire_server.engines.sglang.messages import Chunk, Facts

logger = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 64
AHEAD = 1.25
"""SGLang gets so many sequences for each that it can run. The rest wait here, where a commit need
not take them back.
"""
BESIDE_STAGING = 3 << 30
"""What SGLang's steps and the buckets under way take of a device, beside staged updates."""
LETTING_GO_SECONDS = 5.0
"""For SGLang to close the memory of updates, of which CUDA would complain at the end."""
ENDING_SECONDS = 30.0
"""For SGLang to end what was given up, before the server goes to sleep."""


class SglangEngine:
    """Samples with SGLang, in processes of their own; implements ``Engine``.

    A hold is SGLang's pause in place. What arrives meanwhile is kept here: SGLang would lose an
    abort of it. A commit puts staged tensors in place inside the scheduler processes. Then
    sequences that are to be computed anew are given up there and sent again with their tokens as
    input, under an id and a cache key of their own; SGLang's own way (retract) would take them up
    from keys and values that it kept of the weights before.
    """

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._warm_up = WarmUp()
        self._bridge = Bridge(config, self._warm_up)
        self._commands = asyncio.Lock()
        self._to_send = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sink: Sink | None = None
        self._facts: Facts | None = None
        self._info: EngineInfo | None = None
        self._tag: WeightTag | None = None
        self._weights: Weights | None = None
        self._sequences = Sequences(0)
        self._held = False
        self._asleep = False
        self._released: list[str] = []

    # Life.

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        """See ``Engine``."""
        folder = Path(self._config.model)
        check_folder(folder)
        self._facts = facts = await self._bridge.start()
        await self._warm_up.run(
            self._bridge,
            context_length=facts.context_length,
            at_once=self._config.max_running_sequences,
        )
        self._bridge.receiver = self
        self._sequences = Sequences(facts.context_length)
        self._weights = Weights(self._bridge, facts, folder, self._config.devices[0])
        self._tag = WeightTag(None, 0, server_id, await self._weights.read())
        await self._choose_staging(self._weights)
        self._info = self._describe(self._weights)
        self._sink = sink
        self._tasks = [
            asyncio.create_task(self._bridge.vital(work, what), name=f"sglang {what}")
            for work, what in (
                (self._send(), "sending sequences"),
                (self._listen(), "listening for its heartbeat"),
            )
        ]
        return self._tag

    async def _choose_staging(self, weights: Weights) -> None:
        config = self._config
        if config.on_cpu or config.staging == "host":
            await weights.take_memory()
            return
        torch.cuda.empty_cache()  # what the checkpoint's digests took
        share = weights.nbytes // len(config.devices)
        free = min(torch.cuda.mem_get_info(device)[0] for device in config.devices)
        if config.staging == "device" or free > share + BESIDE_STAGING:
            await weights.take_memory(config.devices)
            return
        logger.warning(
            "updates are staged in host memory, which commits copy at the speed of PCIe: SGLang "
            "leaves %d MiB of a device free, and an update takes %d MiB; leave it that with "
            "--engine-arg mem-fraction-static=…",
            *(free >> 20, (share + BESIDE_STAGING) >> 20),
        )
        await weights.take_memory()

    async def stop(self) -> None:
        """See ``Engine``."""
        self._sink = None
        for task in self._tasks:
            task.cancel()
        letting_go = asyncio.create_task(self._let_go())
        ending = [*self._tasks, letting_go]
        try:
            await asyncio.wait(ending, timeout=LETTING_GO_SECONDS)
        finally:
            await self._bridge.stop()  # whoever still waits for it learns that
            await asyncio.gather(*ending, return_exceptions=True)
        self._tasks = []

    async def _let_go(self) -> None:
        if self._weights is not None:
            with contextlib.suppress(EngineError):  # its processes end all the same
                await self._weights.let_go()

    def describe(self) -> EngineInfo:
        """See ``Engine``."""
        if self._info is None:
            raise EngineError("the engine has not started")
        return self._info

    def _describe(self, weights: Weights) -> EngineInfo:
        facts, config = self._known(), self._config
        basis = LogprobBasis.TEMPERATURE
        if facts.logprobs_before_temperature:
            basis = LogprobBasis.MODEL
        return EngineInfo(
            engine="sglang",
            model=config.model,
            device=config.devices[0],
            staging="device" if weights.on_devices else "host",
            staging_bytes=weights.nbytes,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            eos_token_ids=facts.eos_token_ids,
            logprob_bases=frozenset({basis}),
            deterministic=facts.deterministic,
            max_running_sequences=config.max_running_sequences,
            max_top_logprobs=min(MAX_TOP_LOGPROBS, facts.vocab_size),
            routed_experts=facts.routed_experts,
            sampling_parameters=facts.sampling_parameters,
            scaled_prompt_logprobs=False,
            unsupported_sleep=_unsupported_sleep(facts),
        )

    def load(self) -> EngineLoad:
        """See ``Engine``."""
        sequences = self._sequences
        count = len(sequences) + len(sequences.ending)
        running = min(count, self._config.max_running_sequences)
        total = self._facts.kv_tokens if self._facts is not None else 0
        return EngineLoad(running, count - running, sequences.kv_tokens(), total)

    # Sampling.

    def submit(self, spec: SequenceSpec) -> None:
        """See ``Engine``."""
        self._living()
        self._sequences.add(spec)
        self._to_send.set()

    async def abort(self, keys: Sequence[int]) -> None:
        """See ``Engine``."""
        self._end_there(self._sequences.remove(keys))
        self._to_send.set()

    async def hold(self) -> None:
        """See ``Engine``; a dead engine samples nothing."""
        async with self._commands:
            if not self._held:
                self._held = True
                with contextlib.suppress(EngineError):
                    await self._bridge.pause()

    async def release(self) -> None:
        """See ``Engine``."""
        async with self._commands:
            if self._held:
                await self._bridge.go_on()
                self._held = False
                self._to_send.set()

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Takes what one step of SGLang says."""
        if self._sink is None or self._tag is None:
            return
        step, to_end = self._sequences.take(chunks, self._tag)
        if step.keys or step.ends or step.extras:
            self._sink.on_step(step)
            self._to_send.set()
        self._end_there(to_end)
        if not self._sequences.ending:
            self._ended.set()

    def on_death(self, error: EngineError) -> None:
        """Learns that SGLang is dead."""
        if (sink := self._sink) is not None:
            self._sink = None
            sink.on_failure(error)

    def _end_there(self, rids: Sequence[str]) -> None:
        with contextlib.suppress(EngineError):  # the dead sample nothing
            for rid in rids:
                self._bridge.abort(rid)

    async def _send(self) -> None:
        """Hands sequences to SGLang, oldest first, while it may sample."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            with contextlib.suppress(EngineError):  # dead: ``on_death`` has told
                while await self._send_one():
                    pass

    async def _send_one(self) -> bool:
        async with self._commands:
            if self._held or self._asleep or not self._started().whole:
                return False
            if self._sequences.sent >= AHEAD * self._config.max_running_sequences:
                return False
            if (tag := self._tag) is None:
                return False
            if (sequence := self._sequences.next_unsent(tag.revision)) is None:
                return False
            sink = self._living()
            request = self._sequences.send(sequence, tag.revision)
            try:
                await self._bridge.send(request)
            except EngineError as error:
                self._living()
                if (end := self._sequences.refuse(request.rid, str(error))) is not None:
                    sink.on_step(Step(tag, [], [], [], ends=[end]))
            return True

    async def _listen(self) -> None:
        """Notices a scheduler that does not answer any more."""
        while True:
            await asyncio.sleep(self._config.unresponsive_seconds / 4)
            async with self._commands:  # whose deadlines notice it too
                try:
                    await self._bridge.echo()
                except EngineError:
                    return

    # Weights.

    def schema(self) -> list[TensorSpec]:
        """See ``Engine``."""
        self._living()
        return list(self._started().specs)

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See ``Engine``."""
        sent = [spec for spec in manifest.tensors if spec.alias_of is None]
        async with self._commands:
            self._awake()
            return await self._started().stage(sent)

    async def commit(
        self, staged: StagedUpdate, weights: WeightTag, policy: KvPolicy
    ) -> CommitStats:
        """See ``Engine``."""
        async with self._commands:
            self._awake()
            if not self._held:
                raise EngineError("weights are committed only while sampling is held")
            began = time.perf_counter_ns()
            await self._started().put(staged)
            self._tag = weights
            to_end, tokens = self._sequences.recall(started=policy is KvPolicy.RECOMPUTE)
            self._end_there(to_end)
            return CommitStats(time.perf_counter_ns() - began, tokens)

    async def digests(self) -> dict[str, int]:
        """See ``Engine``; raises EngineError when the memory is not what was committed."""
        async with self._commands:
            self._awake()
            return await self._started().digests()

    # Sleeping.

    async def sleep(self, weights: SleepingWeights) -> int:
        """See ``Engine``; without SGLang's memory saver nothing is really freed."""
        if len(self._sequences):
            raise EngineError("sequences are live: end them before the engine goes to sleep")
        async with self._commands:
            self._living()
            facts, freed = self._known(), 0
            if not facts.can_release_memory:
                logger.warning(
                    "sleep frees no memory without --engine-arg enable-memory-saver=true"
                )
            else:
                await self._idle()
                keep = weights is SleepingWeights.KEEP
                self._released = ["kv_cache"] if keep else ["kv_cache", "weights"]
                before = self._free_device_bytes()
                await self._bridge.release_memory(self._released)
                freed = max(0, self._free_device_bytes() - before)
            self._asleep = True
            if weights is SleepingWeights.DISCARD:
                self._started().whole = False
            return freed

    async def wake(self, *, reload_checkpoint: bool) -> None:
        """See ``Engine``."""
        async with self._commands:
            self._living()
            if self._released:
                await self._bridge.take_memory(self._released)
                self._released = []
            if reload_checkpoint:
                await self._started().reload()
            self._asleep = False
            self._to_send.set()

    async def _idle(self) -> None:
        """Returns when SGLang runs nothing; it gives no memory back before. No sequence is live."""
        if self._held:  # what was given up ends with the next step
            await self._bridge.go_on()
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                while self._sequences.ending:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            raise EngineError(f"SGLang did not end its sequences in {ENDING_SECONDS:g} s") from None
        finally:
            if self._held:
                await self._bridge.pause()
        await self._bridge.echo()  # a step that had begun by then is over

    # What is known.

    def _known(self) -> Facts:
        if self._facts is None:
            raise EngineError("the engine has not started")
        return self._facts

    def _started(self) -> Weights:
        if self._weights is None:
            raise EngineError("the engine has not started")
        return self._weights

    def _living(self) -> Sink:
        if self._sink is None:
            raise EngineError("the engine does not run")
        return self._sink

    def _awake(self) -> None:
        self._living()
        if self._asleep:
            raise EngineError("the weights' memory is given back: wake the engine up first")

    def _free_device_bytes(self) -> int:
        devices = [] if self._config.on_cpu else self._config.devices
        return sum(int(torch.cuda.mem_get_info(device)[0]) for device in devices)


def _unsupported_sleep(facts: Facts) -> dict[SleepingWeights, str]:
    if not facts.can_release_memory or facts.keeps_weights_on_release:
        return {}
    return {
        SleepingWeights.HOST_BACKUP: "SGLang keeps one with --engine-arg "
        "enable-weights-cpu-backup=true alone; ask for KEEP or DISCARD"
    }
