"""The SGLang engine: the server's interface over a bridge to SGLang's processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rollwire.types import SleepingWeights, WeightTag
from rollwire_transport import Encoding

from rollwire_server.engines.base import (
    CommitStats,
    EndReason,
    EngineError,
    EngineLoad,
    SamplingParams,
    SequenceSpec,
    Step,
)
from rollwire_server.engines.deltas import staged_specs
from rollwire_server.engines.sglang.bridge import Bridge
from rollwire_server.engines.sglang.sequences import SequenceTable
from rollwire_server.engines.sglang.weights import SglangWeights, check_folder

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from rollwire_transport import Manifest, TensorSpec
    from torch import Tensor

    from rollwire_server.engines.base import (
        EngineInfo,
        PreparedDelta,
        SequenceEnd,
        Sink,
        StagedUpdate,
    )
    from rollwire_server.engines.sglang.launch import SglangConfig
    from rollwire_server.engines.sglang.sequences import SchedulerOutput

logger = logging.getLogger(__name__)

AHEAD = 1.25
"""SGLang gets this many sequences for each that it can run. The others wait here, where a commit
need not withdraw them.
"""
BESIDE_STAGING = 3 << 30
"""Device memory that SGLang's steps and the buckets under way need beside a staged update."""
LETTING_GO_SECONDS = 5.0
"""For SGLang to close the memory of updates; CUDA would complain of open handles at exit."""
ENDING_SECONDS = 30.0
"""For SGLang to end withdrawn sequences, before the server goes to sleep."""
WARM_UP_SECONDS = 1200.0
WARM_UP_AT_ONCE = 24
"""SGLang compiles kernels for minutes, separately for one sequence, for few, and for many."""
WARM_UP_PROMPT, WARM_UP_OUTPUT = 128, 8


class SglangEngine:
    """Samples with SGLang, in processes of their own; implements ``Engine``.

    A hold is SGLang's pause in place. Sequences that arrive during a hold are kept here: SGLang
    would lose an abort of them. A commit puts staged tensors in place inside the scheduler
    processes. To recompute sequences, the engine withdraws them from SGLang and sends them again
    with their tokens as input, under a new id and a new cache key. SGLang's own ``retract`` would
    reuse keys and values of the old weights.
    """

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._bridge = Bridge(config, self._on_outputs, self._on_death)
        self._commands = asyncio.Lock()
        self._to_send = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sink: Sink | None = None
        self._info: EngineInfo | None = None
        self._tag: WeightTag | None = None
        self._weights: SglangWeights | None = None
        self._sequences = SequenceTable(0)
        self._held = False
        self._asleep = False
        self._released: list[str] = []

    async def start(self, server_id: str, sink: Sink) -> WeightTag:
        folder = Path(self._config.model)
        check_folder(folder)
        info = await self._bridge.start()
        weights = self._weights = SglangWeights(self._bridge, info, folder, self._config.devices[0])
        context = info.described.context_length
        self._sequences = SequenceTable(context)
        self._run(self._send(), "sending sequences")
        await self._warm_up(context)
        self._tag = WeightTag(None, 0, server_id, await weights.read())
        await self._choose_staging(weights)
        self._info = replace(
            info.described,
            staging="device" if weights.staged_on_devices else "host",
            staging_bytes=weights.nbytes,
            deltas=weights.takes_deltas,
        )
        self._sink = sink
        self._run(self._listen(), "listening for its heartbeat")
        return self._tag

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = self._bridge.run_critical(work, what)
        self._tasks.append(asyncio.create_task(task, name=f"sglang {what}"))

    async def _warm_up(self, context_length: int) -> None:
        """Samples one sequence, then some at once, under weights of a revision of their own."""
        prompt = min(WARM_UP_PROMPT, context_length - WARM_UP_OUTPUT)
        if prompt <= 0:
            return
        self._tag = WeightTag(None, -1, "", 0)
        warm_up = self._sink = _WarmUp()
        try:
            async with asyncio.timeout(WARM_UP_SECONDS):
                for count in (1, min(WARM_UP_AT_ONCE, self._config.max_running_sequences)):
                    for i in range(count):
                        top_p = 0.9 if i % 10 == 1 else 1.0
                        sampling = SamplingParams(WARM_UP_OUTPUT, top_p=top_p, seed=1)
                        # Keys of no other sequence; -1 and -2 would have the same hash.
                        self.submit(SequenceSpec(-2 - i, [0] * max(1, prompt - i), sampling))
                    for _ in range(count):
                        await warm_up.next_end()
        except TimeoutError:
            raise EngineError(
                f"SGLang's first sequences took more than {WARM_UP_SECONDS:g} s"
            ) from None
        finally:
            self._sink = None

    async def _choose_staging(self, weights: SglangWeights) -> None:
        devices = self._config.devices
        if self._config.on_cpu or self._config.staging == "host":
            devices = []
        else:
            torch.cuda.empty_cache()  # what the checkpoint's digests took
            needed = weights.nbytes // len(devices) + BESIDE_STAGING
            free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
            if self._config.staging == "auto" and free <= needed:
                logger.warning(
                    "updates are staged in host memory, which commits copy at the speed of PCIe: "
                    "SGLang leaves %d MiB of a device free, and an update takes %d MiB; leave it "
                    "that with --engine-arg mem-fraction-static=…",
                    *(free >> 20, needed >> 20),
                )
                devices = []
        await weights.allocate_staging(devices)

    async def stop(self) -> None:
        self._sink = None
        for task in self._tasks:
            task.cancel()
        ending = self._tasks
        if self._weights is not None:
            ending.append(asyncio.create_task(self._weights.release_staging()))
        try:
            if ending:
                await asyncio.wait(ending, timeout=LETTING_GO_SECONDS)
        finally:
            await self._bridge.stop()  # whoever still waits for it learns that
            await asyncio.gather(*ending, return_exceptions=True)
        self._tasks = []

    def describe(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine has not started")
        return self._info

    def load(self) -> EngineLoad:
        if self._info is None:
            return EngineLoad(0, 0, 0, 0)
        sequences = self._sequences
        count = len(sequences) + len(sequences.ending)
        running = min(count, self._config.max_running_sequences)
        total = self._started().info.kv_tokens
        return EngineLoad(running, count - running, sequences.kv_tokens(), total)

    def submit(self, spec: SequenceSpec) -> None:
        self._running()
        self._sequences.add(spec)
        self._to_send.set()

    async def abort(self, keys: Sequence[int]) -> None:
        self._end_there(self._sequences.remove(keys))
        self._to_send.set()

    async def hold(self) -> None:
        async with self._commands:
            if not self._held:
                self._held = True
                with contextlib.suppress(EngineError):  # a dead engine samples nothing
                    await self._bridge.pause()

    async def release(self) -> None:
        async with self._commands:
            if self._held:
                await self._bridge.resume()
                self._held = False
                self._to_send.set()

    def _on_outputs(self, outputs: Sequence[SchedulerOutput]) -> None:
        if self._tag is None:
            return
        step, to_end = self._sequences.process(outputs, self._tag)
        if self._sink is not None and (step.keys or step.ends or step.extras):
            self._sink.on_step(step)
            self._to_send.set()
        self._end_there(to_end)
        if not self._sequences.ending:
            self._ended.set()

    def _on_death(self, error: EngineError) -> None:
        if (sink := self._sink) is not None:
            self._sink = None
            sink.on_failure(error)

    def _end_there(self, rids: Sequence[str]) -> None:
        with contextlib.suppress(EngineError):  # a dead engine samples nothing
            for rid in rids:
                self._bridge.abort(rid)

    async def _send(self) -> None:
        """Sends sequences to SGLang, oldest first, while it may sample."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            with contextlib.suppress(EngineError):  # dead: ``_on_death`` has reported it
                while await self._send_one():
                    pass

    async def _send_one(self) -> bool:
        async with self._commands:
            tag, sink = self._tag, self._running()
            full = self._sequences.sent >= AHEAD * self._config.max_running_sequences
            if tag is None or full or self._held or self._asleep or not self._started().intact:
                return False
            if (request := self._sequences.send_next(tag.revision)) is None:
                return False
            try:
                await self._bridge.send(request)
            except EngineError as error:
                self._running()
                if (end := self._sequences.refuse(request.rid, str(error))) is not None:
                    sink.on_step(Step(tag, [], [], [], ends=[end]))
            return True

    async def _listen(self) -> None:
        """Notices a scheduler that no longer answers."""
        while True:
            await asyncio.sleep(self._config.unresponsive_seconds / 4)
            async with self._commands:  # whose deadlines notice it too
                try:
                    await self._bridge.barrier()
                except EngineError as error:
                    self._on_death(error)  # unless reported: it may have died before it served
                    return

    def schema(self) -> list[TensorSpec]:
        self._running()
        return list(self._started().specs)

    async def stage(self, manifest: Manifest) -> Mapping[str, Tensor]:
        async with self._commands:
            weights = self._awake()
            if manifest.encoding is Encoding.DELTA:
                return await weights.stage_delta(manifest)
            return await weights.stage(staged_specs(manifest))

    async def prepare_delta(
        self, manifest: Manifest, staged: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> PreparedDelta:
        async with self._commands:
            return await self._awake().prepare_delta(manifest, staged, before)

    async def commit(
        self, staged: StagedUpdate, weights: WeightTag, max_kv_lag: int | None
    ) -> CommitStats:
        async with self._commands:
            own = self._awake()
            if not self._held:
                raise EngineError("weights are committed only while sampling is held")
            began = time.perf_counter_ns()
            await own.apply(staged)
            self._tag = weights
            to_end, tokens = self._sequences.requeue(weights.revision, max_kv_lag)
            self._end_there(to_end)
            return CommitStats(time.perf_counter_ns() - began, tokens)

    async def digests(self) -> dict[str, int]:
        async with self._commands:
            return await self._awake().digests()

    async def sleep(self, weights: SleepingWeights) -> int:
        if len(self._sequences):
            raise EngineError("sequences are live: end them before the engine goes to sleep")
        async with self._commands:
            self._running()
            freed = 0
            if not self._started().info.can_release_memory:
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
                self._started().intact = False
            return freed

    async def wake(self, *, reload_checkpoint: bool) -> None:
        async with self._commands:
            self._running()
            if self._released:
                await self._bridge.resume_memory(self._released)
                self._released = []
            if reload_checkpoint:
                await self._started().reload()
            self._asleep = False
            self._to_send.set()

    async def _idle(self) -> None:
        """Returns when SGLang runs nothing; until then it frees no memory. No sequence is live."""
        if self._held:  # withdrawn sequences end with the next step
            await self._bridge.resume()
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
        await self._bridge.barrier()  # the step under way is over

    def _started(self) -> SglangWeights:
        if self._weights is None:
            raise EngineError("the engine has not started")
        return self._weights

    def _running(self) -> Sink:
        if self._sink is None:
            raise EngineError("the engine is not running")
        return self._sink

    def _awake(self) -> SglangWeights:
        self._running()
        if self._asleep:
            raise EngineError("the weights' memory is freed: wake the engine up first")
        return self._started()

    def _free_device_bytes(self) -> int:
        devices = [] if self._config.on_cpu else self._config.devices
        return sum(int(torch.cuda.mem_get_info(device)[0]) for device in devices)


class _WarmUp:
    """A sink that waits for the ends of the first sequences."""

    def __init__(self) -> None:
        self._ends: asyncio.Queue[SequenceEnd | BaseException] = asyncio.Queue()

    def on_step(self, step: Step) -> None:
        for end in step.ends:
            self._ends.put_nowait(end)

    def on_failure(self, error: BaseException) -> None:
        self._ends.put_nowait(error)

    async def next_end(self) -> None:
        """Raises EngineError if the sequence failed."""
        end = await self._ends.get()
        if isinstance(end, BaseException):
            raise end
        if end.reason is EndReason.STEP_FAILED:
            raise EngineError(f"SGLang cannot sample: {end.message}")
