"""What every test may use."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from support.servers import ServerProcess, StartServer, servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# The same examples in every run, so that what passes here passes in CI. To look for more:
# pytest --hypothesis-profile random
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("random")
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default="embedded", help="the engine that tests/contract tries")


def pytest_configure() -> None:
    # As from a terminal: what a shell runs in the background inherits that SIGINT is ignored, and
    # so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
