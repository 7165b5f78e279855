"""The page of ``rollwire view`` in Chromium: ``make test-view``."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from rollwire_client import Group, Prompt, append_groups
from rollwire_client._cli.app import run
from support.viewing import SERVERS, Words, conversation_of, word_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rollwire_client import Sample

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-view")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

GROUPS, SIZE = 40, 8
CONTRAST = 4.5  # of text, by WCAG 2 AA


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


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


def reads(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    """Waits until what is selected has a text."""
    playwright.expect(page.locator(selector).first).to_have_text(text)


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
    words = Words()
    page = open_page(write(list(word_problems(words, 1, 64)), words))
    last = page.locator(".sample").last
    assert last.locator(".t").count() == 0
    last.scroll_into_view_if_needed()
    playwright.expect(last.locator(".t").first).to_be_visible()
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
