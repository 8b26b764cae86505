// -- navigation --------------------------------------------------------------------------------

const numSteps = () => (state.view === "runs" ? activeRun().steps.length : beams.steps);

function go(index) {
  state.steps[state.view] = clamp(index, 0, Math.max(0, numSteps() - 1));
  show();
}

function selectRun(index, offset) {
  state.run = clamp(index, 0, data.runs.length - 1);
  state.steps.runs = stepAt(activeRun(), offset);
  buildText(activeRun());
  buildChart(activeRun());
  byId("about").textContent = readable(activeRun().about);
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
  if (state.view === "runs") Object.assign(moves, { m: activeRun().best, s: activeRun().worst });
  if (key in moves) go(moves[key]);
  else if (key === " ") play(state.timer === null);
  else if (key === "t") setTheme(root.dataset.theme === "dark" ? "light" : "dark");
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
  for (const element of document.querySelectorAll(".jump, #about")) element.hidden = state.view !== "runs";
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
      each.moveCursor(run.starts[index]);
    });
    state.markStep(index);
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
  byId("text").addEventListener("click", (event) => event.target.dataset.step && go(Number(event.target.dataset.step)));
  byId("slider").addEventListener("input", () => go(Number(byId("slider").value)));
  byId("theme").addEventListener("click", () => act("t"));
  for (const view of ["runs", "beams"]) byId(`tab-${view}`).addEventListener("click", () => selectView(view));
  for (const button of document.querySelectorAll("[data-key]")) button.addEventListener("click", () => act(button.dataset.key));
  document.addEventListener("keydown", onKey);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", follow);
  follow();
  const richest = argmax(data.runs, (run) => run.steps[run.best]?.accepted.length ?? 0), run = data.runs[richest];
  if (run) selectRun(richest, run.starts[run.best] ?? 0);
  else show();
}

start();
