"""What every test may use."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from support import forked, worker
from support.servers import ServerProcess, StartServer, servers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
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
settings.register_profile("fast", settings.get_profile("repeatable"), max_examples=10)
settings.load_profile("repeatable")

# Several processes test side by side: more threads of torch would only slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FAST_SECONDS = 3  # what takes longer, alone on an idle machine, is marked slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default="embedded", help="the engine that tests/contract tries")


def is_fast(config: pytest.Config) -> bool:
    """Whether slow tests are left out."""
    return "not slow" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    if address := getattr(config, "workerinput", {}).get("forked"):
        forked.adopt(address)
    if is_fast(config) and not config.getoption("--hypothesis-profile"):
        settings.load_profile("fast")
    # As from a terminal: what a shell runs in the background inherits that SIGINT is ignored, and
    # so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports everything without looking for garbage; no later collection walks over all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """The processes that test (``-n``), and all servers, are forks of the same one."""
    if sys.version_info >= (3, 14):  # from there on, it knows its own by a key
        return
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([sys.executable, worker.__file__, forked.share()])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if sys.version_info < (3, 14):
        node.workerinput["forked"] = forked.share()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prepares a run by several processes (``-n``): what shares servers stays together, and what
    takes long comes first.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if group := _group(item, whole_package=is_fast(config)):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _group(item: pytest.Item, *, whole_package: bool) -> str:
    """Tests that share a fixture of their module or package run one after the other: each process
    would set it up anew. A package whose slow tests run too takes too long for a single process,
    so that each of its modules has its servers. What is of the session is set up once in each
    process.
    """
    scopes = {
        definitions[-1].scope
        for definitions in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    }
    package = item.path.parent.name
    if whole_package and "package" in scopes:
        return package
    return f"{package}/{item.path.stem}" if scopes & {"module", "package"} else ""


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Lists what a fast run should leave out. It never fails: a busy machine is slow too."""
    if not is_fast(config):
        return
    limit = FAST_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    if slow := [r for r in reports if r.when == "call" and r.duration > limit]:
        terminalreporter.section(f"not marked slow, and took more than {limit:.0f} s")
        for report in sorted(slow, key=lambda r: -r.duration):
            terminalreporter.line(f"{report.duration:6.1f} s  {report.nodeid}")


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
