"""What the tests of the HTTP gateway share; they need the environment of ``make test-gateway``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from support.gateways import GatewayProcess, StartGateway
    from support.servers import ServerProcess

if find_spec("starlette") is None or find_spec("openai") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import httpx
    import pytest_asyncio
    from gateway.spoken import MODEL, SpokenPolicy, spoken_policy
    from support.gateways import gateways, loaded_tokenizer, small_tokenizer

    @pytest.fixture(scope="session")
    def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    @pytest.fixture(scope="session")
    def tokenizer(tokenizer_folder: Path) -> Any:
        return loaded_tokenizer(tokenizer_folder)

    @pytest.fixture
    def start_gateway(tmp_path: Path) -> Iterator[StartGateway]:
        """Starts a gateway of its own: ``start_gateway(server.address, "--flag", …)``."""
        with gateways(tmp_path) as start:
            yield start

    @pytest.fixture(scope="session")
    def gateway(
        server: ServerProcess, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[GatewayProcess]:
        """One gateway over one server, for all tests that leave both as they found them."""
        with gateways(tmp_path_factory.mktemp("gateway")) as start:
            yield start(
                server.address,
                *("--tokenizer", str(tokenizer_folder), "--model-name", MODEL),
                *("--metrics-listen", "127.0.0.1:0", "--stream-interval", "0"),
            )

    @pytest_asyncio.fixture
    async def policy(start_gateway: StartGateway, tmp_path: Path) -> AsyncIterator[SpokenPolicy]:
        """It says what the test chooses."""
        async with spoken_policy(start_gateway, tmp_path / "tokenizer") as made:
            yield made

    @pytest_asyncio.fixture
    async def http(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            yield client
