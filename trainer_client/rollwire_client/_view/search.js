// What a query means, and which samples it finds.

const FINISHES = ["stop", "length", "aborted", "superseded", "interrupted", "unfinished"];
const DROPS = ["tail", "stale", "filtered", "cut", "failed", "unscored", "any", "no"];

/** Of each filter: what makes a test of a sample from its value. An error is thrown as text. */
const FILTERS = {
  reward: (value) => ofNumber(value, (sample) => [sample.reward]),
  length: (value) => ofNumber(value, (sample) => [sample.sampled]),
  version: (value) =>
    ofNumber(value, (sample) => sample.segments.map((segment) => segment.weights.version)),
  updates: (value) => ofNumber(value, (sample) => [crossings(sample)]),
  logprob: (value) => ofNumber(value, lowestLogprob),
  epoch: (value) => ofNumber(value, (sample) => [sample.group.epoch]),
  server: (value) => ofText(value, (sample) => [
    ...sample.servers, ...sample.segments.map((segment) => segment.weights.serverId),
  ]),
  prompt: (value) => ofText(value, (sample) => [sample.group.id]),
  request: (value) => ofText(value, (sample) => [sample.requestId]),
  finish: (value) => {
    const wanted = oneOf(value, FINISHES);
    return (sample) => (sample.finish ?? "unfinished") === wanted;
  },
  dropped: (value) => {
    const wanted = oneOf(value, DROPS);
    if (wanted === "any") return (sample) => sample.group.dropped !== null;
    if (wanted === "no") return (sample) => sample.group.dropped === null;
    return (sample) => sample.group.dropped === wanted;
  },
};

const NUMBER = String.raw`[-−]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?`;
const COMPARISON = new RegExp(`^(<=|>=|<|>|=|)(${NUMBER})$`, "i");
const RANGE = new RegExp(`^(${NUMBER})\\.\\.(${NUMBER})$`, "i");
const TERM = /(-?)(?:([a-z]+):)?(?:"([^"]*)"?|(\S+))/gi;

const numberOf = (text) => Number(text.replace("−", "-"));

function ofNumber(value, valuesOf) {
  const test = condition(value);
  return (sample) => valuesOf(sample).some(test);
}

function condition(value) {
  if (value === "none") return (x) => x === null;
  const range = RANGE.exec(value);
  if (range) {
    const [low, high] = [numberOf(range[1]), numberOf(range[2])];
    return (x) => x !== null && low <= x && x <= high;
  }
  const found = COMPARISON.exec(value);
  if (!found) throw `${value || "nothing"} is not a number, such as 0.5, <0.5, >=2, 1..3 or none`;
  const bound = numberOf(found[2]);
  switch (found[1]) {
    case "<": return (x) => x !== null && x < bound;
    case "<=": return (x) => x !== null && x <= bound;
    case ">": return (x) => x !== null && x > bound;
    case ">=": return (x) => x !== null && x >= bound;
    default: return (x) => x === bound;
  }
}

function ofText(value, valuesOf) {
  const wanted = fold(value);
  return (sample) => valuesOf(sample).some((text) => fold(text).includes(wanted));
}

function oneOf(value, known) {
  const found = known.find((name) => value !== "" && name.startsWith(value.toLowerCase()));
  if (!found) throw `${value || "nothing"} is not one of ${known.join(", ")}`;
  return found;
}

function crossings(sample) {
  let changes = 0;
  for (let i = 1; i < sample.segments.length; i++) {
    const [before, after] = [sample.segments[i - 1].weights, sample.segments[i].weights];
    changes += before.version !== after.version || before.digest !== after.digest;
  }
  return changes;
}

function lowestLogprob(sample) {
  let most = -1;
  for (let i = sample.logprobsAt; i < sample.logprobsAt + sample.length; i++) {
    const steps = logprobColumn[i];
    if (steps !== LOGPROB_UNKNOWN && steps > most) most = steps;
  }
  return most < 0 ? [null] : [-most * LOGPROB_STEP];
}

/** The tests of a query, and what is to be marked: texts and runs of tokens. */
function parseQuery(text) {
  const query = { tests: [], texts: [], runs: [], error: "" };
  for (const [whole, minus, name, quoted, word] of text.matchAll(TERM)) {
    const value = quoted ?? word;
    const key = name?.toLowerCase();
    try {
      let test;
      if (key === "token") test = runTest(query, value, minus);
      else if (key in FILTERS) test = FILTERS[key](value);
      else test = textTest(query, key === undefined ? value : whole.slice(minus.length), minus);
      query.tests.push(minus ? (sample) => !test(sample) : test);
    } catch (error) {
      if (typeof error !== "string") throw error;
      query.error = key === undefined ? error : `${key}: ${error}`;
    }
  }
  return query;
}

function textTest(query, value, minus) {
  if (pieces === null) return runTest(query, value, minus);
  const wanted = fold(value);
  if (!minus && wanted) query.texts.push(wanted);
  return (sample) => foldedText(sample).includes(wanted) || foldedText(sample.group.prompt).includes(wanted);
}

function runTest(query, value, minus) {
  const ids = value.split(",").map((id) => id.trim());
  if (!ids.every((id) => /^\d+$/.test(id))) {
    const why = pieces === null ? "text needs --tokenizer; here, search for token ids" : "give token ids";
    throw `${value} is not a token id: ${why}, such as 279 or 279,11`;
  }
  const run = ids.map((id) => vocabulary.indexOf(Number(id)));
  if (run.includes(-1)) return () => false;
  if (!minus) query.runs.push(run);
  return (sample) => hasRun(sample, run) || hasRun(sample.group.prompt, run);
}

function foldedText(part) {
  part.folded ??= fold(textOf(part));
  return part.folded;
}

function hasRun(part, run) {
  return nextRun(part, run, 0) >= 0;
}

function nextRun(part, run, from) {
  const last = part.at + part.length - run.length;
  for (let i = part.at + from; i <= last; i++) {
    let j = 0;
    while (j < run.length && tokenColumn[i + j] === run[j]) j++;
    if (j === run.length) return i - part.at;
  }
  return -1;
}

/** The samples that pass all tests. */
function findSamples(query) {
  return samples.filter((sample) => query.tests.every((test) => test(sample)));
}

/** Of a prompt or sample: 2 for each token that begins a match, 1 for others in it, else 0. */
function marks(part, texts, query) {
  const marked = new Uint8Array(part.length);
  for (const run of query.runs) {
    for (let i = nextRun(part, run, 0); i >= 0; i = nextRun(part, run, i + 1)) {
      marked.fill(1, i, i + run.length);
      marked[i] = 2;
    }
  }
  if (!query.texts.length) return marked;
  const whole = foldedText(part);
  for (const wanted of query.texts) {
    let token = 0;
    let begin = 0; // of the token, in the text
    for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + wanted.length)) {
      while (begin + texts[token].length <= at) begin += texts[token++].length;
      let end = begin;
      for (let i = token; end < at + wanted.length; i++) {
        marked[i] = Math.max(marked[i], i === token ? 2 : 1);
        end += texts[i].length;
      }
    }
  }
  return marked;
}
