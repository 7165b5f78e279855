// Draws a group: its prompt, and its samples side by side.

const DROP_WHY = {
  tail: "the batch had its target before this group was complete",
  stale: "a token was sampled under weights older than max_lag allows",
  filtered: "the trainer's decide dropped it",
  cut: "a sample reached its time limit",
  failed: "a sample could not be completed",
  unscored: "a sample has no reward",
};
const LONG_PROMPT = 400; // tokens, or what is higher than the box
const EAGER_SAMPLES = 12; // drawn at once; the others, when they come near
const TOKENS_OF_LINE = 10; // a guess, for the room that a sample will take
const LINE_HEIGHT = 21; // pixels
const LONG_INFO = 120; // characters

function drawGroup(into, group, query, matching, showAll, onShowAll) {
  const searching = query.tests.length > 0;
  const shown = searching && !showAll ? group.samples.filter((sample) => matching.has(sample)) : group.samples;
  const title = element("h2", {}, `Prompt ${group.id}`);
  if (group.epoch) title.append(element("span", { class: "faint" }, ` epoch ${group.epoch}`));
  const parts = [element("div", { class: "group-head" }, title, groupFacts(group))];
  if (group.dropped) parts.push(droppedNote(group));
  parts.push(promptBox(group, query));
  if (group.info !== null) parts.push(infoBox(group.info));
  if (shown.length < group.samples.length) {
    parts.push(element("p", { class: "partial" },
      `${shown.length} of ${count(group.samples.length, "sample")} match. `,
      element("button", { type: "button", class: "link", onclick: onShowAll }, "Show all")));
  }
  const cards = shown.map((sample, place) => sampleCard(sample, place, query, searching && matching.has(sample)));
  parts.push(element("div", { class: "samples" }, ...cards));
  if (!group.samples.length) parts.push(element("p", { class: "faint" }, "Nothing was sampled."));
  into.replaceChildren(...parts);
}

function groupFacts(group) {
  const facts = [count(group.samples.length, "sample"), count(group.tokens, "token")];
  if (group.rewards.length) {
    const deviation = group.rewards.length > 1 ? ` ± ${decimal(spread(group.rewards), 2)}` : "";
    facts.push(`reward ${decimal(mean(group.rewards), 2)}${deviation}`);
  }
  const range = versionRange(group.samples);
  if (range) facts.push(range);
  return element("p", { class: "group-facts" }, facts.join(" · "));
}

function droppedNote(group) {
  const note = element("div", { class: "dropped-note", role: "note" },
    element("strong", {}, `Dropped: ${group.dropped}`), ` – ${DROP_WHY[group.dropped] ?? ""}.`);
  if (group.error) note.append(element("pre", {}, group.error));
  return note;
}

function promptBox(group, query) {
  const text = element("div", { class: "tokens prompt-tokens" });
  drawPrompt(text, group.prompt, query);
  const box = element("section", { class: "prompt", "aria-label": "Prompt" },
    element("p", { class: "caption" }, `Prompt, ${count(group.prompt.length, "token")}`), text);
  if (group.prompt.length > LONG_PROMPT && !text.querySelector(".hit")) {
    text.classList.add("clamped");
    const more = element("button", { type: "button", class: "link", onclick: () => {
      text.classList.remove("clamped");
      more.remove();
    } }, "Show the whole prompt");
    box.append(more);
  }
  return box;
}

function infoBox(info) {
  const line = info.replace(/\n\s*/g, " ");
  if (line.length <= LONG_INFO) return element("p", { class: "info-line" }, `info ${line}`);
  return element("details", { class: "info" }, element("summary", {}, "Info"), element("pre", {}, info));
}

function sampleCard(sample, place, query, matches) {
  const text = element("div", { class: "tokens" });
  const card = element("section", {
    class: `sample${matches ? " matches" : ""}`, tabindex: "-1",
    "aria-label": `Sample ${sample.index}`,
  }, sampleHead(sample), segmentStrip(sample), text);
  const more = element("button", { type: "button", class: "link", onclick: () => drawAll(card) });
  card.sample = sample;
  card.drawUpTo = (end) => {
    drawOutput(text, sample, query, end);
    more.textContent = `Show the other ${count(sample.length - end, "token")}`;
    if (end >= sample.length) more.remove();
  };
  if (sample.length > FIRST_TOKENS) card.append(more);
  const begin = () => card.drawUpTo(Math.min(sample.length, FIRST_TOKENS));
  if (place < EAGER_SAMPLES) begin();
  else whenNear(card, text, sample, begin);
  if (sample.length === 0) text.append(element("span", { class: "faint" }, "No token yet."));
  card.append(segmentDetails(sample));
  return card;
}

/** Draws the tokens of a sample that is far from sight when it comes near. */
function whenNear(card, text, sample, draw) {
  text.style.minHeight = `${Math.ceil(Math.min(sample.length, FIRST_TOKENS) / TOKENS_OF_LINE) * LINE_HEIGHT}px`;
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    text.style.minHeight = "";
    if (text.drawn === undefined) draw();
  }, { root: byId("main"), rootMargin: "1000px" });
  observer.observe(card);
}

const drawAll = (card) => card.drawUpTo(card.sample.length);

function sampleHead(sample) {
  const reward = element("span", { class: "reward", title: "Reward" },
    sample.reward === null ? "no reward" : decimal(sample.reward));
  const finish = sample.finish ?? "unfinished";
  const badge = element("span", { class: `badge ${finish}`, title: sample.message || null }, finish);
  const average = meanLogprob(sample);
  const facts = [count(sample.sampled, "token")];
  if (sample.sampled < sample.length) facts.push(`${sample.length - sample.sampled} given`);
  if (average !== null) facts.push(`mean log-probability ${decimal(average, 2)}`);
  return element("header", { class: "sample-head" },
    element("h3", {}, `Sample ${sample.index}`), rewardMeter(sample.reward), reward, badge,
    element("p", { class: "sample-facts" }, facts.join(" · ")),
    sample.message ? element("p", { class: "sample-facts" }, sample.message) : "");
}

function meanLogprob(sample) {
  let sum = 0;
  for (const { start, end } of sample.segments) {
    for (let i = start; i < end; i++) sum += logprob(sample, i);
  }
  return sample.sampled && !Number.isNaN(sum) ? sum / sample.sampled : null;
}

/** The reward between the lowest and the highest of all. */
function rewardMeter(reward) {
  const meter = element("span", { class: "meter", "aria-hidden": "true" });
  if (reward === null) return meter;
  const bar = element("span");
  bar.style.width = `${100 * rewardShare(reward)}%`;
  meter.append(bar);
  return meter;
}

function rewardShare(reward) {
  const { low, high } = rewardBounds;
  return high > low ? (reward - low) / (high - low) : 1;
}

function segmentDetails(sample) {
  const updates = crossings(sample);
  const servers = new Set(sample.segments.map(serverName)).size;
  const summary = element("summary", {}, [
    count(sample.segments.length, "segment"), count(updates, "update"), count(servers, "server"),
  ].join(" · "));
  const rows = sample.segments.map((segment) => element("tr", {},
    element("td", {}, `${segment.start}–${segment.end - 1}`),
    element("td", {}, element("i", { class: `swatch w${versionColour(segment.weights.version)}` }),
      segment.weights.version === null ? "none" : String(segment.weights.version)),
    element("td", {}, String(segment.weights.revision)),
    element("td", {}, segment.kvRevision === segment.weights.revision ? "same" : `${segment.kvRevision} on`),
    element("td", {}, serverName(segment)),
    element("td", { class: "digest" }, segment.weights.digest)));
  const heads = ["Tokens", "Version", "Revision", "KV", "Server", "Digest"];
  const table = element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows));
  const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Segments" };
  return element("details", { class: "segments" }, summary, element("div", scroll, table),
    element("p", { class: "faint" }, `Request ${sample.requestId}, servers ${sample.servers.join(", ") || "none"}`));
}
