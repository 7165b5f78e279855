"""A rollout server for tests of your own trainer: in this process, without a model or torch.

    async with FakeServer(version=3) as server, Fleet([server.address]) as fleet:
        trajectory = await fleet.generate([1, 2, 3], Sampling(max_new_tokens=8))
        assert trajectory.versions == (3,) * 8

It speaks the real API over a real socket, so that the library behaves as it does with a real
server. ``interrupt()``, ``cut()`` and ``state`` simulate faults; it can be paused and put to sleep.
The server ignores ``max_weight_version`` and accepts no updates (``commit()`` stands for one): to
test publishing use ``rollwire-server --engine synthetic``, which needs no model either.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
from rollwire.conversion import (
    FINISH_REASON_TO_PROTO,
    SERVER_STATE_TO_PROTO,
    SLEEPING_WEIGHTS_FROM_PROTO,
    SLEEPING_WEIGHTS_TO_PROTO,
)
from rollwire.reasons import DETAILS_KEY, Reason, encode_status
from rollwire.types import FinishReason, ServerState, SleepingWeights
from rollwire.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc

from rollwire_client._arguments import checked_version
from rollwire_client._concurrency import cancel_all, use_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

__all__ = ["FakeServer", "Sampler"]

Sampler = Callable[[Sequence[int], Sequence[int]], int]
"""The next token, from the prompt and the output so far."""


@dataclass(eq=False)
class _FakeSequence:
    """A sequence under way; ``ended`` gets the reason if it is ended early."""

    handle: int
    request: rollout_pb2.GenerateRequest
    output: list[int]
    routed: int = 0  # tokens whose routing was sent
    ended: asyncio.Future[FinishReason] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, reason: FinishReason) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class FakeServer(rollout_pb2_grpc.RolloutServiceServicer):
    """A server whose tokens you choose; an async context manager.

    Args:
        sample: Returns the next token. Default: a token that depends on the request's seed and the
            position, so that a sequence is the same on every fake server.
        version: Version of the weights that it reports.
        tokens_per_second: Rate of each sequence; 0: as fast as they are read.
        vocab_size: Token ids are below it; every token's log-probability is -log(vocab_size).
        context_length: Most tokens of prompt and output together.
        routing: Number of layers of a mixture of experts, and of experts per layer and token. The
            experts depend on the token and its position. None: requests for routing are refused.

    Attributes:
        address: HOST:PORT, once it runs.
        state: The state that it reports; while it is not SERVING, sequences wait.
        requests: All requests so far, as messages of the API.
    """

    def __init__(
        self,
        sample: Sampler | None = None,
        *,
        version: int | None = None,
        tokens_per_second: float = 0.0,
        vocab_size: int = 512,
        context_length: int = 4096,
        routing: tuple[int, int] | None = None,
    ) -> None:
        self.address = ""
        self.state = ServerState.SERVING
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self._sample = sample
        self._pause = 1 / tokens_per_second if tokens_per_second else 0.0
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._routing = routing
        version = checked_version("version", version)
        self._weights = common_pb2.WeightTag(server_id=uuid.uuid4().hex, version=version)
        self._highest_version = version
        self._live: set[_FakeSequence] = set()
        self._pauses: dict[str, asyncio.TimerHandle | None] = {}  # by id; the end of each lease
        self._sleeping_weights: SleepingWeights | None = None
        self._streams: set[asyncio.Event] = set()  # set: the stream is to be cut
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        use_grpc(self._server)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops the server at once, as if it died. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    @property
    def running(self) -> int:
        """Sequences under way."""
        return len(self._live)

    def commit(self, version: int | None) -> None:
        """Serves this version from the next token on, as after an update."""
        version = checked_version("version", version)
        if self.state is ServerState.AWAITING_WEIGHTS:
            self.state = ServerState.SERVING
        self._weights = common_pb2.WeightTag(
            server_id=self._weights.server_id,
            revision=self._weights.revision + 1,
            digest=self._weights.digest + 1,
            version=version,
        )
        if version is not None:
            self._highest_version = max(version, self._highest_version or 0)

    def interrupt(self) -> None:
        """Interrupts all sequences under way, as a draining server does."""
        for sequence in self._live:
            sequence.end(FinishReason.INTERRUPTED)

    def cut(self) -> None:
        """Breaks all streams, as a network failure does."""
        for cut in self._streams:
            cut.set()

    # The API.

    async def GetServerInfo(  # noqa: N802, D102
        self,
        request: rollout_pb2.GetServerInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> rollout_pb2.GetServerInfoResponse:
        response = rollout_pb2.GetServerInfoResponse(
            server_id=self._weights.server_id,
            state=SERVER_STATE_TO_PROTO[self.state],
            weights=self._weights,
            highest_version=self._highest_version,
            engine="fake",
            model="none",
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            deterministic=True,
            max_running_sequences=2**31 - 1,
            running_sequences=self.running,
            pauses=[rollout_pb2.ActivePause(pause_id=pause_id) for pause_id in self._pauses],
        )
        if self._sleeping_weights is not None:
            response.sleeping_weights = SLEEPING_WEIGHTS_TO_PROTO[self._sleeping_weights]
        return response

    async def Pause(  # noqa: N802, D102
        self,
        request: rollout_pb2.PauseRequest,
        context: Any,  # noqa: ARG002
    ) -> rollout_pb2.PauseResponse:
        pause_id = request.pause_id or uuid.uuid4().hex
        self._lift(pause_id)
        lease, timer = request.lease.ToTimedelta().total_seconds(), None
        if lease:
            timer = asyncio.get_running_loop().call_later(lease, self._lift, pause_id)
        self._pauses[pause_id] = timer
        if self.state is ServerState.SERVING:
            self.state = ServerState.PAUSED
        return rollout_pb2.PauseResponse(pause_id=pause_id, held_sequences=self.running)

    async def Resume(  # noqa: N802, D102
        self,
        request: rollout_pb2.ResumeRequest,
        context: Any,  # noqa: ARG002
    ) -> rollout_pb2.ResumeResponse:
        for pause_id in [request.pause_id] if request.pause_id else list(self._pauses):
            self._lift(pause_id)
        return rollout_pb2.ResumeResponse(
            resumed_sequences=0 if self._pauses else self.running,
            remaining_pauses=len(self._pauses),
            weights=self._weights,
        )

    def _lift(self, pause_id: str) -> None:
        if (timer := self._pauses.pop(pause_id, None)) is not None:
            timer.cancel()
        if self.state is ServerState.PAUSED and not self._pauses:
            self.state = ServerState.SERVING

    async def Sleep(  # noqa: N802, D102
        self, request: rollout_pb2.SleepRequest, context: Any
    ) -> rollout_pb2.SleepResponse:
        if not self.state.ready:
            reason = Reason[self.state.name]
            message = f"Sleep is refused while the server is {self.state.value}"
            status = encode_status(reason, message, metadata={})
            trailing = ((DETAILS_KEY, status.SerializeToString()),)
            await context.abort(reason.code, message, trailing)
        self.state = ServerState.SLEEPING
        self._sleeping_weights = SLEEPING_WEIGHTS_FROM_PROTO[request.weights]
        self.interrupt()
        return rollout_pb2.SleepResponse()

    async def WakeUp(  # noqa: N802, D102
        self,
        request: rollout_pb2.WakeUpRequest,
        context: Any,  # noqa: ARG002
    ) -> rollout_pb2.WakeUpResponse:
        if self.state is ServerState.SLEEPING:
            discarded = self._sleeping_weights is SleepingWeights.DISCARD
            self.state = ServerState.PAUSED if self._pauses else ServerState.SERVING
            if discarded and not request.reload_checkpoint:
                self.state = ServerState.AWAITING_WEIGHTS
        self._sleeping_weights = None
        return rollout_pb2.WakeUpResponse(weights=self._weights)

    async def Abort(  # noqa: N802, D102
        self,
        request: rollout_pb2.AbortRequest,
        context: Any,  # noqa: ARG002
    ) -> rollout_pb2.AbortResponse:
        wanted = {key.request_id for key in request.sequences}
        found = [s for s in self._live if request.all or s.request.request_id in wanted]
        for sequence in found:
            sequence.end(FinishReason.ABORTED)
        known = {sequence.request.request_id for sequence in found}
        return rollout_pb2.AbortResponse(aborted=len(found), not_found=sorted(wanted - known))

    async def StreamRollouts(  # type: ignore[override]  # noqa: N802, D102  writes as it goes
        self, requests: AsyncIterator[rollout_pb2.StreamRolloutsRequest], context: Any
    ) -> None:
        cut, tasks = asyncio.Event(), set[asyncio.Task[Any]]()
        lock = asyncio.Lock()  # gRPC sends one thing at a time
        live = dict[int, _FakeSequence]()

        async def write(**fields: Any) -> None:
            message = rollout_pb2.StreamRolloutsResponse(weights=self._weights, **fields)
            async with lock:
                await context.write(message)

        async def read() -> None:
            async for message in requests:
                if message.HasField("abort"):
                    if message.handle in live:
                        live[message.handle].end(FinishReason.ABORTED)
                    continue
                self.requests.append(message.start)
                output = list(message.start.output_token_ids)
                sequence = live[message.handle] = _FakeSequence(
                    message.handle, message.start, output
                )
                tasks.add(asyncio.create_task(self._play(sequence, write)))

        self._streams.add(cut)
        reading = asyncio.create_task(read())
        cutting = asyncio.create_task(cut.wait())
        try:
            await asyncio.wait([reading, cutting], return_when=asyncio.FIRST_COMPLETED)
            if cut.is_set():
                async with lock:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
            await asyncio.gather(*tasks)
        finally:
            self._streams.discard(cut)
            await cancel_all([reading, cutting, *tasks])

    async def _play(self, sequence: _FakeSequence, write: Callable[..., Awaitable[None]]) -> None:
        if sequence.request.routed_experts and self._routing is None:
            error = rollout_pb2.SequenceError(
                code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
                reason="UNSUPPORTED_ROUTING",
                message="this server has no experts: use FakeServer(routing=(layers, top_k))",
                field="routed_experts",
            )
            await write(events=[rollout_pb2.SequenceEvent(handle=sequence.handle, error=error)])
            return
        self._live.add(sequence)
        try:
            while (reason := self._reason(sequence)) is None:
                if self._may_sample(sequence):
                    token = self._next(sequence)
                    await write(
                        handles=[sequence.handle],
                        counts=[1],
                        offsets=[len(sequence.output)],
                        token_ids=[token],
                        logprobs=[-math.log(self._vocab_size)],
                        events=self._routed(sequence),
                    )
                    sequence.output.append(token)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause or 0.001):
                        await asyncio.shield(sequence.ended)
            self._live.discard(sequence)  # before anybody learns of its end
            finish = rollout_pb2.Finish(
                reason=FINISH_REASON_TO_PROTO[reason],
                stop_token_id=sequence.output[-1] if reason is FinishReason.STOP else None,
                message="as the test asked for" if reason is FinishReason.INTERRUPTED else "",
                prompt_tokens=len(sequence.request.prompt_token_ids),
                output_tokens=len(sequence.output),
            )
            await write(events=[rollout_pb2.SequenceEvent(handle=sequence.handle, finish=finish)])
        finally:
            self._live.discard(sequence)

    def _reason(self, sequence: _FakeSequence) -> FinishReason | None:
        """Why the sequence ends now; None if it continues."""
        request, output = sequence.request, sequence.output
        most = request.sampling.max_new_tokens or self._context_length
        room = self._context_length - len(request.prompt_token_ids)
        if output and output[-1] in request.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(output) >= min(most, room):
            return FinishReason.LENGTH
        return sequence.ended.result() if sequence.ended.done() else None

    def _may_sample(self, sequence: _FakeSequence) -> bool:
        request = sequence.request
        least = request.min_weight_version if request.HasField("min_weight_version") else None
        version = self._weights.version if self._weights.HasField("version") else None
        new_enough = least is None or (version is not None and version >= least)
        return self.state is ServerState.SERVING and new_enough

    def _routed(self, sequence: _FakeSequence) -> list[rollout_pb2.SequenceEvent]:
        """The experts of the tokens that the next one is drawn from, each sent once."""
        request, start = sequence.request, sequence.routed
        if not request.routed_experts or self._routing is None:
            return []
        tokens = [*request.prompt_token_ids, *sequence.output][start:]
        sequence.routed += len(tokens)
        layers, top_k = self._routing
        experts = b"".join(
            hashlib.shake_128(struct.pack("<QQ", token, position)).digest(layers * top_k)
            for position, token in enumerate(tokens, start)
        )
        rows = rollout_pb2.RoutedExperts(
            start_position=start,
            num_tokens=len(tokens),
            num_layers=layers,
            top_k=top_k,
            experts=experts,
            bytes_per_expert=1,
            weights=self._weights,
            oldest_kv_revision=self._weights.revision,
        )
        return [rollout_pb2.SequenceEvent(handle=sequence.handle, routed_experts=[rows])]

    def _next(self, sequence: _FakeSequence) -> int:
        request, output = sequence.request, sequence.output
        if self._sample is not None:
            return self._sample(tuple(request.prompt_token_ids), tuple(output))
        text = struct.pack("<QQ", request.sampling.seed, len(output))
        drawn = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(drawn, "little") % self._vocab_size
