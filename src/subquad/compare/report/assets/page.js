/* What the page shows: the data become series, the controls choose among them. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const RESULT = DATA.result;
const METRIC = RESULT.metric;
const LABELS = RESULT.mechanisms.map((mechanism) => mechanism.label);
const OTHERS = LABELS.filter((label) => label !== RESULT.baseline);
const STYLE = Object.fromEntries([RESULT.baseline, ...OTHERS].map((label, i) => [label, i]));
const HIDDEN = new Set();
const PAPER = 680; // pixels across a page: what is drawn wider becomes too small to read
const find = (id) => document.getElementById(id);
const shown = () => LABELS.filter((label) => !HIDDEN.has(label));
const whole = (count) => count.toLocaleString("en");
const settingText = (setting) => Object.entries(setting).map(([key, value]) => `${key} ${value}`).join(", ");
const metricNumber = (value) => value.toFixed(METRIC.digits);

/* ---- series of each plot */

function paretoSpec() {
  const axis = DATA.axes[+find("pareto-cost").value];
  const costs = Object.values(axis.values);
  const series = shown().filter((label) => label in axis.values).map((label) => {
    const { mean, low, high, seeds } = DATA.quality[label];
    const interval = low === null ? "no interval" : `95% interval ${metricNumber(low)} to ${metricNumber(high)}`;
    const lines = [
      `${metricNumber(mean)}${METRIC.unit} ${METRIC.name}`,
      `${formatted(axis.values[label], axis.unit)}, ${axis.name}`,
      `${interval}, ${seeds === 1 ? "1 seed" : `${seeds} seeds`}`,
    ];
    const point = { x: axis.values[label], y: mean, low, high, lines, hollow: !axis.front.includes(label) };
    return { name: label, style: STYLE[label], points: [point] };
  });
  const visible = axis.front.filter((label) => !HIDDEN.has(label));
  const front = visible.map((label) => [axis.values[label], DATA.quality[label].mean]);
  const log = Math.max(...costs) > 3 * Math.min(...costs);
  return {
    label: `${METRIC.name} against ${axis.name}`,
    x: { name: `${axis.name} →`, unit: axis.unit, log },
    y: { name: `${METRIC.name} (${METRIC.better} is better)`, unit: METRIC.unit },
    series, front, names: "point",
  };
}

const LENGTH_COSTS = {
  training: ["training time of a batch", "ms"],
  inference: ["inference time of a batch", "ms"],
  training_bytes: ["peak memory of training", "bytes"],
  inference_bytes: ["peak memory of inference", "bytes"],
  flops: ["FLOPs of a forward pass", "FLOPs"],
};

function lengthPoint(point, key, unit) {
  const timing = typeof point[key] === "object" ? point[key] : null;
  const y = timing ? timing.median : point[key];
  const lines = [formatted(y, unit), `${whole(point.length)} tokens, batch of ${point.batch}`];
  if (timing) {
    lines[0] += ` (${formatted(timing.low, unit)} to ${formatted(timing.high, unit)}, ${timing.repeats} repeats)`;
  }
  if (Object.keys(point.setting).length) lines.push(settingText(point.setting));
  return { x: point.length, y, low: timing?.low, high: timing?.high, lines };
}

function lengthsSpec() {
  const key = find("lengths-cost").value;
  const part = find("lengths-part").value;
  const [name, unit] = LENGTH_COSTS[key];
  const known = RESULT.lengths.filter((point) => point.part === part && point[key] !== null);
  const series = shown().map((label) => {
    const ours = known.filter((point) => point.mechanism === label).sort((a, b) => a.length - b.length);
    const points = ours.map((point) => lengthPoint(point, key, unit));
    return { name: label, style: STYLE[label], joined: true, points };
  });
  const ticks = [...new Set(known.map((point) => point.length))].sort((a, b) => a - b);
  return {
    label: `${name} by sequence length`,
    x: { name: "tokens in a sequence →", unit: "", log: true, ticks },
    y: { name, unit, log: true },
    series, names: "end",
  };
}

function describeLengths() {
  const part = find("lengths-part").value;
  const points = RESULT.lengths.filter((point) => point.part === part);
  const budgets = new Set(points.map((point) => point.batch * point.length));
  const text = ["Both axes are logarithmic. Bars are quartiles of the repeats."];
  if (budgets.size === 1) text.push(`Every batch holds ${whole([...budgets][0])} tokens, whatever the length.`);
  for (const point of points.filter((item) => item.status !== "done")) {
    text.push(`${point.mechanism} at ${whole(point.length)} tokens: ${point.status}, ${point.reason}.`);
  }
  find("lengths-note").textContent = text.join(" ");
}

function curvesSpec() {
  const key = find("curves-value").value;
  const byTime = find("curves-by").value === "seconds";
  const [name, unit] = key === "value" ? [METRIC.name, METRIC.unit] : ["validation loss", ""];
  const series = shown().flatMap((label) => {
    const trials = RESULT.trials.filter((trial) => trial.mechanism === label);
    const failed = trials.filter((trial) => trial.status === "failed");
    return [
      {
        name: label, style: STYLE[label], joined: true, band: true, quiet: true,
        points: meanCurve(trials, key, byTime, name),
      },
      ...failed.map((trial) => ({
        name: `${label}, seed ${trial.seed} (failed)`, style: STYLE[label], joined: true, failed: true,
        points: trial.curve.filter((point) => isKnown(point, key, byTime)).map((point) => ({
          x: byTime ? point.seconds / 60 : point.update, y: point[key],
          lines: [`${name} ${formatted(point[key], "", 4)} at update ${whole(point.update)}`, trial.reason],
        })),
      })),
    ];
  });
  return {
    label: `${name} by ${byTime ? "training time" : "update"}`,
    x: { name: byTime ? "minutes of training →" : "updates →", unit: "", fromZero: true },
    y: { name: `${name} on validation data`, unit },
    series, names: "end",
  };
}

function isKnown(point, key, byTime) {
  return point && point[key] !== null && (!byTime || point.seconds !== null);
}

/* Mean, lowest and highest of the finished seeds at every update that all of them have. */
function meanCurve(trials, key, byTime, name) {
  const done = trials.filter((trial) => trial.status === "done");
  const curves = done.map((trial) => new Map(trial.curve.map((point) => [point.update, point])));
  if (!curves.length) return [];
  const inAll = (update) => curves.every((curve) => isKnown(curve.get(update), key, byTime));
  const updates = [...curves[0].keys()].filter(inAll);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return updates.sort((a, b) => a - b).map((update) => {
    const points = curves.map((curve) => curve.get(update));
    const values = points.map((point) => point[key]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const lines = [`${name} ${formatted(mean(values), "", 4)}`, `update ${whole(update)}`];
    if (byTime) lines[1] += `, ${formatted(mean(points.map((point) => point.seconds)) / 60, "minutes")}`;
    if (values.length > 1) lines.push(`${values.length} seeds, ${formatted(low, "", 4)} to ${formatted(high, "", 4)}`);
    return { x: byTime ? mean(points.map((point) => point.seconds)) / 60 : update, y: mean(values), low, high, lines };
  });
}

function approximationSpec() {
  const source = find("approximation-source").value;
  const known = RESULT.approximation.filter((point) => point.source === source);
  const series = shown().map((label) => {
    const points = known.filter((point) => point.mechanism === label).sort((a, b) => a.cost - b.cost);
    const described = points.map((point) => ({
      x: point.cost, y: point.error,
      lines: [`error ${formatted(point.error, "")}`, `${formatted(point.cost, "")} of the time of exact attention`,
        [point.option, `${whole(point.length)} tokens`, settingText(point.setting)].filter(Boolean).join(", ")],
    }));
    return { name: label, style: STYLE[label], joined: true, points: described };
  }).filter((item) => item.points.length);
  return {
    label: "Distance from exact attention against relative time",
    x: { name: "time relative to exact attention →", unit: "", log: true },
    y: { name: "relative error (lower is better)", unit: "", log: true },
    series, names: "end",
  };
}

/* ---- controls */

function fill(id, options, chosen) {
  const select = find(id);
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (chosen !== undefined && options.some(([value]) => value === chosen)) select.value = chosen;
  select.closest("label").hidden = options.length < 2;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function fillControls() {
  const parts = new Set(RESULT.lengths.map((point) => point.part));
  const points = RESULT.trials.flatMap((trial) => trial.curve);
  const has = (key) => points.some((point) => point[key] !== null);
  const sources = new Set(RESULT.approximation.map((point) => point.source));
  const costs = Object.entries(LENGTH_COSTS).filter(([key]) => RESULT.lengths.some((point) => point[key] !== null));
  fill("pareto-cost", DATA.axes.map((axis, i) => [String(i), capital(axis.name)]));
  fill("lengths-cost", costs.map(([key, [name]]) => [key, capital(name)]));
  fill("lengths-part", [["full", "Whole model"], ["encoder", "Encoder"]].filter(([key]) => parts.has(key)), DATA.part);
  fill("curves-value", [["value", METRIC.name], ["loss", "Loss"]].filter(([key]) => has(key)));
  fill("curves-by", [["update", "Update"], ["seconds", "Wall clock"]].filter(([key]) => has(key)));
  fill("approximation-source", [["trained", "Trained"], ["random", "Random"]].filter(([key]) => sources.has(key)));
}

function legendButton(label) {
  const button = element("button", { type: "button", "aria-pressed": "true" }, sample(STYLE[label]), label);
  button.addEventListener("click", () => {
    if (!HIDDEN.delete(label)) HIDDEN.add(label);
    button.setAttribute("aria-pressed", String(!HIDDEN.has(label)));
    drawAll();
  });
  return button;
}

const PLOTS = [
  ["pareto", paretoSpec, DATA.axes.length],
  ["lengths", lengthsSpec, RESULT.lengths.some((point) => point.status === "done")],
  ["curves", curvesSpec, RESULT.trials.some((trial) => trial.curve.length)],
  ["approximation", approximationSpec, RESULT.approximation.length],
].map(([id, spec, known]) => ({ id, spec, known, plot: known ? new Plot(find(id)) : null }));

function drawAll(width) {
  for (const { spec, plot } of PLOTS) plot?.draw(spec(), width);
  if (RESULT.lengths.length) describeLengths();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

function start() {
  find("plots").hidden = PLOTS.every(({ known }) => !known);
  fillControls();
  find("legend").append(...[RESULT.baseline, ...OTHERS].map(legendButton));
  for (const { id, known, plot, spec } of PLOTS) {
    find(id).closest("section").hidden = !known;
    for (const select of document.querySelectorAll(`select[id^="${id}-"]`)) {
      select.addEventListener("change", () => {
        plot.draw(spec());
        if (id === "lengths") describeLengths();
      });
    }
  }
  for (const row of document.querySelectorAll("tr[data-label]")) {
    if (row.dataset.label in STYLE) row.cells[0].prepend(sample(STYLE[row.dataset.label]));
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  find("theme").hidden = find("download").hidden = false;
  find("theme").setAttribute("aria-pressed", String(dark.matches));
  find("theme").addEventListener("click", () => {
    setTheme(find("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark");
  });
  find("raw").addEventListener("toggle", () => {
    find("raw-text").textContent = find("raw").open ? JSON.stringify(RESULT, null, 2) : "";
  });
  find("download").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([JSON.stringify(RESULT, null, 2)], { type: "application/json" }));
    element("a", { href: url, download: "comparison.json" }).click();
    URL.revokeObjectURL(url);
  });
  addEventListener("beforeprint", () => drawAll(PAPER));
  addEventListener("afterprint", () => drawAll());
  drawAll();
}

start();
