// The header with its histogram, and the help: drawn once.

const BINS = 20;
const KEYS = [
  ["j k", "next, previous group"],
  ["n p", "next, previous match; without a search, sample"],
  ["→ ←", "next, previous token of the sample"],
  ["/", "search; Enter goes to the first match, Esc back"],
  ["c", "colour by log-probability or by weight version"],
  ["t", "light, dark, or as the system is"],
  ["g G", "first, last group"],
  ["?", "this help"],
];
const EXAMPLES = [
  pieces === null
    ? ["279", "samples or prompts with this token"]
    : ["answer", "samples or prompts with this text; with spaces, in quotes"],
  ["token:279,11", "this run of token ids"],
  ["reward:<0.2", "also >, <=, >=, 0.2..0.5, none"],
  ["version:12", "a token was sampled under version 12"],
  ["updates:>0", "an update crossed the sequence"],
  ["logprob:<-8", "a token was this unlikely"],
  ["length:>500", "output tokens"],
  ["finish:abort", FINISHES.join(", ")],
  ["dropped:stale", DROPS.join(", ")],
  ["server:10.0.0.2", "address, or id of the process"],
  ["prompt:7 request:ab epoch:1", "ids"],
  ["-finish:stop", "a minus: all but these"],
];

function drawHeader() {
  byId("file").textContent = [overview.name, overview.summary].filter(Boolean).join(" – ");
  const tokens = samples.reduce((sum, sample) => sum + sample.sampled, 0);
  const facts = [
    [thousands.format(samples.length), "samples", ""],
    [thousands.format(groups.length), "groups", ""],
    [compact.format(tokens), "tokens", thousands.format(tokens)],
    [allRewards.length ? decimal(mean(allRewards)) : "–", "mean reward", ""],
    [versionRange(samples).replace(/^v/, "").replace("no version", "none") || "–", "versions", ""],
    [thousands.format(overview.servers.length), "servers", overview.servers.join(", ")],
  ];
  byId("stats").append(...facts.map(([value, name, title]) =>
    element("div", { title: title || null }, element("dd", {}, value), element("dt", {}, name))));
}

function drawHistogram() {
  const figure = byId("histogram");
  if (!allRewards.length) {
    figure.append(element("figcaption", {}, "no rewards"));
    return;
  }
  const { low, high } = rewardBounds;
  const bins = new Array(low < high ? BINS : 1).fill(0);
  const edge = (i) => (i === bins.length ? high : low + (i * (high - low)) / bins.length);
  for (const reward of allRewards) {
    bins[Math.min(Math.floor(((reward - low) / (high - low || 1)) * bins.length), bins.length - 1)]++;
  }
  const most = Math.max(...bins);
  const bars = bins.map((n, i) => {
    const [from, to] = [short(edge(i)), short(edge(i + 1))];
    const inner = i + 1 < bins.length ? `${from}..${to}` : `>=${from}`;
    const bar = element("button", {
      type: "button", tabindex: "-1", title: `reward ${from} to ${to}: ${count(n, "sample")}`,
      onclick: () => toggleFilter(`reward:${i === 0 ? `<=${to}` : inner}`),
    }, element("i"));
    bar.firstChild.style.height = n ? `${6 + (94 * n) / most}%` : "0";
    return bar;
  });
  figure.setAttribute("aria-label", `Rewards of ${count(allRewards.length, "sample")}, from `
    + `${decimal(low)} to ${decimal(high)}, mean ${decimal(mean(allRewards))}`);
  figure.append(
    element("div", { class: "bins", "aria-hidden": "true" }, ...bars), // the search does the same
    element("figcaption", {},
      ...[decimal(low, 2), "reward", decimal(high, 2)].map((text) => element("span", {}, text))));
}

const short = (x) => String(Number(x.toPrecision(6)));

function drawHelp() {
  const rows = (pairs, tag) => element("dl", {}, ...pairs.flatMap(([words, what]) => [
    element("dt", {}, ...words.split(" ").map((word) => element(tag, {}, word))), element("dd", {}, what)]));
  const close = element("button", { type: "button", onclick: () => byId("help").close() }, "Close");
  byId("help").append(
    element("h2", { id: "help-title" }, "Help"),
    element("div", { class: "help-columns" },
      element("section", {}, element("h3", {}, "Keys"), rows(KEYS, "kbd")),
      element("section", {}, element("h3", {}, "Search"), rows(EXAMPLES, "code"))),
    close);
}
