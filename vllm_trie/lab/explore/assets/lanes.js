// -- lanes: all methods over the same output; the text ----------------------------------------

/** Return the blocks of a run, one for each step: the wider and darker, the more tokens it made. */
function blocksOfRun(run) {
  const shades = Array.from({ length: 6 }, () => "");
  run.steps.forEach(({ tokens }, index) => {
    const wide = tokens.length - 0.12;
    shades[Math.min(tokens.length, 6) - 1] += `M${run.starts[index]} 0h${wide}v1h${-wide}z`;
  });
  return stretched(0, longestRun, 1, ...shades.map((d, shade) => svg("path", { d, "fill-opacity": 0.26 + 0.148 * shade })));
}

function buildLanes() {
  const names = ["method", "speed", "tokens/step", "steps", "time", "tokens/s"];
  byId("lanes").append(html("div", { class: "lane head", "aria-hidden": "true" }, ...names.map((name) => html("span", {}, name))));
  data.runs.forEach((run, index) => {
    const [factor, source] = run.speed ?? [null, run.method === "plain" ? "plain decoding" : "no step of plain decoding to compare with"];
    const speed = factor === null ? "–" : `${source.startsWith("measured") ? "" : "≈ "}${factor.toFixed(2)}×`;
    const perStep = (run.numTokens / Math.max(1, run.steps.length)).toFixed(2);
    const figures = [perStep, run.steps.length, duration(run.seconds), (run.numTokens / run.seconds || 0).toFixed(0)];
    const cursor = html("i", { class: "cursor" }), track = html("div", { class: "track", "aria-hidden": "true" }, blocksOfRun(run), cursor);
    run.lane = html("button", { class: "lane" },
      html("b", { title: run.method }, run.method),
      html("span", { class: "strong", title: `${source}; without the prefill` }, speed),
      ...figures.map((figure) => html("span", {}, String(figure))), track);
    run.moveCursor = (offset) => {
      cursor.hidden = offset >= run.numTokens;
      cursor.style.left = `${(100 * offset) / longestRun}%`;
    };
    run.lane.setAttribute("aria-label", `${run.method}: ` + (factor === null ? "" : `${speed} the speed of plain decoding, ${source}, `) +
      `${perStep} tokens per step, ${plural(run.steps.length, "step")}, ${duration(run.seconds)}`);
    run.lane.addEventListener("click", (event) => selectRun(index,
      track.contains(event.target) ? shareAt(track, event) * longestRun : activeRun().starts[state.steps.runs] ?? 0));
    byId("lanes").append(run.lane);
    if (run.notice) byId("lanes").append(html("p", { class: "notice" }, `${run.method}: ${run.notice}`));
  });
}

function buildText(run) {
  let tint = 0;
  byId("text").replaceChildren(...run.steps.map((step, index) => html("span",
    { class: step.tokens.length > 1 ? `s${tint++ % 6}` : "single", "data-step": index }, readable(step.text))));
}

function markText(index) {
  const panel = byId("text");
  [...panel.children].forEach((span, place) => {
    span.classList.toggle("later", place > index);
    span.classList.toggle("now", place === index);
  });
  const now = panel.children[index];
  if (now && !isWithin(now.offsetTop, panel.scrollTop, panel.clientHeight)) panel.scrollTop = now.offsetTop - panel.clientHeight / 2;
}
