// -- charts ------------------------------------------------------------------------------------

/** Return bars as one shape, each step's from its low to its high value. */
const bars = (name, spans) => svg("path", { class: `bar ${name}`,
  d: spans.map(([low, high], index) => `M${index} ${-low}h.94V${-high}h-.94z`).join("") });

/** Fill an element with panels of bars over `count` steps, one below the other.
 *
 * Each panel has the largest value of its axis, that value in words, shapes and a note above it.
 * Returns a function that marks a step.
 */
function fillChart(element, count, panels) {
  const cursor = html("i", { class: "cursor", style: `width: ${100 / count}%` });
  const plots = panels.map(({ most, shapes, note = "" }) => html("div", { class: "plot" }, html("span", {}, note), stretched(-most, count, most, ...shapes)));
  const steps = html("div", { class: "steps", style: `min-width: ${3 * count}px` }, ...plots, cursor);
  const scroll = html("div", { class: "scroll" }, steps);
  element.replaceChildren(html("div", { class: "axis" }, ...panels.map(({ unit }) => html("span", {}, unit))), scroll);
  steps.addEventListener("click", (event) => go(Math.floor(shareAt(steps, event) * count)));
  return (index) => {
    cursor.style.left = `${(100 * index) / count}%`;
    if (!isWithin(cursor.offsetLeft, scroll.scrollLeft, scroll.clientWidth)) scroll.scrollLeft = cursor.offsetLeft - scroll.clientWidth / 2;
  };
}

function buildChart({ steps }) {
  if (!steps.length) return;
  const most = Math.max(1, ...steps.map((step) => step.tokens.length));
  // The axis of time is that of the steps after the prefill, whose bar may break.
  const slowest = Math.max(...(steps.length > 1 ? steps.slice(1) : steps).map((step) => step.seconds));
  const isBroken = steps[0].seconds > slowest;
  const element = byId("chart");
  state.markStep = fillChart(element, steps.length, [
    { most, unit: `${most}`, shapes: [bars("green", steps.map((step) => [0, step.accepted.length])), bars("bonus", steps.map((step) => [step.accepted.length, step.tokens.length]))] },
    { most: slowest, unit: duration(slowest, 2), note: `prefill ${duration(steps[0].seconds)}`,
      shapes: [bars("time", steps.map((step) => [0, Math.min(step.seconds, slowest)])), ...(isBroken ? [bars("gap", [[0.7 * slowest, 0.8 * slowest]])] : [])] },
  ]);
  element.querySelector(".steps").addEventListener("pointermove", (event) => {
    const index = Math.min(Math.floor(shareAt(event.currentTarget, event) * steps.length), steps.length - 1), step = steps[index];
    event.currentTarget.title = `step ${index + 1}: ${plural(step.tokens.length, "token")}, ${duration(step.seconds)}`;
  });
  const mean = (value) => sum(steps.map(value)) / steps.length;
  element.setAttribute("aria-label", `Tokens and milliseconds of ${plural(steps.length, "step")}: ` +
    `${mean((step) => step.tokens.length).toFixed(2)} tokens and ${duration(mean((step) => step.seconds))} on average`);
}
