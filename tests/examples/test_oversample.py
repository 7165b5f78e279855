"""The example of over-sampling, as a reader runs it, and again where it left off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.programs import ran

if TYPE_CHECKING:
    from support.servers import StartServer

SCRIPT = Path(__file__).parents[2] / "examples" / "oversample.py"
LINE = re.compile(
    r"version (\d+): reward 0\.\d{3}, \d+ tokens a rollout, of versions \[([\d, ]+)\]; "
    r"(\d+) groups carried, (\d+) dropped"
)


def train(folder: Path, addresses: list[str], steps: int) -> list[tuple[int, set[int], int, int]]:
    """Of each step: version, versions that sampled its batch, groups carried and dropped."""
    done = ran(SCRIPT, "--servers", *addresses, "--steps", str(steps), cwd=folder)
    found = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    assert all(found), done.stdout
    return [
        (int(m[1]), {int(version) for version in m[2].split(",")}, int(m[3]), int(m[4]))
        for m in found
        if m
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_groups_are_carried_and_a_second_run_goes_on_with_them(
    start_server: StartServer, tmp_path: Path
) -> None:
    addresses = [start_server().address, start_server().address]
    steps = train(tmp_path, addresses, 4)
    assert [version for version, *_ in steps] == [1, 2, 3, 4]
    assert any(len(versions) > 1 for _, versions, *_ in steps)
    assert all(max(versions) - min(versions) <= 3 for _, versions, *_ in steps)
    # What is left over is carried or, once it is too old, dropped; the last step left something.
    assert steps[-1][2] > 0
    again = train(tmp_path, addresses, 3)
    assert [version for version, *_ in again] == [5, 6, 7]
    assert any(4 in versions for _, versions, *_ in again)  # of groups that the first run began
