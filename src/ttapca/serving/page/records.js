// What the page knows of each stream: the last status, its shift over time, and its alarms.

const KEEP = 600; // seconds of history
const ENDED = 20; // alarms that are over and still shown
const SURE = 0.95; // from this on a shift is shown before the alarm, which waits for more images

export class Records {
  constructor() {
    this.all = new Map(); // by name
    this.ended = []; // alarms that this page saw end, newest first
    this.written = new Map(); // by name: when this page last changed a stream
  }

  get(name) {
    return this.all.get(name);
  }

  /** Records by name; `camera-10` comes after `camera-9`. */
  sorted() {
    const order = new Intl.Collator("en", { numeric: true });
    return [...this.all.values()].sort((one, two) => order.compare(one.name, two.name));
  }

  /** Alarms that are on, and some that are over, by the time they began, newest first. */
  alarms() {
    const on = [...this.all.values()].filter((each) => each.shifted).map((each) => each.alarm);
    return [...on, ...this.ended].sort((one, two) => (two.began ?? 0) - (one.began ?? 0));
  }

  /** The server has answered for this page: statuses that were asked for before are out of date. */
  wrote(status, now) {
    this.written.set(flat(status).stream, now);
    this.take(status, now, now);
  }

  /** Take in a status that was asked for and has come at these times, in the server's seconds. */
  take(status, asked, now) {
    const values = flat(status);
    const name = values.stream;
    let record = this.all.get(name);
    if (!record) {
      record = { name, values: {}, asked, history: [], watched: now, usualSince: null, shifted: false, sure: false, alarm: null, first: false };
      this.all.set(name, record);
    }
    if (asked < Math.max(record.asked, this.written.get(name) ?? 0)) return; // a newer one came first
    record.asked = asked;
    const before = record.shifted;
    Object.assign(record.values, values); // the list tells less than the stream itself
    record.shifted = values.shifted === true;
    record.sure = !record.shifted && (values.shift ?? 0) >= SURE;
    if (record.shifted && (!before || record.alarm.began !== values.shifted_since)) {
      record.alarm = { name, began: values.shifted_since, ended: null };
    } else if (before && !record.shifted) {
      this.end(record, now);
    }
    remember(record, now);
  }

  /** Forget streams that the server does not have any more, or whose alarm is over and that are too many to watch. */
  keep(first, shifted, chosen, now) {
    for (const [name, record] of this.all) {
      const watched = record.first; // whether it was told of even without an alarm
      record.first = first.has(name);
      if (record.first || shifted.has(name) || name === chosen) continue;
      if (record.shifted && !watched) this.end(record, now);
      this.all.delete(name);
    }
  }

  end(record, now) {
    record.shifted = false;
    record.usualSince = now;
    this.ended = [{ ...record.alarm, ended: now }, ...this.ended].slice(0, ENDED);
  }
}

/** A status with the fields of its health beside the others. */
function flat({ health, ...rest }) {
  return { ...health, ...rest };
}

function remember(record, now) {
  const { history } = record;
  const point = { at: now, shift: record.values.shift ?? 0, shifted: record.shifted };
  const last = history.at(-1);
  if (last && now - last.at < 0.5) history.pop(); // the list and the chosen stream say the same
  history.push(point);
  while (history[0].at < now - KEEP) history.shift();
}

/** How much of the past a chart shows: one minute at least, so that it does not start crowded. */
export function span(record, now) {
  return Math.min(KEEP, Math.max(60, now - record.history[0].at));
}
