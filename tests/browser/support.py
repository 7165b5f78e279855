"""What is done on a page, and what it is compared to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re

    from rollwire_client import Group, Sample
    from support.viewing import Words

GROUPS, SIZE = 40, 8


def reads(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    """Waits until what is selected has a text."""
    from playwright.sync_api import expect

    expect(page.locator(selector).first).to_have_text(text)


def search(page: Any, query: str) -> None:
    page.fill("#search", query)
    page.press("#search", "Enter")


def heading(number: int) -> str:
    return f"Prompt math-{number:04}"


def text_of(words: Words, token_ids: Any) -> str:
    texts = list(words.ids)
    return "".join(texts[token] for token in token_ids)


def samples_of(groups: list[Group]) -> list[tuple[Group, Sample]]:
    return [(group, sample) for group in groups for sample in group.samples]
