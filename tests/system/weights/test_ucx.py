"""A publish down a chain of real servers, and one whose middle dies while it passes buckets on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import Fleet, Publisher, ServerUnreachableError
from rollwire_transport import available_backends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import StartServer
    from torch import Tensor

UCX = available_backends()["ucx"]
pytestmark = pytest.mark.skipif(not UCX.ok, reason=UCX.reason)


async def policy(publisher: Publisher, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: (torch.randn(spec.shape, generator=generator) * 0.1).to(
            getattr(torch, spec.dtype)
        )
        for spec in await publisher.schema()
        if spec.alias_of is None
    }


async def test_a_publish_goes_down_the_chain_and_around_a_death(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    servers = [start_server() for _ in range(3)]
    async with Fleet([server.address for server in servers]) as fleet:
        publisher = Publisher(fleet, backend="ucx", bucket_bytes=1 << 14)
        for version in (1, 2):
            report = await (
                await publisher.publish(version, await policy(publisher, version))
            ).committed
            assert report.failed == ()
            assert {s.weights.digest for s in report.servers if s.weights} == {report.digest}

        tensors = await policy(publisher, 3)

        def source() -> Iterator[tuple[str, Tensor]]:
            for number, item in enumerate(tensors.items()):
                if number == len(tensors) // 2:
                    servers[1].process.kill()
                yield item

        report = await (await publisher.publish(3, source)).committed
        first, second, third = report.servers
        assert isinstance(second.error, ServerUnreachableError)
        assert [first.weights.version, third.weights.version] == [3, 3]
        assert {first.weights.digest, third.weights.digest} == {report.digest}
