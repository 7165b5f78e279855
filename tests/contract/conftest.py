"""The contract: what any engine does behind the API. ``--engine`` names the one that is tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from support.calls import Api, connected
from support.contract import EXCEPTIONS, NEAR, flags
from support.servers import ServerProcess, servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    engine = config.getoption("--engine")
    here = Path(__file__).parent
    for item in items:
        if item.path.parent != here:
            continue
        names = (item.name, item.name.partition("[")[0], item.path.name)
        reasons = (EXCEPTIONS[engine].get(name) for name in names)
        if (reason := next(filter(None, reasons), None)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{engine}: {reason}"))


@pytest.fixture
def near(request: pytest.FixtureRequest) -> float:
    """How far log-probabilities in fp32 may lie from those of the model in this process."""
    return NEAR.get(request.config.getoption("--engine"), 1e-4)


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with the engine under test, for all cases that leave it as they found it."""
    engine = request.config.getoption("--engine")
    folder = tmp_path_factory.mktemp("contract")
    with servers(folder) as start:
        yield start("--engine", engine, *flags(engine, folder))


@pytest_asyncio.fixture
async def api(server: ServerProcess) -> AsyncIterator[Api]:
    """The API of that server; afterwards nothing runs there and its KV cache is empty."""
    async with connected(server.address) as api:
        yield api
        await api.idle()
