"""The life of a server in a fleet: what each event does in each state."""

from __future__ import annotations

import pytest
from rollwire_client._fleet.server_lifecycle import TRANSITIONS, Event, Life

# A row for each life, a column for each event; "." changes nothing.
TABLE = """
            serves   lags     rests    failed   listed   unlisted  unused
joining     ready    behind   resting  suspect  .        leaving   .
ready       ready    behind   resting  suspect  .        leaving   .
behind      ready    behind   resting  suspect  .        leaving   .
resting     ready    behind   resting  suspect  .        leaving   .
suspect     ready    behind   resting  suspect  .        leaving   .
leaving     .        .        .        .        joining  .         gone
gone        .        .        .        .        .        .         .
"""
HEADER, *ROWS = (line.split() for line in TABLE.strip().splitlines())
CELLS = [
    (life, event, cell) for life, *cells in ROWS for event, cell in zip(HEADER, cells, strict=True)
]


@pytest.mark.parametrize(("life", "event", "cell"), CELLS)
def test_a_cell_of_the_table(life: str, event: str, cell: str) -> None:
    after = TRANSITIONS[Life(life)].get(Event[event.upper()])
    assert after == (None if cell == "." else Life(cell))


def test_the_table_is_whole() -> None:
    assert {Life(row[0]) for row in ROWS} == set(Life) == set(TRANSITIONS)
    assert {Event[name.upper()] for name in HEADER} == set(Event)
