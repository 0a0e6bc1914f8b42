// Alarms on top, newest first, and a sentence for screen readers when one begins or ends.

import { clock, count, duration, say } from "./words.js";

const FEW = 4; // that are shown before somebody asks for all
const NAMED = 3; // in an announcement

export class AlarmList {
  constructor(records) {
    this.records = records;
    this.list = document.getElementById("alarms");
    this.more = document.getElementById("all-alarms");
    this.known = null; // names of streams with an alarm, as last announced
    this.all = false;
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.more.setAttribute("aria-expanded", String(this.all));
      this.show(this.now);
    });
  }

  show(now) {
    this.now = now;
    const alarms = this.records.alarms();
    const shown = this.all ? alarms : alarms.slice(0, FEW);
    while (this.list.childElementCount > shown.length) this.list.lastElementChild.remove();
    while (this.list.childElementCount < shown.length) this.list.append(makeEntry());
    shown.forEach((alarm, at) => fill(this.list.children[at], alarm, now));
    this.more.hidden = alarms.length <= FEW;
    say(this.more, this.all ? "Show the newest only" : `Show all ${alarms.length}`);
    const on = alarms.filter((alarm) => alarm.ended === null).map((alarm) => alarm.name);
    const quiet = `None is on; ${count(this.records.all.size, "stream")} watched.`;
    say(document.getElementById("no-alarm"), on.length ? "" : quiet);
    document.title = `${on.length ? `(${on.length}) ` : ""}ttapca serve`;
    this.announce(on);
  }

  announce(on) {
    const begun = on.filter((name) => !this.known?.includes(name));
    const over = (this.known ?? []).filter((name) => !on.includes(name));
    this.known = on;
    const said = [];
    if (begun.length) said.push(`Alarm: ${names(begun)} shifted.`);
    if (over.length) said.push(`${names(over)} as usual again.`);
    if (said.length) say(document.getElementById("announcement"), said.join(" "));
  }
}

function names(all) {
  const rest = all.length - NAMED;
  return all.slice(0, NAMED).join(", ") + (rest > 0 ? ` and ${count(rest, "other")}` : "");
}

function makeEntry() {
  const entry = document.createElement("li");
  const time = document.createElement("time");
  const link = document.createElement("a");
  const lasted = document.createElement("span");
  entry.append(time, link, lasted);
  return entry;
}

function fill(entry, { name, began, ended }, now) {
  const [time, link, lasted] = entry.children;
  entry.classList.toggle("over", ended !== null);
  say(time, began ? clock(began) : "earlier");
  if (began) time.dateTime = new Date(1000 * began).toISOString();
  say(link, name);
  link.href = `#${encodeURIComponent(name)}`;
  const seconds = began ? duration((ended ?? now) - began) : "some time";
  say(lasted, ended === null ? `shifted for ${seconds}` : `over at ${clock(ended)}, after ${seconds}`);
}
