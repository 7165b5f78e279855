"""What the tests of the page of ``rollwire view`` share: Chromium, and pages in it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from browser.support import GROUPS, SIZE
from rollwire_client import append_groups
from rollwire_client._cli.app import run
from support.viewing import Words, word_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rollwire_client import Group


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: make test-view"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


@pytest.fixture(scope="module")
def groups(words: Words) -> list[Group]:
    return list(word_problems(words, GROUPS, SIZE))


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the page of groups."""

    def write_page(groups: list[Group], words: Words | None) -> Path:
        folder = tmp_path_factory.mktemp("view")
        append_groups(folder / "groups.jsonl", groups)
        arguments = ["view", str(folder / "groups.jsonl"), "--output", str(folder / "page.html")]
        if words is not None:
            words.save(folder / "tokenizer.json")
            arguments += ["--tokenizer", str(folder)]
        assert run(arguments) == 0
        return folder / "page.html"

    return write_page


@pytest.fixture(scope="module")
def file(write: Callable[..., Path], groups: list[Group], words: Words) -> Path:
    return write(groups, words)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page. When the test ends, it must have logged nothing and asked for nothing."""
    contexts, told, asked = [], [], []

    def opened(path: Path, scheme: str = "light") -> Any:
        size = {"width": 1360, "height": 860}
        context = browser.new_context(color_scheme=scheme, viewport=size)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("dialog", lambda dialog: told.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert told == []
    assert [url for url in asked if not url.startswith(("file://", "data:,"))] == []
    assert sum(url.startswith("file://") for url in asked) == len(contexts)


@pytest.fixture
def page(open_page: Callable[..., Any], file: Path) -> Any:
    return open_page(file)
