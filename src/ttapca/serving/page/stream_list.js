// The list of streams: a listbox with one tab stop. Arrow keys, Home and End move through it.

import { HistoryChart } from "./charts.js";
import { span } from "./records.js";
import { count, say, whole } from "./words.js";

const NAMED = 5; // damaged streams that are named

export class StreamList {
  constructor(records, choose) {
    this.records = records;
    this.choose = choose; // called with a name
    this.chosen = null;
    this.rows = new Map(); // by name
    this.order = ""; // of the rows in the document
    this.list = document.getElementById("list");
    this.find = document.getElementById("find");
    this.onlyShifted = document.getElementById("only-shifted");
    // A line is drawn for rows that can be seen; five hundred of them would cost time for nothing.
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) target.inView = isIntersecting;
    }, { root: this.list });
    this.list.addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) this.choose(row.dataset.name, { byHand: true });
    });
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.find.addEventListener("input", () => this.show());
    this.find.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" && this.list.firstElementChild) {
        event.preventDefault();
        this.go(this.list.firstElementChild);
      }
    });
    this.onlyShifted.addEventListener("change", () => this.show());
  }

  move(event) {
    const rows = [...this.list.children];
    const at = rows.indexOf(document.activeElement);
    const far = Math.max(1, Math.floor(this.list.clientHeight / (rows[0]?.offsetHeight || 1)) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: far, PageUp: -far, Home: -at, End: rows.length - 1 - at };
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    this.go(rows[Math.max(0, Math.min(rows.length - 1, at + steps[event.key]))]);
  }

  go(row) {
    this.choose(row.dataset.name);
    row.focus();
  }

  /** Mark the chosen stream, and see that it can be reached with the tab key. */
  mark(name) {
    this.chosen = name;
    for (const [each, row] of this.rows) {
      row.setAttribute("aria-selected", String(each === name));
      row.tabIndex = each === name ? 0 : -1;
    }
    if (!this.list.querySelector("[tabindex='0']") && this.list.firstElementChild) {
      this.list.firstElementChild.tabIndex = 0;
    }
  }

  show(now = this.now ?? 0, total = this.total ?? 0, damaged = this.damaged ?? []) {
    this.now = now;
    this.total = total;
    this.damaged = damaged;
    const wanted = this.find.value.trim().toLowerCase();
    const found = this.records.sorted().filter((record) =>
      record.name.toLowerCase().includes(wanted) && (record.shifted || !this.onlyShifted.checked));
    this.place(found);
    for (const record of found) this.draw(this.rows.get(record.name), record, now);
    say(document.getElementById("count"), whole(Math.max(total, this.records.all.size)));
    say(document.getElementById("list-note"), [this.note(found, total - damaged.length), unreadable(damaged)].filter(Boolean).join(" "));
  }

  /** What is not in the list, of so many streams that could be. */
  note(found, total) {
    const known = this.records.all.size;
    if (total > known) return `Of ${whole(total)} streams, the first ones and those with an alarm are watched here: ${whole(known)}.`;
    if (known && !found.length) return this.find.value ? `No stream has “${this.find.value}” in its name.` : "No stream has shifted.";
    return found.length < known ? `${whole(found.length)} of ${count(known, "stream")}` : "";
  }

  /** Put the rows of these records into the document, in this order, and no others. */
  place(shown) {
    const order = shown.map((record) => record.name).join("\n");
    if (order === this.order) return;
    this.order = order;
    const focused = document.activeElement?.dataset?.name;
    for (const name of this.rows.keys()) {
      if (!this.records.get(name)) {
        this.seen.unobserve(this.rows.get(name));
        this.rows.delete(name);
      }
    }
    for (const { name } of shown) if (!this.rows.has(name)) this.rows.set(name, this.makeRow(name));
    this.list.replaceChildren(...shown.map(({ name }) => this.rows.get(name)));
    if (focused && this.list.contains(this.rows.get(focused))) this.rows.get(focused).focus();
    this.mark(this.chosen);
  }

  makeRow(name) {
    const row = document.createElement("div");
    row.setAttribute("role", "option");
    row.dataset.name = name;
    row.id = `stream-${name}`;
    for (const part of ["dot", "row-name", "row-chart", "row-mode"]) {
      const piece = document.createElement("span");
      piece.className = part;
      row.append(piece);
    }
    const [dot, title, chart, mode] = row.children;
    dot.setAttribute("aria-hidden", "true");
    title.textContent = name;
    const state = document.createElement("span");
    state.className = "unseen";
    title.after(state);
    row.parts = { state, mode, chart: new HistoryChart(chart, { height: 20, axes: false }) };
    this.seen.observe(row);
    return row;
  }

  draw(row, record, now) {
    row.classList.toggle("shifted", record.shifted);
    row.classList.toggle("odd", record.sure);
    say(row.parts.state, record.shifted ? ", shifted, " : record.sure ? ", looks shifted, " : ", as usual, ");
    say(row.parts.mode, record.values.mode);
    row.dataset.mode = record.values.mode;
    if (row.inView) row.parts.chart.show(record.history, now, span(record, now));
  }
}

/** What to do about streams that the server cannot read. */
function unreadable(names) {
  if (!names.length) return "";
  const told = names.slice(0, NAMED).join(", ") + (names.length > NAMED ? ", …" : "");
  return `Damaged on the server's disk, and refused until deleted: ${count(names.length, "stream")} (${told}).`;
}
