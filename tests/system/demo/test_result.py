"""What the demo says at the end: goals, table, plot."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rollwire_client import (
    Finish,
    FinishReason,
    PublishReport,
    Segment,
    ServerReport,
    Trajectory,
    WeightTag,
)
from rollwire_demo.report import (
    CheckResult,
    Display,
    TrainingHistory,
    goals,
    plot_reward,
)
from rollwire_demo.task import LENGTH, ScoredAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GOOD_CHECK = CheckResult(sequences=2, tokens=64, versions=3, worst_error=2e-6, problems=())


def rollout(version: int, right: int) -> ScoredAnswer:
    """Half of it by ``version``, half by the next one."""
    middle = LENGTH // 2
    tags = [WeightTag(v, v, "s", v) for v in (version, version + 1)]
    segments = (
        Segment(0, middle, tags[0], version),
        Segment(middle, LENGTH, tags[1], version + 1),
    )
    trajectory = Trajectory(
        "a",
        tuple(range(LENGTH + 2)),
        (1,) * LENGTH,
        (-1.0,) * LENGTH,
        segments,
        Finish(FinishReason.LENGTH),
        ("s",),
    )
    return ScoredAnswer(trajectory, [1.0] * right + [0.0] * (LENGTH - right))


def history(rights: Sequence[int], sequences: int = 8) -> TrainingHistory:
    """One step for each number of right letters."""
    made = TrainingHistory()
    made.begin()
    for version, right in enumerate(rights, start=1):
        tag = WeightTag(version, version, "s", version)
        server = ServerReport("s", tag, None, 10, 0.1, paused_seconds=0.004)
        report = PublishReport(version, "u", version, 10, 0.2, (server,))
        made.add(version, [rollout(version, right) for _ in range(sequences)], report)
    return made


def missed(made: TrainingHistory, check: CheckResult = GOOD_CHECK) -> list[str]:
    return [row.what for row in goals(made, check, 1.0) if row.reached is False]


LEARNED = [1] * 20 + [LENGTH] * 5


def test_a_policy_that_learned_reaches_every_goal() -> None:
    made = history(LEARNED)
    assert made.goal_held
    assert missed(made) == []


def test_each_goal_can_be_missed() -> None:
    assert missed(history([LENGTH] * 25)) == ["reward at the start"]
    assert missed(history([1] * 25)) == ["reward at the end"]
    assert missed(history([1] * 10 + [LENGTH] * 5)) == ["versions published"]
    assert missed(history(LEARNED, sequences=1)) == ["sequences that crossed an update"]
    for check in (
        CheckResult(2, 64, 3, 1.0, ("sequence a: wrong",)),
        CheckResult(0, 0, 0, 0.0, ()),
    ):
        assert missed(history(LEARNED), check) == ["worst log-probability error"]


def test_what_was_not_checked_has_no_error() -> None:
    for check, told in [(CheckResult(0, 0, 0, 0.0, ()), "not checked"), (GOOD_CHECK, "2.0e-06")]:
        rows = goals(history(LEARNED), check, 1.0)
        (result,) = [f.result for f in rows if f.what == "worst log-probability error"]
        assert result == told


def test_nothing_learned_at_all_is_a_result_too() -> None:
    assert len(missed(TrainingHistory(), CheckResult(0, 0, 0, 0.0, ()))) == 4


def test_a_goal_that_is_lost_again_is_not_held() -> None:
    assert not history([*LEARNED, 1]).goal_held


def test_reward_by_version_follows_the_labels() -> None:
    by_version = history([LENGTH // 2]).reward_by_version()
    assert by_version == {1: 1.0, 2: 0.0}


def test_the_display_tells_what_matters_without_a_terminal(tmp_path: Path) -> None:
    output = io.StringIO()
    made = history(LEARNED)
    check = CheckResult(2, 64, 3, 0.5, ("sequence a: a token tagged version 3 is wrong",))
    with Display(console=Console(file=output, width=100)) as display:
        display.phase("learning")
        display.step(made)
        display.note("a server died")
    display.result(goals(made, check, 1.0), check.problems, tmp_path / "reward.png")
    told = output.getvalue()
    for words in (
        "learning",
        "step and version  25",
        "200 sequences crossed",
        "a server died",
        "5.0e-01",
        "tagged version 3 is wrong",
        "Missed: worst log-probability",
        "reward.png",
    ):
        assert words in told
    assert "\x1b" not in told


def test_the_live_panel_shows_a_sequence_and_its_versions() -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True)
    with Display(console=console) as display:
        display.step(history(LEARNED))
    told = output.getvalue()
    assert "ABCDEF" not in told  # the mark at its begin is no letter
    assert "BCDEFGHIJKLMNOPQRSTUVWXYZ" in told
    assert "25 published" in told


def test_quiet_shows_the_result_alone() -> None:
    output = io.StringIO()
    with Display(quiet=True, console=Console(file=output, width=100)) as display:
        display.phase("learning")
        display.step(history(LEARNED))
    assert output.getvalue() == ""


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "reward.png"
    plot_reward(history(LEARNED), path)
    assert path.read_bytes().startswith(b"\x89PNG")
