"use strict";
// The page of `vllm-trie explore`. Its data:
//
//   title, prompt, promptCut     texts; whether the prompt's beginning is missing
//   labels                       token id -> its visible text
//   runs[]                       method, notice, steps[]: text, seconds, tokens, and of the verified
//                                tree nodes, parents, probabilities, never_accept, accepted
//   beams                        a search's trie (token_ids, parents, sums, fates, returned, scores),
//                                texts, promptTokens, blockSize; or null
//
// All of it is text that a model or a user wrote: it enters the document by `append` and
// `setAttribute` only, never as markup.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const root = document.documentElement;

const MAX_WINDOW = 160; // steps in the chart before the brush is needed
const BEAM_COLUMNS = 16; // steps of a search that are drawn at a time
const CHARACTER = 7.3, ROW = 27, BOX = 20, GAP = 42, MARGIN = 12; // sizes in pixels

const state = {
  view: data.runs.length ? "runs" : "beams",
  run: 0,
  steps: { runs: 0, beams: 0 }, // the current step of each view
  window: [0, 0], // the steps in the chart
  timer: null,
  withWindow: new Set(), // runs whose lookahead window is drawn
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
const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

/** Return a canvas' context in CSS pixels, cleared, with its width and height. */
function surface(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

// -- the runs ----------------------------------------------------------------------------------

for (const run of data.runs) {
  run.starts = []; // output tokens before each step
  run.numTokens = 0;
  for (const step of run.steps) {
    for (const key of ["nodes", "parents", "probabilities", "never_accept", "accepted"])
      step[key] ??= [];
    run.starts.push(run.numTokens);
    run.numTokens += step.tokens.length;
  }
  run.seconds = sum(run.steps.map((step) => step.seconds));
}
const longestRun = Math.max(1, ...data.runs.map((run) => run.numTokens));
const activeRun = () => data.runs[state.run];

/** Return the step of a run that made the output token at `offset`. */
function stepAt(run, offset) {
  let low = 0, high = run.starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (run.starts[middle] <= offset) low = middle;
    else high = middle - 1;
  }
  return low;
}

// -- lanes: all methods over the same output ---------------------------------------------------

function buildLanes() {
  const names = ["method", "tokens/step", "steps", "time", "tokens/s", ""];
  const minor = (index) => (index > 2 && index < 5 ? { class: "minor" } : {});
  byId("lanes").append(
    html("div", { class: "lane head", "aria-hidden": "true" },
      ...names.map((name, index) => html("span", minor(index), name))),
  );
  data.runs.forEach((run, index) => {
    const shown = [
      [(run.numTokens / Math.max(1, run.steps.length)).toFixed(2), { class: "strong" }],
      [run.steps.length, {}],
      [duration(run.seconds), { class: "minor" }],
      [(run.numTokens / run.seconds || 0).toFixed(0), { class: "minor" }],
    ];
    run.lane = html("button", { class: "lane" },
      html("b", { title: run.method }, run.method),
      ...shown.map(([value, attributes]) => html("span", attributes, String(value))),
      html("canvas", { "aria-hidden": "true" }));
    run.lane.setAttribute("aria-label", `${run.method}: ${shown[0][0]} tokens per step, ` +
      `${plural(run.steps.length, "step")}, ${duration(run.seconds)}`);
    run.lane.addEventListener("click", (event) => {
      let offset = activeRun().starts[state.steps.runs] ?? 0;
      if (event.target.tagName === "CANVAS") {
        const box = event.target.getBoundingClientRect();
        offset = ((event.clientX - box.left) / box.width) * longestRun;
      }
      selectRun(index, offset);
    });
    byId("lanes").append(run.lane);
    if (run.notice) byId("lanes").append(html("p", { class: "notice" }, `${run.method}: ${run.notice}`));
  });
}

function drawLane(run, offset) {
  const { context, width, height } = surface(run.lane.querySelector("canvas"));
  const scale = width / longestRun;
  const shade = (numTokens) => clamp(0.1 + 0.16 * numTokens, 0, 1);
  context.fillStyle = color("green");
  if (scale >= 2) {
    run.steps.forEach((step, index) => {
      context.globalAlpha = shade(step.tokens.length);
      context.fillRect(run.starts[index] * scale, 3, step.tokens.length * scale - 1, height - 6);
    });
  } else {
    for (let x = 0; x < Math.ceil(run.numTokens * scale); x += 1) {
      const first = stepAt(run, x / scale), last = stepAt(run, (x + 1) / scale);
      const steps = run.steps.slice(first, Math.max(last, first + 1));
      context.globalAlpha = shade(sum(steps.map((step) => step.tokens.length)) / steps.length);
      context.fillRect(x, 3, 1, height - 6);
    }
  }
  context.globalAlpha = 1;
  context.fillStyle = color("accent");
  if (offset < run.numTokens) context.fillRect(clamp(offset * scale, 0, width - 2), 0, 2, height);
}

// -- charts ------------------------------------------------------------------------------------

const AXIS = 52; // room for the numbers at the left

/** Group the steps from..to so that each group has at least 3 pixels; return their ranges. */
function groups(from, to, width) {
  const size = Math.max(1, Math.ceil((to - from) / (width / 3)));
  const found = [];
  for (let first = from; first < to; first += size) found.push([first, Math.min(to, first + size)]);
  return found;
}

/** Draw stacked bars of one panel; `bars(first, last)` returns [value, color name] from below. */
function drawPanel({ context, width }, top, height, from, to, maximum, bars, unit) {
  const scale = height / (maximum || 1), left = AXIS, room = width - AXIS;
  context.strokeStyle = color("line");
  context.fillStyle = color("dim");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of [0, maximum]) {
    const y = Math.round(top + height - value * scale) + 0.5;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(width, y);
    context.stroke();
    if (value) context.fillText(unit(value), left - 6, clamp(y, 7, Infinity));
  }
  for (const [first, last] of groups(from, to, room)) {
    const x = left + ((first - from) / (to - from)) * room;
    const wide = ((last - first) / (to - from)) * room;
    let y = top + height;
    for (const [value, name] of bars(first, last)) {
      const tall = Math.min(value * scale, y - top);
      context.fillStyle = color(name);
      context.fillRect(x, y - tall, Math.max(wide - (wide > 4 ? 1.5 : 0), 0.8), tall);
      y -= tall;
    }
  }
}

function drawCursor({ context, width, height }, from, to, index) {
  const room = width - AXIS, wide = Math.max(room / (to - from), 2);
  context.fillStyle = color("accent");
  context.globalAlpha = 0.18;
  context.fillRect(AXIS + ((index - from) / (to - from)) * room, 0, wide, height);
  context.globalAlpha = 1;
  context.fillRect(AXIS + ((index - from) / (to - from)) * room, height - 3, wide, 3);
}

const mean = (steps, value) => sum(steps.map(value)) / Math.max(1, steps.length);
const stepAtPoint = (canvas, event, from, to) => {
  const box = canvas.getBoundingClientRect();
  const share = (event.clientX - box.left - AXIS) / (box.width - AXIS);
  return clamp(Math.floor(from + share * (to - from)), from, to - 1);
};

function tokenBars(run, first, last) {
  const steps = run.steps.slice(first, last);
  const accepted = mean(steps, (step) => step.accepted.length);
  return [[mean(steps, (step) => step.tokens.length) - accepted, "bonus"], [accepted, "green"]];
}

function drawCharts(run) {
  const [from, to] = state.window, count = run.steps.length;
  const shown = run.steps.slice(from, to);
  const most = Math.max(1, ...shown.map((step) => step.tokens.length));
  // The first step has the prefill; a longer bar than all others would hide them.
  const slowest = Math.max(...(shown.length > 1 && !from ? shown.slice(1) : shown).map((step) => step.seconds));
  const chart = surface(byId("chart")), high = chart.height - 8;
  drawPanel(chart, 4, high * 0.62, from, to, most, (a, b) => tokenBars(run, a, b), (value) => `${value}`);
  drawPanel(chart, high * 0.62 + 16, high * 0.38 - 14, from, to, slowest,
    (a, b) => [[mean(run.steps.slice(a, b), (step) => step.seconds), "time"]],
    (value) => duration(value, 2));
  drawCursor(chart, from, to, state.steps.runs);
  byId("chart-title").textContent =
    from || to < count ? `Steps ${from + 1} to ${to} of ${count}` : "Tokens and time of each step";
  byId("chart").setAttribute("aria-label", `Tokens and milliseconds of steps ${from + 1} to ${to}: ` +
    `${mean(shown, (step) => step.tokens.length).toFixed(2)} tokens and ` +
    `${duration(mean(shown, (step) => step.seconds))} on average`);

  byId("brush").hidden = count <= MAX_WINDOW;
  if (count <= MAX_WINDOW) return;
  const brush = surface(byId("brush")), room = brush.width - AXIS;
  const highest = Math.max(...run.steps.map((step) => step.tokens.length));
  drawPanel(brush, 0, brush.height, 0, count, highest, (a, b) => tokenBars(run, a, b), () => "");
  brush.context.fillStyle = brush.context.strokeStyle = color("accent");
  const left = AXIS + (from / count) * room, wide = Math.max(((to - from) / count) * room, 4);
  brush.context.globalAlpha = 0.16;
  brush.context.fillRect(left, 0, wide, brush.height);
  brush.context.globalAlpha = 1;
  brush.context.strokeRect(left + 0.5, 0.5, wide - 1, brush.height - 1);
}

/** Set the chart's steps: all that fit, or those around the current one. */
function moveWindow(size) {
  const count = activeRun().steps.length;
  const length = clamp(size ?? state.window[1] - state.window[0], 1, count);
  const index = state.steps.runs;
  let from = clamp(state.window[0], 0, count - length);
  if (index < from || index >= from + length) from = index - Math.floor(length / 2);
  from = clamp(from, 0, count - length);
  state.window = [from, from + length];
}

function listenToCharts() {
  const chart = byId("chart"), brush = byId("brush");
  chart.addEventListener("click", (event) => go(stepAtPoint(chart, event, ...state.window)));
  chart.addEventListener("pointermove", (event) => {
    const index = stepAtPoint(chart, event, ...state.window), step = activeRun().steps[index];
    chart.title = `step ${index + 1}: ${plural(step.tokens.length, "token")}, ${duration(step.seconds)}`;
  });
  let anchor = null;
  const all = () => activeRun().steps.length;
  brush.addEventListener("pointerdown", (event) => {
    brush.setPointerCapture(event.pointerId);
    anchor = stepAtPoint(brush, event, 0, all());
  });
  brush.addEventListener("pointermove", (event) => {
    if (anchor === null) return;
    const index = stepAtPoint(brush, event, 0, all());
    if (Math.abs(index - anchor) < 8) return;
    state.window = [Math.min(anchor, index), Math.max(anchor, index) + 1];
    state.steps.runs = clamp(state.steps.runs, state.window[0], state.window[1] - 1);
    show();
  });
  brush.addEventListener("pointerup", (event) => {
    if (anchor !== null && Math.abs(stepAtPoint(brush, event, 0, all()) - anchor) < 8) go(anchor);
    anchor = null;
  });
  brush.addEventListener("dblclick", () => {
    state.window = [0, all()];
    show();
  });
  byId("blocks-chart").addEventListener("click", (event) =>
    go(stepAtPoint(byId("blocks-chart"), event, 0, beams.steps)));
}

// -- text --------------------------------------------------------------------------------------

function buildText(run) {
  let tint = 0;
  const spans = run.steps.map((step, index) => {
    const tinted = step.tokens.length > 1;
    const name = tinted ? `s${tint % 6}` : "single";
    if (tinted) tint += 1;
    return html("span", { class: name, "data-step": index }, readable(step.text));
  });
  byId("text").replaceChildren(...spans);
}

function markText(index) {
  const spans = byId("text").children;
  for (let place = 0; place < spans.length; place += 1) {
    spans[place].classList.toggle("later", place > index);
    spans[place].classList.toggle("now", place === index);
  }
  const now = spans[index], panel = byId("text");
  if (!now) return;
  const top = now.offsetTop - panel.scrollTop;
  if (top < 20 || top > panel.clientHeight - 40) panel.scrollTop = now.offsetTop - panel.clientHeight / 2;
}

// -- trees -------------------------------------------------------------------------------------

/** Return the place of each node: a leaf has a row of its own, a parent the middle of its children. */
function placeRows(children, top) {
  const rows = new Map();
  let next = 0;
  const place = (node) => {
    const below = (children.get(node) ?? []).map(place);
    const row = below.length ? (below[0] + below.at(-1)) / 2 : next++;
    rows.set(node, row);
    return row;
  };
  place(top);
  return { rows, count: Math.max(1, next) };
}

function curve(fromX, fromY, x, y, attributes) {
  const bend = (fromX + x) / 2;
  return svg("path", { ...attributes, d: `M${fromX} ${fromY}C${bend} ${fromY} ${bend} ${y} ${x} ${y}` });
}

/** Return a node's box with its label, its left end in the middle at x, y. */
function box(x, y, text, classes, tip, ...more) {
  const width = CHARACTER * [...text].length + 12;
  return svg("g", { class: `node ${classes}` },
    svg("title", {}, tip),
    svg("rect", { x, y: y - BOX / 2, width, height: BOX, rx: 5 }),
    svg("text", { x: x + 6, y: y + 4 }, text), ...more);
}

const drawing = (width, height, name, shapes) =>
  svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name }, ...shapes);

/** Return the drawing of a step's tree, and the height of the end of its accepted path. */
function drawTree(step, withWindow) {
  const never = new Set(step.never_accept), accepted = new Set(step.accepted);
  const nodes = step.nodes.map((token, node) => ({
    token, node, parent: step.parents[node], share: step.probabilities[node],
    kind: accepted.has(node) ? "taken" : never.has(node) ? "window" : "rejected",
  })).filter((node) => withWindow || node.kind !== "window");
  if (step.tokens.length > step.accepted.length)
    nodes.push({ token: step.tokens.at(-1), node: step.nodes.length, parent: step.accepted.at(-1) ?? -1, kind: "bonus" });
  const children = new Map(), depth = new Map([[-1, 0]]), columns = [0];
  for (const each of nodes) {
    depth.set(each.node, depth.get(each.parent) + 1);
    if (!children.has(each.parent)) children.set(each.parent, []);
    children.get(each.parent).push(each.node);
    each.text = shorten(label(each.token), 18);
    each.width = CHARACTER * [...each.text].length + 12;
    columns[depth.get(each.node)] = Math.max(columns[depth.get(each.node)] ?? 0, each.width);
  }
  const lefts = [MARGIN];
  columns.forEach((width, index) => lefts.push(lefts[index] + width + (index ? GAP : 26)));
  const { rows, count } = placeRows(children, -1);
  const y = (node) => MARGIN + ROW * (rows.get(node) + 0.5);
  const right = new Map([[-1, MARGIN + 4]]), edges = [], boxes = [];
  for (const each of nodes) {
    const x = lefts[depth.get(each.node)];
    right.set(each.node, x + each.width);
    const kind = each.kind === "window" ? "rejected" : each.kind;
    const wide = each.kind === "bonus" ? 1.8 : 1 + 2.5 * (each.share ?? 0.1);
    edges.push(curve(right.get(each.parent), y(each.parent), x, y(each.node),
      { class: `edge ${kind}`, "stroke-width": wide.toFixed(1) }));
    const outcome = { taken: "accepted", rejected: "rejected", window: "lookahead window, never accepted", bonus: "bonus token" }[each.kind];
    const predicted = each.share === undefined ? "" : `, predicted probability ${percent(each.share)}`;
    const share = each.share === undefined ? [] : [svg("text", { class: "share", x: x + each.width + 4, y: y(each.node) - 3 }, percent(each.share))];
    boxes.push(box(x, y(each.node), each.text, each.kind, `${label(each.token)}: token ${each.token}${predicted}; ${outcome}`, ...share));
  }
  const dot = svg("circle", { class: "root", cx: MARGIN, cy: y(-1), r: 4 });
  const end = nodes.length ? y(nodes.at(-1).node) : 0;
  const name = `Draft tree of ${plural(step.nodes.length, "node")}; accepted: ` +
    `${step.accepted.map((node) => label(step.nodes[node])).join(" ") || "none"}`;
  return { end, picture: drawing(lefts.at(-1), 2 * MARGIN + ROW * count, name, [...edges, dot, ...boxes]) };
}

function treeCard(run, index, stepIndex) {
  const step = run.steps[stepIndex];
  const ended = activeRun().starts[state.steps.runs] >= run.numTokens;
  const facts = html("span", { class: "facts" }, step && !ended
    ? `step ${stepIndex + 1} · ${plural(step.nodes.length, "node")} · ${duration(step.seconds)}` : "");
  const head = html("div", { class: "row" }, html("h2", {}, run.method), facts, html("span", { class: "grow" }));
  const card = html("section", { "aria-label": `Draft tree of ${run.method}` }, head);
  card.classList.toggle("active", index === state.run && data.runs.length > 1);
  if (!step || ended) {
    card.append(html("p", { class: "empty" }, "No output here."));
    return { card };
  }
  if (step.never_accept.length) {
    const check = html("input", { type: "checkbox" });
    check.checked = state.withWindow.has(index);
    check.addEventListener("change", () => {
      state.withWindow[check.checked ? "add" : "delete"](index);
      show();
    });
    head.append(html("label", { class: "small" }, check, `lookahead window (${step.never_accept.length})`));
  }
  const chips = step.tokens.map((token, place) =>
    html("li", { class: place < step.accepted.length ? "accepted" : "bonus", title: `token ${token}` }, label(token)));
  card.append(html("ul", { class: "taken", "aria-label": "Tokens of the step" }, ...chips));
  if (!step.nodes.length) {
    card.append(html("p", { class: "empty" }, "No draft in this step, only the model's own token."));
    return { card };
  }
  const { picture, end } = drawTree(step, state.withWindow.has(index));
  const panel = html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Tree of ${run.method}` }, picture);
  card.append(panel);
  return { card, panel, end };
}

function showTrees() {
  const offset = activeRun().starts[state.steps.runs] ?? 0;
  const made = data.runs.map((run, index) => // a run without drafts has no trees to show
    treeCard(run, index, index === state.run ? state.steps.runs : stepAt(run, offset)))
    .filter((_, index) => index === state.run || data.runs[index].steps.some((step) => step.nodes.length));
  byId("trees").replaceChildren(...made.map(({ card }) => card));
  for (const { panel, end } of made) if (panel) panel.scrollTop = end - panel.clientHeight / 2;
}

// -- beam search -------------------------------------------------------------------------------

const beams = data.beams;
if (beams) {
  beams.depths = beams.parents.reduce((depths, parent) => {
    depths.push(parent < 0 ? 1 : depths[parent] + 1);
    return depths;
  }, []);
  beams.best = new Set();
  for (let node of beams.returned)
    for (; node >= 0 && !beams.best.has(node); node = beams.parents[node]) beams.best.add(node);
  beams.ranks = new Map(beams.returned.map((node, rank) => [node, rank + 1]));
  beams.at = Array.from({ length: beams.steps + 1 }, () => []); // nodes by depth, likelier first
  beams.depths.forEach((depth, node) => beams.at[depth].push(node));
  beams.at.forEach((nodes) => nodes.sort((a, b) => beams.sums[b] - beams.sums[a]));
  beams.blocks = beams.at.slice(1).map((_, index) => blocksOf(index + 1));
}

/** Return the rows of a step with the KV blocks of each, and how many blocks they are in all.
 *
 * A full block is named by the node of its last token, because a fork refers to its parent's full
 * blocks; the block at the tail is a row's own.
 */
function blocksOf(depth) {
  const size = beams.blockSize, used = new Map();
  const live = beams.at[depth].filter((node) => beams.fates[node] === "kept");
  const rows = live.map((node) => {
    const path = [];
    for (let each = node; each >= 0; each = beams.parents[each]) path.unshift(each);
    const tokens = beams.promptTokens + path.length, blocks = [];
    for (let block = 0; block * size < tokens; block += 1) {
      const last = (block + 1) * size - beams.promptTokens; // its last token, as a depth
      const full = (block + 1) * size <= tokens;
      const name = !full ? `tail ${node}` : last <= 0 ? `prompt ${block}` : `node ${path[last - 1]}`;
      blocks.push({ name, full, path: path.slice(Math.max(0, last - size), Math.max(0, last)) });
      used.set(name, (used.get(name) ?? 0) + 1);
    }
    return { node, blocks };
  });
  return { rows, used, unshared: sum(rows.map((row) => row.blocks.length)) };
}

/** Return a step's nodes, likelier first; a parent's dropped candidates are one entry. */
function entriesOf(depth) {
  const entries = [], dropped = new Map(); // by parent
  for (const node of beams.at[depth]) {
    const parent = beams.parents[node], name = label(beams.token_ids[node]);
    const tip = `${name}: token ${beams.token_ids[node]}, sum of log-probabilities ${beams.sums[node]}; ${beams.fates[node]}`;
    const same = beams.fates[node] === "dropped" ? dropped.get(parent) : null;
    if (same) {
      same.text = shorten(`${same.text} · ${name}`, 24);
      same.tip += `\n${tip}`;
      continue;
    }
    entries.push({ node, parent, text: shorten(name, 16), tip });
    if (beams.fates[node] === "dropped") dropped.set(parent, entries.at(-1));
  }
  return entries;
}

function drawSearch(depth) {
  const first = clamp(depth - 10, 0, Math.max(0, beams.steps - BEAM_COLUMNS));
  const last = Math.min(beams.steps, first + BEAM_COLUMNS);
  const widths = [], entries = new Map();
  let count = 1;
  for (let at = first + 1; at <= last; at += 1) {
    // A column is packed from the top in the order of the parents, so that no edges cross.
    const order = ({ node, parent }) => 10 * (entries.get(parent)?.row ?? 0) +
      (beams.best.has(node) ? 0 : beams.fates[node] === "dropped" ? 2 : 1);
    const column = entriesOf(at).sort((a, b) => order(a) - order(b));
    column.forEach((entry, row) => {
      entries.set(entry.node, entry);
      entry.row = row;
      entry.width = CHARACTER * [...entry.text].length + 12;
      widths[at] = Math.max(widths[at] ?? 0, entry.width);
    });
    count = Math.max(count, column.length);
  }
  const lefts = new Map();
  let x = MARGIN + 30;
  for (let at = first + 1; at <= last; at += 1) {
    lefts.set(at, x);
    x += (widths[at] ?? 20) + GAP - 14;
  }
  const y = (entry) => MARGIN + ROW * (entry.row + 0.5), height = 2 * MARGIN + ROW * count;
  const shapes = [svg("rect", { class: "column", x: lefts.get(depth) - 8, y: 0, width: (widths[depth] ?? 20) + 16, height, rx: 8 })];
  const edges = [], boxes = [];
  const start = MARGIN + ROW / 2;
  for (const entry of entries.values()) {
    const { node, parent, text, tip, width } = entry;
    const at = beams.depths[node], left = lefts.get(at), above = entries.get(parent);
    const later = at > depth ? " later" : "", best = beams.best.has(node) ? " best" : "";
    const fromX = above ? lefts.get(at - 1) + above.width : MARGIN + 5;
    edges.push(curve(fromX, above ? y(above) : start, left, y(entry), { class: `edge ${beams.fates[node]}${best}${later}` }));
    const rank = beams.ranks.get(node);
    const more = rank ? [svg("text", { class: "rank", x: left + width + 4, y: y(entry) + 4 }, `#${rank}`)] : [];
    boxes.push(box(left, y(entry), text, `${beams.fates[node]}${later}`, tip, ...more));
  }
  const dot = first ? svg("text", { x: MARGIN - 4, y: start + 4 }, "…") : svg("circle", { class: "root", cx: MARGIN + 1, cy: start, r: 4 });
  const name = `Search trie, steps ${first + 1} to ${last}`;
  const panel = byId("search");
  const scrolled = panel.scrollTop;
  panel.replaceChildren(drawing(x + 24, height, name, [...shapes, ...edges, dot, ...boxes]));
  panel.scrollTop = scrolled;
  const right = lefts.get(depth) + (widths[depth] ?? 20);
  if (right > panel.scrollLeft + panel.clientWidth - 60 || right < panel.scrollLeft + 60)
    panel.scrollLeft = right - panel.clientWidth * 0.7;
}

function blockCell({ name, full, path }, used) {
  const shared = used.get(name), attributes = { class: !full ? "tail" : shared > 1 ? "shared" : "own" };
  const letters = [...path.map((node) => label(beams.token_ids[node])).join("")];
  const text = letters.length > 24 ? `…${letters.slice(-23).join("")}` : letters.join("");
  return html("td", { ...attributes, title: `${full ? "full block" : "tail block, of this hypothesis alone"}${shared > 1 ? `, shared by ${shared} hypotheses` : ""}` },
    html("code", {}, text || "prompt"), shared > 1 ? ` ×${shared}` : "");
}

function showBlocks(depth) {
  const { rows, used } = beams.blocks[depth - 1];
  const whole = Math.floor(beams.promptTokens / beams.blockSize); // blocks that the prompt fills
  const lines = rows.map(({ node, blocks }, index) => {
    const shared = used.get("prompt 0"); // all full blocks of the prompt are shared alike
    const prompt = html("td", { class: shared > 1 ? "shared" : "own" }, `prompt, ${plural(whole, "block")}${shared > 1 ? ` ×${shared}` : ""}`);
    return html("tr", {},
      html("th", { scope: "row" }, `${index + 1}`, html("span", { class: "facts" }, beams.sums[node].toFixed(2))),
      ...(whole ? [prompt] : []), ...blocks.slice(whole).map((block) => blockCell(block, used)));
  });
  byId("blocks").replaceChildren(rows.length
    ? html("table", {}, html("tbody", {}, ...lines))
    : html("p", { class: "empty" }, "The search has ended: no hypothesis continues."));
}

/** Return what happened in a step of the search, in words. */
function eventsOf(depth) {
  const kept = beams.blocks[depth - 1].rows.map(({ node }) => node);
  const before = depth > 1 ? beams.blocks[depth - 2].rows.map(({ node }) => node) : [-1];
  const children = (node) => kept.filter((each) => beams.parents[each] === node).length;
  const with_ = (fate) => beams.at[depth].filter((node) => beams.fates[node] === fate).length;
  const forks = sum(before.map((node) => Math.max(0, children(node) - 1)));
  const ended = before.filter((node) => !children(node)).length;
  return `${plural(kept.length, "row")} · ${plural(forks, "fork")} · ${plural(ended, "row")} freed · ` +
    `${with_("finished")} finished · ${with_("dropped")} dropped`;
}

function showBeams() {
  const depth = state.steps.beams + 1, { used, unshared } = beams.blocks[depth - 1];
  byId("search-title").textContent = `Beam width ${beams.beam_width}, ${plural(beams.steps, "step")}`;
  byId("blocks-title").textContent =
    `${plural(used.size, "KV block")} of ${beams.blockSize} tokens in use, ${unshared} without sharing`;
  drawSearch(depth);
  showBlocks(depth);
  const chart = surface(byId("blocks-chart"));
  const most = Math.max(1, ...beams.blocks.map((each) => each.unshared));
  drawPanel(chart, 6, chart.height - 12, 0, beams.steps, most, (first, last) => {
    const mine = mean(beams.blocks.slice(first, last), (each) => each.used.size);
    return [[mine, "green"], [mean(beams.blocks.slice(first, last), (each) => each.unshared) - mine, "time"]];
  }, (value) => `${value}`);
  drawCursor(chart, 0, beams.steps, state.steps.beams);
  byId("blocks-chart").setAttribute("aria-label", byId("blocks-title").textContent);
}

// -- navigation --------------------------------------------------------------------------------

const numSteps = () => (state.view === "runs" ? activeRun().steps.length : beams.steps);

function go(index) {
  state.steps[state.view] = clamp(index, 0, Math.max(0, numSteps() - 1));
  if (state.view === "runs") moveWindow();
  show();
}

function selectRun(index, offset) {
  state.run = clamp(index, 0, data.runs.length - 1);
  state.steps.runs = stepAt(activeRun(), offset);
  state.window = [0, 0];
  moveWindow(MAX_WINDOW);
  buildText(activeRun());
  show();
}

function selectView(view) {
  if (view === "beams" ? !beams : !data.runs.length) return;
  state.view = view;
  show();
}

function play(on) {
  clearInterval(state.timer);
  state.timer = on ? setInterval(() => {
    if (state.steps[state.view] >= numSteps() - 1) play(false);
    else go(state.steps[state.view] + 1);
  }, 400) : null;
  byId("play").textContent = on ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", on ? "Pause" : "Play");
}

function setTheme(theme) {
  root.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colors`);
}

/** Do what a key stands for; return whether it stands for something. */
function act(key) {
  const index = state.steps[state.view];
  const moves = { ArrowLeft: index - 1, k: index - 1, ArrowRight: index + 1, j: index + 1, Home: 0, End: Infinity };
  if (key in moves) go(moves[key]);
  else if (key === " ") play(state.timer === null);
  else if (key === "t") {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    show();
  }
  else if (key === "b") selectView(state.view === "runs" ? "beams" : "runs");
  else if (key >= "1" && key <= "9" && data.runs[key - 1] && state.view === "runs")
    selectRun(key - 1, activeRun().starts[state.steps.runs] ?? 0);
  else return false;
  return true;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  if (target.type === "range" && event.key !== " ") return; // the slider moves by itself
  if (target.closest("button, summary, input") && (event.key === " " || event.key === "Enter")) return;
  if (act(event.key)) event.preventDefault();
}

// -- all of it ---------------------------------------------------------------------------------

function show() {
  const index = state.steps[state.view], count = numSteps();
  for (const view of ["runs", "beams"]) {
    byId(`${view}-view`).hidden = state.view !== view;
    byId(`tab-${view}`).setAttribute("aria-selected", String(state.view === view));
  }
  Object.assign(byId("slider"), { max: Math.max(0, count - 1), value: index });
  byId("place").replaceChildren("Step ", html("b", {}, String(count ? index + 1 : 0)), ` of ${count}`);
  let happened = "";
  if (state.view === "beams") {
    happened = eventsOf(index + 1);
    showBeams();
  } else if (count) {
    const run = activeRun(), step = run.steps[index];
    happened = `${plural(step.tokens.length, "token")}, ${step.accepted.length} accepted of ${plural(step.nodes.length, "node")}`;
    data.runs.forEach((each, place) => {
      each.lane.setAttribute("aria-pressed", String(place === state.run));
      drawLane(each, run.starts[index]);
    });
    drawCharts(run);
    markText(index);
    showTrees();
  }
  byId("place").append(` · ${happened}`);
  byId("slider").setAttribute("aria-valuetext", `step ${index + 1} of ${count}: ${happened}`);
  if (state.timer === null) byId("spoken").textContent = `Step ${index + 1}: ${happened}`;
}

function start() {
  byId("title").textContent = readable(data.title);
  byId("views").hidden = !(beams && data.runs.length);
  byId("prompt").textContent = `${data.promptCut ? "… " : ""}${readable(data.prompt)}`;
  for (const [rank, text] of (beams?.texts ?? []).entries())
    byId("returned").append(html("li", {}, html("span", { class: "facts" }, `score ${beams.scores[rank].toFixed(3)}`), html("span", { class: "hypothesis" }, readable(text))));
  buildLanes();
  listenToCharts();
  byId("text").addEventListener("click", (event) => event.target.dataset.step && go(Number(event.target.dataset.step)));
  byId("slider").addEventListener("input", () => go(Number(byId("slider").value)));
  byId("theme").addEventListener("click", () => act("t"));
  for (const view of ["runs", "beams"]) byId(`tab-${view}`).addEventListener("click", () => selectView(view));
  for (const button of document.querySelectorAll("[data-key]")) button.addEventListener("click", () => act(button.dataset.key));
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", show);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => {
    follow();
    show();
  });
  follow();
  if (data.runs.length) selectRun(0, 0);
  else show();
}

start();
