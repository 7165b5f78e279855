"""Health, as whoever watches it learns it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rollwire.v1 import rollout_pb2
from support.calls import connected

if TYPE_CHECKING:
    from support.servers import StartServer

READINESS = health_pb2.HealthCheckRequest(service="rollwire.v1.RolloutService")
Status = health_pb2.HealthCheckResponse


async def test_every_watcher_learns_of_every_change(start_server: StartServer) -> None:
    """Also those that are left when another has gone."""
    server = start_server("--engine", "synthetic")
    async with connected(server.address) as api:
        health = health_pb2_grpc.HealthStub(api.channel)
        gone, stays, none = (
            health.Watch(READINESS),
            health.Watch(READINESS),
            health.Watch(health_pb2.HealthCheckRequest(service="none")),
        )
        for watching in (gone, stays):
            assert (await told(watching)) == Status.SERVING
        assert (await told(none)) == Status.SERVICE_UNKNOWN
        gone.cancel()
        await asyncio.gather(gone.code(), return_exceptions=True)
        for _ in range(2):
            await api.rollouts.Sleep(rollout_pb2.SleepRequest(), timeout=60)
            assert (await told(stays)) == Status.NOT_SERVING
            await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            assert (await told(stays)) == Status.SERVING
        for service, status in (("", Status.SERVING), (READINESS.service, Status.SERVING)):
            asked = health_pb2.HealthCheckRequest(service=service)
            assert (await health.Check(asked, timeout=60)).status == status
        unknown = health.Check(health_pb2.HealthCheckRequest(service="none"), timeout=60)
        assert await unknown.code() is grpc.StatusCode.NOT_FOUND


async def told(watching: grpc.aio.UnaryStreamCall) -> int:
    message = await asyncio.wait_for(watching.read(), 60)
    status: int = message.status
    return status
