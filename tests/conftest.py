"""What every test may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.servers import ServerProcess, StartServer, servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default="embedded", help="the engine that tests/contract tries")


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server of its own: ``start_server("--flag", "value", …)``; ended after the test."""
    with servers(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    with servers(tmp_path_factory.mktemp("server")) as start:
        yield start()
