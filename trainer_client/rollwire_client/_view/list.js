// The list of groups. Only the rows in sight are in the page.

const ROW_HEIGHT = 58; // pixels, as in view.css
const SPARE_ROWS = 6;
const SNIPPET_TOKENS = 24;
const BARS = 24;

class GroupList {
  /** ``onSelect`` is told the group that the user selects. */
  constructor(box, onSelect) {
    this.box = box;
    this.onSelect = onSelect;
    this.groups = [];
    this.selected = 0; // its place in ``groups``
    this.matches = null; // by group: how many samples match; null: no search
    this.space = element("div", { class: "space", role: "presentation" });
    this.drawn = "";
    box.append(this.space);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) this.select(row.place);
    });
    box.addEventListener("keydown", (event) => this.onKey(event));
  }

  show(groups, matches, selected) {
    this.groups = groups;
    this.matches = matches;
    this.selected = Math.max(groups.indexOf(selected), 0);
    this.space.style.height = `${groups.length * ROW_HEIGHT}px`;
    this.drawn = "";
    this.reveal();
    this.draw();
  }

  select(place) {
    if (!this.groups.length) return;
    this.selected = Math.min(Math.max(place, 0), this.groups.length - 1);
    this.reveal();
    this.drawn = "";
    this.draw();
    this.onSelect(this.groups[this.selected]);
  }

  reveal() {
    const top = this.selected * ROW_HEIGHT;
    const { scrollTop, clientHeight } = this.box;
    if (top < scrollTop) this.box.scrollTop = top;
    else if (top + ROW_HEIGHT > scrollTop + clientHeight) this.box.scrollTop = top + ROW_HEIGHT - clientHeight;
  }

  draw() {
    const { scrollTop, clientHeight } = this.box;
    const first = Math.max(Math.floor(scrollTop / ROW_HEIGHT) - SPARE_ROWS, 0);
    const last = Math.min(Math.ceil((scrollTop + clientHeight) / ROW_HEIGHT) + SPARE_ROWS, this.groups.length);
    const drawn = `${first}-${last}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.row(place));
    this.space.replaceChildren(...rows);
    if (first <= this.selected && this.selected < last) {
      this.box.setAttribute("aria-activedescendant", `row-${this.selected}`);
    } else {
      this.box.removeAttribute("aria-activedescendant");
    }
  }

  row(place) {
    const group = this.groups[place];
    const prompt = { at: group.prompt.at, length: Math.min(group.prompt.length, SNIPPET_TOKENS) };
    const row = element("div", {
      role: "option", id: `row-${place}`, class: "row",
      "aria-selected": String(place === this.selected),
      "aria-setsize": this.groups.length, "aria-posinset": place + 1,
    },
    element("span", { class: "row-id" }, group.id),
    element("span", { class: "row-text" }, visible(textOf(prompt)).replace(/\s+/g, " ")),
    rewardBars(group),
    element("span", { class: "row-facts" }, rowFacts(group, this.matches?.get(group))));
    if (group.dropped) row.append(element("span", { class: "badge dropped" }, group.dropped));
    row.place = place;
    row.style.top = `${place * ROW_HEIGHT}px`;
    return row;
  }

  onKey(event) {
    const page = Math.max(Math.floor(this.box.clientHeight / ROW_HEIGHT) - 1, 1);
    const moves = {
      ArrowDown: this.selected + 1, ArrowUp: this.selected - 1,
      PageDown: this.selected + page, PageUp: this.selected - page,
      Home: 0, End: this.groups.length - 1,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(moves[event.key]);
  }
}

function rowFacts(group, found) {
  const facts = [];
  if (found !== undefined) facts.push(`${found} of ${group.samples.length}`);
  if (group.rewards.length) facts.push(decimal(mean(group.rewards), 2));
  facts.push(versionRange(group.samples));
  return facts.filter(Boolean).join(" · ");
}

/** A bar for the reward of each sample. */
function rewardBars(group) {
  const bars = element("span", { class: "bars", "aria-hidden": "true" });
  for (const sample of group.samples.slice(0, BARS)) {
    const bar = element("i", { class: sample.reward === null ? "none" : "" });
    if (sample.reward !== null) bar.style.height = `${8 + 92 * rewardShare(sample.reward)}%`;
    bars.append(bar);
  }
  return bars;
}
