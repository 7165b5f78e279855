"""The README lists every extra, and says which pages there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_extra_is_in_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = README.split("## Install")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", install, re.MULTILINE)) == set(
        project["optional-dependencies"]
    )


def test_every_page_is_in_the_readme() -> None:
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in README
    ] == []
