"""How the subcommands print tables, JSON and errors."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rollwire.types import ServerState

from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError

if TYPE_CHECKING:
    from collections.abc import Sequence

Answer = ServerInfo | RollwireError

# Told apart on dark and on light ground; versions beyond these begin again.
VERSION_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_STATE_STYLES = {ServerState.SERVING: "green", ServerState.QUARANTINED: "red"}


def table(*columns: str, title: str | None = None) -> Table:
    """A table without lines; a column whose name begins with ``>`` is justified right."""
    made = Table(
        box=None, header_style="bold", pad_edge=False,
        title=title, title_justify="left", title_style="",
    )  # fmt: skip
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return made


def state_text(state: ServerState) -> str:
    return f"[{_STATE_STYLES.get(state, 'yellow')}]{state.value}[/]"


def print_table(shown: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_error(error: object) -> None:
    """One line on stderr."""
    sys.stderr.write(f"rollwire: {' '.join(str(error).split())}\n")


def print_errors(answers: Sequence[Answer]) -> int:
    """Prints the errors among the servers' answers; the exit code: 1 if there are any."""
    errors = [answer for answer in answers if isinstance(answer, RollwireError)]
    for error in errors:
        print_error(error)
    return 1 if errors else 0


def as_json(address: str, answer: Answer) -> dict[str, Any]:
    if isinstance(answer, RollwireError):
        return {"address": address, "error": str(answer)}
    fields = asdict(answer)
    fields["state"] = answer.state.value
    fields["weights"]["digest"] = hex_digest(answer.weights.digest)
    fields["logprob_bases"] = sorted(basis.value for basis in answer.logprob_bases)
    return fields


def hex_digest(digest: int) -> str:
    """As text everywhere, as numbers of JSON have too few bits."""
    return f"{digest:016x}"
