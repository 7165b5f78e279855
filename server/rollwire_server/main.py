"""``rollwire-server``: the command."""

from __future__ import annotations

import sys


def main() -> None:
    """Serves; without the extra ``server`` it says in one line what is missing."""
    try:
        from rollwire_server.command import run
    except ModuleNotFoundError as error:
        sys.exit(f"rollwire-server: needs {error.name}: pip install 'rollwire[server]'")
    run()
