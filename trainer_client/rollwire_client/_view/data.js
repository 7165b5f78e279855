"use strict";
// Unpacks what page_data.py packed.

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children); // text, never HTML
  return made;
}

function column(id, kind) {
  const text = byId(id).textContent;
  byId(id).remove(); // its memory is worth more than its text
  if (Uint8Array.fromBase64) return new kind(Uint8Array.fromBase64(text).buffer);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return new kind(bytes.buffer);
}

const overview = JSON.parse(byId("overview").textContent);
byId("overview").remove();
const vocabulary = overview.vocabulary;
const pieces = overview.pieces; // of each token of the vocabulary; null: no tokenizer was given
const special = new Set(overview.special);
const tokenColumn = column("token-ids", vocabulary.length <= 1 << 16 ? Uint16Array : Uint32Array);
const logprobColumn = column("logprobs", Uint16Array);

const LOGPROB_STEP = 0.001;
const LOGPROB_LEAST = 65534;
const LOGPROB_UNKNOWN = 65535;

const weights = overview.weights.map(([version, revision, serverId, digest]) => ({
  version, revision, serverId, digest,
}));
const versions = [...new Set(weights.map((tag) => tag.version))].sort((a, b) => (a ?? -1) - (b ?? -1));
const versionRanks = new Map(versions.map((version, rank) => [version, rank]));

const samples = [];
const groups = unpackGroups();

const allRewards = samples.map((sample) => sample.reward).filter((reward) => reward !== null);
const rewardBounds = allRewards.reduce(
  ({ low, high }, x) => ({ low: Math.min(low, x), high: Math.max(high, x) }), { low: Infinity, high: -Infinity },
);

function unpackGroups() {
  let tokensAt = 0;
  let logprobsAt = 0;
  return overview.groups.map((packed, number) => {
    const group = { ...packed, number, prompt: { at: tokensAt, length: packed.prompt } };
    tokensAt += packed.prompt;
    group.samples = packed.samples.map((fields, index) => {
      const [requestId, reward, finish, message, servers, length, segments] = fields;
      const sample = {
        group, index, requestId, reward, finish, message, length, logprobsAt,
        at: tokensAt,
        servers: servers.map((server) => overview.servers[server]),
        segments: unpackSegments(segments),
        sampled: segments.reduce((sum, [start, end]) => sum + end - start, 0), // tokens
        folded: null, // its text for searches, once it is needed
      };
      tokensAt += length;
      logprobsAt += length;
      samples.push(sample);
      return sample;
    });
    group.rewards = group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
    group.tokens = group.samples.reduce((sum, sample) => sum + sample.sampled, 0);
    return group;
  });
}

function unpackSegments(packed) {
  return packed.map(([start, end, tag, kvRevision, server]) => ({
    start, end, kvRevision,
    weights: weights[tag],
    server: server === null ? null : overview.servers[server],
  }));
}

// The text of tokens. One that is a part of a character has none; the token that completes the
// character has it.

const utf8 = new TextDecoder("utf-8", { fatal: true });
const MOST_PENDING = 16;

function tokenTexts(at, length) {
  if (pieces === null) return Array.from({ length }, (_, i) => String(vocabulary[tokenColumn[at + i]]));
  const texts = new Array(length);
  let pending = [];
  for (let i = 0; i < length; i++) {
    const piece = pieces[tokenColumn[at + i]];
    if (Array.isArray(piece)) {
      pending.push(...piece);
      texts[i] = "";
      try {
        texts[i] = utf8.decode(new Uint8Array(pending));
        pending = [];
      } catch {
        if (pending.length < MOST_PENDING) continue;
        texts[i] = "�";
        pending = [];
      }
      continue;
    }
    if (pending.length) texts[i - 1] = "�";
    pending = [];
    texts[i] = piece ?? `⟨${vocabulary[tokenColumn[at + i]]}⟩`;
  }
  if (pending.length) texts[length - 1] = "�";
  return texts;
}

const textOf = (part) => tokenTexts(part.at, part.length).join(pieces === null ? " " : "");

/** Lower case, of the same length. */
function fold(text) {
  const lower = text.toLowerCase();
  return lower.length === text.length ? lower : text;
}

function logprob(sample, i) {
  const steps = logprobColumn[sample.logprobsAt + i];
  return steps === LOGPROB_UNKNOWN ? NaN : -steps * LOGPROB_STEP;
}

// Numbers as people read them.

const thousands = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (n, what) => `${thousands.format(n)} ${what}${n === 1 ? "" : "s"}`;
const versionName = (version) => (version === null ? "no version" : `version ${version}`);
const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;

function decimal(x, digits = 3) {
  if (x === null || Number.isNaN(x)) return "–";
  if (x !== 0 && (Math.abs(x) >= 1e6 || Math.abs(x) < 1e-4)) return x.toExponential(2);
  return String(Number(x.toFixed(digits))).replace("-", "−");
}

function spread(numbers) {
  const middle = mean(numbers);
  return Math.sqrt(mean(numbers.map((x) => (x - middle) ** 2)));
}

function versionRange(list) {
  const known = list.flatMap((sample) => sample.segments.map((segment) => segment.weights.version));
  const numbers = known.filter((version) => version !== null);
  if (!numbers.length) return known.length ? "no version" : "";
  const [low, high] = numbers.reduce(
    ([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity],
  );
  return low === high ? `v${low}` : `v${low}–${high}`;
}
