"""One server in a publish: its progress, and the calls that stage, commit or discard the update."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, TypeVar

import grpc
from rollwire.conversion import KV_POLICY_TO_PROTO, UPDATE_PHASE_FROM_PROTO, weight_tag_from_proto
from rollwire.deadlines import Deadline, Timeout
from rollwire.types import KvPolicy, UpdatePhase, version_text, weights_text
from rollwire.v1 import weights_pb2
from rollwire_transport import PROTOCOL

from rollwire_client._errors import (
    PublishError,
    RollwireError,
    ServerUnreachableError,
    UpdateRefusedError,
)
from rollwire_client._rpc.channel import unary
from rollwire_client._rpc.status import error_from_call

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client._data import PublishTimeouts
    from rollwire_client._fleet.policy import Policy
    from rollwire_client._publishing.payload import Payload
    from rollwire_client._rpc.client import RolloutClient

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Changes:
    """Wakes whoever waits for servers of a publish."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


class PublishTarget:
    """A server that an update is published to.

    Its phase is ANNOUNCED → READY → RECEIVING ⇄ STALLED → STAGED, as the server reports it. After a
    failure, in any phase, it is left out of the rest of the publish.
    """

    def __init__(
        self,
        client: RolloutClient,
        payload: Payload,
        publisher: weights_pb2.Publisher,
        update_id: str,
        timeouts: PublishTimeouts,
        changes: Changes,
    ) -> None:
        self.address = client.address
        self.payload = payload
        self.phase = UpdatePhase.ANNOUNCED
        self.next_bucket = 0  # the server has all buckets before this one
        self.received_bytes = 0
        self.digest = 0  # of what it received, once STAGED
        self.error: RollwireError | None = None
        self.transports: tuple[str, ...] = ()  # backends that it can use
        self.announced_at = 0.0
        self.reported_at = 0.0  # when its last report came
        # The rank that it waits for; once STALLED that it lost, or waited for in vain.
        self.peer: int | None = None
        self.timed_out = False
        self.detail = ""  # of why it STALLED
        self.committed: weights_pb2.CommitWeightsResponse | None = None
        self._client = client
        self._stub = client.weight_service
        self._publisher = publisher
        self._update_id = update_id
        self._timeouts = timeouts
        self._changes = changes
        self._epoch = ""  # of the group that it is in, or was told to join
        self._announced = weights_pb2.UpdateWeightsRequest()

    @property
    def staged(self) -> bool:
        return self.error is None and self.phase is UpdatePhase.STAGED

    @property
    def staging_seconds(self) -> float:
        """From the announcement to its last report, which is that it has STAGED the update."""
        return max(self.reported_at - self.announced_at, 0.0)

    def fail(self, error: RollwireError) -> None:
        """Leaves the server out of the publish; the first error counts."""
        if self.error is None:
            self.error = error
            self._changes.notify()

    async def stage(self, request: weights_pb2.UpdateWeightsRequest, policy: Policy) -> None:
        """Announces the update, and follows the server's reports until STAGED or a failure.

        Cancelling it makes the server discard the update.
        """
        self.announced_at = time.monotonic()
        try:
            if request.manifest.partial or policy.rolled_back:
                request = await self._as_it_needs(request, policy)
            try:
                await self._follow_reports(request)
            except UpdateRefusedError as error:
                leftover = error.metadata.get("update_id")
                if error.reason != "UPDATE_IN_PROGRESS" or leftover is None:
                    raise
                # An earlier update of this publisher, whose discard did not reach the server.
                await self.discard(leftover)
                await self._follow_reports(request)
        except RollwireError as error:
            self.fail(error)

    async def _as_it_needs(
        self, request: weights_pb2.UpdateWeightsRequest, policy: Policy
    ) -> weights_pb2.UpdateWeightsRequest:
        """The request for this server, which depends on what it serves."""
        serves = (await self._client.info()).weights
        if request.manifest.partial and not policy.accepts(serves):
            raise PublishError(
                f"{self.address}: serves {version_text(serves.version)} and missed the "
                "last publish: a partial update would mix two policies, so it was not sent; "
                "call catch_up(), or publish all tensors",
                server=self.address,
            )
        if policy.missed_rollback(serves) and not request.allow_version_rollback:
            announced, request = request, weights_pb2.UpdateWeightsRequest()
            request.CopyFrom(announced)
            request.allow_version_rollback = True
        return request

    async def renew_lease(self) -> None:
        """Announces again what it has staged, so that it waits on; a failure is ignored."""
        call = self._stub.UpdateWeights(self._announced)
        try:
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with Timeout(self._timeouts.call):
                    while await call.read() is not grpc.aio.EOF:
                        pass
        finally:
            call.cancel()

    async def _follow_reports(self, request: weights_pb2.UpdateWeightsRequest) -> None:
        self._announced = request
        call = self._stub.UpdateWeights(request)
        try:
            while not self.staged and self.error is None:
                silence = self._longest_silence()
                async with Timeout(silence):
                    report = await call.read()
                if not isinstance(report, weights_pb2.UpdateWeightsResponse):
                    raise PublishError(
                        f"{self.address}: ended its reports on the update while it was "
                        f"{self.phase.value}",
                        server=self.address,
                    )
                if report.transport_protocol != PROTOCOL:
                    raise PublishError(
                        f"{self.address}: runs another version of rollwire than this trainer, and "
                        "transfers between them are not possible: use the same version for both",
                        server=self.address,
                    )
                self._apply(report)
            if self.staged:
                await call.code()  # the server ends it, which costs less than to cancel it
        except TimeoutError as error:
            raise ServerUnreachableError(
                f"{self.address}: silent for {silence:g} s while the update was {self.phase.value}",
                server=self.address,
            ) from error
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, self.address) from error
        finally:
            call.cancel()

    def _longest_silence(self) -> float:
        if not self.reported_at:
            return self._timeouts.call
        announced = self.phase is UpdatePhase.ANNOUNCED
        return self._timeouts.ready if announced else self._timeouts.silence

    def _apply(self, report: weights_pb2.UpdateWeightsResponse) -> None:
        phase = UPDATE_PHASE_FROM_PROTO.get(report.phase, self.phase)
        if self.phase is UpdatePhase.ANNOUNCED:
            self.transports = self.transports or tuple(report.transports)
            self._epoch = report.epoch  # of the last update's group, if the server uses it again
        # On a busy event loop, a report of the former group may be read late.
        if phase is not UpdatePhase.STALLED or report.epoch == self._epoch:
            self.phase = phase
            self.peer = report.peer if report.HasField("peer") else None
            self.timed_out, self.detail = report.timed_out, report.detail
        self.reported_at = time.monotonic()
        self.next_bucket = report.next_bucket
        self.received_bytes = report.received_bytes
        self.digest = report.digest
        self._changes.notify()

    def resumed(self, epoch: str) -> bool:
        """Whether it receives in the group of the last update."""
        return self.phase is UpdatePhase.RECEIVING and self._epoch == epoch

    def leave_group(self) -> None:
        """Takes it that its former group is over: reports on that are ignored from now on."""
        self._epoch = ""
        if self.phase is UpdatePhase.STALLED:
            self.phase = UpdatePhase.READY

    async def join(
        self, request: weights_pb2.JoinTransportRequest
    ) -> weights_pb2.JoinTransportResponse:
        """Makes the server take a step to join a transport group."""
        request.publisher.CopyFrom(self._publisher)
        request.update_id = self._update_id
        self._epoch = request.epoch
        # Longer than the trainer's end waits for the group, which then knows who is missing.
        limit = Deadline(self._timeouts.join + self._timeouts.call)
        return await self._call_until_answered(
            lambda: unary(
                self._stub.JoinTransport,
                request,
                server=self.address,
                timeout=limit.left,
                deadline=limit.left,
            ),
            limit,
        )

    async def commit(self, digest: int, max_kv_lag: int | None) -> None:
        """Makes the server serve the staged update; sets ``committed`` unless that fails."""
        kv_policy = KvPolicy.RECOMPUTE if max_kv_lag == 0 else KvPolicy.KEEP
        request = weights_pb2.CommitWeightsRequest(
            publisher=self._publisher,
            update_id=self._update_id,
            expected_digest=digest,
            kv_policy=KV_POLICY_TO_PROTO[kv_policy],
            max_kv_lag=max_kv_lag or None,
        )
        try:
            self.committed = await self._call_until_answered(
                lambda: unary(
                    self._stub.CommitWeights,
                    request,
                    server=self.address,
                    timeout=self._timeouts.commit_silence,
                ),
                Deadline(self._timeouts.commit),
            )
        except ServerUnreachableError as error:
            self.fail(
                ServerUnreachableError(
                    f"{error}; it was committing, and may or may not have done it",
                    server=self.address,
                )
            )
        except RollwireError as error:
            self.fail(error)

    async def discard(self, update_id: str | None = None) -> None:
        """Makes the server drop this update, or another one; a failure is ignored."""
        with contextlib.suppress(RollwireError):
            await unary(
                self._stub.DiscardUpdate,
                weights_pb2.DiscardUpdateRequest(
                    publisher=self._publisher, update_id=update_id or self._update_id
                ),
                server=self.address,
                timeout=self._timeouts.discard,
            )

    async def describe_weights(self) -> str:
        """What the server serves now, for an error's message."""
        try:
            status = await unary(
                self._stub.GetWeightStatus,
                weights_pb2.GetWeightStatusRequest(),
                server=self.address,
                timeout=self._timeouts.discard,
            )
        except RollwireError:
            return "cannot be asked what it serves"
        return f"serves {weights_text(weight_tag_from_proto(status.weights))}"

    async def _call_until_answered(self, call: Callable[[], Awaitable[T]], limit: Deadline) -> T:
        """Repeats a call whose answer was lost while the server is alive: it acts once."""
        while True:
            try:
                return await call()
            except ServerUnreachableError as error:
                if not await self._is_alive() or limit.left == 0:
                    raise
                logger.info("%s; it is asked again", error)

    async def _is_alive(self) -> bool:
        try:
            await self._client.info()
        except RollwireError:
            return False
        return True
