"""The page of ``rollwire view`` by keyboard, in the dark, and its contrast: ``make test-view``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from browser.support import GROUPS, heading, reads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTRAST = 4.5  # of text, by WCAG 2 AA


def test_the_keyboard_does_it_all(page: Any) -> None:
    press = page.keyboard.press
    for key, number in (
        ("j", 1),
        ("j", 2),
        ("k", 1),
        ("ArrowDown", 2),
        ("G", GROUPS - 1),
        ("g", 0),
    ):
        press(key)
        reads(page, "h2", heading(number))
        selected = page.locator("[role=option][aria-selected=true]")
        assert selected.get_attribute("aria-posinset") == str(number + 1)
        assert page.locator("#list").get_attribute("aria-activedescendant") == f"row-{number}"
    for index in range(3):  # without a search, n and p visit samples
        press("n")
        assert page.evaluate("document.activeElement.sample.index") == index
    press("ArrowRight")
    press("ArrowRight")
    assert "position 1 of" in page.locator("#inspector").inner_text()
    assert "sample 2" in page.locator("#inspector").inner_text()
    press("ArrowLeft")
    assert "position 0 of" in page.locator("#inspector").inner_text()
    press("c")
    assert page.locator("body").get_attribute("data-colour") == "version"
    press("/")
    page.keyboard.type("version:12 jjj")  # keys of a search are text
    assert page.input_value("#search") == "version:12 jjj"
    press("Escape")
    press("?")
    assert page.locator("#help").is_visible()
    press("Escape")
    assert not page.locator("#help").is_visible()


def test_every_button_has_a_name_and_can_be_reached(page: Any) -> None:
    for button in page.locator("button:visible").all():
        assert button.inner_text().strip() or button.get_attribute("title")
    page.locator("#search").focus()
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "[document.activeElement.id || document.activeElement.dataset.colourBy || '',"
                " getComputedStyle(document.activeElement).outlineStyle].join(' ')"
            )
        )
    assert {"sort solid", "logprob solid", "version solid"} <= reached
    assert any(name.startswith("list") for name in reached)


def test_dark_follows_the_system_and_the_switch(open_page: Callable[..., Any], file: Path) -> None:
    page = open_page(file, "dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    page.keyboard.press("t")  # from auto to light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == light
    page.locator("#theme").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark
    assert page.evaluate("localStorage.getItem('rollwire-theme')") == "dark"


# Of each element that has text of its own: its colour and what is behind it.
_COLOURS = """() => {
  const numbers = (text) => {
    const found = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith('color(') ? [...found.slice(0, 3).map((x) => 255 * x), found[3] ?? 1]
                                     : [...found.slice(0, 3), found[3] ?? 1];
  };
  const over = (top, below) => below.map((x, i) => top[i] * top[3] + x * (1 - top[3]));
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const own = numbers(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(element.parentElement));
  };
  const opacity = (e) => e ? Number(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1;
  const texts = [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility()
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  return texts.filter((e) => !e.matches('.control, script, noscript, option')).map((e) => {
    const ground = behind(e);
    const own = numbers(getComputedStyle(e).color);
    own[3] *= opacity(e);
    return [e.className || e.tagName, over(own, ground), ground];
  });
}"""


def luminance(colour: list[float]) -> float:
    linear = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
        for x in (part / 255 for part in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("colour", ["logprob", "version"])
def test_all_text_can_be_read(
    open_page: Callable[..., Any], file: Path, scheme: str, colour: str
) -> None:
    page = open_page(file, scheme)
    page.click(f"[data-colour-by={colour}]")
    worst: dict[str, float] = {}
    for query in ("dropped:failed", "the", "reward:?"):
        page.fill("#search", query)
        page.press("#search", "Enter")
        for name, text, ground in page.evaluate(_COLOURS):
            lighter, darker = sorted((luminance(text), luminance(ground)), reverse=True)
            ratio = (lighter + 0.05) / (darker + 0.05)
            worst[name] = min(ratio, worst.get(name, ratio))
    assert len(worst) > 40
    assert {name: ratio for name, ratio in worst.items() if ratio < CONTRAST} == {}
