"""Much on the page of ``rollwire view``: ``make test-view``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from browser.support import heading, reads, samples_of, search
from support.viewing import Words, word_problems

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_thousands_of_groups_scroll_as_few_do(
    open_page: Callable[..., Any], write: Callable[..., Path]
) -> None:
    words = Words()
    many = list(word_problems(words, 5000, 1))
    seconds = []
    for groups in (many[:50], many):
        page = open_page(write(groups, words))
        place = page.locator("#list")
        seconds.append(
            place.evaluate(
                """async (box) => {
                  const began = performance.now();
                  for (let i = 0; i < 200; i++) {
                    box.scrollTop = (box.scrollHeight * ((i * 37) % 200)) / 200;
                    list.draw();
                  }
                  return performance.now() - began;
                }"""
            )
        )
        assert page.locator(".row").count() < 40
    assert seconds[1] < 5 * seconds[0] + 100
    page.keyboard.press("G")
    reads(page, "h2", heading(4999))
    assert page.locator("[role=option][aria-selected=true]").is_visible()
    search(page, "reward:<0.1")
    found = sum(s.reward is not None and s.reward < 0.1 for _, s in samples_of(many))
    reads(page, "#found", re.compile(rf"^{found:,} samples of 5,000"))


def test_a_long_sample_is_drawn_as_far_as_it_is_read(
    open_page: Callable[..., Any], write: Callable[..., Path]
) -> None:
    words = Words()
    page = open_page(write(list(word_problems(words, 1, 1, long=4000)), words))
    tokens = page.locator(".sample .tokens .t")
    assert tokens.count() == 1500
    search(page, '"answer: " finish:stop')  # its end is found all the same
    page.keyboard.press("n")  # after the prompt's
    reads(page, ".sample .here", re.compile("Answer", re.IGNORECASE))
    assert tokens.count() > 4000


def test_a_large_group_is_drawn_as_far_as_it_is_seen(
    open_page: Callable[..., Any], write: Callable[..., Path]
) -> None:
    from playwright.sync_api import expect

    words = Words()
    page = open_page(write(list(word_problems(words, 1, 64)), words))
    last = page.locator(".sample").last
    assert last.locator(".t").count() == 0
    last.scroll_into_view_if_needed()
    expect(last.locator(".t").first).to_be_visible()
    assert page.locator(".sample").count() == 64
    search(page, '"the units"')
    matching = page.locator(".sample.matches")
    assert matching.count() > 12
    visited = set()
    while len(visited) < matching.count():  # each is drawn when it is visited
        visited.add(page.evaluate("document.activeElement.sample.index"))
        page.keyboard.press("n")
    for _ in range(3):
        page.keyboard.press("p")
    assert page.locator(".hit-start.here").count() == 1
