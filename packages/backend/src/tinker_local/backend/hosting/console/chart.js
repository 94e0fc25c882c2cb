// A chart in SVG: one metric, a line for each run, axes with numbers, and the values at the pointer.

import { h, setText, show, svg } from "./dom.js";
import { integer, number } from "./format.js";
import { thinned } from "./series.js";

const HEIGHT = 190;
const LEFT = 58;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 24;
const MOST_COLORS = 6;

let charts = 0;

/** Classes of line number `at`: six colors, then the same ones dashed. */
function styleOf(at) {
  return `c${at % MOST_COLORS}${Math.floor(at / MOST_COLORS) % 2 ? " dashed" : ""}`;
}

/** The unit for a length of time in seconds: how many seconds it has, and its name. */
function unitOf(seconds) {
  if (seconds < 240) return [1, " s"];
  return seconds < 14400 ? [60, " min"] : [3600, " h"];
}

/** A round distance, so that about `count` of it fit between two numbers. */
function stepOf(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * (1 - 1e-9));
}

/** The multiples number `from` to `to` of a step, without the noise of binary fractions. */
function multiples(from, to, step) {
  return Array.from({ length: to - from + 1 }, (_, at) => Number(((from + at) * step).toPrecision(12)));
}

/** Round numbers between two, about `count` of them. */
function ticks(low, high, count) {
  const step = stepOf(low, high, count);
  return multiples(Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9), step);
}

/** The same, from the one below `low` to the one above `high`. */
function ticksAround(low, high, count) {
  const step = stepOf(low, high, count);
  return multiples(Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9), step);
}

/** For a logarithmic axis: 1, 2 and 5 times powers of ten around two numbers; powers of ten alone if that is many. */
function logTicks(low, high, count) {
  const from = Math.floor(Math.log10(low) + 1e-9);
  const to = Math.ceil(Math.log10(high) - 1e-9);
  if (to - from <= 2) {
    const all = [];
    for (let at = from; at <= to; at += 1) all.push(...[1, 2, 5].map((factor) => Number(`${factor}e${at}`)));
    const first = all.findLastIndex((value) => value <= low * (1 + 1e-9));
    return all.slice(first, all.findIndex((value) => value >= high * (1 - 1e-9)) + 1);
  }
  const every = Math.ceil((to - from) / count);
  return Array.from({ length: Math.ceil((to - from) / every) + 1 }, (_, at) => Number(`1e${from + at * every}`));
}

/** Where a value is between two, from 0 to 1. */
function scale(low, high, logarithmic) {
  if (!logarithmic) return (value) => (value - low) / (high - low);
  const [from, to] = [Math.log10(low), Math.log10(high)];
  return (value) => (Math.log10(value) - from) / (to - from);
}

export class Chart {
  constructor(title) {
    this.title = title;
    this.lines = [];
    this.by = "step";
    this.logarithmic = false;
    this.cursor = null;
    this.drawn = null;
    const id = `chart-${(charts += 1)}`;
    this.canvas = svg("svg", {
      height: HEIGHT,
      tabindex: "0",
      role: "img",
      "aria-labelledby": `${id}-title`,
      "aria-describedby": `${id}-values ${id}-legend`,
    });
    this.values = h("p", { class: "values", id: `${id}-values` });
    this.legend = h("ul", { class: "legend", id: `${id}-legend` });
    this.frame = h("div", {}, this.canvas);
    this.node = h("figure", {}, h("figcaption", { id: `${id}-title` }, title), this.frame, this.values, this.legend);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.clientX));
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("blur", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.frame);
  }

  close() {
    this.resized.disconnect();
  }

  /** lines: [{ name, series, begin, color }], `color` a number; by: "step" or "time". */
  update(lines, by, logarithmic) {
    if (by !== this.by) this.cursor = null;
    Object.assign(this, { lines, by, logarithmic });
    this.draw();
  }

  draw() {
    const width = Math.max(200, this.frame.clientWidth);
    const lines = this.lines.map((line) => ({ ...line, style: styleOf(line.color), x: this.places(line) }));
    const useLog = this.logarithmic && lines.every(({ series }) => series.value.every((value) => value > 0));
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { series, x } of lines) {
      for (let at = 0; at < series.length; at += 1) {
        left = Math.min(left, x[at]);
        right = Math.max(right, x[at]);
        low = Math.min(low, series.value[at]);
        high = Math.max(high, series.value[at]);
      }
    }
    if (left === Infinity) [left, right, low, high] = [0, 1, 0, 1];
    if (left === right) right = left + 1;
    if (low === high) {
      const room = useLog ? 0 : Math.abs(low) / 2 || 0.5;
      [low, high] = useLog ? [low / 2, high * 2] : [low - room, high + room];
    }
    const ticksUp = useLog ? logTicks(low, high, 4) : ticksAround(low, high, 4);
    [low, high] = [ticksUp[0], ticksUp.at(-1)];
    const inside = { width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };
    const across = scale(left, right, false);
    const up = scale(low, high, useLog);
    const px = (value) => LEFT + across(value) * inside.width;
    const py = (value) => TOP + (1 - up(value)) * inside.height;
    this.canvas.setAttribute("width", width);
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const value of ticksUp) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(value), y2: py(value) }));
      parts.push(svg("text", { class: "tick", x: LEFT - 6, y: py(value) + 4, "text-anchor": "end" }, number(value)));
    }
    const [unit, unitName] = this.by === "time" ? unitOf(right - left) : [1, ""];
    for (const inUnits of ticks(left / unit, right / unit, Math.max(2, Math.floor(inside.width / 90)))) {
      if (this.by === "step" && !Number.isInteger(inUnits)) continue;
      const [value, text] = [inUnits * unit, `${number(inUnits)}${unitName}`];
      parts.push(svg("line", { class: "axis", x1: px(value), x2: px(value), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
      parts.push(svg("text", { class: "tick", x: px(value), y: HEIGHT - 6, "text-anchor": "middle" }, text));
    }
    parts.push(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
    for (const line of lines) {
      const { series, x } = line;
      const kept = thinned(series.length, (at) => px(x[at]), (at) => series.value[at]);
      const path = kept.map((at) => `${px(x[at]).toFixed(1)},${py(series.value[at]).toFixed(1)}`);
      if (path.length === 1) {
        const at = kept[0];
        parts.push(svg("circle", { class: `dot ${line.style}`, cx: px(x[at]), cy: py(series.value[at]), r: 3 }));
      } else {
        parts.push(svg("polyline", { class: `line ${line.style}`, points: path.join(" ") }));
      }
    }
    this.marks = svg("g");
    this.canvas.replaceChildren(...parts, this.marks);
    this.drawn = { lines, px, py, left, right, width };
    show(this.legend, lines.length > 1);
    show(this.values, lines.length < 2);
    if (this.legend.childElementCount !== lines.length) {
      this.legend.replaceChildren(
        ...lines.map((line) => h("li", {}, h("span", { class: `key ${line.style}`, "aria-hidden": "true" }), h("span"))),
      );
    }
    this.mark();
  }

  /** Where the points of a series are along the axis: steps, or seconds since its run's first point. */
  places({ series, begin }) {
    return this.by === "step" ? series.step : series.time.map((time) => time - begin);
  }

  point(clientX) {
    const { width, left, right } = this.drawn;
    const box = this.canvas.getBoundingClientRect();
    const share = ((clientX - box.left) * (width / box.width) - LEFT) / (width - LEFT - RIGHT);
    this.move(left + Math.min(1, Math.max(0, share)) * (right - left));
  }

  /** Arrows go from point to point of the first line, Home and End to its ends. */
  key(event) {
    const line = this.drawn?.lines[0];
    if (!line || !line.x.length) return;
    const last = line.x.length - 1;
    const here = this.cursor === null ? last : nearest(line.x, this.cursor);
    const steps = Math.max(1, Math.floor(last / 100));
    const to = { ArrowLeft: here - steps, ArrowRight: here + steps, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.move(line.x[Math.min(last, Math.max(0, to))]);
  }

  move(cursor) {
    this.cursor = cursor;
    this.mark();
  }

  /** The values at the cursor, or the last ones. */
  mark() {
    const { lines, px, py, left, right } = this.drawn;
    const words = [];
    const parts = [];
    for (const [index, line] of lines.entries()) {
      const at = this.cursor === null ? line.x.length - 1 : nearest(line.x, this.cursor);
      const [x, value] = [line.x[at], line.series.value[at]];
      const [unit, unitName] = unitOf(right - left);
      const where = this.by === "time" ? `${number(x / unit)}${unitName}` : `step ${integer(x)}`;
      words.push(`${number(value)} at ${where}`);
      setText(this.legend.children[index].lastChild, `${line.name}: ${words.at(-1)}`);
      if (this.cursor !== null) parts.push(svg("circle", { class: `dot ${line.style}`, cx: px(x), cy: py(value), r: 3.5 }));
    }
    if (this.cursor !== null) {
      const x = px(this.cursor);
      parts.unshift(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.marks.replaceChildren(...parts);
    setText(this.values, lines.length < 2 ? words.join() : "");
  }
}

/** The index of what is nearest to `value`; the last of equals, as a later step counts. */
function nearest(places, value) {
  let best = 0;
  for (let at = 1; at < places.length; at += 1) {
    if (Math.abs(places[at] - value) <= Math.abs(places[best] - value)) best = at;
  }
  return best;
}
