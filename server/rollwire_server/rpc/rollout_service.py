"""rollwire.v1.RolloutService over gRPC."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rollwire.conversion import SLEEPING_WEIGHTS_FROM_PROTO, weight_tag_to_proto
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc

from rollwire_server.errors import ServiceError
from rollwire_server.logs import bind
from rollwire_server.rpc import conversion
from rollwire_server.rpc.interceptor import client_of
from rollwire_server.rpc.rollout_stream import RolloutStream
from rollwire_server.rpc.validation import check_id, read_duration, read_request
from rollwire_server.security import Scope
from rollwire_server.sequences.sequence import ReadyQueue
from rollwire_server.state import Rpc

if TYPE_CHECKING:
    import grpc

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.rpc.server_info import ServerInfoBuilder
    from rollwire_server.security import TokenAuthorizer
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.sequences.request import Request
    from rollwire_server.sequences.sequence import Cursor
    from rollwire_server.sleep import SleepController
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.state import WeightState

    Context = grpc.aio.ServicerContext[Any, Any]

MAX_ABORTED_SEQUENCES = 10_000
TOKENS_A_MESSAGE = 65_536  # at most 9 bytes each: well below 1 MiB


class RolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """See rollout.proto."""

    def __init__(
        self,
        engine: Engine,
        state: StateMachine,
        sequences: Sequences,
        weights: WeightState,
        sleep: SleepController,
        info: ServerInfoBuilder,
        counters: ServerCounters,
        authorizer: TokenAuthorizer,
        *,
        max_streams_per_client: int,
    ) -> None:
        self._counters = counters
        self._engine = engine
        self._state = state
        self._sequences = sequences
        self._weights = weights
        self._sleep = sleep
        self._info = info
        self._authorizer = authorizer
        self._max_streams = max_streams_per_client
        self._streams: Counter[str] = Counter()  # by client address

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
                await context.write(
                    conversion.generate_response(
                        output, request.request_id, request.attempt, self._weights.current
                    )
                )
            if error is not None:
                raise error

    async def StreamRollouts(  # type: ignore[override]  # noqa: N802  reads and writes by itself
        self, _: Any, context: Context
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
                self._engine, self._state, self._sequences, self._counters, context
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
                raise ServiceError(
                    Reason.BAD_REQUEST, "`all` and `sequences` exclude each other", field="all"
                )
            return rollout_pb2.AbortResponse(aborted=await self._sequences.abort_all())
        if len(request.sequences) > MAX_ABORTED_SEQUENCES:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"{len(request.sequences)} sequences in one call, the limit is "
                f"{MAX_ABORTED_SEQUENCES}",
                field="sequences",
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
            weights=weight_tag_to_proto(self._weights.current),
        )

    async def Sleep(  # noqa: N802
        self, request: rollout_pb2.SleepRequest, _: Context
    ) -> rollout_pb2.SleepResponse:
        if request.weights not in SLEEPING_WEIGHTS_FROM_PROTO:
            raise ServiceError(
                Reason.BAD_REQUEST, f"unknown value {request.weights} of weights", field="weights"
            )
        freed = await self._sleep.sleep(SLEEPING_WEIGHTS_FROM_PROTO[request.weights])
        return rollout_pb2.SleepResponse(freed_bytes=freed)

    async def WakeUp(  # noqa: N802
        self, request: rollout_pb2.WakeUpRequest, _: Context
    ) -> rollout_pb2.WakeUpResponse:
        await self._sleep.wake(reload_checkpoint=request.reload_checkpoint)
        return rollout_pb2.WakeUpResponse(weights=weight_tag_to_proto(self._weights.current))

    async def GetServerInfo(  # noqa: N802
        self, _request: rollout_pb2.GetServerInfoRequest, _context: Context
    ) -> rollout_pb2.GetServerInfoResponse:
        self._state.check(Rpc.GET_SERVER_INFO)
        return self._info.build()
