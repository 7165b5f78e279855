// Draws tokens: shaded, marked where an update crossed the sequence, and explained one at a time.

const SHADES = [0.5, 0.2, 0.05, 0.01, 0.001]; // probabilities above which a token has a shade
const SHADE_STEPS = SHADES.map((p) => -Math.log(p) / LOGPROB_STEP);
const VERSION_COLOURS = 6;
const FIRST_TOKENS = 1500; // of a sample that are drawn at once
const VISIBLE = new Map([["\n", "⏎\n"], ["\r", "␍"], ["\t", "→\t"]]);
// Controls that would change how the text around them looks.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** With a sign for each control. */
const visible = (text) => text.replace(UNSEEN, (c) =>
  VISIBLE.get(c) ?? (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "␦"));

function shade(steps) {
  if (steps === LOGPROB_UNKNOWN) return "x";
  const found = SHADE_STEPS.findIndex((bound) => steps <= bound);
  return found < 0 ? SHADES.length : found;
}

const versionColour = (version) =>
  version === null ? "none" : versionRanks.get(version) % VERSION_COLOURS;

function tokenSpan(text, index, mark, classes) {
  const span = document.createElement("span");
  span.className = `t${classes}${mark ? " hit" : ""}${mark === 2 ? " hit-start" : ""}`;
  if (text === "") span.classList.add("part");
  const id = tokenColumn[index];
  if (special.has(id)) span.classList.add("special");
  if (text === "") span.textContent = "·";
  else if (text.search(UNSEEN) < 0) span.textContent = text;
  else span.append(...withControls(text));
  return span;
}

function withControls(text) {
  const parts = text.split(new RegExp(`(${UNSEEN.source})`));
  return parts.filter(Boolean).flatMap((part) => {
    const shown = visible(part);
    if (shown === part) return [part];
    const sign = element("i", { class: "control" }, shown.replace(part, ""));
    return shown.endsWith(part) ? [sign, part] : [sign];
  });
}

function appendToken(into, span) {
  into.append(span);
  if (pieces === null) into.append(" ");
}

function drawPrompt(into, prompt, query) {
  const texts = tokenTexts(prompt.at, prompt.length);
  const marked = marks(prompt, texts, query);
  const drawn = document.createDocumentFragment();
  texts.forEach((text, i) => appendToken(drawn, tokenSpan(text, prompt.at + i, marked[i], "")));
  into.replaceChildren(drawn);
}

/** Draws tokens of a sample up to ``end``; those that are there stay. */
function drawOutput(into, sample, query, end) {
  const texts = tokenTexts(sample.at, sample.length);
  const marked = marks(sample, texts, query);
  const drawn = document.createDocumentFragment();
  let begin = into.drawn ?? 0;
  let at = Math.max(sample.segments.findIndex((segment) => segment.end > begin), 0);
  for (let i = begin; i < end; i++) {
    while (at + 1 < sample.segments.length && i >= sample.segments[at].end) at++;
    const segment = sample.segments[at];
    if (segment?.start === i && at > 0 && sample.segments[at - 1].weights !== segment.weights) {
      drawn.append(crossingMark(sample.segments[at - 1], segment));
    }
    const given = !segment || i < segment.start || i >= segment.end;
    const classes = given ? " given"
      : ` s${shade(logprobColumn[sample.logprobsAt + i])} w${versionColour(segment.weights.version)}`;
    const span = tokenSpan(texts[i], sample.at + i, marked[i], classes);
    span.token = i;
    appendToken(drawn, span);
  }
  into.append(drawn);
  into.drawn = end;
}

function crossingMark(before, after) {
  const [was, is] = [before.weights, after.weights];
  const words = [];
  if (was.version !== is.version) words.push(`v${was.version ?? "–"} → v${is.version ?? "–"}`);
  else if (was.digest !== is.digest) words.push("other weights");
  else words.push(`revision ${was.revision} → ${is.revision}`);
  const moved = was.serverId !== is.serverId;
  if (moved) words.push(`on ${serverName(after)}`);
  const made = element("span", {
    class: `crossing w${versionColour(is.version)}${moved ? " moved" : ""}`,
    title: `Tokens from ${after.start} on: ${weightsText(after)}`,
  }, words.join(" "));
  return made;
}

const serverName = (segment) => segment.server ?? `process ${segment.weights.serverId.slice(0, 8)}`;

function weightsText(segment) {
  const { version, revision } = segment.weights;
  const kept = segment.kvRevision < revision ? `, keys and values from revision ${segment.kvRevision} on` : "";
  return `${versionName(version)}, revision ${revision}${kept}; ${serverName(segment)}`;
}

/** A strip of the sample's segments, as long as their tokens. */
function segmentStrip(sample) {
  const strip = element("div", { class: "strip", "aria-hidden": "true" });
  const gap = (tokens) => {
    if (!tokens) return;
    const part = element("span", { class: "given", title: count(tokens, "given token") });
    part.style.flexGrow = tokens;
    strip.append(part);
  };
  sample.segments.forEach((segment, i) => {
    gap(segment.start - (i ? sample.segments[i - 1].end : 0));
    const moved = i > 0 && sample.segments[i - 1].weights.serverId !== segment.weights.serverId;
    const share = (segment.end - segment.start) / sample.length;
    const part = element("span", {
      class: `w${versionColour(segment.weights.version)}${moved ? " moved" : ""}`,
      title: `Tokens ${segment.start} to ${segment.end - 1}: ${weightsText(segment)}`,
    }, share > 0.12 ? `v${segment.weights.version ?? "–"}` : "");
    part.style.flexGrow = segment.end - segment.start;
    strip.append(part);
  });
  gap(sample.length - (sample.segments.at(-1)?.end ?? 0));
  return strip;
}

/** One line about a token, for the foot of the page. */
function describeToken(sample, i) {
  const text = tokenTexts(sample.at, sample.length)[i];
  const index = tokenColumn[sample.at + i];
  const value = logprob(sample, i);
  const segment = sample.segments.find((s) => s.start <= i && i < s.end);
  const facts = [
    ["token", pieces === null ? "" : JSON.stringify(visible(text))],
    ["id", vocabulary[index]],
    ["position", `${i} of ${thousands.format(sample.length)}`],
    ["log-probability", segment ? logprobText(value) : ""],
    ["weights", segment ? weightsText(segment) : "given, not sampled"],
    ["sample", sample.index],
  ];
  return facts.filter(([, fact]) => fact !== "").map(([name, fact]) =>
    element("span", { class: "fact" }, element("b", {}, `${name} `), String(fact)));
}

function logprobText(value) {
  if (Number.isNaN(value)) return "not a number";
  const bound = value <= -LOGPROB_LEAST * LOGPROB_STEP ? "≤ " : "";
  return `${bound}${value.toFixed(3).replace("-", "−")} (${percent(Math.exp(value))})`;
}

const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${Number((100 * p).toPrecision(2))} %`);
