"""Two servers that the tests of this folder leave as they found them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.servers import ServerProcess, servers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with servers(tmp_path_factory.mktemp("rollouts")) as start:
        yield [start(), start()]
