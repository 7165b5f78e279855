"""What ``rollwire view`` takes for many samples: the page's size, and how quick a browser is.

    make .overlays/browser/installed
    PYTHONPATH=.overlays/browser/site-packages:tests .venv/bin/python benchmarks/view.py

The samples are made up. Times are medians of ``--repeats`` visits in headless Chromium: from the
start of navigation to the first paint, and until the page can be used; for a search, until its
result is laid out; for a step to the next group.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from common import machine, print_table
from playwright.sync_api import sync_playwright
from rollwire_client import append_groups
from rollwire_client._cli.app import run
from support.viewing import Words, word_problems

QUERIES = (
    '"the units agree"',
    "token:12,13",
    "reward:<0.2",
    "version:12 updates:>0",
    "logprob:<-12",
)
TIMED = """(work) => {
  const began = performance.now();
  work();
  document.body.offsetHeight;
  return performance.now() - began;
}"""
SEARCH = f"(query) => ({TIMED})(() => searchNow(query))"
STEP = f"() => ({TIMED})(() => ACTIONS.j())"


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=625)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--tokens", type=int, default=500, help="least tokens of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(machine("cpu"))
    words = Words()
    groups = list(word_problems(words, options.groups, options.size, long=options.tokens))
    tokens = sum(len(s.trajectory.token_ids) for group in groups for s in group.samples)
    rows = [("samples", f"{options.groups * options.size:,}"), ("output tokens", f"{tokens:,}")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        append_groups(folder / "groups.jsonl", groups)
        rows.append(("append_groups", _seconds(began)))
        words.save(folder / "tokenizer.json")
        began = time.perf_counter()
        page = folder / "page.html"
        arguments = [str(folder / "groups.jsonl"), "--tokenizer", name, "--output", str(page)]
        assert run(["view", *arguments]) == 0
        rows.append(("rollwire view", _seconds(began)))
        rows += [
            (f"size of {path.name}", f"{path.stat().st_size / 1e6:.1f} MB")
            for path in (folder / "groups.jsonl", page)
        ]
        visits = _visits(page, options.repeats)
    for what in visits[0]:
        rows.append((what, f"{median(visit[what] for visit in visits):.0f} ms"))
    print_table(rows)


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"


def _visits(page: Path, repeats: int) -> list[dict[str, float]]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    visits = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(repeats):
            tab = browser.new_page(viewport={"width": 1360, "height": 860})
            tab.goto(page.as_uri())
            tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            times = {
                "first paint": tab.evaluate(
                    "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                ),
                "page usable": tab.evaluate(
                    "performance.getEntriesByType('navigation')[0].domComplete"
                ),
            }
            times |= {"first search, for a text": tab.evaluate(SEARCH, QUERIES[0])}
            times |= {f"search {query}": tab.evaluate(SEARCH, query) for query in QUERIES}
            tab.evaluate(SEARCH, "")
            times["next group"] = tab.evaluate(STEP)
            visits.append(times)
            tab.close()
        browser.close()
    return visits


if __name__ == "__main__":
    main()
