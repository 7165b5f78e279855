"""Servers that fail in a publish: scripted ones, over the real transport."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import Mock

import pytest
import rollwire_transport as transport
from client.publishing import TIMEOUTS, holds, publish, publishing
from client.scripted import until
from client.scripted_weights import PublishableServer, policy
from rollwire.v1 import weights_pb2
from rollwire_client import (
    DigestMismatchError,
    PublishFailedError,
    PublishReport,
    ServerUnreachableError,
    TransferError,
    UpdateRefusedError,
)
from rollwire_client._publishing.group_failure import who_is_behind
from rollwire_client._publishing.publish import Publish
from rollwire_client._publishing.transfer import WeightTransfer
from rollwire_transport import Link, UnsuitableDevices
from rollwire_transport import _links as links
from rollwire_transport._links.gloo import GlooBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport._links.base import GroupMember


def one_failed(report: PublishReport, servers: list[PublishableServer], seed: int = 0) -> Exception:
    """The error of the first server, after checks that all others committed."""
    assert [s.weights is not None for s in report.servers] == [False] + [True] * (len(servers) - 1)
    assert all(holds(server, seed) for server in servers[1:])
    assert servers[0].commits == []
    assert report.failed == report.servers[:1]
    error = report.servers[0].error
    assert error is not None
    assert servers[0].address in str(error)
    return error


async def test_a_server_that_refuses_is_left_out() -> None:
    async with publishing(3) as (servers, fleet, publisher):
        servers[0].refuse_update = ("VERSION_NOT_NEWER", {})
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, UpdateRefusedError)
        assert error.reason == "VERSION_NOT_NEWER"
        # It is behind now, and gets no sequences.
        assert [member.problem is None for member in fleet._pool.servers] == [False, True, True]
        await fleet.generate([1])
        assert servers[0].requests == []


async def test_a_dead_server_is_left_out() -> None:
    async with publishing(3) as (servers, _, publisher):
        await publisher.schema()
        await servers[0].stop()
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, ServerUnreachableError)


async def test_a_stopped_server_is_left_out_soon() -> None:
    """A server that has reported may take longer to check the update."""
    prompt = dataclasses.replace(TIMEOUTS, call=0.5)
    async with publishing(3, prompt) as (servers, _, publisher):
        await publisher.schema()
        servers[0].hangs_in = "UpdateWeights"
        servers[1].checks_for = 1.0
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, ServerUnreachableError)
        assert "silent for 0.5 s while the update was announced" in str(error)


@pytest.mark.parametrize(
    "phase", [weights_pb2.UPDATE_PHASE_READY, weights_pb2.UPDATE_PHASE_RECEIVING]
)
async def test_a_silent_server_is_cut_out(phase: int) -> None:
    async with publishing(3, dataclasses.replace(TIMEOUTS, silence=0.5)) as (servers, _, publisher):
        servers[0].silent_after = phase
        if phase == weights_pb2.UPDATE_PHASE_READY:
            servers[0].hangs_in = "JoinTransport"
        else:
            servers[0].stop_receiving_at = 3
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, ServerUnreachableError)
        assert "silent for 0.5 s" in str(error)


async def test_a_server_that_dies_in_the_transfer_is_cut_out() -> None:
    async with publishing(3) as (servers, _, publisher):
        servers[0].die_at = 3
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, ServerUnreachableError)


async def test_a_broken_link_is_mended_from_the_first_missing_bucket() -> None:
    async with publishing(3, TIMEOUTS) as (servers, _, publisher):
        servers[1].stop_receiving_at = 4
        report = await publish(publisher)
        assert report.failed == ()
        assert all(holds(server) for server in servers)
        first, second = servers[1].first_buckets
        assert first == 0 < second <= 4
        epochs = [j.epoch for j in servers[1].joins]
        assert len(set(epochs)) == len(epochs) == 2
        assert all(len(epoch) >= 32 for epoch in epochs)


async def test_a_server_that_cannot_join_is_cut_out() -> None:
    async with publishing(3) as (servers, _, publisher):
        servers[0].refuse_joins = 99
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, TransferError)
        assert len(servers[0].joins) == 2


async def test_a_server_whose_join_hangs_takes_nobody_with_it() -> None:
    """It goes on reporting."""
    hasty = dataclasses.replace(TIMEOUTS, join=0.3)
    async with publishing(3, hasty) as (servers, _, publisher):
        servers[0].hangs_in = "JoinTransport"
        error = one_failed(await publish(publisher), servers)
        assert "did not join within 0.3 s" in str(error)


async def test_a_report_of_the_former_group_that_comes_late_is_of_the_past() -> None:
    """As where the event loop computes between one report and the next."""
    async with publishing(2) as (servers, _, publisher):
        servers[0].stop_receiving_at = 4
        servers[0].late_reports = 2
        assert (await publish(publisher)).failed == ()
        assert len(servers[0].joins) == 2


async def test_nobody_is_blamed_where_a_kept_group_has_lost_a_member(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have begun to receive, and report that the trainer has left, before it asks them
    to join the next group."""
    find_host = Publish._find_host

    async def find_host_slowly(self: Publish) -> str:
        await asyncio.sleep(0.5)
        return await find_host(self)

    async with publishing(3) as (servers, _, publisher):
        await publish(publisher)
        monkeypatch.setattr(Publish, "_find_host", find_host_slowly)
        await servers[0]._close_kept()
        assert (await publish(publisher, 2)).failed == ()
        assert [(server.resumed, len(server.joins)) for server in servers] == [(0, 2)] + [
            (1, 2)
        ] * 2
        assert "group of 3 failed" not in caplog.text


async def test_a_server_that_takes_no_updates_does_not_end_the_group_of_the_others() -> None:
    async with publishing(3) as (servers, _, publisher):
        servers[0].refuse_update = ("SLEEPING", {})
        for version in (1, 2):
            one_failed(await publish(publisher, version), servers)
        assert [(s.resumed, len(s.joins)) for s in servers] == [(0, 0), (1, 1), (1, 1)]
        servers[0].refuse_update = None
        assert (await publish(publisher, 3)).failed == ()
        assert [(s.resumed, len(s.joins)) for s in servers] == [(0, 1), (2, 2), (2, 2)]


async def test_a_kept_group_that_breaks_before_all_are_ready_is_nobodys_fault() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        await publish(publisher)
        servers[1].checks_for = 1.0
        publishing_again = asyncio.create_task(publish(publisher, 2))
        await until(lambda: servers[0].resumed)
        kept = fleet._pool.groups.group
        assert kept is not None
        await asyncio.to_thread(kept.link.abort)
        assert (await publishing_again).failed == ()
        assert [(server.resumed, len(server.joins)) for server in servers] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("moment", ["formed", "opened"])
async def test_a_publish_that_is_cancelled_as_its_group_is_ready_closes_its_link(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    opened: list[Link] = []
    closed: list[Link] = []
    open_link, form = transport.open_link, WeightTransfer._form

    def open_and_note(*args: Any, **options: Any) -> Link:
        link = open_link(*args, **options)
        if options["rank"] == 0:
            close = link.close
            monkeypatch.setattr(link, "close", lambda: [closed.append(link), close()][-1])
            opened.append(link)
            if moment == "opened":
                loop.call_soon_threadsafe(cancel)
        return link

    async def form_and_cancel(self: WeightTransfer, targets: Any) -> Any:
        formed = await form(self, targets)
        if moment == "formed":
            loop.call_soon(cancel)
        return formed

    def cancel() -> None:
        assert publisher._handle is not None
        publisher._handle._task.cancel()

    monkeypatch.setattr(transport, "open_link", open_and_note)
    monkeypatch.setattr(WeightTransfer, "_form", form_and_cancel)
    loop = asyncio.get_running_loop()
    async with publishing(2) as (_, _, publisher):
        with pytest.raises(asyncio.CancelledError):
            await publish(publisher)
        await until(lambda: closed == opened != [])


def test_a_server_that_has_everything_is_not_behind() -> None:
    """It reports no more."""
    long_ago, now = time.monotonic() - 60, time.monotonic()

    async def rank_behind() -> int:
        return who_is_behind(
            [
                Mock(staged=True, reported_at=long_ago, peer=None),
                Mock(staged=False, reported_at=now, peer=None),
            ],
            2,
        )

    assert asyncio.run(rank_behind()) == 2


async def test_a_server_that_could_not_join_once_gets_another_chance() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[0].refuse_joins = 1
        assert (await publish(publisher)).failed == ()
        assert all(holds(server) for server in servers)


async def test_a_backend_that_cannot_share_a_gpu_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo stands in for one that cannot, beside gloo as it is."""

    class OneEach(GlooBackend):
        def open(self, member: GroupMember) -> Link:
            link = super().open(member)
            monkeypatch.setattr(link, "offers", self.refuse)
            return link

        def refuse(self, answers: Mapping[int, bytes]) -> NoReturn:
            raise UnsuitableDevices("rank 2 is on the GPU of another", 2)

    monkeypatch.setitem(links._BACKENDS, "nccl", OneEach())
    monkeypatch.setattr(Publish, "_common_backends", lambda *_: ["nccl", "gloo"])
    async with publishing(2) as (servers, _, publisher):
        report = await publish(publisher)
        assert report.failed == ()
        assert [[j.backend for j in s.joins] for s in servers] == [["nccl", "gloo"]] * 2


async def test_a_gpu_that_processes_cannot_share_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo stands in for a backend whose receivers find that out as they connect, and fail too."""

    class Unshared(GlooBackend):
        def open(self, member: GroupMember) -> Link:
            link = super().open(member)
            monkeypatch.setattr(link, "connect", self.refuse)
            return link

        def refuse(self, timeout: float, offer: bytes = b"") -> NoReturn:
            del timeout, offer
            raise UnsuitableDevices("rank 1 cannot open this process's memory", 1)

    monkeypatch.setitem(links._BACKENDS, "cuda_ipc", Unshared())
    monkeypatch.setattr(Publish, "_common_backends", lambda *_: ["cuda_ipc", "gloo"])
    async with publishing(2) as (servers, _, publisher):
        report = await publish(publisher)
        assert report.failed == ()
        assert all(holds(server) for server in servers)


async def test_a_server_that_has_everything_and_stalls_is_cut_out() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[0].never_staged = True
        async with asyncio.timeout(60):
            report = await publish(publisher)
        assert isinstance(report.servers[0].error, TransferError)
        assert "stalled" in str(report.servers[0].error)
        assert holds(servers[1])
        assert len(servers[0].joins) == 2


async def test_a_server_with_another_digest_does_not_commit() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[0].lie_about_digest = True
        error = one_failed(await publish(publisher), servers)
        assert isinstance(error, DigestMismatchError)
        await until(lambda: servers[0].discards != [])


async def test_a_lost_commit_answer_is_asked_for_again() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[0].lose_commit_answers = 2
        report = await publish(publisher)
        assert report.failed == ()
        assert report.servers[0].weights.version == 1
        assert len(servers[0].commits) == 1


async def test_a_commit_that_fails_leaves_the_others_committed() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[0].refuse_commit = True
        error = one_failed(await publish(publisher), servers)
        assert error.reason == "COMMIT_FAILED"


async def test_what_an_earlier_publish_left_behind_is_discarded() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[0].refuse_update = ("UPDATE_IN_PROGRESS", {"update_id": "leftover"})
        assert (await publish(publisher)).failed == ()
        assert servers[0].discards == ["leftover"]


# All fail.


async def test_total_failure_says_what_each_server_serves() -> None:
    async with publishing(2) as (servers, _, publisher):
        for server in servers:
            server.weights.version = 3
            server.refuse_commit = True
        handle = await publisher.publish(4, policy())
        await handle.released
        with pytest.raises(PublishFailedError) as caught:
            await handle.committed
        for server in servers:
            assert server.address in str(caught.value)
            assert caught.value.errors[server.address].reason == "COMMIT_FAILED"
            assert handle.update_id in server.discards
        assert str(caught.value).count("serves version 3, revision 0") == 2
