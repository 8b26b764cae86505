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

const boxWidth = (text) => CHARACTER * [...text].length + 12;

/** Return a box of one or more texts side by side, its left end in the middle at x, y. */
function box(x, y, texts, classes, tip, ...more) {
  return svg("g", { class: `node ${classes}` },
    svg("title", {}, tip),
    svg("rect", { x, y: y - BOX / 2, width: boxWidth(texts.join("")), height: BOX, rx: 5 }),
    svg("text", { x: x + 6, y: y + 4 }, ...texts.map((text) => svg("tspan", {}, text))), ...more);
}

const drawing = (width, height, name, shapes) =>
  svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name }, ...shapes);

const OUTCOMES = { taken: "accepted", rejected: "rejected", window: "lookahead window, never accepted", bonus: "bonus token" };

/** Return what is known of a node, in words. */
function nodeTip({ token, share, kind, origin }) {
  return [`${label(token)}: token ${token}`, share === undefined ? "" : `predicted probability ${percent(share)}`, OUTCOMES[kind],
    origin && kind !== "window" ? (origin === "e" ? "its n-gram is new" : `its n-gram occurs in the ${ORIGINS[origin]}`) : ""].filter(Boolean).join(", ");
}

/** Return the nodes of a step's tree, and the bonus token behind them. */
function nodesOf(step) {
  const never = new Set(step.never_accept), accepted = new Set(step.accepted);
  const nodes = step.nodes.map((token, node) => ({
    token, node, parent: step.parents[node], share: step.probabilities[node], origin: step.origins?.[node],
    kind: accepted.has(node) ? "taken" : never.has(node) ? "window" : "rejected",
  }));
  if (step.tokens.length > step.accepted.length)
    nodes.push({ token: step.tokens.at(-1), node: step.nodes.length, parent: step.accepted.at(-1) ?? -1, kind: "bonus" });
  return nodes;
}

/** Join nodes of one kind that have no siblings; return the paths, each after the one it continues. */
function pathsOf(nodes) {
  const numChildren = new Map(), pathOf = new Map(), paths = [];
  for (const { parent } of nodes) numChildren.set(parent, (numChildren.get(parent) ?? 0) + 1);
  for (const node of nodes) {
    const text = shorten(label(node.token), 18);
    let path = pathOf.get(node.parent);
    if (path && numChildren.get(node.parent) === 1 && path.kind === node.kind && [...path.texts.join(""), ...text].length <= LONGEST_BOX) {
      path.nodes.push(node);
      path.texts.push(text);
    } else {
      path = { kind: node.kind, above: path, nodes: [node], texts: [text] };
      paths.push(path);
    }
    pathOf.set(node.node, path);
  }
  return paths;
}

/** Return the drawing of a step's tree, and the height of the end of its accepted path. */
function drawTree(run, step, withWindow) {
  const paths = pathsOf(nodesOf(step).filter(({ kind }) => withWindow || kind !== "window"));
  const children = new Map();
  for (const path of paths) children.set(path.above, [...(children.get(path.above) ?? []), path]);
  const { rows, count } = placeRows(children, undefined);
  const y = (path) => MARGIN + ROW * (rows.get(path) + 0.5);
  const edges = [], boxes = [];
  let width = 0;
  for (const path of paths) {
    const x = path.above ? path.above.right + GAP : MARGIN + 30, { kind } = path, { share } = path.nodes.at(-1);
    path.right = x + boxWidth(path.texts.join(""));
    width = Math.max(width, path.right + GAP);
    edges.push(curve(path.above?.right ?? MARGIN + 4, y(path.above), x, y(path), {
      class: `edge ${kind === "window" ? "rejected" : kind}`,
      "stroke-width": (kind === "bonus" ? 1.8 : 1 + 2.5 * (path.nodes[0].share ?? 0.1)).toFixed(1),
    }));
    const shown = share === undefined ? [] : [svg("text", { class: "share", x: path.right + 4, y: y(path) - 3 }, percent(share))];
    boxes.push(box(x, y(path), path.texts, kind, path.nodes.map((node) => nodeTip(node)).join("\n"), ...shown));
  }
  const dot = svg("circle", { class: "root", cx: MARGIN, cy: y(undefined), r: 4 });
  const name = `Draft tree of ${plural(step.nodes.length, "node")}; accepted: ` +
    `${step.accepted.map((node) => label(step.nodes[node])).join(" ") || "none"}`;
  return { end: paths.length ? y(paths.at(-1)) : 0, picture: drawing(width, 2 * MARGIN + ROW * count, name, [...edges, dot, ...boxes]) };
}

/** Return where a step's nodes are from: how many, and how many of them were accepted. */
function sources(step) {
  const nodes = nodesOf(step).filter(({ kind }) => kind === "taken" || kind === "rejected");
  const counted = (name, isFrom) => {
    const from = nodes.filter(isFrom), accepted = from.filter(({ kind }) => kind === "taken").length;
    return from.length ? [`${name} ${from.length}${accepted ? ` (${accepted} accepted)` : ""}`] : [];
  };
  return Object.entries(ORIGINS).flatMap(([letter, name]) => counted(name, ({ origin }) => origin === letter)).join(", ");
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
    card.append(html("p", { class: "empty" }, NO_DRAFT[step.no_draft]));
    return { card };
  }
  card.append(html("p", { class: "facts", title: "Where the n-gram of a node occurs before it; elsewhere: other requests, a corpus or a model" }, sources(step)));
  const { picture, end } = drawTree(run, step, state.withWindow.has(index));
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
