"""The files that docs/architecture.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = (
    "protos",
    "server",
    "trainer_client",
    "transport",
    "deploy",
    "docs",
    "examples",
    "benchmarks",
    "tests",
)
NAMED = re.findall(
    r"`([\w./]+(?:\.py|\.proto|\.json|\.md|/))`", (ROOT / "docs/architecture.md").read_text()
)


@pytest.fixture(scope="module")
def paths() -> list[str]:
    """Every file and folder, with a / before each of its parts and after a folder."""
    found = [path for part in PARTS for path in (ROOT / part, *(ROOT / part).rglob("*"))]
    return [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in found]


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_it_is_there(name: str, paths: list[str]) -> None:
    assert any(path.endswith(f"/{name}") for path in paths)
