"""What the page of ``rollwire view`` shows of a group: ``make test-view``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from browser.support import GROUPS, SIZE, heading, reads, samples_of, search, text_of
from rollwire_client import Group, Prompt
from support.viewing import SERVERS, Words, conversation_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_group_is_shown_with_its_samples(page: Any, groups: list[Group], words: Words) -> None:
    first = groups[0]
    assert page.title() == "groups.jsonl · rollwire view"
    reads(page, "h2", heading(0))
    shown = page.locator(".prompt-tokens").inner_text()
    assert shown.replace("⏎", "") == text_of(words, first.prompt.token_ids)
    cards = page.locator(".sample")
    assert cards.count() == SIZE
    for index, sample in enumerate(first.samples):
        card = cards.nth(index)
        tokens = card.locator(".tokens .t").all_inner_texts()
        assert len(tokens) == len(sample.trajectory.token_ids)
        expected = text_of(words, sample.trajectory.token_ids)
        assert "".join(tokens).replace("⏎", "") == expected
        assert float(card.locator(".reward").inner_text()) == pytest.approx(sample.reward, abs=1e-3)
        assert card.locator(".badge").inner_text() == "stop"
    reads(page, ".info-line", re.compile(r'info \{ "answer": \d+ \}'))


def test_what_is_copied_is_the_text_of_the_sample(
    page: Any, groups: list[Group], words: Words
) -> None:
    index, sample = next(
        (i, s) for i, s in enumerate(groups[0].samples) if len(s.trajectory.segments) > 1
    )
    tokens = page.locator(".sample").nth(index).locator(".tokens")
    copied = tokens.evaluate(
        "e => { getSelection().selectAllChildren(e); return getSelection().toString(); }"
    )
    assert copied == text_of(words, sample.trajectory.token_ids)


def test_the_header_counts_and_draws_the_rewards(page: Any, groups: list[Group]) -> None:
    facts = dict(
        zip(
            page.locator(".stats dt").all_inner_texts(),
            page.locator(".stats dd").all_inner_texts(),
            strict=True,
        )
    )
    rewards = [s.reward for _, s in samples_of(groups) if s.reward is not None]
    assert (facts["samples"], facts["groups"]) == (str(GROUPS * SIZE), str(GROUPS))
    assert float(facts["mean reward"]) == pytest.approx(sum(rewards) / len(rewards), abs=1e-3)
    assert facts["servers"] == str(len(SERVERS))
    titles = [bar.get_attribute("title") for bar in page.locator("#histogram button").all()]
    assert sum(int(re.search(r": (\d+) sample", title)[1]) for title in titles) == len(rewards)
    page.locator("#histogram button").first.click()
    low = min(rewards)
    bound = low + (max(rewards) - low) / len(titles)
    count = sum(reward <= bound for reward in rewards)
    reads(page, "#found", re.compile(rf"^{count} samples of"))


def test_a_dropped_group_says_why(page: Any, groups: list[Group]) -> None:
    dropped = [group for group in groups if group.dropped]
    page.click(".facet[title='dropped:failed']")
    reads(page, "#found", re.compile(rf"in {len(dropped)} group"))
    reads(page, ".dropped-note strong", "Dropped: failed")
    reads(page, ".dropped-note pre", "StepFailedError: no memory for another 512 tokens")
    assert page.locator(".sample .badge").first.inner_text() == "unfinished"
    page.click(".facet[title='dropped:failed']")
    reads(page, "#found", f"{GROUPS * SIZE} samples in {GROUPS} groups")


def test_versions_have_colours_and_updates_are_marked(page: Any, groups: list[Group]) -> None:
    page.get_by_role("button", name="Weight version").click()
    index, sample = next(
        (i, s) for i, s in enumerate(groups[0].samples) if len(s.trajectory.segments) > 1
    )
    card = page.locator(".sample").nth(index)
    segments = sample.trajectory.segments
    colours = [
        card.locator(".tokens .t")
        .nth(segment.start)
        .evaluate("e => getComputedStyle(e).backgroundColor")
        for segment in segments
    ]
    assert len(set(colours)) == len(segments)
    marked = card.locator(".crossing").all_inner_texts()
    for before, after, text in zip(segments, segments[1:], marked, strict=False):
        assert text.startswith(f"v{before.weights.version} → v{after.weights.version}")
    assert len(marked) == len(segments) - 1
    legend = page.locator("#legend .entry").all_inner_texts()
    assert f"version {segments[-1].weights.version}" in legend
    card.locator(".segments summary").click()
    rows = card.locator(".segments tbody tr").all_inner_texts()
    assert len(rows) == len(segments)
    assert f"{segments[0].weights.digest:016x}" in rows[0]


def test_unlikely_tokens_are_shaded(page: Any, groups: list[Group]) -> None:
    logprobs = groups[0].samples[0].trajectory.logprobs
    tokens = page.locator(".sample").first.locator(".tokens .t")

    def colour(index: int) -> str:
        found: str = tokens.nth(index).evaluate("e => getComputedStyle(e).backgroundColor")
        return found

    likeliest, unlikeliest = logprobs.index(max(logprobs)), logprobs.index(min(logprobs))
    assert colour(likeliest) == "rgba(0, 0, 0, 0)"
    assert colour(unlikeliest) not in {colour(likeliest), "rgba(0, 0, 0, 0)"}
    tokens.nth(unlikeliest).click()
    value = re.search(r"log-probability \W([\d.]+)", page.locator("#inspector").inner_text())
    assert value is not None
    assert float(value[1]) == pytest.approx(-min(logprobs), abs=1e-3)


def test_a_conversation_shows_what_was_given(
    open_page: Callable[..., Any], write: Callable[..., Path], groups: list[Group], words: Words
) -> None:
    tool = words.encode("\n\nTool: the total is 12.\n\n")
    group = conversation_of(groups[0], given=tool)
    page = open_page(write([group], words))
    card = page.locator(".sample")
    given = card.locator(".t.given").all_inner_texts()
    assert "".join(given).replace("⏎", "") == 2 * text_of(words, tool)
    sampled = sum(len(turn.token_ids) for turn in group.samples[0].turns)
    assert f"{sampled} tokens · {2 * len(tool)} given" in card.inner_text()
    assert card.locator(".strip .given").count() == 2
    card.locator(".t.given").nth(4).click()
    assert "given, not sampled" in page.locator("#inspector").inner_text()
    search(page, f"length:{sampled} total")
    reads(page, "#found", "1 sample of 1, in 1 group")


def test_text_is_never_html(open_page: Callable[..., Any], write: Callable[..., Path]) -> None:
    words = Words()
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00 &amp;"
    prompt = Prompt(f"<b>{evil}", words.encode(evil), info={"<i>": evil})
    page = open_page(write([Group(prompt, ())], words))
    reads(page, "h2", re.compile(re.escape("Prompt <b></script><script>alert(1)</script><img")))
    shown = page.locator(".prompt-tokens").inner_text()
    assert shown == evil.replace("\u202e", "␦").replace("\x00", "␀")
    assert page.locator("img, #group script").count() == 0


def test_without_a_tokenizer_token_ids_are_shown_and_found(
    open_page: Callable[..., Any], write: Callable[..., Path], groups: list[Group]
) -> None:
    page = open_page(write(groups, None))
    token_ids = groups[0].samples[0].trajectory.token_ids
    shown = page.locator(".sample").first.locator(".tokens .t").all_inner_texts()
    assert shown == [str(token) for token in token_ids]
    search(page, str(token_ids[3]))
    matching = [s for g, s in samples_of(groups)
                if token_ids[3] in (*s.trajectory.token_ids, *g.prompt.token_ids)]  # fmt: skip
    reads(page, "#found", re.compile(rf"^{len(matching)} samples? of"))
    page.fill("#search", "answer")
    reads(page, "#found", re.compile("text needs --tokenizer"))


def test_a_character_of_several_tokens_is_whole(
    open_page: Callable[..., Any], write: Callable[..., Path], tmp_path: Path
) -> None:
    class Octets(Words):
        """A token for each byte of UTF-8."""

        def save(self, path: Path) -> None:
            vocabulary = ", ".join(f'"<0x{byte:02X}>": {byte}' for byte in range(256))
            path.write_text(
                f'{{"model": {{"vocab": {{{vocabulary}}}}}, "decoder": {{"type": "ByteFallback"}}}}'
            )

    text = "東京 🙂!"
    page = open_page(write([Group(Prompt("p", [*text.encode(), 0xE6]), ())], Octets()))
    shown = page.locator(".prompt-tokens").inner_text()
    assert shown.replace("·", "") == f"{text}�"
    search(page, "京")
    assert page.locator(".row").count() == 0  # a prompt without samples has none to find
    assert page.evaluate("foldedText(groups[0].prompt)") == f"{text}�"
