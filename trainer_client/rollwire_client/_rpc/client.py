"""One rollout server, as a trainer sees it."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import TYPE_CHECKING, Self, Unpack

from rollwire.conversion import weight_tag_from_proto
from rollwire.reasons import Reason
from rollwire.types import SleepingWeights
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2_grpc

from rollwire_client._arguments import seconds, server_address
from rollwire_client._concurrency import LoopAffinity
from rollwire_client._data import Aborted, Asleep, Pause, Resumed, Sampling, ServerInfo
from rollwire_client._errors import (
    ClosedError,
    RollwireError,
    ServerNotReadyError,
    ServerUnreachableError,
)
from rollwire_client._rpc import conversion
from rollwire_client._rpc.channel import Credentials, connect, unary
from rollwire_client._rpc.conversion import (
    DEFAULT_SAMPLING,
    RolloutOptions,
    begin_output,
    checked_token_ids,
    deliver_rarely,
    generate_request,
    pause_request,
    resume_request,
    set_field,
    sleep_request,
    wake_up_request,
)
from rollwire_client._rpc.pausing import MIN_LEASE, PAUSED_LEASE, paused
from rollwire_client._rpc.rollout_stream import Stream
from rollwire_client._rpc.timeouts import SLEEP_TIMEOUT, Timeouts, checked_timeouts
from rollwire_client._trajectory import Chunk, Trajectory, TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    import grpc

    from rollwire_client._rpc.channel import Request, Response
    from rollwire_client._rpc.rollout_stream import Attempt


class RolloutClient:
    """A client of one server; an async context manager.

    It has one channel, and one StreamRollouts call for any number of sequences. The call is opened
    with the first sequence, and again if it is lost. Closing the client aborts the sequences under
    way.

    Args:
        address: HOST:PORT of the server.
        timeouts: How long to wait for it.
        credentials: TLS and token.

    Raises:
        TypeError, ValueError: The address is not HOST:PORT, or ``timeouts`` is not ``Timeouts``.
    """

    def __init__(
        self,
        address: str,
        *,
        timeouts: Timeouts | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = server_address(address)
        self._credentials = credentials or Credentials()
        self.timeouts = checked_timeouts(timeouts)
        self._channel: grpc.aio.Channel | None = None
        # Making a stub costs a fifth of a call.
        self._rollout_stub: rollout_pb2_grpc.RolloutServiceStub | None = None
        self._weight_stub: weights_pb2_grpc.WeightServiceStub | None = None
        self._affinity = LoopAffinity("RolloutClient")
        self._stream: Stream | None = None
        self._opening = asyncio.Lock()
        self._context_length = 0

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            self._affinity.check()
            raise RuntimeError(f"the client of {self.address} is open already")
        self._affinity.bind()
        self._channel = connect(self.address, self._credentials)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Aborts the sequences under way and closes the channel. Idempotent."""
        if self._channel is None or self._affinity.forked:
            return
        self._affinity.check()
        channel, self._channel = self._channel, None
        self._rollout_stub = self._weight_stub = None
        try:
            if self._stream is not None:
                await self._stream.close(self.timeouts.close)
        finally:
            await channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the server, for its other services.

        Raises:
            ClosedError: The client is not open.
            NotOpenHereError: The client is open in another process or event loop.
        """
        if self._channel is None:
            raise ClosedError(
                f"the client of {self.address} is not open: use `async with`", server=self.address
            )
        self._affinity.check()
        return self._channel

    @property
    def last_message_at(self) -> float:
        """When the last tokens arrived, on the event loop's clock."""
        return self._stream.last_message_at if self._stream is not None else -math.inf

    @property
    def outstanding_tokens(self) -> int:
        """Most tokens that the sequences under way may still sample."""
        return self._stream.outstanding_tokens if self._stream is not None else 0

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        **options: Unpack[RolloutOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Samples one sequence and yields its tokens as they arrive.

        The last chunk has ``finish``, whatever its reason. An interrupted sequence is not resumed
        here; a ``Fleet`` does that. Leaving the iteration aborts the sequence on the server.

        Args:
            prompt_ids: Token ids, at least one: any sequence of integers, including arrays and
                tensors of one dimension.
            sampling: How to sample.
            **options: The options of ``RolloutOptions``.

        Raises:
            TypeError: There is no such option.
            InvalidRequestError: A value is invalid; ``violations`` names the field.
            RollwireError: Another error; ``.trajectory`` has the tokens sampled before it.
        """
        return self._sample(*_new_sequence(prompt_ids, sampling, options), whole=False)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        **options: Unpack[RolloutOptions],
    ) -> Trajectory:
        """Samples one sequence to its end; see ``stream``."""
        request, output = _new_sequence(prompt_ids, sampling, options)
        deliver_rarely(request, output)
        async for _ in self._sample(request, output, whole=output.text is None):
            pass
        return output.trajectory()

    async def start(
        self, request: rollout_pb2.GenerateRequest, output: TrajectoryBuilder
    ) -> Attempt:
        """Starts one attempt at a sequence, which appends to ``output``; the caller closes it. For
        the library itself, beneath ``stream`` and a ``Fleet``.
        """
        stream = await self._open()
        limit = request.sampling.max_new_tokens or self._context_length
        room = max(self._context_length - len(request.prompt_token_ids), 0)
        budget = max(min(limit, room), len(request.output_token_ids))
        return stream.start(request, output, budget)

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server's identity, weights, state and load.

        Args:
            timeout: Seconds to wait for the answer, instead of ``timeouts.call``.

        Raises:
            ServerUnreachableError: Nothing answers at the address within that time.
        """
        timeout = None if timeout is None else seconds("timeout", timeout)
        request = rollout_pb2.GetServerInfoRequest()
        answer = await self._call(self._rollouts.GetServerInfo, request, timeout)
        return conversion.server_info_from_proto(answer, self.address)

    async def abort(self, request_ids: Iterable[str]) -> Aborted:
        """Ends sequences on the server; their readers get ``FinishReason.ABORTED``.

        Raises:
            TypeError: ``request_ids`` is one id, not several.
        """
        if isinstance(request_ids, str):
            raise TypeError(f"request_ids is the text {request_ids!r}: give a list of ids")
        request = rollout_pb2.AbortRequest()
        for number, request_id in enumerate(request_ids):
            key = request.sequences.add()
            set_field(key, "request_id", request_id, prefix=f"sequences[{number}].")
        answer = await self._call(self._rollouts.Abort, request)
        return Aborted(answer.aborted, tuple(answer.not_found))

    async def abort_all(self) -> Aborted:
        """Ends every sequence of the server, also those of other clients."""
        answer = await self._call(self._rollouts.Abort, rollout_pb2.AbortRequest(all=True))
        return Aborted(answer.aborted, tuple(answer.not_found))

    async def pause(self, pause_id: str = "", *, lease: float | None = None) -> Pause:
        """Stops sampling at the next step and holds every sequence, until ``resume``.

        Args:
            pause_id: Id of the pause; "": the server makes one.
            lease: Seconds after which the pause ends without ``resume``; 0: never; None: the
                server's default.
        """
        request = pause_request(pause_id, lease)
        answer = await self._call(self._rollouts.Pause, request)
        return Pause(answer.pause_id, answer.held_sequences)

    def paused(self, *, lease: float = PAUSED_LEASE) -> AbstractAsyncContextManager[Pause]:
        """Pauses the server for the time of an ``async with`` block, and renews the lease.

        Args:
            lease: Seconds after which the pause ends if this process dies, or its event loop is
                blocked.
        """
        lease, pause_id = seconds("lease", lease, minimum=MIN_LEASE), uuid.uuid4().hex

        async def pause() -> Pause:
            return await self.pause(pause_id, lease=lease)

        return paused(pause, pause, lambda: self.resume(pause_id), lease=lease)

    async def resume(self, pause_id: str = "") -> Resumed:
        """Ends one pause, or all pauses if ``pause_id`` is ""."""
        request = resume_request(pause_id)
        answer = await self._call(self._rollouts.Resume, request)
        return Resumed(
            answer.resumed_sequences, answer.remaining_pauses, weight_tag_from_proto(answer.weights)
        )

    async def sleep(
        self,
        weights: SleepingWeights = SleepingWeights.HOST_BACKUP,
        *,
        timeout: float = SLEEP_TIMEOUT,
    ) -> Asleep:
        """Frees the server's device memory, until ``wake_up``. Idempotent.

        Sequences under way, also those of other clients, end with ``FinishReason.INTERRUPTED``. An
        update that was not committed is discarded; a commit that has begun is waited for.

        Args:
            weights: What becomes of the weights. The KV cache is freed in any case.
            timeout: Seconds to wait for the answer. A server that takes longer still falls asleep.

        Raises:
            TypeError, ValueError: An argument is invalid.
            RefusedError: The engine does not support this mode; the server serves as before.
            ServerNotReadyError: The server awaits weights, is quarantined, drains, or sleeps
                already with something else done to its weights.
            ServerFailedError: The engine failed; nothing was freed, and the server serves.
            ServerUnreachableError: Nothing answers, or not in time.
        """
        timeout = seconds("timeout", timeout)
        request = sleep_request(weights)
        try:
            answer = await self._call(self._rollouts.Sleep, request, timeout)
        except ServerNotReadyError as error:
            if error.reason != Reason.SLEEPING.name:
                raise
            found = (await self.info()).sleeping_weights
            if found is None:  # it was woken meanwhile
                raise
            if found is not weights:
                raise ServerNotReadyError(
                    f"{self.address}: sleeps already, with weights {found.name}, and was asked for "
                    f"{weights.name}: wake it up first",
                    server=self.address,
                    reason=error.reason,
                ) from error
            return Asleep(weights, 0, already_asleep=True)
        return Asleep(weights, answer.freed_bytes)

    async def wake_up(
        self, *, reload_checkpoint: bool = False, timeout: float = SLEEP_TIMEOUT
    ) -> ServerInfo:
        """Allocates the memory again that ``sleep`` freed. Does nothing if the server is awake.

        Args:
            reload_checkpoint: After ``SleepingWeights.DISCARD``: load the checkpoint with which the
                server started. Otherwise the server then awaits an update.
            timeout: Seconds to wait for the answer. A server that takes longer still wakes up.

        Returns:
            Its state, and the weights that it serves.

        Raises:
            InvalidRequestError: ``reload_checkpoint``, but the weights were not discarded.
            ServerNotReadyError: The server drains.
            ServerFailedError: It has no memory, or the engine failed: it still sleeps, and
                ``wake_up`` can be called again.
            ServerUnreachableError: Nothing answers, or not in time.
        """
        timeout = seconds("timeout", timeout)
        request = wake_up_request(reload_checkpoint=reload_checkpoint)
        await self._call(self._rollouts.WakeUp, request, timeout)
        return await self.info()

    @property
    def _rollouts(self) -> rollout_pb2_grpc.RolloutServiceStub:
        channel = self.channel
        if self._rollout_stub is None:
            self._rollout_stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        return self._rollout_stub

    @property
    def weight_service(self) -> weights_pb2_grpc.WeightServiceStub:
        """The server's ``WeightService``, called as gRPC has it.

        Raises:
            ClosedError: The client is not open.
        """
        channel = self.channel
        if self._weight_stub is None:
            self._weight_stub = weights_pb2_grpc.WeightServiceStub(channel)
        return self._weight_stub

    async def _sample(
        self, request: rollout_pb2.GenerateRequest, output: TrajectoryBuilder, *, whole: bool
    ) -> AsyncGenerator[Chunk, None]:
        attempt = None
        try:
            attempt = await self.start(request, output)
            if whole:
                await attempt.wait_end()
                output.finish = attempt.finish
                return
            while (chunk := await attempt.next()) is not None:
                chunk = output.with_text(chunk)
                output.finish = chunk.finish
                if output.text is not None and output.text.stop_string is not None:
                    attempt.detach()
                    attempt.close()
                    attempt = None
                    output.cut(chunk.offset + len(chunk.token_ids))
                    yield output.with_routing(chunk)
                    return
                yield output.with_routing(chunk)
        except RollwireError as error:
            error.trajectory = output.trajectory()
            raise
        finally:
            if attempt is not None:
                attempt.close()

    async def _open(self) -> Stream:
        _ = self.channel  # raises if it is not open here
        if self._stream is not None and self._stream.lost is None:
            return self._stream
        async with self._opening:
            if self._stream is None or self._stream.lost is not None:
                # A stream has no deadline, so the server is first asked whether it is there.
                info = await self.info()
                self._context_length = info.context_length
                self._stream = Stream(
                    self._rollouts.StreamRollouts(),
                    self.address,
                    probe=lambda: self._require_server(info.server_id),
                    silence=self.timeouts.silence,
                )
            return self._stream

    async def _require_server(self, server_id: str) -> None:
        info = await self.info(timeout=self.timeouts.probe)
        if info.server_id != server_id:
            raise ServerUnreachableError(
                f"{self.address}: another server process has taken its place", server=self.address
            )

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout: float | None = None,
    ) -> Response:
        timeout = self.timeouts.call if timeout is None else timeout
        return await unary(method, request, server=self.address, timeout=timeout)


def _new_sequence(
    prompt_ids: Sequence[int], sampling: Sampling, options: RolloutOptions
) -> tuple[rollout_pb2.GenerateRequest, TrajectoryBuilder]:
    output = TrajectoryBuilder(checked_token_ids(prompt_ids))
    request = generate_request(output.prompt_ids, sampling, options)
    return request, begin_output(output, request, options)
