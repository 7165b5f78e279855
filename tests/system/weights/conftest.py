"""Three servers that the tests of this folder leave whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.fleets import RestartableServers, shared_servers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableServers]:
    with shared_servers(
        tmp_path_factory.mktemp("weights"), 3, "--bucket-timeout-seconds", "4"
    ) as three:
        yield three
