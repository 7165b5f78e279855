"""SGLang without rollwire, in a process of its own: what the figures are held against."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

from common import START_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from rollwire_server.engines.sglang import SglangConfig


def arguments(config: SglangConfig) -> dict[str, Any]:
    """The same that a rollwire-server gives to SGLang, but for what is rollwire's own."""
    own = ("custom_weight_loader", "context_length")
    return {name: value for name, value in config.server_args().items() if name not in own}


@contextlib.contextmanager
def alone(given: dict[str, Any]) -> Iterator[Connection]:
    """An Engine; speaks as ``_serve`` does once it has said "ready"."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, given))
    process.start()
    there.close()
    try:
        yield here
    finally:
        with contextlib.suppress(OSError):
            here.send(None)
        process.join(60)
        process.kill()
        process.join()


def answer(pipe: Connection, seconds: float = START_SECONDS) -> Any:
    """What it says next; raises SystemExit when nothing comes."""
    try:
        if pipe.poll(seconds):
            said = pipe.recv()
            if isinstance(said, Exception):
                raise SystemExit(f"SGLang alone failed: {said}")
            return said
    except EOFError:
        pass
    raise SystemExit("SGLang alone has ended, or does not answer")


def _serve(pipe: Connection, given: dict[str, Any]) -> None:
    """Obeys (name, arguments) with what a method of ``_Serving`` returns, until None comes."""
    if given["device"] == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**{name: value for name, value in given.items() if value is not None})
    try:
        loop.run_until_complete(_obey(pipe, _Serving(engine)))
    finally:
        engine.shutdown()


async def _obey(pipe: Connection, serving: _Serving) -> None:
    pipe.send("ready")
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        name, values = asked
        try:
            said = await getattr(serving, name)(*values)
        except Exception as error:
            said = error
        pipe.send(said)


class _Serving:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._arrivals: list[tuple[float, int]] = []
        self._streams: list[asyncio.Task[None]] = []

    async def sample(self, prompts: list[list[int]], tokens: int, streamed: bool) -> float:  # noqa: FBT001
        """Seconds until every prompt has its ``tokens``."""
        began = time.perf_counter()
        counts = await asyncio.gather(*(self._one(p, tokens, streamed) for p in prompts))
        seconds = time.perf_counter() - began
        if sum(counts) != tokens * len(prompts):
            raise RuntimeError(f"{sum(counts)} tokens came of {tokens * len(prompts)}")
        return seconds

    async def _one(self, prompt: list[int], tokens: int, streamed: bool) -> int:  # noqa: FBT001
        count = 0
        async for total in self._counts(prompt, tokens, streamed):
            count = total
        return count

    async def _counts(self, prompt: list[int], tokens: int, streamed: bool) -> Any:  # noqa: FBT001
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        asked = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        result = await self._engine.async_generate(**asked, stream=streamed)
        if not streamed:
            yield result["meta_info"]["completion_tokens"]
            return
        async for chunk in result:
            yield chunk["meta_info"]["completion_tokens"]

    async def decode(self, prompts: list[list[int]], tokens: int) -> None:
        """Samples on and on from now, a stream a prompt."""

        async def endless(prompt: list[int]) -> None:
            while True:
                had = 0
                async for total in self._counts(prompt, tokens, True):  # noqa: FBT003
                    self._arrivals.append((time.perf_counter(), total - had))
                    had = total

        self._streams = [asyncio.create_task(endless(prompt)) for prompt in prompts]

    async def arrivals(self) -> list[tuple[float, int]]:
        """When tokens came, and how many, since it was asked last."""
        for stream in self._streams:
            if stream.done():
                stream.result()
        arrived, self._arrivals = self._arrivals, []
        return arrived

    async def meet(self, address: str, port: int, world_size: int, backend: str) -> None:
        """Joins the group ``weights`` for updates, from rank 1 on."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        asked = InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name="weights",
            backend=backend,
        )
        success, message = await self._manager.init_weights_update_group(asked)
        if not success:
            raise RuntimeError(message)

    async def update(self, way: str, calls: list[Any], mode: str) -> tuple[float, float]:
        """Receives tensors while paused, in ``_asked``'s ``way``; when it began and ended."""
        from sglang.srt.managers import io_struct

        manager, began = self._manager, time.perf_counter()
        await manager.pause_generation(io_struct.PauseGenerationReqInput(mode=mode))
        if hasattr(manager, "begin_weight_update"):  # since 0.5.21
            await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput())
        for call in calls:
            update = getattr(manager, f"update_weights_from_{way}")
            success, message = await update(_asked(way, call))
            if not success:
                raise RuntimeError(message)
        if hasattr(manager, "end_weight_update"):
            await manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        await manager.continue_generation(io_struct.ContinueGenerationReqInput())
        return began, time.perf_counter()


def _asked(way: str, call: Any) -> Any:
    """Of "distributed": names, dtypes and shapes. Of "tensor": a bucket's handle, for each rank."""
    from sglang.srt.managers import io_struct

    if way == "distributed":
        names, dtypes, shapes = (list(column) for column in zip(*call, strict=True))
        return io_struct.UpdateWeightsFromDistributedReqInput(
            names=names, dtypes=dtypes, shapes=shapes, group_name="weights", flush_cache=False
        )
    return io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=call, load_format="flattened_bucket", flush_cache=False
    )
