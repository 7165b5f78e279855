"""One server in a publish: what it was told, how far it is, and what went wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from rollwire.conversion import KV_POLICY_TO_PROTO, UPDATE_PHASE_FROM_PROTO, weight_tag_from_proto
from rollwire.deadlines import Deadline, Timeout
from rollwire.types import UpdatePhase, version_text, weights_text
from rollwire.v1 import weights_pb2, weights_pb2_grpc

from rollwire_client._arguments import all_seconds
from rollwire_client._errors import (
    PublishError,
    RollwireError,
    ServerUnreachableError,
    UpdateRefusedError,
)
from rollwire_client._rpc.channel import unary
from rollwire_client._rpc.status import error_from_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire.types import KvPolicy

    from rollwire_client._fleet.committed_policy import Policy
    from rollwire_client._rpc.client import RolloutClient


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishTimeouts:
    """How long a publish waits, in seconds.

    Where servers and other ranks are waited for, time in which the event loop did not run is not
    counted: it heard nobody.

    Attributes:
        call: For the answer to a short call.
        ready: For a server to check an update and to reserve memory for it.
        silence: A server that reports nothing for this long is cut out; servers report at least
            every half second.
        join: For a transport group to stand.
        bucket: For one bucket to reach all servers.
        source: For the trainer's tensors to come, all that one bucket holds. Servers by default
            wait 30 s for a bucket.
        stalled: For the servers to say how far they came, once a group failed.
        staged: For the servers to verify what they have, once all is sent.
        commit: For a server to put an update in place.
        commit_silence: For the answer to a commit, before the server is asked whether it is there.
        discard: For the answer to a discard; a server that does not answer discards by its lease.
        stage_lease: How long a server keeps an update that waits for its publisher, who is gone:
            announced, stalled or staged.

    Raises:
        TypeError, ValueError: One of them is no number of seconds.
    """

    call: float = 10.0
    ready: float = 30.0
    silence: float = 5.0
    join: float = 20.0
    bucket: float = 30.0
    source: float = 20.0
    stalled: float = 2.0
    staged: float = 30.0
    commit: float = 60.0
    commit_silence: float = 5.0
    discard: float = 5.0
    stage_lease: float = 120.0

    def __post_init__(self) -> None:
        """Refuses what is no time."""
        all_seconds(self)


class Recipient:
    """One server's part in one update.

    ANNOUNCED → READY → RECEIVING ⇄ STALLED → STAGED, as the server reports; at any time it may
    fail, and is out then.

    Attributes:
        phase: As reported last.
        next_bucket: All before it are there.
        received_bytes: Of the update.
        digest: Of what it received, once STAGED.
        error: Why it is out.
        seconds: From the announcement to STAGED.
        transports: Backends that it can use.
    """

    def __init__(
        self,
        client: RolloutClient,
        publisher: weights_pb2.Publisher,
        update_id: str,
        timeouts: PublishTimeouts,
    ) -> None:
        self.address = client.address
        self.phase = UpdatePhase.ANNOUNCED
        self.next_bucket = 0
        self.received_bytes = 0
        self.digest = 0
        self.error: RollwireError | None = None
        self.seconds = 0.0
        self.transports: tuple[str, ...] = ()
        self._client = client
        self._stub = weights_pb2_grpc.WeightServiceStub(client.channel)
        self._publisher = publisher
        self._update_id = update_id
        self._timeouts = timeouts
        self._change = asyncio.Event()
        self._epoch = ""  # of the group that it was told to join last

    @property
    def staged(self) -> bool:
        """Whether it has everything, verified."""
        return self.error is None and self.phase is UpdatePhase.STAGED

    def fail(self, error: RollwireError) -> None:
        """Cuts the server out of the publish; the first reason counts."""
        if self.error is None:
            self.error = error
            self._changed()

    async def wait(self, until: Callable[[Recipient], bool]) -> None:
        """Returns once ``until`` is true of it, or it is out."""
        while self.error is None and not until(self):
            change = self._change
            await change.wait()

    async def follow(
        self,
        request: weights_pb2.UpdateWeightsRequest,
        policy: Policy,
    ) -> None:
        """Announces the update and keeps track of it until it is staged, or fails.

        Ending this before makes the server discard the update.

        Args:
            request: The announcement.
            policy: What the server should have by now.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            info = await self._client.info()
            self.transports = info.transports
            if request.manifest.partial and not policy.accepts(info.weights):
                raise PublishError(
                    f"{self.address}: serves {version_text(info.weights.version)} and missed what "
                    "was published last: a partial update would mix the two, so that it gets none; "
                    "catch_up() brings it up, or a publish of all tensors",
                    server=self.address,
                )
            if policy.missed_rollback(info.weights) and not request.allow_version_rollback:
                announced, request = request, weights_pb2.UpdateWeightsRequest()
                request.CopyFrom(announced)
                request.allow_version_rollback = True
            try:
                await self._report(request)
            except UpdateRefusedError as error:
                leftover = error.metadata.get("update_id")
                if error.reason != "UPDATE_IN_PROGRESS" or leftover is None:
                    raise
                # Of this publisher, whose discard did not reach the server.
                await self.discard(leftover)
                await self._report(request)
        except RollwireError as error:
            self.fail(error)
        self.seconds = clock() - began

    async def _report(self, request: weights_pb2.UpdateWeightsRequest) -> None:
        call = self._stub.UpdateWeights(request)
        try:
            while not self.staged and self.error is None:
                announced = self.phase is UpdatePhase.ANNOUNCED
                silence = self._timeouts.ready if announced else self._timeouts.silence
                async with Timeout(silence):
                    report = await call.read()
                if not isinstance(report, weights_pb2.UpdateWeightsResponse):
                    raise PublishError(
                        f"{self.address}: ended its reports on the update while it was "
                        f"{self.phase.value}",
                        server=self.address,
                    )
                self._take(report)
        except TimeoutError as error:
            raise ServerUnreachableError(
                f"{self.address}: silent for {silence:g} s while the update was {self.phase.value}",
                server=self.address,
            ) from error
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, self.address) from error
        finally:
            call.cancel()

    async def join(self, request: weights_pb2.JoinTransportRequest) -> None:
        """Joins a transport group; returns when the group stands.

        An answer that was lost is asked for again: the server joins once.

        Raises:
            RollwireError: It does not.
        """
        request.publisher.CopyFrom(self._publisher)
        request.update_id = self._update_id
        self._epoch = request.epoch
        if self.phase is not UpdatePhase.STAGED:
            self.phase = UpdatePhase.RECEIVING
        # Longer than the trainer waits for the group, which then knows who is missing.
        limit = Deadline(self._timeouts.join + self._timeouts.call)
        while True:
            try:
                await unary(
                    self._stub.JoinTransport,
                    request,
                    server=self.address,
                    timeout=limit.left,
                    deadline=limit.left,
                )
            except ServerUnreachableError as error:
                if not await self._answers() or limit.left == 0:
                    raise
                logger.info("%s; it is asked again", error)
            else:
                break

    async def commit(
        self, digest: int, kv_policy: KvPolicy
    ) -> weights_pb2.CommitWeightsResponse | None:
        """Makes the staged update the weights that serve; None if the server is out then.

        An answer that was lost is asked for again: the server commits once.
        """
        limit = Deadline(self._timeouts.commit)
        request = weights_pb2.CommitWeightsRequest(
            publisher=self._publisher,
            update_id=self._update_id,
            expected_digest=digest,
            kv_policy=KV_POLICY_TO_PROTO[kv_policy],
        )
        while True:
            try:
                answer = await unary(
                    self._stub.CommitWeights,
                    request,
                    server=self.address,
                    timeout=self._timeouts.commit_silence,
                )
            except ServerUnreachableError as error:
                if not await self._answers() or limit.left == 0:
                    self.fail(_maybe_committed(self.address, error))
                    return None
                logger.info("%s; it is asked again", error)
            except RollwireError as error:
                self.fail(error)
                return None
            else:
                return answer

    async def discard(self, update_id: str | None = None) -> None:
        """Makes the server drop this update, or another one; if it answers."""
        with contextlib.suppress(RollwireError):
            await unary(
                self._stub.DiscardUpdate,
                weights_pb2.DiscardUpdateRequest(
                    publisher=self._publisher, update_id=update_id or self._update_id
                ),
                server=self.address,
                timeout=self._timeouts.discard,
            )

    async def serves(self) -> str:
        """What the server serves now, in words."""
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

    async def _answers(self) -> bool:
        try:
            await self._client.info()
        except RollwireError:
            return False
        return True

    def _take(self, report: weights_pb2.UpdateWeightsResponse) -> None:
        phase = UPDATE_PHASE_FROM_PROTO.get(report.phase, self.phase)
        # Where the loop has no time, a report of the former group may be read late.
        if phase is not UpdatePhase.STALLED or report.epoch == self._epoch:
            self.phase = phase
        self.next_bucket = report.next_bucket
        self.received_bytes = report.received_bytes
        self.digest = report.digest
        self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _maybe_committed(address: str, error: RollwireError) -> ServerUnreachableError:
    return ServerUnreachableError(
        f"{error}; it was committing, and may or may not have done it", server=address
    )
