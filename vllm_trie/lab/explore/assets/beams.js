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
      entry.width = boxWidth(entry.text);
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
    boxes.push(box(left, y(entry), [text], `${beams.fates[node]}${later}`, tip, ...more));
  }
  const dot = first ? svg("text", { x: MARGIN - 4, y: start + 4 }, "…") : svg("circle", { class: "root", cx: MARGIN + 1, cy: start, r: 4 });
  const name = `Search trie, steps ${first + 1} to ${last}`;
  const panel = byId("search");
  const scrolled = panel.scrollTop;
  panel.replaceChildren(drawing(x + 24, height, name, [...shapes, ...edges, dot, ...boxes]));
  panel.scrollTop = scrolled;
  const right = lefts.get(depth) + (widths[depth] ?? 20);
  if (!isWithin(right, panel.scrollLeft, panel.clientWidth)) panel.scrollLeft = right - panel.clientWidth * 0.7;
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
  return `${plural(kept.length, "beam")} · ${plural(forks, "fork")} · ${plural(ended, "beam")} freed · ` +
    `${with_("finished")} finished · ${with_("dropped")} dropped`;
}

function showBeams() {
  const depth = state.steps.beams + 1, { used, unshared } = beams.blocks[depth - 1];
  byId("search-title").textContent = `Beam width ${beams.beam_width}, ${plural(beams.steps, "step")}`;
  byId("blocks-title").textContent =
    `${plural(used.size, "KV block")} of ${beams.blockSize} tokens in use, ${unshared} without sharing`;
  drawSearch(depth);
  showBlocks(depth);
  beams.markStep ??= buildBlocksChart();
  beams.markStep(depth - 1);
}

function buildBlocksChart() {
  const most = Math.max(1, ...beams.blocks.map(({ unshared }) => unshared));
  return fillChart(byId("blocks-chart"), beams.steps, [{ most, unit: `${most}`, shapes: [
    bars("green", beams.blocks.map(({ used }) => [0, used.size])),
    bars("time", beams.blocks.map(({ used, unshared }) => [used.size, unshared])),
  ] }]);
}
