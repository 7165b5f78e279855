"""What every test may use."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.servers import ServerProcess, StartServer, servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# What gRPC's core prints comes between tests too, where nothing captures it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The same examples in every run, so that what passes here passes in CI. To look for more:
# pytest --hypothesis-profile random. No example fails because the machine is busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "repeatable", settings.get_profile("untimed"), derandomize=True, database=None
)
settings.register_profile("random", settings.get_profile("untimed"))
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default="embedded", help="the engine that tests/contract tries")


def pytest_configure() -> None:
    # As from a terminal: what a shell runs in the background inherits that SIGINT is ignored, and
    # so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prepares a run by several processes (``-n``): what shares servers stays together, and what
    takes long comes first.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _group(item: pytest.Item) -> str:
    """Tests that share a fixture of their module or package run one after the other: each process
    would set it up anew. What is of the session is set up once in each process.
    """
    scopes = {
        definitions[-1].scope
        for definitions in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    }
    return f"{item.path.parent.name}/{item.path.stem}" if scopes & {"module", "package"} else ""


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
