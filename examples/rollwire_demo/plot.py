"""The plot: reward against version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rollwire_demo.history import GOAL

if TYPE_CHECKING:
    from pathlib import Path

    from rollwire_demo.history import History

INK, FAINT = "#22313f", "#8a97a3"
CROSSED, WITHIN, LINE, PAUSE = "#2a9d8f", "#c9b458", "#e4572e", "#5b7db1"


def plot_reward(history: History, path: Path) -> None:
    """Writes a PNG: every sequence, the mean reward of each version's tokens, and the pauses."""
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    reward, paused = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for axes in (reward, paused):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK)
        axes.grid(axis="y", color=FAINT, alpha=0.2)

    for crossed, colour, label in (
        (True, CROSSED, "sequence that crossed an update"),
        (False, WITHIN, "sequence of one version"),
    ):
        points = [p for p in history.points if p.crossed is crossed]
        reward.scatter(
            [p.version for p in points],
            [p.reward for p in points],
            s=7, alpha=0.25, color=colour, linewidths=0, label=label,
        )  # fmt: skip
    means = history.reward_by_version()
    reward.plot(
        list(means), list(means.values()), color=LINE, linewidth=2.2, label="tokens of each version"
    )
    reward.axhline(GOAL, color=INK, linewidth=1, linestyle=(0, (4, 4)))
    reward.annotate(
        f"goal {GOAL}", (0, GOAL), (4, 4), textcoords="offset points", color=INK, fontsize=9
    )
    reward.set_ylim(-0.02, 1.02)
    reward.set_ylabel("mean reward", color=INK)
    reward.set_title(
        "A policy learns a secret alphabet from streamed rollouts",
        loc="left", color=INK, fontsize=13, fontweight="bold",
    )  # fmt: skip
    for handle in reward.legend(loc="lower right", frameon=False, labelcolor=INK).legend_handles:
        if handle is not None:
            handle.set_alpha(1)

    paused.bar(
        [step.version for step in history.steps],
        [1e3 * step.paused_seconds for step in history.steps],
        color=PAUSE, width=0.8,
    )  # fmt: skip
    paused.set_ylabel("paused, ms", color=INK)
    paused.set_xlabel("weight version: the trainer's step", color=INK)
    canvas.print_png(path)  # type: ignore[no-untyped-call]  # matplotlib's
