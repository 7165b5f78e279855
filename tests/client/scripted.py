"""A rollout server in this process that does what a test's script says."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from rollwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from support.waiting import until as until

if TYPE_CHECKING:
    from rollwire_client import Fleet, WeightTag

CONTEXT = 4096


def expected_token(prompt: list[int], position: int) -> int:
    """What every scripted server samples, so that a wrong resumption shows."""
    return (sum(prompt) * 31 + position * 7) % 1000


@dataclass(eq=False)
class Sequence:
    """One attempt as its script sees it."""

    server: ScriptedServer
    stream: Stream
    handle: int
    request: rollout_pb2.GenerateRequest
    offset: int
    unsent: int = 0  # tokens that it has sampled and sends at the latest when it is aborted
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def budget(self) -> int:
        return self.request.sampling.max_new_tokens or 16

    async def send(
        self, count: int = 1, *, offset: int | None = None, logprobs: int | None = None
    ) -> None:
        """Sends the next ``count`` tokens, or those from ``offset`` on."""
        start = self.offset if offset is None else offset
        prompt = list(self.request.prompt_token_ids)
        tokens = [expected_token(prompt, start + i) for i in range(count)]
        message = rollout_pb2.StreamRolloutsResponse(
            weights=self.server.weights,
            handles=[self.handle],
            counts=[count],
            offsets=[start],
            token_ids=tokens,
            logprobs=[-t / 1000 for t in tokens][:logprobs],
        )
        await self.stream.write(message)
        self.offset = start + count

    async def route(self, start: int, end: int, expert: int = 0, **other: object) -> None:
        """Sends the routing of tokens ``start`` to ``end``, of two layers with two experts each:
        all are ``expert`` plus the token's position, unless ``other`` fields say otherwise.
        """
        fields = {
            "start_position": start,
            "num_tokens": end - start,
            "num_layers": 2,
            "top_k": 2,
            "experts": bytes((expert + p) % 256 for p in range(start, end) for _ in range(4)),
            "bytes_per_expert": 1,
            "weights": self.server.weights,
        }
        rows = rollout_pb2.RoutedExperts(**{**fields, **other})
        await self._event(rollout_pb2.SequenceEvent(handle=self.handle, routed_experts=[rows]))

    async def finish(
        self, reason: str = "LENGTH", *, output_tokens: int | None = None, message: str = ""
    ) -> None:
        finish = rollout_pb2.Finish(
            reason=rollout_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"),
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=self.offset if output_tokens is None else output_tokens,
            message=message,
        )
        await self._event(rollout_pb2.SequenceEvent(handle=self.handle, finish=finish))

    async def fail(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str = "as scripted",
        *,
        retry_after: float | None = None,
    ) -> None:
        error = rollout_pb2.SequenceError(code=code.value[0], reason=reason, message=message)
        if retry_after is not None:
            error.retry_delay.FromMilliseconds(int(retry_after * 1000))
        await self._event(rollout_pb2.SequenceEvent(handle=self.handle, error=error))

    async def cut(self) -> None:
        """Ends the whole stream, as a lost link does."""
        self.stream.cut.set()
        await asyncio.Event().wait()

    async def rest(self, *, step: int = 4) -> None:
        """Goes on to the end, ``step`` tokens a message."""
        while self.offset < self.budget:
            await self.send(min(step, self.budget - self.offset))
        await self.finish()

    async def _event(self, event: rollout_pb2.SequenceEvent) -> None:
        await self.stream.write(
            rollout_pb2.StreamRolloutsResponse(weights=self.server.weights, events=[event])
        )


Script = Callable[[Sequence], Awaitable[None]]


@dataclass
class Stream:
    """One StreamRollouts call and the tasks that play its sequences."""

    context: grpc.aio.ServicerContext
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self, message: rollout_pb2.StreamRolloutsResponse) -> None:
        async with self.lock:
            await self.context.write(message)


class ScriptedServer(rollout_pb2_grpc.RolloutServiceServicer):
    """Plays ``scripts`` one after the other, one a sequence; then ``Sequence.rest``."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.default: Script = Sequence.rest
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.streams = 0
        self.asked = 0  # how it is
        self.mute = False  # answers no calls, as a frozen process
        self.weights = common_pb2.WeightTag(server_id=uuid.uuid4().hex, digest=1)
        self.highest_version: int | None = None  # None: that of the weights
        self.state = common_pb2.SERVER_STATE_SERVING
        self.accepts_deltas = False
        self.pauses: list[rollout_pb2.ActivePause] = []
        self.sleeping_weights = rollout_pb2.SLEEPING_WEIGHTS_UNSPECIFIED
        self.refusals: dict[str, dict[str, Any]] = {}  # by the name of the call: how it is refused
        self.calls: list[tuple[str, object]] = []  # that control it, with their requests
        self.delays: dict[str, asyncio.Event] = {}  # by the name of the call: it waits for that
        self._live: set[Sequence] = set()
        self.address = ""
        self._grpc: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> ScriptedServer:
        self._grpc = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self.register(self._grpc)
        port = self._grpc.add_insecure_port(address)
        await self._grpc.start()
        self.address = f"127.0.0.1:{port}"
        return self

    def register(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(None)
            await self._grpc.wait_for_termination()
            self._grpc = None

    async def StreamRollouts(self, requests, context) -> None:  # noqa: N802
        self.streams += 1
        stream = Stream(context)
        cut = asyncio.create_task(stream.cut.wait())
        reading = asyncio.create_task(self._read(requests, stream))
        stream.tasks |= {cut, reading}
        try:
            await asyncio.wait([cut, reading], return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                async with stream.lock:  # gRPC sends one thing at a time
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was cut")
            await asyncio.gather(*(stream.tasks - {cut}))
        finally:
            for task in stream.tasks:
                task.cancel()
            await asyncio.gather(*stream.tasks, return_exceptions=True)

    async def _read(self, requests, stream: Stream) -> None:
        live: dict[int, Sequence] = {}
        async for message in requests:
            if message.HasField("abort"):
                if not self.mute:
                    live[message.handle].aborted.set()
                continue
            self.requests.append(message.start)
            sequence = Sequence(
                self, stream, message.handle, message.start, len(message.start.output_token_ids)
            )
            live[message.handle] = sequence
            script = self.scripts.pop(0) if self.scripts else self.default
            stream.tasks.add(asyncio.create_task(self._play(script, sequence)))

    async def _play(self, script: Script, sequence: Sequence) -> None:
        playing = asyncio.ensure_future(script(sequence))
        aborted = asyncio.ensure_future(sequence.aborted.wait())
        interrupted = asyncio.ensure_future(sequence.interrupted.wait())
        self._live.add(sequence)
        try:
            await asyncio.wait([playing, aborted, interrupted], return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            elif interrupted.done():
                await sequence.finish("INTERRUPTED", message="the server goes to sleep")
            else:
                self.aborted.put_nowait(sequence.request.request_id)
                if sequence.unsent:
                    await sequence.send(sequence.unsent)
                await sequence.finish("ABORTED")
        finally:
            self._live.discard(sequence)
            for task in (playing, aborted, interrupted):
                task.cancel()
            await asyncio.gather(playing, aborted, interrupted, return_exceptions=True)

    async def GetServerInfo(self, request, context):  # noqa: N802
        self.asked += 1
        if self.mute:
            await asyncio.Event().wait()
        return rollout_pb2.GetServerInfoResponse(
            server_id=self.weights.server_id,
            state=self.state,
            weights=self.weights,
            highest_version=self.highest_version
            or (self.weights.version if self.weights.HasField("version") else None),
            engine="scripted",
            model="none",
            vocab_size=1000,
            context_length=CONTEXT,
            accepts_updates=True,
            accepts_deltas=self.accepts_deltas,
            transports=["gloo"],
            pauses=self.pauses,
            sleeping_weights=self.sleeping_weights,
        )

    async def Abort(self, request, context):  # noqa: N802
        return rollout_pb2.AbortResponse(not_found=[key.request_id for key in request.sequences])

    async def Pause(self, request, context):  # noqa: N802
        await self._controlled("Pause", request, context)
        others = [pause for pause in self.pauses if pause.pause_id != request.pause_id]
        self.pauses = [
            *others,
            rollout_pb2.ActivePause(pause_id=request.pause_id, lease_left=request.lease),
        ]
        self.state = common_pb2.SERVER_STATE_PAUSED
        return rollout_pb2.PauseResponse(pause_id=request.pause_id, held_sequences=len(self._live))

    async def Resume(self, request, context):  # noqa: N802
        await self._controlled("Resume", request, context)
        self.pauses = [
            pause for pause in self.pauses if request.pause_id not in {"", pause.pause_id}
        ]
        if not self.pauses:
            self.state = common_pb2.SERVER_STATE_SERVING
        return rollout_pb2.ResumeResponse(remaining_pauses=len(self.pauses), weights=self.weights)

    async def Sleep(self, request, context):  # noqa: N802
        await self._controlled("Sleep", request, context)
        if self.state == common_pb2.SERVER_STATE_SLEEPING:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "SLEEPING", "sleeps already")
        self.state = common_pb2.SERVER_STATE_SLEEPING
        self.sleeping_weights = request.weights
        for sequence in self._live:
            sequence.interrupted.set()
        return rollout_pb2.SleepResponse(freed_bytes=1000)

    async def WakeUp(self, request, context):  # noqa: N802
        await self._controlled("WakeUp", request, context)
        if self.state == common_pb2.SERVER_STATE_SLEEPING:
            discarded = self.sleeping_weights == rollout_pb2.SLEEPING_WEIGHTS_DISCARD
            self.state = common_pb2.SERVER_STATE_SERVING
            if discarded and not request.reload_checkpoint:
                self.state = common_pb2.SERVER_STATE_AWAITING_WEIGHTS
        self.sleeping_weights = rollout_pb2.SLEEPING_WEIGHTS_UNSPECIFIED
        return rollout_pb2.WakeUpResponse(weights=self.weights)

    async def _controlled(self, name, request, context) -> None:
        self.calls.append((name, request))
        if name in self.delays:
            await self.delays[name].wait()
        if name in self.refusals:
            await refuse(context, **self.refusals[name])


async def refuse(
    context: grpc.aio.ServicerContext,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *,
    fields: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Ends a call as a rollwire server does."""
    details = [
        error_details_pb2.ErrorInfo(reason=reason, domain="rollwire", metadata=metadata or {})
    ]
    if fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=what)
            for field, what in fields.items()
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, message, trailing)


@contextlib.asynccontextmanager
async def scripted(count: int = 1):
    """So many scripted servers, stopped at the end."""
    servers = [await ScriptedServer().start() for _ in range(count)]
    try:
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def was_published(fleet: Fleet, weights: WeightTag, *, rollback: bool = False) -> None:
    """A publish ended with these weights, at a server that is none of the fleet's."""
    with fleet._pool.policy.committing(weights.version, weights.digest, rollback=rollback):
        fleet._pool.committed("127.0.0.1:1", weights)
