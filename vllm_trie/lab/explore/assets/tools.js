"use strict";
// The page of `vllm-trie explore`: this file, lanes.js, charts.js, trees.js, beams.js and page.js are
// one script, in this order. Its data:
//
//   title, prompt, promptCut     texts; whether the prompt's beginning is missing
//   labels                       token id -> its visible text
//   runs[]                       method, about (request, date, options), notice, speed
//                                ([factor over plain decoding, how it is known] or null), steps[]:
//                                text, seconds, tokens, no_draft, and of the verified tree nodes,
//                                parents, probabilities, never_accept, accepted,
//                                origins (a letter a node, see ORIGINS)
//   beams                        a search's trie (token_ids, parents, sums, fates, returned, scores),
//                                texts, promptTokens, blockSize; or null
//
// All of it is text that a model or a user wrote: it enters the document by `append` and
// `setAttribute` only, never as markup.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const root = document.documentElement;

const BEAM_COLUMNS = 16; // steps of a search that are drawn at a time
const CHARACTER = 7.3, ROW = 27, BOX = 20, GAP = 42, MARGIN = 12; // sizes in pixels
const LONGEST_BOX = 56; // characters of the joined nodes of a path
const ORIGINS = { p: "prompt", o: "output", e: "elsewhere" }; // where a node's n-gram occurs before it
const NO_DRAFT = {
  prefill: "This step computed the prompt; drafts begin after it.",
  unknown: "No draft: the drafter knew no continuation.",
  budget: "No draft: no candidate was worth its time.",
  pause: "No draft: drafting pauses, because drafts were not worth their time.",
  limit: "No draft: none was asked for, by the request's options or its length.",
  failed: "No draft: the drafter failed for this request.",
  dropped: "No draft: the scheduler left it out of this step.",
  "": "No draft in this step, only the model's own token.",
};

const state = {
  view: data.runs.length ? "runs" : "beams",
  run: 0,
  steps: { runs: 0, beams: 0 }, // the current step of each view
  timer: null,
  withWindow: new Set(), // runs whose lookahead window is drawn
  markStep: () => {}, // moves the cursor of the chart
};

// -- small tools -------------------------------------------------------------------------------

function make(space, name, attributes, children) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const html = (name, attributes = {}, ...children) => make(null, name, attributes, children);
const svg = (name, attributes = {}, ...children) =>
  make("http://www.w3.org/2000/svg", name, attributes, children);

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const sum = (values) => values.reduce((total, value) => total + value, 0);
/** Return the index of the first item with the largest value. */
const argmax = (items, value) => items.map(value).reduce((best, each, index, all) => (each > all[best] ? index : best), 0);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const label = (token) => data.labels[token] ?? `<${token}>`;
const percent = (share) =>
  share >= 0.1 ? `${Math.round(100 * share)}%` : `${(100 * share).toPrecision(2)}%`;
/** Round to significant digits, without an exponent. */
const rounded = (value, digits) => Number(value.toPrecision(digits)).toString();
const duration = (seconds, digits = 3) =>
  seconds < 1 ? `${rounded(1000 * seconds, digits)} ms` : `${rounded(seconds, digits)} s`;
const shorten = (text, length) => {
  const letters = [...text];
  return letters.length > length ? `${letters.slice(0, length - 1).join("")}…` : text;
};
/** Return a text whose characters that reorder or break lines unseen are written out. */
const readable = (text) => text.replace(/[\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
  (character) => `\\u{${character.codePointAt(0).toString(16)}}`);
/** Return a drawing in units of its data that fills its element. */
const stretched = (top, width, height, ...shapes) =>
  svg("svg", { viewBox: `0 ${top} ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...shapes);
/** Return where the pointer is, from 0 at the left of an element to 1 at its right. */
const shareAt = (element, { clientX }) => {
  const { left, width } = element.getBoundingClientRect();
  return (clientX - left) / width;
};
/** Return whether a place of a scrolled panel is in sight. */
const isWithin = (place, scrolled, size) => place >= scrolled + 20 && place <= scrolled + size - 40;

// -- the runs ----------------------------------------------------------------------------------

for (const run of data.runs) {
  run.starts = []; // output tokens before each step
  run.numTokens = 0;
  for (const step of run.steps) {
    for (const key of ["nodes", "parents", "probabilities", "never_accept", "accepted"])
      step[key] ??= [];
    step.no_draft ??= run.starts.length ? "" : "prefill";
    run.starts.push(run.numTokens);
    run.numTokens += step.tokens.length;
  }
  run.seconds = sum(run.steps.map((step) => step.seconds));
  // The step with the most accepted nodes, and the slowest one for its tokens.
  run.best = argmax(run.steps, (step) => step.accepted.length - step.seconds / (1 + run.seconds));
  run.worst = argmax(run.steps, (step, index) => (index ? step.seconds / step.tokens.length : 0));
}
const longestRun = Math.max(1, ...data.runs.map((run) => run.numTokens));
const activeRun = () => data.runs[state.run];

/** Return the step of a run that made the output token at `offset`. */
const stepAt = (run, offset) => Math.max(0, run.starts.findLastIndex((start) => start <= offset));
