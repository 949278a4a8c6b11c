/* A plot in an element: axes, curves, marks, names, and the values of a mark under the pointer or the arrow keys.

   spec = {
     label, x: axis, y: axis,              axis = {name, unit, log, ticks, from_zero}
     series: [{name, style, points: [{x, y, low, high, lines, hollow, dots}], joined, failed, band, last_mark_only}],
                                           last_mark_only: the other points have none; failed: it ends in a cross
     front: [[x, y], ...],                 a dashed line, or none
     names: "end" (beside the last point) or "point" (beside every first point)
     lines: [{name, y, end}]               dashed: across the plot, or from the first point to the height of `end` at the
                                           last one
   }                                                                                                              */

const SVG = "http://www.w3.org/2000/svg";
const GAP = 15; // pixels between the lines of names
const LETTER = 7.6; // pixels of a letter of a name, about

function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/* Corners of a regular polygon or star, the first one at the given angle. */
function corners(count, radius, start = -90, inner = null) {
  const total = inner === null ? count : 2 * count;
  return Array.from({ length: total }, (_, i) => {
    const size = inner !== null && i % 2 ? inner : radius;
    const angle = ((start + (360 / total) * i) * Math.PI) / 180;
    return `${(size * Math.cos(angle)).toFixed(2)} ${(size * Math.sin(angle)).toFixed(2)}`;
  });
}

const closed = (points) => `M${points.join("L")}Z`;
const SHAPES = [
  "M-4.5 0A4.5 4.5 0 1 0 4.5 0A4.5 4.5 0 1 0 -4.5 0Z",
  closed(corners(4, 5.4, 45)),
  closed(corners(3, 6)),
  closed(corners(4, 6)),
  closed(corners(3, 6, 90)),
  closed(corners(5, 6.5, -90, 2.8)),
  closed(corners(4, 6.5, -90, 2.4)),
  closed(corners(6, 5.4)),
  closed(corners(3, 6, 0)),
  closed(corners(5, 5.6, 90)),
  closed(corners(4, 6.5, 45, 2.4)),
  closed(corners(3, 6, 180)),
];
const CROSS = "M-4 -4L4 4M4 -4L-4 4";

function mark(style, x = 0, y = 0, hollow = false) {
  const shape = { d: SHAPES[style % SHAPES.length], transform: `translate(${x} ${y})` };
  return node("path", { ...shape, class: hollow ? "mark hollow" : "mark" });
}

function sample(style) {
  const svg = node("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" });
  svg.classList.add(`s${style % 12}`);
  svg.append(mark(style));
  return svg;
}

class Plot {
  constructor(holder) {
    this.holder = holder;
    this.tip = element("div", { class: "tip", role: "status", "aria-live": "polite" });
    this.tip.hidden = true;
    this.spec = null;
    this.chosen = null; // [series, point]
    new ResizeObserver(() => {
      if (this.spec && this.holder.clientWidth !== this.width) this.draw(this.spec);
    }).observe(holder);
    holder.addEventListener("pointermove", (event) => this.nearest(event));
    holder.addEventListener("pointerdown", (event) => this.nearest(event));
    holder.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.choose(null); // a finger leaves at once, and its value stays
    });
    holder.addEventListener("keydown", (event) => this.key(event));
    holder.addEventListener("focus", () => {
      if (holder.matches(":focus-visible")) this.choose(this.chosen ?? this.firstPoint());
    });
    holder.addEventListener("blur", () => this.choose(null));
  }

  draw(spec, width = this.holder.clientWidth) {
    this.spec = spec;
    this.chosen = null;
    this.tip.hidden = true;
    this.width = width;
    const points = spec.series.flatMap((series) => series.points);
    if (!points.length || !this.width) return this.drawNothing();
    this.holder.tabIndex = 0;
    this.holder.setAttribute("role", "group");
    this.holder.setAttribute("aria-label", `${spec.label}. Arrow keys move between values.`);
    this.layOut(points);
    const count = spec.series.filter((series) => series.points.length).length;
    const about = `${spec.y.name} against ${spec.x.name}, ${count} curves or groups of points.`;
    const box = { viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": spec.label };
    this.svg = node("svg", box, node("desc", {}, about));
    this.drawAxes();
    if (spec.front?.length > 1) this.svg.append(node("path", { class: "front", d: this.line(spec.front) }));
    this.drawLines();
    for (const series of spec.series) this.svg.append(this.drawSeries(series));
    this.drawNames();
    this.ring = node("circle", { class: "ring", r: 9, visibility: "hidden" });
    this.svg.append(this.ring);
    this.holder.replaceChildren(this.svg, this.tip);
  }

  drawNothing() {
    this.holder.removeAttribute("tabindex");
    this.holder.removeAttribute("role");
    this.holder.removeAttribute("aria-label");
    this.holder.replaceChildren(element("p", { class: "empty" }, "Nothing to show: no mechanism is chosen."));
  }

  layOut(points) {
    const { x, y, series, names } = this.spec;
    this.height = Math.round(Math.min(430, Math.max(270, this.width * 0.52)));
    this.named = this.width >= 560;
    const longest = Math.max(0, ...series.map((item) => item.name.length));
    const right = this.named && names === "end" ? Math.min(190, 26 + LETTER * longest) : 16;
    this.box = { left: 16, right: this.width - right, top: 34, bottom: this.height - 48 };
    const ends = this.spec.lines.flatMap((line) => [line.y, line.end ?? line.y]);
    const drawn = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y, ...point.dots]);
    const heights = [...drawn, ...ends];
    const rows = Math.floor((this.box.bottom - this.box.top) / 45);
    this.y = scale(heights, this.box.bottom, this.box.top, y, rows);
    const widest = Math.max(...this.y.ticks.map((tick) => formatted(tick, y.unit).length));
    this.box.left = 14 + 7 * widest;
    const columns = Math.floor((this.box.right - this.box.left) / 75);
    this.x = scale(points.map((point) => point.x), this.box.left, this.box.right, x, columns);
  }

  drawAxes() {
    const { left, right, top, bottom } = this.box;
    const { x, y } = this.spec;
    for (const tick of this.y.ticks) {
      const at = this.y.at(tick);
      this.svg.append(node("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
      const place = { x: left - 8, y: at + 4, "text-anchor": "end" };
      this.svg.append(node("text", place, formatted(tick, y.unit)));
    }
    this.svg.append(node("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    let free = -Infinity;
    for (const tick of this.x.ticks) {
      const at = this.x.at(tick);
      const text = formatted(tick, x.unit);
      const half = 3.6 * text.length;
      this.svg.append(node("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 5 }));
      const middle = Math.min(at, this.width - half);
      if (middle - half < free) continue;
      free = middle + half + 6;
      this.svg.append(node("text", { x: middle, y: bottom + 20, "text-anchor": "middle" }, text));
    }
    this.svg.append(node("text", { x: right, y: this.height - 6, "text-anchor": "end" }, x.name));
    this.svg.append(node("text", { x: 0, y: 14 }, y.name));
  }

  line(pairs) {
    return pairs.map(([x, y], i) => `${i ? "L" : "M"}${this.x.at(x).toFixed(1)} ${this.y.at(y).toFixed(1)}`).join("");
  }

  drawLines() {
    const { left, right, top, bottom } = this.box;
    const across = this.spec.series.flatMap((series) => series.points.map((point) => this.x.at(point.x)));
    const places = this.spec.lines.map(({ name, y, end }) => {
      const [first, last] = end == null ? [left, right] : [Math.min(...across), Math.max(...across)];
      const ends = `M${first} ${this.y.at(y)}L${last} ${this.y.at(end ?? y)}`;
      this.svg.append(node("path", { class: "front", d: ends }));
      return { name, text: this.y.at(y) - 4 };
    });
    places.sort((a, b) => a.text - b.text);
    spread(places, top, bottom);
    for (const { name, text } of places) {
      this.svg.append(node("text", { class: "reference", x: left + 12, y: text }, name));
    }
  }

  drawSeries(series) {
    const group = node("g", { class: `series s${series.style % 12}`, "data-label": series.name });
    const pairs = series.points.map((point) => [point.x, point.y]);
    if (series.band && pairs.length > 1) {
      const upper = series.points.map((point) => [point.x, point.high]);
      const lower = series.points.map((point) => [point.x, point.low]).reverse();
      group.append(node("path", { class: "band", d: `${this.line([...upper, ...lower])}Z` }));
    }
    if (series.joined && pairs.length > 1) {
      group.append(node("path", { class: series.failed ? "curve failed" : "curve", d: this.line(pairs) }));
    }
    series.points.forEach((point, i) => {
      const [x, y] = [this.x.at(point.x), this.y.at(point.y)];
      if (!series.band && point.low != null && point.high > point.low) {
        const ends = { y1: this.y.at(point.low), y2: this.y.at(point.high) };
        group.append(node("line", { class: "whisker", x1: x, x2: x, ...ends }));
      }
      for (const dot of point.dots) group.append(node("circle", { class: "dot", cx: x, cy: this.y.at(dot), r: 2.2 }));
      const isLast = i === series.points.length - 1;
      if (!series.failed && (isLast || !series.last_mark_only)) group.append(mark(series.style, x, y, point.hollow));
      if (series.failed && isLast) {
        group.append(node("path", { class: "curve", d: CROSS, transform: `translate(${x} ${y})` }));
      }
    });
    return group;
  }

  /* Names stand beside the curves where there is room, moved apart so that none covers another. */
  drawNames() {
    if (!this.named) return;
    const atEnd = this.spec.names === "end";
    const named = this.spec.series.filter((series) => series.points.length && !series.failed);
    const places = named.map((series) => {
      const point = series.points[atEnd ? series.points.length - 1 : 0];
      return { series, x: this.x.at(point.x), y: this.y.at(point.y), text: this.y.at(point.y) };
    });
    places.sort((a, b) => a.text - b.text);
    if (atEnd) spread(places, this.box.top, this.box.bottom);
    else stepAside(places);
    for (const { series, x, y, text } of places) {
      const group = node("g", { class: `series s${series.style % 12}`, "data-label": series.name });
      const flip = !atEnd && x + 12 + LETTER * series.name.length > this.box.right;
      const start = atEnd ? this.box.right + 14 : flip ? x - 12 : x + 12;
      if (atEnd) group.append(node("path", { class: "leader", d: `M${x + 7} ${y}L${this.box.right + 10} ${text}` }));
      const place = { class: "name", x: start, y: text + 4, "text-anchor": flip ? "end" : "start" };
      group.append(node("text", place, series.name));
      this.svg.append(group);
    }
  }

  /* ---- values of a point */

  firstPoint() {
    const series = this.spec.series.findIndex((item) => item.points.length);
    return series < 0 ? null : [series, 0];
  }

  nearest(event) {
    if (!this.svg?.isConnected) return;
    const frame = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    let [best, distance] = [null, 40];
    this.spec.series.forEach((series, i) => series.points.forEach((point, j) => {
      const away = Math.hypot(this.x.at(point.x) - x, this.y.at(point.y) - y);
      if (away < distance) [best, distance] = [[i, j], away];
    }));
    this.choose(best);
  }

  key(event) {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (event.key === "Escape") return this.choose(null);
    if (!(event.key in moves) || !this.firstPoint()) return;
    event.preventDefault();
    const [down, along] = moves[event.key];
    let [series, point] = this.chosen ?? this.firstPoint();
    const all = this.spec.series;
    if (down) do series = (series + down + all.length) % all.length; while (!all[series].points.length);
    point = Math.max(0, Math.min(all[series].points.length - 1, point + along));
    this.choose([series, point]);
  }

  choose(place) {
    if (!this.svg?.isConnected) return;
    this.chosen = place;
    this.tip.hidden = !place;
    this.ring.setAttribute("visibility", place ? "visible" : "hidden");
    if (!place) return;
    const series = this.spec.series[place[0]];
    const point = series.points[place[1]];
    const [x, y] = [this.x.at(point.x), this.y.at(point.y)];
    this.ring.setAttribute("cx", x);
    this.ring.setAttribute("cy", y);
    const [first, ...rest] = point.lines;
    const setting = rest.map((line) => element("span", { class: "setting" }, line));
    this.tip.className = `tip s${series.style % 12}`;
    this.tip.replaceChildren(element("strong", {}, series.name), element("span", {}, first), ...setting);
    const left = Math.max(0, Math.min(x + 14, this.width - this.tip.offsetWidth));
    const above = y - this.tip.offsetHeight - 14;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${above < 0 ? y + 16 : above}px`;
  }
}

/* Moves places, sorted by their text's height, so that neighbours are GAP apart and all stay between top and bottom. */
function spread(places, top, bottom) {
  for (let i = 1; i < places.length; i++) places[i].text = Math.max(places[i].text, places[i - 1].text + GAP);
  const last = places.length - 1;
  if (last >= 0) places[last].text = Math.min(places[last].text, bottom);
  for (let i = last - 1; i >= 0; i--) places[i].text = Math.min(places[i].text, places[i + 1].text - GAP);
  places.forEach((place, i) => {
    place.text = Math.max(place.text, top + i * GAP);
  });
}

/* Moves a name down while another stands in its place; sorted by height. */
function stepAside(places) {
  const meet = (a, b) => Math.abs(a.x - b.x) < LETTER * Math.max(a.series.name.length, b.series.name.length) + 12;
  places.forEach((place, i) => {
    for (const other of places.slice(0, i)) {
      if (meet(place, other) && place.text - other.text < GAP) place.text = other.text + GAP;
    }
  });
}
