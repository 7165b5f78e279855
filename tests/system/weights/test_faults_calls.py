"""Lost answers, groups that are kept, cancelled publishes, versions that are not newer."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from rollwire.v1 import rollout_pb2, weights_pb2
from rollwire_client import PublishFailedError
from support.calls import connected
from support.crossing import assert_equal_under, crossing
from support.fleets import policy, published, publisher
from support.footprint import Footprint, nothing_is_left
from support.publishing import no_update, status
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from support.fleets import Servers
    from support.servers import ServerProcess
    from torch import Tensor

SECONDS = 120


async def told(server: ServerProcess) -> weights_pb2.GetWeightStatusResponse:
    async with connected(server.address) as api:
        return await status(api, verify=True)


# Lost answers.


class Losing:
    """Loses one of a server's answers to a method, once the server has done what it was asked to.

    Args:
        number: Which answer, from 1 on.
    """

    def __init__(self, steps: Steps, method: str, address: str, number: int) -> None:
        self.calls = 0
        self._address = address
        self._number = number
        steps.before[method] = self._before
        steps.after[method] = self._after

    async def _before(self, address: str, _request: Any) -> None:
        self.calls += address == self._address

    async def _after(self, address: str, _request: Any) -> None:
        if address == self._address and self.calls == self._number:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the connection was cut"
            )


@pytest.mark.parametrize(
    ("method", "number", "calls"),
    [
        pytest.param("CommitWeights", 1, 2, id="commit"),
        pytest.param("JoinTransport", 1, 3, id="prepare"),
        pytest.param("JoinTransport", 2, 3, id="connect"),
    ],
)
async def test_a_lost_answer_is_asked_for_again_and_done_once(
    three: Servers, method: str, number: int, calls: int
) -> None:
    old, new = three.next_version(), three.next_version()
    async with three.fleet() as fleet:
        await published(publisher(fleet), old)
    steps = Steps()
    async with three.fleet(steps) as fleet:
        trainer = publisher(fleet)
        before = [await told(server) for server in three.all]
        losing = Losing(steps, method, three.all[1].address, number)
        async with crossing(*three.addresses) as sequences:
            report = await published(trainer, new)
            for sequence in sequences:
                await sequence.reaches(new)
                assert sequence.versions == [old, new]
                assert sequence.digests[new] == {report.digest}
        assert losing.calls == calls
        for server, was in zip(three.all, before, strict=True):
            now = await told(server)
            assert now.intact
            assert now.weights.revision == was.weights.revision + 1


@pytest.mark.parametrize(
    ("change", "joins"),
    [("nothing", 0), ("another publisher", 0), ("another trainer", 6), ("a server slept", 6)],
)
async def test_a_group_is_kept_while_its_members_live(
    three: Servers, change: str, joins: int
) -> None:
    steps = Steps()
    calls: list[int] = []

    async def note(_address: str, request: weights_pb2.JoinTransportRequest) -> None:
        calls.append(request.step)

    async with three.fleet(steps) as fleet:
        trainer = publisher(fleet)
        await published(trainer, three.next_version())
        steps.before["JoinTransport"] = note
        if change == "another publisher":
            trainer = publisher(fleet)
        elif change == "another trainer":
            async with three.fleet() as other:
                await published(publisher(other), three.next_version())
            trainer = publisher(fleet)  # of a higher term
        elif change == "a server slept":
            async with connected(three.addresses[0]) as api:
                await api.rollouts.Sleep(rollout_pb2.SleepRequest())
                await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest())
        await published(trainer, three.next_version())
        assert len(calls) == joins
        for server in three.all:
            assert (await told(server)).intact


# Cancelled publishes.


class Halt:
    """A publish that stops at a moment, until it is cancelled.

    Args:
        moment: The number of tensors on their way; or "released", when all servers have everything;
            or "commit", when one has committed and the last was not told to.
        steps: Of the publisher's channels.
        last: The address of the last to commit.
    """

    def __init__(self, moment: int | str, steps: Steps, last: str) -> None:
        self.reached = asyncio.Event()
        self.go_on = threading.Event()
        self._moment = moment
        self._last = last
        self._one_committed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        steps.before = {"CommitWeights": self._before_commit}
        steps.after = {"CommitWeights": self._after_commit}

    def source(self, tensors: Mapping[str, Tensor]) -> Callable[[], Iterator[tuple[str, Tensor]]]:
        """The tensors, as what a publish takes."""

        def source() -> Iterator[tuple[str, Tensor]]:
            for number, item in enumerate(tensors.items()):
                if number == self._moment:
                    self._loop.call_soon_threadsafe(self.reached.set)
                    assert self.go_on.wait(SECONDS)
                yield item

        return source

    async def _before_commit(self, address: str, _request: Any) -> None:
        if self._moment == "released" or (self._moment == "commit" and address == self._last):
            if self._moment == "commit":
                await self._one_committed.wait()
            self.reached.set()
            await asyncio.get_running_loop().create_future()

    async def _after_commit(self, _address: str, _request: Any) -> None:
        self._one_committed.set()


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True])
async def test_a_publish_may_be_cancelled_at_any_moment(three: Servers, *, delta: bool) -> None:
    old = three.next_version()
    steps = Steps()
    async with three.fleet(steps) as fleet:
        trainer = publisher(fleet, delta=delta)
        await published(trainer, old)
        footprints = [Footprint.of(server.process.pid) for server in three.all]
        count = len(await policy(trainer, old))
        first = old
        async with crossing(*three.addresses) as sequences:
            for moment in (0, 1, count // 2, count - 1, "released", "commit"):
                lost, new = three.next_version(), three.next_version()
                halt = Halt(moment, steps, three.addresses[-1])
                source = halt.source(await policy(trainer, lost))
                publishing = asyncio.create_task(trainer.publish_and_wait(lost, source))
                async with asyncio.timeout(SECONDS):
                    await halt.reached.wait()
                    publishing.cancel()
                    await asyncio.sleep(0)  # for that to begin
                    halt.go_on.set()
                    with pytest.raises(asyncio.CancelledError):
                        await publishing
                versions = [await serves_whole(server) for server in three.all]
                assert versions[-1] == old, moment
                assert set(versions) <= {old, lost}
                assert (lost in versions) == (moment == "commit"), moment

                steps.before = steps.after = {}
                report = await published(trainer, new)
                for sequence in sequences:
                    await sequence.reaches(new)
                    assert sequence.versions[-1] == new
                    assert sequence.digests[new] == {report.digest}
                old = new
        assert_equal_under(first, sequences)
        for server, footprint in zip(three.all, footprints, strict=True):
            await nothing_is_left(server, footprint)


async def serves_whole(server: ServerProcess) -> int:
    """The version that a server serves, once it holds no update."""
    async with connected(server.address) as api:
        await no_update(api)
        now = await status(api, verify=True)
    assert now.intact
    return now.weights.version


# Versions.


async def test_versions_that_are_not_newer(three: Servers) -> None:
    lower, version, untagged_seed = (three.next_version() for _ in range(3))
    async with three.fleet() as fleet:
        trainer = publisher(fleet)
        report = await published(trainer, version)
        before = [(await told(server)).weights for server in three.all]

        again = await (await trainer.publish(version, await policy(trainer, version))).committed
        assert again.failed == ()
        assert again.digest == report.digest
        assert all(server.already_current for server in again.servers)

        other = await policy(trainer, lower)
        await refused("VERSION_CONFLICT", trainer.publish, version, other)
        await refused("VERSION_NOT_NEWER", trainer.publish, lower, other)
        assert [(await told(server)).weights for server in three.all] == before

        back = await trainer.publish(lower, other, allow_version_rollback=True)
        assert (await back.committed).failed == ()
        assert {(await told(server)).weights.version for server in three.all} == {lower}

        untagged = await trainer.publish(None, await policy(trainer, untagged_seed))
        assert (await untagged.committed).failed == ()
        for server in three.all:
            now = await told(server)
            assert now.intact
            assert not now.weights.HasField("version")
        assert await fleet.newest_version() == version  # a trainer that starts again goes on above
        await published(trainer, three.next_version())


async def refused(reason: str, publish: Any, version: int, tensors: Mapping[str, Tensor]) -> None:
    """Every server refuses it, each with this reason."""
    with pytest.raises(PublishFailedError) as caught:
        await (await publish(version, tensors)).committed
    assert len(caught.value.errors) == 3
    assert {error.reason for error in caught.value.errors.values()} == {reason}
