// -- lanes: all methods over the same output; the text ----------------------------------------

function buildLanes() {
  const names = ["method", "speed", "tokens/step", "steps", "time", "tokens/s"];
  byId("lanes").append(html("div", { class: "lane head", "aria-hidden": "true" }, ...names.map((name) => html("span", {}, name))));
  data.runs.forEach((run, index) => {
    const [factor, source] = run.speed ?? [null, run.method === "plain" ? "plain decoding" : "no step of plain decoding to compare with"];
    const speed = factor === null ? "–" : `${source.startsWith("measured") ? "" : "≈ "}${factor.toFixed(2)}×`;
    const perStep = (run.numTokens / Math.max(1, run.steps.length)).toFixed(2);
    const figures = [perStep, run.steps.length, duration(run.seconds), (run.numTokens / run.seconds || 0).toFixed(0)];
    run.lane = html("button", { class: "lane" },
      html("b", { title: run.method }, run.method),
      html("span", { class: "strong", title: `${source}; without the prefill` }, speed),
      ...figures.map((figure) => html("span", {}, String(figure))),
      html("canvas", { "aria-hidden": "true" }));
    run.lane.setAttribute("aria-label", `${run.method}: ` + (factor === null ? "" : `${speed} the speed of plain decoding, ${source}, `) +
      `${perStep} tokens per step, ${plural(run.steps.length, "step")}, ${duration(run.seconds)}`);
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
