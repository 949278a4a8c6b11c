/* What the page shows: the views of every plot, of which the controls choose one, and the legend that hides series. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const STYLE = Object.fromEntries(DATA.labels.map((label, i) => [label, i]));
const HIDDEN = new Set();
const PAPER = 680; // pixels across a page: what is drawn wider becomes too small to read
const find = (id) => document.getElementById(id);
const isShown = (series) => !HIDDEN.has(series.mechanism);

const PLOTS = Object.entries(DATA.plots).map(([id, { controls, views }]) => ({
  id,
  plot: new Plot(find(id)),
  note: find(`${id}-note`),
  selects: controls.map((control) => find(`${id}-${control.name}`)),
  views,
}));

/* The chosen view, without the mechanisms that are hidden. */
function drawPlot({ plot, note, selects, views }, width) {
  const view = views[selects.map((select) => select.value).join(" ")];
  const series = view.series.filter(isShown).map((one) => ({ ...one, style: STYLE[one.mechanism] }));
  const places = Object.fromEntries(series.map((one) => [one.name, one.points[0]]));
  const front = view.front.filter((name) => name in places).map((name) => [places[name].x, places[name].y]);
  plot.draw({ ...view, series, front }, width);
  note.textContent = view.note;
  note.hidden = !view.note;
}

const STYLED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family"];

/* The drawing as a file of its own: what the page's style says is written into its elements. */
function saveFigure(plot, name) {
  const copy = plot.svg.cloneNode(true);
  const drawn = [plot.svg, ...plot.svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((one, i) => {
    const style = getComputedStyle(drawn[i]);
    for (const property of STYLED) one.setAttribute(property, style.getPropertyValue(property));
    one.removeAttribute("class");
  });
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", plot.width);
  copy.setAttribute("height", plot.height);
  save(new XMLSerializer().serializeToString(copy), "image/svg+xml", `${name}.svg`);
}

function save(text, type, name) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

function drawAll(width) {
  for (const one of PLOTS) drawPlot(one, width);
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

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

function showTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  find("theme").hidden = false;
  find("theme").setAttribute("aria-pressed", String(dark.matches));
  find("theme").addEventListener("click", () => {
    setTheme(find("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark");
  });
}

function showRawData() {
  const text = () => JSON.stringify(DATA.result, null, 2);
  find("download").hidden = false;
  find("raw").addEventListener("toggle", () => {
    find("raw-text").textContent = find("raw").open ? text() : "";
  });
  find("download").addEventListener("click", () => {
    save(text(), "application/json", "comparison.json");
  });
}

function start() {
  find("plots").hidden = !PLOTS.length;
  find("legend").append(...DATA.labels.map(legendButton));
  for (const one of PLOTS) {
    for (const select of one.selects) select.addEventListener("change", () => drawPlot(one));
    find(`${one.id}-save`).addEventListener("click", () => saveFigure(one.plot, one.id));
  }
  for (const row of document.querySelectorAll("tr[data-label]")) {
    if (row.dataset.label in STYLE) row.cells[0].prepend(sample(STYLE[row.dataset.label]));
  }
  showTheme();
  showRawData();
  addEventListener("beforeprint", () => drawAll(PAPER));
  addEventListener("afterprint", () => drawAll());
  drawAll();
}

start();
