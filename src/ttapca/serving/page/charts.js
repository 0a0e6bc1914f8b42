// Charts in SVG. Elements are made once and then moved, so that a tooltip under the mouse stays.

import { clock, duration, known, ratio } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44; // pixels for the numbers of an axis; the style sheet knows them too
const SURE = 0.01; // p-value from which a band has surely shifted

function make(name, attributes = {}, parent = null) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  parent?.append(element);
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = typeof value === "number" ? String(Math.round(100 * value) / 100) : value;
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** As many elements as there are values, made by `create` and changed by `update`. */
function match(group, values, create, update) {
  while (group.childElementCount > values.length) group.lastElementChild.remove();
  while (group.childElementCount < values.length) group.append(create());
  values.forEach((value, at) => update(group.children[at], value, at));
}

function text(words, attributes) {
  const element = make("text", attributes);
  element.textContent = words;
  return element;
}

function relabel(element, words, attributes) {
  set(element, attributes);
  if (element.textContent !== words) element.textContent = words;
}

/** One unit is one pixel, so that letters have the same size on a phone. */
const widthOf = (svg) => svg.clientWidth || 320;

/** Bars of bands, on a scale that the two charts below define. */
class BandChart {
  constructor(parent, height) {
    this.height = height;
    this.left = LEFT;
    this.svg = make("svg", { height, role: "img" }, parent);
    this.lines = make("g", { class: "lines" }, this.svg);
    this.ticks = make("g", { class: "ticks" }, this.svg);
    this.bars = make("g", { class: "bars" }, this.svg);
    this.values = make("g", { class: "values" }, this.svg);
  }

  draw(bands, ticks, place, baseline, describe) {
    this.width = widthOf(this.svg);
    match(this.lines, ticks, () => make("line"), (line, tick) => {
      const y = place(tick.value);
      set(line, { x1: this.left, x2: this.width, y1: y, y2: y, class: tick.strong ? "strong" : "" });
    });
    match(this.ticks, ticks, () => text("", { "text-anchor": "end" }), (label, tick) =>
      relabel(label, tick.label, { x: this.left - 6, y: place(tick.value) + 4 }));
    const step = (this.width - this.left) / Math.max(1, bands.length);
    const thick = Math.min(46, 0.7 * step);
    match(this.bars, bands, makeBar, (bar, band, at) => {
      const [top, low] = [place(band.value), baseline].sort((one, two) => one - two);
      const x = this.left + (at + 0.5) * step - thick / 2;
      set(bar, { x, y: top, width: thick, height: Math.max(1, low - top), rx: 1.5, class: band.sure ? "sure" : "usual" });
      relabel(bar.firstElementChild, describe(band), {});
    });
    const written = step >= 30 ? bands : []; // narrower ones have their value in the tooltip
    match(this.values, written, () => text("", { "text-anchor": "middle" }), (label, band, at) => {
      const y = place(band.value);
      const below = y > baseline + 0.5;
      relabel(label, band.label, { x: this.left + (at + 0.5) * step, y: below ? y + 14 : y - 5 });
    });
  }
}

function makeBar() {
  const bar = make("rect");
  make("title", {}, bar);
  return bar;
}

/** Variance of each band over that of the source, in doublings above and below 1. */
export class RatioChart extends BandChart {
  constructor(parent) {
    super(parent, 170);
  }

  show(bands) {
    const sizes = bands.map((band) => doublings(band.ratio));
    const [low, high] = [-reach(-Math.min(...sizes)), reach(Math.max(...sizes))];
    const place = (value) => 16 + ((high - value) / (high - low)) * (this.height - 32);
    const step = Math.ceil((high - low) / 6);
    const ticks = [];
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
      ticks.push({ value, strong: value === 0, label: value < 0 ? `1/${2 ** -value}` : `${2 ** value}` });
    }
    const shown = bands.map((band, at) => ({
      ...band,
      value: Math.max(low, Math.min(high, sizes[at])),
      sure: known(band.p_value) && band.p_value <= SURE,
      label: ratio(band.ratio),
    }));
    this.draw(shown, ticks, place, place(0), (band) =>
      `${bandName(band)}: ${ratio(band.ratio)} times the variance of the source, p = ${ratio(band.p_value)}`);
    const sure = shown.filter((band) => band.sure).length;
    set(this.svg, { "aria-label": `Shift by band: ${sure} of ${bands.length} bands have surely shifted. The table below has the numbers.` });
  }
}

/** The gain of each band, from 0 up. */
export class GainChart extends BandChart {
  constructor(parent) {
    super(parent, 170);
  }

  show(bands, gains) {
    const most = Math.max(1, ...gains.filter(known));
    const floor = this.height - 16;
    const place = (value) => floor - (value / most) * (floor - 22);
    const ticks = [0, 0.5, 1].map((value) => ({ value, strong: value === 0, label: String(value) }));
    if (most > 1.2) ticks.push({ value: most, label: ratio(most) });
    const shown = bands.map((band, at) => ({ ...band, value: gains[at] ?? 1, label: ratio(gains[at]), sure: true }));
    this.draw(shown, ticks, place, floor, (band) => `${bandName(band)}: gain ${ratio(band.value)}`);
    const words = gains.map((gain) => ratio(gain)).join(", ");
    set(this.svg, { "aria-label": `Gain by band, from large shapes to fine detail: ${words}` });
  }
}

/** How far a scale goes on one side of 1: two doublings at least, ten at most. */
const reach = (size) => Math.min(10, Math.max(2, Math.ceil(size)));
const doublings = (value) => (known(value) ? Math.log2(Math.max(value, 1e-12)) : 0);

export function bandName(band) {
  const numbers = band.first === band.last ? `component ${band.first}` : `components ${band.first} to ${band.last}`;
  return band.layer ? `${band.layer}, ${numbers}` : numbers;
}

/** A line of the shift over time, with axes or, in the list, without. */
export class HistoryChart {
  constructor(parent, { height, axes }) {
    Object.assign(this, { height, axes });
    this.left = axes ? LEFT : 0;
    this.low = axes ? height - 18 : height - 2;
    this.svg = make("svg", { height, class: "history", ...(axes ? { role: "img" } : { "aria-hidden": "true" }) }, parent);
    this.shades = make("g", { class: "shades" }, this.svg);
    this.lines = make("g", { class: "lines" }, this.svg);
    this.labels = make("g", { class: "ticks" }, this.svg);
    this.area = make("path", { class: "area" }, this.svg);
    this.line = make("path", { class: "line" }, this.svg);
    this.marks = make("g", { class: "marks" }, this.svg);
  }

  show(history, now, seconds) {
    this.width = widthOf(this.svg);
    const top = this.axes ? 8 : 2;
    const x = (at) => this.left + (this.width - this.left) * Math.max(0, 1 - (now - at) / seconds);
    const y = (shift) => this.low - shift * (this.low - top);
    const points = thinned(history.filter((point) => point.at >= now - seconds), this.axes ? 300 : 40);
    const path = points.map((point) => `${x(point.at).toFixed(1)},${y(point.shift).toFixed(1)}`);
    set(this.line, { d: path.length > 1 ? `M${path.join("L")}` : "" });
    const ends = path.length > 1 ? [x(points[0].at), x(points.at(-1).at)] : [];
    set(this.area, { d: ends.length ? `M${ends[0].toFixed(1)},${this.low}L${path.join("L")}L${ends[1].toFixed(1)},${this.low}Z` : "" });
    const on = stretches(points);
    for (const [group, from, size] of [[this.shades, top, this.low - top], [this.marks, this.low - 3, 3]]) {
      match(group, on, () => make("rect"), (shade, [begin, end]) =>
        set(shade, { x: x(begin), y: from, width: Math.max(1, x(end) - x(begin)), height: size }));
    }
    if (this.axes) this.drawAxes(history, now, seconds, y);
  }

  drawAxes(history, now, seconds, y) {
    match(this.lines, [0, 0.5, 1], () => make("line"), (line, value) =>
      set(line, { x1: this.left, x2: this.width, y1: y(value), y2: y(value), class: value ? "" : "strong" }));
    const words = [
      ...[0, 0.5, 1].map((value) => [String(value), this.left - 6, y(value) + 4, "end"]),
      [clock(now - seconds), this.left, this.height - 3, "start"],
      [clock(now - seconds / 2), (this.left + this.width) / 2, this.height - 3, "middle"],
      ["now", this.width, this.height - 3, "end"],
    ];
    match(this.labels, words, () => text("", {}), (label, [said, atX, atY, anchor]) =>
      relabel(label, said, { x: atX, y: atY, "text-anchor": anchor }));
    const last = history.at(-1);
    set(this.svg, { "aria-label": `Shift over the last ${duration(seconds)}: now ${last.shift.toFixed(2)}, at most ${Math.max(...history.map((point) => point.shift)).toFixed(2)}` });
  }
}

/** Fewer points; of those that fall together, the one with the largest shift. */
function thinned(points, most) {
  if (points.length <= most) return points;
  const size = points.length / most;
  const kept = [];
  for (let at = 0; at < most; at += 1) {
    const some = points.slice(Math.floor(at * size), Math.max(Math.floor((at + 1) * size), Math.floor(at * size) + 1));
    const highest = some.reduce((one, two) => (two.shift > one.shift ? two : one));
    kept.push({ ...highest, shifted: some.some((point) => point.shifted) });
  }
  return kept;
}

/** From when to when the alarm was on. */
function stretches(points) {
  const found = [];
  points.forEach((point, at) => {
    if (!point.shifted) return;
    if (at > 0 && points[at - 1].shifted) found.at(-1)[1] = point.at;
    else found.push([point.at, point.at]);
  });
  return found;
}
