// Everything about the chosen stream, and its switches.

import { streamPath } from "./api.js";
import { GainChart, HistoryChart, RatioChart, bandName } from "./charts.js";
import { span } from "./records.js";
import { clock, count, duration, fixed, known, percent, ratio, say, whole } from "./words.js";

const TOP_CLASSES = 5;
const ODD = 0.01; // p-value at which an alarm begins, if it stays
const SMALL = 96; // pixels of a side up to which an image is shown with its pixels
const element = (id) => document.getElementById(id);

export class StreamDetails {
  constructor(api, records, refresh) {
    Object.assign(this, { api, records, refresh, name: null, classes: [] });
    this.history = new HistoryChart(element("history"), { height: 150, axes: true });
    this.ratios = new RatioChart(element("ratios"));
    this.gains = new GainChart(element("gains"));
    this.busy = false;
    element("mode").addEventListener("change", (event) =>
      this.change(`switch to ${event.target.value}`, streamPath(this.name), { method: "PUT", body: { mode: event.target.value } }));
    const dialog = element("confirm");
    element("reset").addEventListener("click", () => {
      say(element("confirm-name"), this.name);
      dialog.returnValue = "cancel"; // what Escape means
      dialog.showModal();
    });
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "reset") this.change("reset", streamPath(this.name, "/reset"), { method: "POST" });
    });
    for (const id of ["before", "after"]) {
      element(id).addEventListener("load", ({ target }) =>
        target.classList.toggle("pixelated", Math.max(target.naturalWidth, target.naturalHeight) <= SMALL));
    }
  }

  /** Change something on the server, and say how it went. */
  async change(what, path, options) {
    const name = this.name;
    this.busy = true;
    this.tell("");
    try {
      this.records.wrote(await this.api.json(path, options), this.api.now());
    } catch (error) {
      this.tell(`Could not ${what} ${name}: ${error.message}`);
    } finally {
      this.busy = false;
    }
    this.refresh(); // a refused switch goes back to where it was
  }

  tell(message) {
    say(element("message"), message);
  }

  choose(name) {
    if (name === this.name) return;
    this.name = name;
    this.tell("");
    for (const side of ["before", "after"]) element(side).hidden = true;
    say(element("pictures-note"), "");
  }

  show(now) {
    const record = this.records.get(this.name);
    element("details").hidden = !record;
    if (!record) return;
    const { values } = record;
    say(element("name"), record.name);
    element("state").classList.toggle("shifted", record.shifted);
    element("state").classList.toggle("odd", isOdd(record));
    say(element("state"), stateOf(record, now));
    if (!this.busy) for (const radio of element("mode").elements) if (radio.type === "radio") radio.checked = radio.value === values.mode;
    say(element("answering"), answeringOf(values));
    this.history.show(record.history, now, span(record, now));
    const bands = values.bands ?? [];
    for (const id of ["ratios", "gains"]) element(id).closest("figure").hidden = !bands.length;
    if (bands.length) {
      this.ratios.show(bands);
      this.gains.show(bands, values.gains ?? []);
      const lets = values.adapting ? "lets" : "would let";
      say(element("gains-note"), `What the filter ${lets} through; 1 leaves a band as it is.`);
    }
    showTable(bands, values.gains ?? []);
    showErrors(values);
    this.showComposition(values);
    showFacts(values, now);
  }

  /** The last image before and after the filter, as data: URLs; null where there is none. */
  showPictures(name, pictures) {
    if (name !== this.name) return; // another stream was chosen meanwhile
    for (const id of ["before", "after"]) {
      const image = element(id);
      const source = pictures[id];
      image.hidden = source === null;
      image.alt = source === null ? "" : `Last image of ${name}, ${id} the filter`;
      if (source !== null && image.src !== source) image.src = source;
    }
    const off = this.records.get(name)?.values.mode === "off" ? "The filter is off: both are the same." : "";
    say(element("pictures-note"), pictures.before === null ? "None are kept: nothing came lately, or the filter does not act on images." : off);
  }

  showComposition(values) {
    const shares = values.composition ?? [];
    const order = shares.map((share, at) => ({ share, at })).sort((one, two) => two.share - one.share);
    const top = order.slice(0, TOP_CLASSES).map(({ share, at }) => ({ share, title: this.classes[at] ?? `class ${at}` }));
    const rest = order.slice(TOP_CLASSES);
    if (rest.length) {
      const share = rest.reduce((sum, each) => sum + each.share, 0);
      top.push({ share, title: rest.length === 1 ? "1 other class" : `${rest.length} other classes`, others: true });
    }
    const list = element("composition");
    while (list.childElementCount > top.length) list.lastElementChild.remove();
    while (list.childElementCount < top.length) list.append(makeShare());
    top.forEach(({ share, title, others }, at) => {
      const entry = list.children[at];
      const [label, bar, value] = entry.children;
      entry.classList.toggle("others", others === true);
      say(label, title);
      bar.firstElementChild.setAttribute("width", (100 * share).toFixed(1));
      say(value, percent(share));
    });
    say(element("skew"), skewOf(values, shares.length));
  }
}

/** Whether the last images are unlike the source, and no alarm is on: two blocks must agree. */
function isOdd({ shifted, sure, values }) {
  return !shifted && (sure || (known(values.p_value) && values.p_value <= ODD));
}

function stateOf(record, now) {
  const { values } = record;
  if (!values.images) return "No image yet";
  if (values.shifted === null || values.shifted === undefined) return "Nobody watches this stream";
  if (record.shifted) {
    const since = values.shifted_since;
    return known(since) ? `Shifted since ${clock(since)}, for ${duration(now - since)}` : "Shifted";
  }
  if (isOdd(record)) return `Looks shifted; the alarm waits for ${count(values.alarm_after ?? 1, "more image")} at least`;
  const since = record.usualSince;
  return since === null ? `As usual since ${clock(record.watched)} at least` : `As usual since ${clock(since)}`;
}

/** Which network answers a stream that chooses between two, and why. */
function answeringOf({ mode, adapting, harmful, switches }) {
  if (mode !== "auto") return "";
  const why = adapting ? "The adapted network answers: it is expected to be less often wrong"
    : harmful ? "The untouched network answers: adapted, it keeps to few classes or is less sure, which may be harm"
      : "The untouched network answers: no gain is sure yet";
  return `${why}. ${count(switches, "switch", "switches")} so far.`;
}

function skewOf({ skew }, classes) {
  if (!classes) return "Nothing was predicted yet.";
  if (!known(skew)) return "";
  if (skew >= 0.5) return `Not the shares of the source, or too few images to tell (skew ${skew.toFixed(2)}).`;
  return `May well be the shares of the source (skew ${skew.toFixed(2)}).`;
}

/** How often both networks are wrong by the service's estimate, with intervals, if it has any. */
function showErrors({ expected_error: adapted, expected_error_untouched: untouched }) {
  const rows = [["adapted network", adapted], ["untouched network", untouched]].filter(([, estimate]) => estimate);
  const list = element("errors");
  list.closest("figure").hidden = !rows.length;
  while (list.childElementCount > rows.length) list.lastElementChild.remove();
  while (list.childElementCount < rows.length) list.append(makeShare(["interval", "estimate"]));
  const end = Math.max(0.1, Math.ceil(10 * Math.max(...rows.map(([, { high }]) => high))) / 10); // of the scale
  rows.forEach(([network, { share, low, high }], at) => {
    const [label, bar, value] = list.children[at].children;
    const [interval, estimate] = bar.children;
    say(label, network);
    for (const [rect, from, width] of [[interval, low, high - low], [estimate, share, 0.004 * end]]) {
      rect.setAttribute("x", ((100 * from) / end).toFixed(1));
      rect.setAttribute("width", ((100 * width) / end).toFixed(1));
    }
    say(value, `${percent(share)} (${percent(low)} to ${percent(high)})`);
  });
  const more = untouched ? "" : " In the modes shadow and auto, the untouched network is asked, too.";
  say(element("errors-note"), `Share of the last answers that are wrong, estimated without labels, with 95 % intervals, from 0 to ${percent(end)}.${more}`);
}

function makeShare(parts = ["share"]) {
  const entry = document.createElement("li");
  const label = document.createElement("span");
  const value = document.createElement("span");
  const bar = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, text] of [["viewBox", "0 0 100 1"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) bar.setAttribute(name, text);
  for (const part of parts) {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.setAttribute("height", "1");
    rect.setAttribute("class", part);
    bar.append(rect);
  }
  label.className = "label";
  value.className = "value";
  entry.append(label, bar, value);
  return entry;
}

// Probability from which a stream is said to have an order, as in `Health`.
const SURE_OF_ORDER = 0.8;

function showFacts(values, now) {
  const facts = [
    ["images seen", whole(values.images ?? 0), known(values.last_seen) ? `last ${duration(now - values.last_seen)} ago` : "none yet"],
    ["adapted", percent(values.adapted_share), "of the answers"],
    ["would differ", percent(values.disagreement), known(values.disagreement) ? "of the images in shadow or auto" : "known after a time in shadow"],
    ["skipped", count(values.skipped ?? 0, "request"), "with NaN or infinity"],
    ["shift", fixed(values.shift, 2), known(values.p_value) ? `p = ${values.p_value.toFixed(3)}` : ""],
    ["size of the shift", fixed(values.size, 1), "doublings of variance"],
  ];
  if (values.conditions > 1) facts.push(["conditions", whole(values.conditions), "told apart"]);
  if (known(values.ordered) && values.ordered >= SURE_OF_ORDER) facts.push(["order", `about ${whole(Math.round(values.run_length))}`, "images of a class in a row"]);
  if (known(values.outliers)) facts.push(["outliers", percent(values.outliers), "of the values"]);
  const list = element("facts");
  while (list.childElementCount > facts.length) list.lastElementChild.remove();
  while (list.childElementCount < facts.length) {
    const box = document.createElement("div");
    box.append(...["dt", "dd", "dd"].map((tag) => document.createElement(tag)));
    list.append(box);
  }
  facts.forEach((words, at) => words.forEach((text, part) => say(list.children[at].children[part], text)));
}

function showTable(bands, gains) {
  const body = element("bands");
  while (body.childElementCount > bands.length) body.lastElementChild.remove();
  while (body.childElementCount < bands.length) {
    const row = body.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    row.append(head, ...[1, 2, 3].map(() => document.createElement("td")));
  }
  bands.forEach((band, at) => {
    const words = [bandName(band), ratio(band.ratio), fixed(band.p_value, 3), ratio(gains[at])];
    words.forEach((text, part) => say(body.children[at].children[part], text));
  });
}
