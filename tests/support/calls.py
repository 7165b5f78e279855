"""The API by hand: raw messages, for tests that look at what really goes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from rollwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc, weights_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

CALL_SECONDS = 90


@dataclass
class Api:
    """Both services of one server."""

    channel: grpc.aio.Channel
    rollouts: rollout_pb2_grpc.RolloutServiceStub = field(init=False)
    weights: weights_pb2_grpc.WeightServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.rollouts = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.weights = weights_pb2_grpc.WeightServiceStub(self.channel)

    async def info(self) -> rollout_pb2.GetServerInfoResponse:
        return await self.rollouts.GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=60)

    async def held(self, count: int) -> None:
        """Returns when so many sequences are held."""
        await self.until(lambda info: info.held_sequences == count)

    async def waits(self, count: int) -> None:
        """Returns when so many sequences wait."""
        await self.until(lambda info: info.waiting_sequences == count)

    async def reaches(self, state: common_pb2.ServerState.ValueType) -> None:
        """Returns when the server is in a state."""
        await self.until(lambda info: info.state == state)

    async def idle(self) -> None:
        """Returns when nothing runs, waits or is held, and the KV cache is empty."""
        await self.until(
            lambda info: (
                not info.running_sequences + info.waiting_sequences + info.held_sequences
                and not info.kv_tokens_used
            )
        )

    async def until(
        self, so: Callable[[rollout_pb2.GetServerInfoResponse], bool], seconds: float = 60
    ) -> None:
        """Returns when the server says so of itself."""

        async def is_so() -> bool:
            return so(await self.info())

        await until(is_so, seconds)

    async def pause(self, pause_id: str = "") -> rollout_pb2.PauseResponse:
        return await self.rollouts.Pause(rollout_pb2.PauseRequest(pause_id=pause_id), timeout=60)

    async def resume(self, pause_id: str = "") -> rollout_pb2.ResumeResponse:
        return await self.rollouts.Resume(rollout_pb2.ResumeRequest(pause_id=pause_id), timeout=60)

    async def abort(self, *request_ids: str, attempt: int | None = None) -> tuple[int, list[str]]:
        keys = [rollout_pb2.SequenceKey(request_id=r, attempt=attempt) for r in request_ids]
        answer = await self.rollouts.Abort(rollout_pb2.AbortRequest(sequences=keys), timeout=60)
        return answer.aborted, list(answer.not_found)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    """Asks until it is so; fails after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  the server is another process
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Api(channel)


@dataclass
class Output:
    """What one sequence's messages added up to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tags: list[common_pb2.WeightTag] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    routed: list[rollout_pb2.RoutedExperts] = field(default_factory=list)
    finish: rollout_pb2.Finish | None = None
    error: rollout_pb2.SequenceError | None = None
    offset: int | None = None
    messages: int = 0

    @property
    def reason(self) -> str:
        assert self.finish is not None, self.error
        return rollout_pb2.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_")

    @property
    def revisions(self) -> list[int]:
        return [tag.revision for tag in self.tags]

    def take(self, offset: int, tokens: Iterable[int], logprobs: Iterable[float]) -> None:
        tokens, logprobs = list(tokens), list(logprobs)
        if self.offset is None:
            self.offset = offset
        assert offset == self.offset + len(self.tokens), "a gap or an overlap"
        assert len(tokens) == len(logprobs)
        self.tokens += tokens
        self.logprobs += logprobs
        self.messages += 1

    def take_extras(
        self, message: rollout_pb2.GenerateResponse | rollout_pb2.SequenceEvent
    ) -> None:
        k = message.top_logprobs.k
        for i in range(0, len(message.top_logprobs.token_ids), k or 1):
            ids = list(message.top_logprobs.token_ids[i : i + k])
            self.top.append((ids, list(message.top_logprobs.logprobs[i : i + k])))
        for part in message.prompt_logprobs:
            assert part.start_position == 1 + len(self.prompt_logprobs)
            self.prompt_logprobs += part.logprobs
        self.routed += message.routed_experts
        if message.HasField("finish"):
            assert self.finish is None
            self.finish = message.finish


def request(
    prompt: Iterable[int] = (1, 2, 3),
    max_new_tokens: int | None = 16,
    *,
    request_id: str | None = None,
    attempt: int = 0,
    prefix: Iterable[int] = (),
    grace: float | None = None,
    timeout: float | None = None,
    interval: float | None = None,
    **rest: object,
) -> rollout_pb2.GenerateRequest:
    """A request; what is no field of GenerateRequest goes into its sampling."""
    own = {f.name for f in rollout_pb2.GenerateRequest.DESCRIPTOR.fields}
    sampling = {name: value for name, value in rest.items() if name not in own}
    message = rollout_pb2.GenerateRequest(
        request_id=uuid.uuid4().hex if request_id is None else request_id,
        attempt=attempt,
        prompt_token_ids=prompt,
        output_token_ids=prefix,
        sampling=rollout_pb2.SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        **{name: value for name, value in rest.items() if name in own},
    )
    durations = {"detach_grace": grace, "timeout": timeout, "delivery_interval": interval}
    for name, seconds in durations.items():
        if seconds is not None:
            duration = Duration()
            duration.FromNanoseconds(int(seconds * 1e9))
            getattr(message, name).CopyFrom(duration)
    return message


class Generation:
    """One Generate call."""

    def __init__(self, api: Api, message: rollout_pb2.GenerateRequest) -> None:
        self.call = api.rollouts.Generate(message, timeout=CALL_SECONDS)
        self.output = Output()

    async def some(self, tokens: int = 1) -> Output:
        """Reads until at least so many tokens have come, or the end."""
        while len(self.output.tokens) < tokens and self.output.finish is None:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                break
            self._take(message)
        return self.output

    async def all(self) -> Output:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            self._take(message)
        return self.output

    async def crosses(self, tokens: int = 20) -> Output:
        """Reads until so many tokens have come of other weights than the first one's."""
        output = await self.some()
        while output.revisions.count(output.revisions[0]) > len(output.tokens) - tokens:
            await self.some(len(output.tokens) + 1)
            assert output.finish is None, "it ended before it was interrupted"
        return output

    def _take(self, message: rollout_pb2.GenerateResponse) -> None:
        output = self.output
        output.take(message.offset, message.token_ids, message.logprobs)
        count = len(message.token_ids)
        output.tags += [message.weights] * count
        output.oldest += [message.oldest_kv_revision] * count
        output.take_extras(message)


async def generate(api: Api, message: rollout_pb2.GenerateRequest) -> Output:
    """One Generate call to its end."""
    return await Generation(api, message).all()


class Stream:
    """One StreamRollouts call."""

    def __init__(self, api: Api) -> None:
        self.call = api.rollouts.StreamRollouts(timeout=2 * CALL_SECONDS)
        self.outputs: dict[int, Output] = {}
        self.messages = 0
        self.largest = 0

    async def start(self, handle: int, message: rollout_pb2.GenerateRequest) -> None:
        self.outputs[handle] = Output()
        await self.call.write(rollout_pb2.StreamRolloutsRequest(handle=handle, start=message))

    async def abort(self, handle: int) -> None:
        command = rollout_pb2.StreamRolloutsRequest(
            handle=handle, abort=rollout_pb2.AbortSequence()
        )
        await self.call.write(command)

    async def read(self) -> bool:
        """Takes one message; False at the stream's end."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.messages += 1
        self.largest = max(self.largest, message.ByteSize())
        assert len(set(message.handles)) == len(message.handles)
        assert sum(message.counts) == len(message.token_ids) == len(message.logprobs)
        start = 0
        for i, (handle, count, offset) in enumerate(
            zip(message.handles, message.counts, message.offsets, strict=True)
        ):
            stop, output = start + count, self.outputs[handle]
            output.take(offset, message.token_ids[start:stop], message.logprobs[start:stop])
            output.tags += [message.weights] * count
            oldest = message.oldest_kv_revisions or [message.weights.revision] * (i + 1)
            output.oldest += [oldest[i]] * count
            start = stop
        for event in message.events:
            output = self.outputs[event.handle]
            assert output.finish is None
            assert output.error is None
            output.take_extras(event)
            if event.HasField("error"):
                output.error = event.error
        return True

    async def all(self) -> dict[int, Output]:
        """Half-closes and reads to the end."""
        await self.call.done_writing()
        while await self.read():
            pass
        return self.outputs


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason in an error's ErrorInfo."""
    info = error_details_pb2.ErrorInfo()
    assert details_of(error, info), error
    assert info.domain == "rollwire"
    return info.reason


def details_of(error: grpc.aio.AioRpcError, into: object) -> bool:
    """Unpacks the error's detail of the message's type."""
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    return any(detail.Unpack(into) for detail in status.details)
