"""rollwire.v1.RolloutService over gRPC."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollwire.conversion import (
    LOGPROB_BASIS_TO_PROTO,
    SERVER_STATE_TO_PROTO,
    SLEEPING_WEIGHTS_FROM_PROTO,
    SLEEPING_WEIGHTS_TO_PROTO,
    committed_update_to_proto,
    finish_to_proto,
    weight_tag_to_proto,
)
from rollwire.reasons import Reason
from rollwire.types import ServerState
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc

from rollwire_server import __version__
from rollwire_server.errors import ServiceError, bad_request
from rollwire_server.logs import bind
from rollwire_server.rpc.interceptor import client_of
from rollwire_server.rpc.rollout_stream import (
    RolloutStream,
    prompt_logprobs_to_proto,
    routed_experts_to_proto,
    top_logprobs_to_proto,
)
from rollwire_server.rpc.validation import check_id, read_duration, read_request
from rollwire_server.security import Scope
from rollwire_server.sequences.sequence import ReadyQueue
from rollwire_server.state import Rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    import grpc
    from rollwire.types import WeightTag

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.security import TokenAuthorizer
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.sequences.sequence import Cursor, Request, SequenceOutput
    from rollwire_server.sleep import SleepController
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.manager import UpdateManager

    Context = grpc.aio.ServicerContext[Any, Any]

MAX_ABORTED_SEQUENCES = 10_000
TOKENS_A_MESSAGE = 65_536  # at most 9 bytes each: well below 1 MiB


@dataclass(eq=False)
class RolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """See rollout.proto."""

    _server_id: str
    _engine: Engine
    _state: StateMachine
    _sequences: Sequences
    _updates: UpdateManager
    _sleep: SleepController
    _counters: ServerCounters
    _authorizer: TokenAuthorizer
    _max_streams: int  # of one client
    _streams: Counter[str] = field(default_factory=Counter)  # by client address

    async def Generate(  # type: ignore[override]  # noqa: N802  writes by itself
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> None:
        self._state.check_started(Rpc.GENERATE)  # ``Sequences.start`` checks the rest
        queue = ReadyQueue()
        checked = read_request(request, self._engine.describe(), self._sequences.next_key())
        bind(request_id=checked.request_id)  # the server chose it where the caller did not
        cursor = self._sequences.start(checked, queue)
        try:
            while not cursor.done:
                await queue.wait()
                queue.pop_all()
                await self._write_outputs(cursor, checked, context)
        finally:
            queue.close()
            self._sequences.detach(cursor)

    async def _write_outputs(self, cursor: Cursor, request: Request, context: Context) -> None:
        while (output := cursor.next_output(TOKENS_A_MESSAGE)) is not None:
            error = output.end if isinstance(output.end, ServiceError) else None
            if error is None or output.token_ids:
                await context.write(_response(output, request, self._updates.weights.current))
            if error is not None:
                raise error

    async def StreamRollouts(  # type: ignore[override]  # noqa: N802  writes by itself
        self, requests: AsyncIterable[rollout_pb2.StreamRolloutsRequest], context: Context
    ) -> None:
        client = client_of(context)
        if self._streams[client] >= self._max_streams:
            raise ServiceError(
                Reason.TOO_MANY_STREAMS,
                f"{client} has {self._streams[client]} StreamRollouts calls open, the limit: use "
                "one of them for many sequences",
            )
        self._streams[client] += 1
        try:
            await RolloutStream(
                self._engine, self._state, self._sequences, self._counters, requests, context
            ).run()
        finally:
            self._streams[client] -= 1
            self._streams += Counter()  # drops clients that have none

    async def Abort(  # noqa: N802
        self, request: rollout_pb2.AbortRequest, context: Context
    ) -> rollout_pb2.AbortResponse:
        self._state.check(Rpc.ABORT)
        if request.all:
            self._authorizer.authorize(Scope.CONTROL, context.invocation_metadata() or ())
            if request.sequences:
                raise bad_request("all", "`all` and `sequences` exclude each other")
            return rollout_pb2.AbortResponse(aborted=await self._sequences.abort_all())
        if len(request.sequences) > MAX_ABORTED_SEQUENCES:
            raise bad_request(
                "sequences",
                f"{len(request.sequences)} sequences in one call, the limit is "
                f"{MAX_ABORTED_SEQUENCES}",
            )
        for key in request.sequences:
            check_id("sequences.request_id", key.request_id)
        aborted, not_found = await self._sequences.abort(
            (key.request_id, key.attempt if key.HasField("attempt") else None)
            for key in request.sequences
        )
        return rollout_pb2.AbortResponse(aborted=aborted, not_found=not_found)

    async def Pause(  # noqa: N802
        self, request: rollout_pb2.PauseRequest, _: Context
    ) -> rollout_pb2.PauseResponse:
        self._state.check(Rpc.PAUSE)
        check_id("pause_id", request.pause_id)
        lease = read_duration(request, "lease")
        pause_id = await self._state.pause(request.pause_id, lease)
        return rollout_pb2.PauseResponse(pause_id=pause_id, held_sequences=self._sequences.live)

    async def Resume(  # noqa: N802
        self, request: rollout_pb2.ResumeRequest, _: Context
    ) -> rollout_pb2.ResumeResponse:
        self._state.check(Rpc.RESUME)
        check_id("pause_id", request.pause_id)
        was_held = self._state.held
        await self._state.resume(request.pause_id)
        resumed = was_held and not self._state.held
        return rollout_pb2.ResumeResponse(
            resumed_sequences=self._sequences.live if resumed else 0,
            remaining_pauses=len(self._state.pauses),
            weights=weight_tag_to_proto(self._updates.weights.current),
        )

    async def Sleep(  # noqa: N802
        self, request: rollout_pb2.SleepRequest, _: Context
    ) -> rollout_pb2.SleepResponse:
        if request.weights not in SLEEPING_WEIGHTS_FROM_PROTO:
            raise bad_request("weights", f"unknown value {request.weights} of weights")
        freed = await self._sleep.sleep(SLEEPING_WEIGHTS_FROM_PROTO[request.weights])
        return rollout_pb2.SleepResponse(freed_bytes=freed)

    async def WakeUp(  # noqa: N802
        self, request: rollout_pb2.WakeUpRequest, _: Context
    ) -> rollout_pb2.WakeUpResponse:
        await self._sleep.wake(reload_checkpoint=request.reload_checkpoint)
        weights = weight_tag_to_proto(self._updates.weights.current)
        return rollout_pb2.WakeUpResponse(weights=weights)

    async def GetServerInfo(  # noqa: N802
        self, _request: rollout_pb2.GetServerInfoRequest, _context: Context
    ) -> rollout_pb2.GetServerInfoResponse:
        self._state.check(Rpc.GET_SERVER_INFO)
        response = rollout_pb2.GetServerInfoResponse(
            server_id=self._server_id,
            state=SERVER_STATE_TO_PROTO[self._state.current],
            software_version=__version__,
            accepts_updates=not self._updates.frozen,
            transports=self._updates.transports,
        )
        for pause_id, left in self._state.pauses.items():
            pause = response.pauses.add(pause_id=pause_id)
            if left is not None:
                pause.lease_left.FromMilliseconds(int(left * 1000))
        if (weights := self._sleep.sleeping_weights) is not None:
            response.sleeping_weights = SLEEPING_WEIGHTS_TO_PROTO[weights]
        if self._state.current is not ServerState.STARTING:
            self._describe_engine(response)
        return response

    def _describe_engine(self, response: rollout_pb2.GetServerInfoResponse) -> None:
        engine, load, weights = self._engine.describe(), self._engine.load(), self._updates.weights
        response.weights.CopyFrom(weight_tag_to_proto(weights.current))
        if weights.highest_version is not None:
            response.highest_version = weights.highest_version
        response.engine = engine.engine
        response.model = engine.model
        response.vocab_size = engine.vocab_size
        response.context_length = engine.context_length
        response.eos_token_ids.extend(engine.eos_token_ids)
        bases = (LOGPROB_BASIS_TO_PROTO[basis] for basis in engine.logprob_bases)
        response.logprob_bases.extend(sorted(bases))
        response.deterministic = engine.deterministic
        response.accepts_deltas = engine.deltas and not self._updates.frozen
        if (update := self._updates.last_update) is not None:
            response.last_update.CopyFrom(committed_update_to_proto(update))
        response.max_running_sequences = engine.max_running_sequences
        activity = self._sequences.by_activity()
        response.running_sequences = activity["running"]
        response.waiting_sequences = activity["waiting"]
        response.held_sequences = activity["held"]
        response.sampled_tokens = self._counters.sampled_tokens
        response.kv_tokens_used = load.kv_tokens_used
        response.kv_tokens_total = load.kv_tokens_total


def _response(
    output: SequenceOutput, request: Request, weights: WeightTag
) -> rollout_pb2.GenerateResponse:
    """A message of Generate; it has ``weights`` where the output has none of its own."""
    weights = output.weights or weights
    prompt = prompt_logprobs_to_proto(output.extras)
    if output.segment is not None:
        oldest = output.segment.oldest_kv_revision
    else:
        oldest = min((part.oldest_kv_revision for part in prompt), default=weights.revision)
    message = rollout_pb2.GenerateResponse(
        request_id=request.request_id,
        attempt=request.attempt,
        offset=output.offset,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        weights=weight_tag_to_proto(weights),
        oldest_kv_revision=oldest,
        top_logprobs=top_logprobs_to_proto(output.tops),
        prompt_logprobs=prompt,
        routed_experts=routed_experts_to_proto(output.extras),
    )
    if output.end is not None and not isinstance(output.end, ServiceError):
        message.finish.CopyFrom(finish_to_proto(output.end))
    return message
