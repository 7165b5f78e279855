"""A bar on the terminal while a batch takes its time."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """Shows on standard error how many of ``total`` are done, until the context is left.

    It shows nothing off a terminal, without rich (which comes with ``rollwire[cli]``), or if it is
    not ``enabled``.
    """

    def __init__(self, title: str, total: int, *, enabled: bool) -> None:
        self._shown: tuple[Progress, TaskID] | None = None
        if enabled and sys.stderr.isatty() and importlib.util.find_spec("rich"):
            self._shown = _bar(title, total)

    def __enter__(self) -> Self:
        if self._shown is not None:
            self._shown[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown[0].stop()

    def show(self, done: int, note: str = "") -> None:
        if self._shown is not None:
            progress, task = self._shown
            progress.update(task, completed=done, note=note)


def _bar(title: str, total: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else it would go to the terminal, not to its file
    )
    return progress, progress.add_task(title, total=total, note="")
