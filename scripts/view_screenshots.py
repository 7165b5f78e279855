"""Makes the pictures of ``rollwire view`` in docs/images, in Chromium, of made-up samples.

make .overlays/browser/installed
PYTHONPATH=.overlays/browser/site-packages:tests .venv/bin/python scripts/view_screenshots.py
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from rollwire_client import append_groups
from rollwire_client._cli.app import run
from support.viewing import Words, word_problems

IMAGES = Path(__file__).parent.parent / "docs/images"
SIZE = {"width": 1320, "height": 800}


def main() -> None:
    """Writes the pictures."""
    words = Words()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        append_groups(folder / "samples.jsonl", word_problems(words, 240, 8, seed=5))
        words.save(folder / "tokenizer.json")
        page = folder / "page.html"
        arguments = [str(folder / "samples.jsonl"), "--tokenizer", name, "--output", str(page)]
        if code := run(["view", *arguments]):
            raise SystemExit(code)
        with sync_playwright() as driver:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            _light(_opened(browser, page, "light"))
            _dark(_opened(browser, page, "dark"))
            browser.close()


def _opened(browser: Any, page: Path, scheme: str) -> Any:
    tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
    tab.goto(page.as_uri())
    return tab


def _light(tab: Any) -> None:
    """A group, shaded by log-probability, and one of its tokens."""
    for _ in range(2):
        tab.keyboard.press("j")
    unlikely = tab.locator(".sample .t:is(.s3, .s4, .s5)", has_text=re.compile("[a-z]{3}"))
    unlikely.first.click()
    _save(tab, "view-light.png")


def _dark(tab: Any) -> None:
    """What a search found, coloured by weight version."""
    tab.keyboard.press("c")
    tab.fill("#search", "wait updates:>0 reward:<0.5")
    tab.keyboard.press("Enter")
    _save(tab, "view-dark.png")


def _save(tab: Any, name: str) -> None:
    """With 256 colours, which the page hardly exceeds: a third of the size."""
    picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(256)
    picture.save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main()
