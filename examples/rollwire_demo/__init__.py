"""``rollwire demo``: rollout servers, a trainer, and a policy that learns through the whole loop.

Server processes sample. A trainer in this process streams their rollouts and publishes each new
policy while sequences are under way. At the end tokens of sequences that updates interrupted are
scored again with the weights that their labels name.

    task       a secret alphabet, and the reward of each letter
    trainer    the model, a policy gradient, and the check of labels and log-probabilities
    run        the course: servers up, train and publish, servers down, check
    report     what happened, and which goals it reached
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rollwire_client import MissingDependencyError, RollwireError

from rollwire_demo.report import Display, goals, plot_reward

if TYPE_CHECKING:
    from collections.abc import Coroutine

TERMINATED = 143  # as shells have it: 128 + SIGTERM
EXTRA = ("torch", "transformers", "pydantic_settings", "matplotlib")

T = TypeVar("T")

__all__ = ["main"]

app = typer.Typer(add_completion=False)


def main(arguments: list[str]) -> int:
    """Runs the demo with these flags; 0 if every goal was reached, 1 if not."""
    code: int | None = app(arguments, prog_name="rollwire demo", standalone_mode=False)
    return code or 0


@app.command()
def demo(
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**31,
            help="Seed of model, task and draws. Timing decides which version samples which token.",
        ),
    ] = 0,
    servers: Annotated[int, typer.Option(min=1, max=16, help="Number of rollout servers.")] = 2,
    steps: Annotated[int, typer.Option(min=1, max=2000, help="Most steps of the trainer.")] = 400,
    minutes: Annotated[float, typer.Option(min=0, help="Most minutes of training.")] = 10.0,
    output: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for the plot, all samples and servers' logs."),
    ] = Path("demo-output"),
    *,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the result.")] = False,
) -> int:
    """Run servers and a trainer whose policy learns, on this machine.

    A random transformer learns a secret alphabet from streamed rollouts.

    Each step publishes a new policy while sequences are under way.

    At the end the demo checks labels and log-probabilities against the weights.
    """
    _check_extra()
    _make_folder(output)
    with Display(quiet=quiet) as display:
        display.phase("loading torch and transformers")
        from rollwire_demo.run import run_demo

        began = time.monotonic()
        running = run_demo(
            display, seed=seed, servers=servers, steps=steps, minutes=minutes, output=output
        )
        try:
            history, check = asyncio.run(_until_terminated(running))
        except asyncio.CancelledError:
            return TERMINATED
    seconds = time.monotonic() - began
    plot = output / "reward.png"
    plot_reward(history, plot)
    rows = goals(history, check, seconds)
    display.result(rows, check.problems, plot)
    return 1 if any(row.reached is False for row in rows) else 0


def _check_extra() -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the demo needs {', '.join(missing)}: pip install 'rollwire[demo]'"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RollwireError(f"cannot make the folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise RollwireError(f"cannot write to the folder {folder}")


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """Makes SIGTERM end the demo as Ctrl-C does: with its servers."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
