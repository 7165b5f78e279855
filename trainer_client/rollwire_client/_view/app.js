// The page as a whole: search, keys, colours.

const SEARCH_DELAY = 120; // milliseconds after a key
const THEMES = ["auto", "light", "dark"];
const ORDERS = {
  file: ["As in the file", null],
  low: ["Lowest reward", (group) => (group.rewards.length ? mean(group.rewards) : Infinity)],
  high: ["Highest reward", (group) => (group.rewards.length ? -mean(group.rewards) : Infinity)],
  spread: ["Most different rewards", (group) => (group.rewards.length ? -spread(group.rewards) : Infinity)],
  long: ["Most tokens", (group) => -group.tokens],
  updates: ["Most updates", (group) => -Math.max(0, ...group.samples.map(crossings))],
};
const FIRST_STOP = { box: 0, place: -1 }; // before the first
const state = {
  query: parseQuery(""),
  matching: new Set(samples),
  group: groups[0],
  showAll: false,
  stop: FIRST_STOP, // where n and p are in the group
  token: null, // the span that the foot describes
};
const list = new GroupList(byId("list"), showGroup);

function showGroup(group) {
  state.group = group;
  state.showAll = false;
  drawMain();
  byId("main").scrollTop = 0;
}

function drawMain() {
  state.stop = FIRST_STOP;
  setToken(null);
  if (!state.group) {
    byId("group").replaceChildren(element("p", { class: "nothing" }, "No sample matches."));
    return;
  }
  drawGroup(byId("group"), state.group, state.query, state.matching, state.showAll, () => {
    state.showAll = true;
    drawMain();
  });
  drawLegend();
}

// Search.

function search() {
  const text = byId("search").value;
  state.query = parseQuery(text);
  const found = state.query.error ? [] : findSamples(state.query);
  state.matching = new Set(found);
  const perGroup = new Map();
  for (const sample of found) perGroup.set(sample.group, (perGroup.get(sample.group) ?? 0) + 1);
  const searching = state.query.tests.length > 0 || state.query.error !== "";
  const shown = searching ? groups.filter((group) => perGroup.has(group)) : groups;
  const measure = ORDERS[byId("sort").value][1];
  const ordered = measure === null ? shown : ordering(shown, measure);
  if (!ordered.includes(state.group)) state.group = ordered[0];
  list.show(ordered, searching ? perGroup : null, state.group);
  state.showAll = false;
  drawMain();
  byId("search").setAttribute("aria-invalid", String(state.query.error !== ""));
  byId("found").classList.toggle("error", state.query.error !== "");
  byId("found").textContent = state.query.error || (searching
    ? `${count(found.length, "sample")} of ${thousands.format(samples.length)}, in ${count(ordered.length, "group")}`
    : `${count(samples.length, "sample")} in ${count(groups.length, "group")}`);
  drawFacets(text);
}

function ordering(list, measure) {
  const keys = new Map(list.map((group) => [group, measure(group)]));
  return [...list].sort((a, b) => keys.get(a) - keys.get(b) || a.number - b.number);
}

let awaited = 0; // the timer of a search
byId("search").addEventListener("input", () => {
  clearTimeout(awaited);
  awaited = setTimeout(search, SEARCH_DELAY);
});
byId("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  searchNow();
  byId("list").focus();
  move(1);
});
byId("sort").addEventListener("change", search);

function searchNow(text = byId("search").value) {
  clearTimeout(awaited);
  byId("search").value = text;
  search();
}

/** Adds a filter to the search, in place of another of its name, or takes it away. */
function toggleFilter(filter) {
  const name = filter.split(":")[0];
  const words = byId("search").value.split(/\s+/).filter(Boolean);
  const others = words.filter((word) => !word.startsWith(`${name}:`));
  searchNow((words.includes(filter) ? others : [...others, filter]).join(" "));
}

function countBy(items, keyOf) {
  const counts = new Map();
  for (const item of items) counts.set(keyOf(item), (counts.get(keyOf(item)) ?? 0) + 1);
  return counts;
}

const finishCounts = countBy(samples, (sample) => sample.finish ?? "unfinished");
const dropCounts = countBy(groups, (group) => group.dropped);
const crossedCount = samples.filter((sample) => crossings(sample) > 0).length;

function drawFacets(text) {
  const words = new Set(text.split(/\s+/));
  const facet = (filter, label, n) => element("button", {
    type: "button", class: "facet", "aria-pressed": String(words.has(filter)), title: filter,
    onclick: () => toggleFilter(filter),
  }, label, element("b", {}, thousands.format(n)));
  const made = FINISHES.filter((name) => finishCounts.has(name))
    .map((name) => facet(`finish:${name}`, name, finishCounts.get(name)));
  if (crossedCount) made.push(facet("updates:>0", "crossed an update", crossedCount));
  for (const name of DROPS.filter((name) => dropCounts.has(name))) {
    made.push(facet(`dropped:${name}`, `dropped: ${name}`, dropCounts.get(name)));
  }
  byId("facets").replaceChildren(...made);
}

// Keys.

const marking = () => state.query.texts.length + state.query.runs.length > 0;

/** What n and p visit: of a search for text, the matches in prompt and samples; else samples. */
function boxes() {
  const cards = [...byId("group").querySelectorAll(".sample")];
  return marking() && state.group ? [byId("group").querySelector(".prompt"), ...cards] : cards;
}

function stopsOf(box) {
  if (!marking()) return [box];
  if (box.sample && state.matching.has(box.sample)) drawAll(box);
  return box.querySelectorAll(".hit-start");
}

/** To the next (1) or previous (-1) stop of the group, and on to the next group. */
function move(step) {
  if (visit(step)) return;
  const place = list.selected + step;
  if (place < 0 || place >= list.groups.length) return;
  list.select(place);
  if (step < 0) state.stop = { box: boxes().length - 1, place: Infinity };
  visit(step);
}

/** Whether there was another stop in the group. */
function visit(step) {
  const all = boxes();
  let { box, place } = state.stop;
  place += step;
  while (box >= 0 && box < all.length) {
    const stops = stopsOf(all[box]);
    if (step < 0) place = Math.min(place, stops.length - 1);
    if (place >= 0 && place < stops.length) {
      state.stop = { box, place };
      stopAt(stops[place]);
      return true;
    }
    box += step;
    place = step > 0 ? 0 : Infinity;
  }
  return false;
}

function stopAt(stop) {
  byId("group").querySelector(".here")?.classList.remove("here");
  stop.classList.add("here");
  stop.scrollIntoView({ block: stop.matches(".sample") ? "start" : "center" });
  stop.closest(".sample")?.focus({ preventScroll: true });
  setToken(stop.token === undefined ? null : stop);
}

/** Describes a token in the foot. */
function setToken(span) {
  state.token?.classList.remove("cursor");
  state.token = span;
  span?.classList.add("cursor");
  describe(span);
}

function describe(span) {
  const card = span?.closest(".sample");
  byId("inspector").replaceChildren(...(card
    ? describeToken(card.sample, span.token)
    : [element("span", { class: "faint" }, "Point at a token, or click it, to see its log-probability and its weights.")]));
}

function moveToken(step) {
  const card = state.token?.closest(".sample") ?? document.activeElement.closest?.(".sample")
    ?? byId("group").querySelector(".sample");
  if (!card) return;
  const spans = [...card.querySelectorAll(".t")];
  const place = state.token ? spans.indexOf(state.token) + step : 0;
  if (place < 0 || place >= spans.length) return;
  setToken(spans[place]);
  spans[place].scrollIntoView({ block: "nearest" });
}

const ACTIONS = {
  j: () => list.select(list.selected + 1),
  k: () => list.select(list.selected - 1),
  g: () => list.select(0),
  G: () => list.select(list.groups.length - 1),
  n: () => move(1),
  p: () => move(-1),
  ArrowRight: () => moveToken(1),
  ArrowLeft: () => moveToken(-1),
  c: () => setColour(document.body.dataset.colour === "logprob" ? "version" : "logprob"),
  t: () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]),
  "/": () => byId("search").select(),
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.target === byId("search")) {
    if (event.key === "Escape") byId("list").focus();
    return;
  }
  if (event.target.matches("select, input") || !Object.hasOwn(ACTIONS, event.key)) return;
  event.preventDefault();
  ACTIONS[event.key]();
});

const main = byId("main");
main.addEventListener("mouseover", (event) => {
  if (event.target.token !== undefined) describe(event.target);
});
main.addEventListener("mouseleave", () => describe(state.token));
main.addEventListener("click", (event) => {
  if (event.target.token !== undefined) setToken(event.target);
});

// Colours.

function setColour(colour) {
  document.body.dataset.colour = colour;
  for (const button of document.querySelectorAll("[data-colour-by]")) {
    button.setAttribute("aria-pressed", String(button.dataset.colourBy === colour));
  }
  drawLegend();
}

function drawLegend() {
  const entry = (shown, text) => element("span", { class: "entry" }, element("i", { class: `swatch ${shown}` }), text);
  let entries;
  if (document.body.dataset.colour === "logprob") {
    const bounds = SHADES.map((p) => percent(p));
    entries = [element("span", { class: "faint" }, "probability"), entry("s0", `≥ ${bounds[0]}`),
      ...bounds.slice(1).map((bound, i) => entry(`s${i + 1}`, `≥ ${bound}`)),
      entry(`s${SHADES.length}`, "less")];
  } else {
    const ofGroup = state.group ? state.group.samples.flatMap((s) => s.segments.map((x) => x.weights.version)) : [];
    const shown = [...new Set(ofGroup)].sort((a, b) => (a ?? -1) - (b ?? -1));
    entries = shown.map((version) => entry(`w${versionColour(version)}`, versionName(version)));
    if (!shown.length) entries = [element("span", { class: "faint" }, "nothing sampled")];
  }
  byId("legend").replaceChildren(...entries);
}

let theme = "auto";
function setTheme(chosen) {
  theme = THEMES.includes(chosen) ? chosen : "auto";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[theme];
  byId("theme").setAttribute("aria-label", `Colours: ${theme}. Change`);
  try {
    localStorage.setItem("rollwire-theme", theme);
  } catch {} // a browser may keep nothing of files
}

byId("sort").append(...Object.entries(ORDERS).map(([value, [label]]) => element("option", { value }, label)));
byId("help-button").addEventListener("click", () => byId("help").showModal());
byId("theme").addEventListener("click", ACTIONS.t);
for (const button of document.querySelectorAll("[data-colour-by]")) {
  button.addEventListener("click", () => setColour(button.dataset.colourBy));
}
let kept = null;
try {
  kept = localStorage.getItem("rollwire-theme");
} catch {} // as above
setTheme(kept);
drawHeader();
drawHistogram();
drawHelp();
setColour("logprob");
search();
byId("list").focus();

// What the first search of a text needs is made before, whenever the page has nothing to do.
function prepare(from, deadline) {
  let i = from;
  while (i < samples.length && deadline.timeRemaining() > 2) foldedText(samples[i++]);
  if (i < samples.length) requestIdleCallback((next) => prepare(i, next));
}
if (pieces !== null && window.requestIdleCallback) requestIdleCallback((deadline) => prepare(0, deadline));
