"""Searches and filters on the page of ``rollwire view``: ``make test-view``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from browser.support import SIZE, reads, samples_of, search, text_of
from support.viewing import SERVERS, Words

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_client import Group, Sample


FILTERS: list[tuple[str, Callable[[Group, Sample], bool]]] = [
    ("reward:<0.2", lambda g, s: s.reward is not None and s.reward < 0.2),
    ("reward:>=1", lambda g, s: s.reward is not None and s.reward >= 1),
    ("reward:0.1..0.15", lambda g, s: s.reward is not None and 0.1 <= s.reward <= 0.15),
    ("reward:none", lambda g, s: s.reward is None),
    ("version:11", lambda g, s: 11 in s.trajectory.versions),
    ("version:>=11", lambda g, s: max(v or 0 for v in s.trajectory.versions) >= 11),
    ("length:>110", lambda g, s: len(s.trajectory.token_ids) > 110),
    ("updates:2", lambda g, s: len(s.trajectory.segments) == 3),
    ("logprob:<-15", lambda g, s: round(min(s.trajectory.logprobs), 3) < -15),
    ("finish:unfin", lambda g, s: s.trajectory.finish is None),
    ("-finish:stop", lambda g, s: s.trajectory.finish is None),
    ("dropped:any", lambda g, s: g.dropped is not None),
    ("dropped:no reward:>1", lambda g, s: g.dropped is None and (s.reward or 0) > 1),
    ("server:0.12:", lambda g, s: SERVERS[1] in s.trajectory.servers),
    ("prompt:math-0007", lambda g, s: g.prompt.id == "math-0007"),
    ("epoch:1", lambda g, s: False),
]


@pytest.mark.parametrize(("query", "wanted"), FILTERS, ids=[query for query, _ in FILTERS])
def test_a_filter_finds_what_it_says(
    page: Any, groups: list[Group], query: str, wanted: Callable[[Group, Sample], bool]
) -> None:
    found = [(group, sample) for group, sample in samples_of(groups) if wanted(group, sample)]
    search(page, query)
    plural = "" if len(found) == 1 else "s"
    in_groups = len({group.prompt.id for group, _ in found})
    reads(page, "#found", re.compile(rf"^{len(found)} sample{plural} of .* in {in_groups} group"))
    shown = page.locator(".sample h3").all_inner_texts()
    first = [s for g, s in found if g is found[0][0]] if found else []
    assert len(shown) == len(first)


def test_a_text_is_found_marked_and_visited(page: Any, groups: list[Group], words: Words) -> None:
    wanted = "another way: sell"
    matching = [
        (group, sample)
        for group, sample in samples_of(groups)
        if wanted in text_of(words, sample.trajectory.token_ids).lower()
    ]
    search(page, f'"{wanted.upper()}"')
    reads(page, "#found", re.compile(rf"^{len(matching)} samples of"))
    begins = page.locator(".hit-start")
    marked = page.locator(".sample").first.locator(".hit").all_inner_texts()
    assert "".join(marked).lower().startswith(wanted)
    assert page.locator(".here").inner_text() == begins.first.inner_text()
    inspected = page.locator("#inspector").inner_text()
    assert "position" in inspected
    for _ in range(begins.count()):
        page.keyboard.press("n")
    others = [group for group, _ in matching if group is not matching[0][0]]
    reads(page, "h2", f"Prompt {others[0].prompt.id}")  # past the last match of a group
    page.keyboard.press("p")
    reads(page, "h2", f"Prompt {matching[0][0].prompt.id}")
    assert page.locator(".hit-start.here").count() == 1
    page.get_by_role("button", name="Show all").click()
    assert page.locator(".sample").count() == SIZE


def test_a_run_of_tokens_is_found(page: Any, groups: list[Group], words: Words) -> None:
    first = groups[3].samples[2].trajectory.token_ids
    run_of = first[5:9]
    search(page, f"token:{','.join(map(str, run_of))} prompt:math-0003")
    marked = page.locator(".sample .hit").all_inner_texts()
    assert "".join(marked).replace("⏎", "").startswith(text_of(words, run_of))


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("reward:high", "reward: high is not a number, such as 0.5"),
        ("finish:tired", "finish: tired is not one of stop, length"),
        ("token:the", "token: the is not a token id"),
    ],
)
def test_a_filter_that_means_nothing_is_told(page: Any, query: str, told: str) -> None:
    page.fill("#search", query)
    reads(page, "#found", re.compile(re.escape(told)))
    assert page.locator("#search").get_attribute("aria-invalid") == "true"
    assert page.locator(".row").count() == 0
