"""What happened, which goals it reached, and how the user sees it: panel, table and plot."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollwire_demo.task import LENGTH, spell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType
    from rollwire_client import PublishReport, Trajectory

    from rollwire_demo.task import ScoredAnswer

GOAL = 0.9  # of the mean reward of a batch
GOAL_STEPS = 5  # in a row that hold it
START_REWARD = 0.3  # more than this at the first step would need no learning
LEAST_VERSIONS = 20
LEAST_CROSSED = 100
TOLERANCE = 1e-4  # of log-probabilities in fp32: batches and kernels sum in other orders
CHECKED_PER_STEP = 2
RECENT_SECONDS = 5.0

LINE_SECONDS = 5.0
SHOWN_PROBLEMS = 5
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 48
WIDTH = 84
INK, FAINT = "#22313f", "#8a97a3"
CROSSED, WITHIN, LINE, PAUSE = "#2a9d8f", "#c9b458", "#e4572e", "#5b7db1"
PLOT_STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": FAINT, "grid.alpha": 0.2,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.titlesize": 13, "axes.titleweight": "bold",
}  # fmt: skip
COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "red")  # of versions


@dataclass(frozen=True, slots=True)
class StepRecord:
    version: int  # that it published, learned from what older ones had sampled
    seconds: float  # since training began
    reward: float  # mean over the batch
    tokens: int
    paused_seconds: float  # of the server that its commit stopped longest


@dataclass(frozen=True, slots=True)
class Point:
    """A sequence in the plot: the mean version of its tokens, and its reward."""

    version: float
    reward: float
    crossed: bool


class TrainingHistory:
    """Grows by one step at a time."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.points: list[Point] = []  # one a sequence
        self.latest: ScoredAnswer | None = None  # to show: one that crossed an update
        self.sample: list[Trajectory] = []  # to check: some of every step
        self.digests: dict[int | None, int] = {}  # of what was published, by version
        self._rewards_by_version: dict[int, list[float]] = defaultdict(list)
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def add(self, version: int, answers: Sequence[ScoredAnswer], report: PublishReport) -> None:
        crossed = [answer for answer in answers if answer.crossed]
        if crossed:
            self.latest = crossed[0]
        self.sample += [answer.trajectory for answer in crossed[:CHECKED_PER_STEP]]
        self.digests[version] = report.digest
        for answer in answers:
            versions = [v or 0 for v in answer.trajectory.versions]
            self.points.append(Point(fmean(versions), answer.reward, answer.crossed))
            for sampled_by, reward in zip(versions, answer.rewards, strict=True):
                self._rewards_by_version[sampled_by].append(reward)
        self.steps.append(
            StepRecord(
                version=version,
                seconds=time.monotonic() - self._began,
                reward=fmean(answer.reward for answer in answers),
                tokens=len(answers) * LENGTH,
                paused_seconds=max(server.paused_seconds for server in report.servers),
            )
        )

    @property
    def crossed(self) -> int:
        return sum(point.crossed for point in self.points)

    @property
    def goal_held(self) -> bool:
        """Whether the goal was reached, and not lost again at once."""
        last = self.steps[-GOAL_STEPS:]
        return len(last) == GOAL_STEPS and all(step.reward > GOAL for step in last)

    @property
    def last_reward(self) -> float:
        return fmean(step.reward for step in self.steps[-GOAL_STEPS:]) if self.steps else 0.0

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds if self.steps else 0.0

    @property
    def recent_tokens_per_second(self) -> float:
        recent = [s for s in self.steps if s.seconds > self.seconds - RECENT_SECONDS]
        return sum(s.tokens for s in recent) / max(min(RECENT_SECONDS, self.seconds), 1e-3)

    def reward_by_version(self) -> dict[int, float]:
        """Mean reward of the tokens that each version sampled; 0 is the initial checkpoint."""
        rewards = self._rewards_by_version
        return {version: fmean(rewards[version]) for version in sorted(rewards)}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check of labels and log-probabilities found.

    Attributes:
        worst_error: The largest difference between the log-probability that a server gave a token
            and the one that the version of its tag gives it; infinite if one is not a number.
        problems: What is wrong, a line each.
    """

    sequences: int
    tokens: int
    versions: int
    worst_error: float
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A row of the table at the end; ``reached`` is None where there is no goal."""

    what: str
    result: str
    goal: str = ""
    reached: bool | None = None


def goals(history: TrainingHistory, check: CheckResult, seconds: float) -> list[ResultRow]:
    """The rows of the table; ``seconds`` of all together."""
    start = history.steps[0].reward if history.steps else 0.0
    end, versions, crossed = history.last_reward, len(history.steps), history.crossed
    tokens = sum(step.tokens for step in history.steps)
    paused = [1e3 * step.paused_seconds for step in history.steps] or [0.0]
    return [
        ResultRow("reward at the start", f"{start:.3f}", f"< {START_REWARD}", start < START_REWARD),
        ResultRow("reward at the end", f"{end:.3f}", f"> {GOAL}", end > GOAL),
        ResultRow(
            "versions published", f"{versions:,}", f"≥ {LEAST_VERSIONS}", versions >= LEAST_VERSIONS
        ),
        ResultRow(
            "sequences that crossed an update",
            f"{crossed:,} of {len(history.points):,}",
            f"≥ {LEAST_CROSSED}",
            crossed >= LEAST_CROSSED,
        ),
        ResultRow(
            "worst log-probability error",
            f"{check.worst_error:.1e}" if check.tokens else "not checked",
            f"≤ {TOLERANCE:.0e}",
            check.tokens > 0 and not check.problems,
        ),
        ResultRow("log-probabilities checked", f"{check.tokens:,}, {check.versions:,} versions"),
        ResultRow(
            "paused by an update", f"median {median(paused):.0f}, worst {max(paused):.0f} ms"
        ),
        ResultRow("tokens a second", f"{tokens / max(history.seconds, 1e-3):,.0f}"),
        ResultRow("time", f"{seconds:.0f} s, learning {history.seconds:.0f} s"),
    ]


class Display:
    """Shows progress while it is entered: a live panel on a terminal, else a line now and then."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._quiet = quiet
        self._phase = ""
        self._began = time.monotonic()
        self._last_line = float("-inf")
        self._history: TrainingHistory | None = None
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=5
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, what: str) -> None:
        self._phase = what
        if self._live is None and not self._quiet:
            self._console.print(f"{what} …", soft_wrap=True)

    def note(self, what: str) -> None:
        """Says that something went wrong, and that the demo continues."""
        self._console.print(Text(what, style="yellow"), soft_wrap=True)

    def step(self, history: TrainingHistory) -> None:
        self._history = history
        now = time.monotonic()
        if self._live is None and not self._quiet and now - self._last_line > LINE_SECONDS:
            self._last_line = now
            self._console.print(_line(history), soft_wrap=True)

    def result(self, rows: Sequence[ResultRow], problems: Sequence[str], plot: Path) -> None:
        table = Table(title="rollwire demo", title_style="bold", header_style="dim")
        table.add_column("")
        table.add_column("what")
        table.add_column("result", justify="right")
        table.add_column("goal")
        for row in rows:
            mark = {True: "[green]✓", False: "[red]✗", None: ""}[row.reached]
            table.add_row(mark, row.what, row.result, row.goal)
        self._console.print(table)
        for problem in problems[:SHOWN_PROBLEMS]:
            self._console.print(Text(problem, style="red"), soft_wrap=True)
        missed = ", ".join(row.what for row in rows if row.reached is False)
        if missed:
            self._console.print(Text(f"Missed: {missed}", style="bold red"))
        self._console.print(f"Reward against version: {plot}", soft_wrap=True)
        folder = plot.parent
        command = f"rollwire view {folder}/samples.jsonl --tokenizer {folder}/checkpoint"
        self._console.print(f"All samples, as a web page: {command}", soft_wrap=True)

    def _panel(self) -> RenderableType:
        seconds = int(time.monotonic() - self._began)
        title = Text.assemble(
            (" rollwire demo ", "bold"), f"{self._phase} · {seconds // 60}:{seconds % 60:02} "
        )
        rows: list[RenderableType] = [Text("")]
        history = self._history
        if history is not None:
            rows = [_facts(history)]
            if history.latest is not None:
                rows += [Text(""), _sequence(history.latest)]
        width = min(self._console.width, WIDTH)
        return Panel(Group(*rows), title=title, title_align="left", width=width, padding=(1, 2))


def plot_reward(history: TrainingHistory, path: Path) -> None:
    """Writes a PNG: every sequence, the mean reward of each version's tokens, and the pauses."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(PLOT_STYLE):
        figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        reward, paused = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
        for crossed, colour, label in (
            (True, CROSSED, "sequence that crossed an update"),
            (False, WITHIN, "sequence of one version"),
        ):
            points = [p for p in history.points if p.crossed is crossed]
            versions, rewards = [p.version for p in points], [p.reward for p in points]
            reward.scatter(
                versions, rewards, s=7, alpha=0.25, color=colour, linewidths=0, label=label
            )
        means = history.reward_by_version()
        label = "tokens of each version"
        reward.plot(list(means), list(means.values()), color=LINE, linewidth=2.2, label=label)
        reward.axhline(GOAL, color=INK, linewidth=1, linestyle=(0, (4, 4)))
        reward.annotate(f"goal {GOAL}", (0, GOAL), (4, 4), textcoords="offset points", fontsize=9)
        reward.set_ylim(-0.02, 1.02)
        reward.set_ylabel("mean reward")
        reward.set_title("A policy learns a secret alphabet from streamed rollouts", loc="left")
        for handle in reward.legend(loc="lower right", frameon=False).legend_handles:
            if handle is not None:
                handle.set_alpha(1)
        paused.bar(
            [step.version for step in history.steps],
            [1e3 * step.paused_seconds for step in history.steps],
            color=PAUSE, width=0.8,
        )  # fmt: skip
        paused.set_ylabel("paused, ms")
        paused.set_xlabel("weight version: the trainer's step")
        canvas.print_png(path)  # type: ignore[no-untyped-call]  # matplotlib's


def _line(history: TrainingHistory) -> str:
    last = history.steps[-1]
    return (
        f"{last.seconds:5.0f} s  step and version {last.version:3}  reward {last.reward:.3f}  "
        f"{history.recent_tokens_per_second:6,.0f} tokens/s  "
        f"{history.crossed:6,} sequences crossed an update  "
        f"paused {1e3 * last.paused_seconds:.0f} ms"
    )


def _facts(history: TrainingHistory) -> Table:
    last = history.steps[-1]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    style = "bold green" if last.reward > GOAL else "bold"
    reward = Text.assemble((f"{last.reward:.3f} ", style), (_spark(history), "green"))
    facts.add_row("reward", reward)
    facts.add_row("version", f"{last.version} published, one a step")
    facts.add_row(
        "sequences",
        f"{len(history.points):,} learned from, {history.crossed:,} of them crossed an update",
    )
    facts.add_row("tokens", f"{history.recent_tokens_per_second:,.0f} a second")
    facts.add_row("paused", f"{1e3 * last.paused_seconds:.0f} ms by the last update")
    return facts


def _spark(history: TrainingHistory) -> str:
    rewards = [step.reward for step in history.steps]
    picked = rewards
    if len(rewards) > SPARKS:
        picked = [rewards[i * (len(rewards) - 1) // (SPARKS - 1)] for i in range(SPARKS)]
    return "".join(BARS[min(int(r * len(BARS)), len(BARS) - 1)] for r in picked)


def _sequence(scored: ScoredAnswer) -> Table:
    trajectory = scored.trajectory
    answer = Text()
    for letter, reward in zip(spell(trajectory.token_ids), scored.rewards, strict=True):
        answer.append(letter, style="green" if reward else "red")
    bar, legend = Text(), Text()
    for number, segment in enumerate(trajectory.segments):
        colour = COLOURS[number % len(COLOURS)]
        bar.append("━" * (segment.end - segment.start), style=colour)
        version = segment.weights.version
        legend.append(f" {'initial' if version is None else version}", style=colour)
    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim")
    shown.add_column()
    shown.add_row("text", spell(trajectory.prompt_ids[1:-1]))
    shown.add_row("answer", answer)
    shown.add_row("versions", Text.assemble(bar, legend))
    return shown
