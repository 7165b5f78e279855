"""What a server's health service says."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def ready(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        services = ("", "rollwire.v1.RolloutService")
        live, serving = [
            await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            for name in services
        ]
    assert live.status == health_pb2.HealthCheckResponse.SERVING
    return bool(serving.status == health_pb2.HealthCheckResponse.SERVING)
