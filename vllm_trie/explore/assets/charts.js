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

/** Name the prefill above its bar, and break the bar if it is higher than the axis. */
function markPrefill({ context }, top, wide, seconds, slowest) {
  context.textAlign = "left";
  context.fillStyle = color("dim");
  context.fillText(`prefill ${duration(seconds, 3)}`, AXIS, top - 7);
  if (seconds <= slowest) return;
  context.strokeStyle = color("card");
  context.lineWidth = 2;
  for (const y of [top + 7, top + 12]) {
    context.beginPath();
    context.moveTo(AXIS - 1, y + 3);
    context.lineTo(AXIS + Math.max(wide, 3) + 1, y - 3);
    context.stroke();
  }
}

function drawCharts(run) {
  const [from, to] = state.window, count = run.steps.length;
  const shown = run.steps.slice(from, to);
  const most = Math.max(1, ...shown.map((step) => step.tokens.length));
  // The axis is that of the steps after the prefill, whose bar may break.
  const slowest = Math.max(...(shown.length > 1 && !from ? shown.slice(1) : shown).map((step) => step.seconds));
  const chart = surface(byId("chart")), high = chart.height - 8;
  drawPanel(chart, 4, high * 0.6, from, to, most, (a, b) => tokenBars(run, a, b), (value) => `${value}`);
  drawPanel(chart, high * 0.6 + 22, high * 0.4 - 20, from, to, slowest,
    (a, b) => [[mean(run.steps.slice(a, b), (step) => step.seconds), "time"]],
    (value) => duration(value, 2));
  if (!from && count) markPrefill(chart, high * 0.6 + 22, (chart.width - AXIS) / to, shown[0].seconds, slowest);
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
