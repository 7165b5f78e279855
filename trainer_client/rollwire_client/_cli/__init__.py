"""The ``rollwire`` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command of this process and exits with its code."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # this command prints errors itself, in one line
    try:
        from rollwire_client._cli.app import run
    except ImportError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print(  # noqa: T201 - rich is what is missing
            "rollwire: the command needs typer and rich: pip install 'rollwire[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(run(sys.argv[1:]))
