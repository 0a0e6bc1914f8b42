// Numbers and times, as people read them.

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** The time of day of a number of seconds; with the day, if that is not today. */
export function clock(seconds) {
  const then = new Date(1000 * seconds);
  const today = then.toDateString() === new Date().toDateString();
  return today ? CLOCK.format(then) : `${DAY.format(then)}, ${CLOCK.format(then)}`;
}

/** A duration in the one or two largest units: `45 s`, `2 min 5 s`, `3 h 10 min`, `4 d`. */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return pair(whole, 60, "min", 1, "s");
  if (whole < 86400) return pair(whole, 3600, "h", 60, "min");
  return `${Math.floor(whole / 86400)} d`;
}

function pair(whole, large, largeName, small, smallName) {
  const rest = Math.floor((whole % large) / small);
  return `${Math.floor(whole / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

export const count = (number, noun, nouns = `${noun}s`) => `${WHOLE.format(number)} ${number === 1 ? noun : nouns}`;
export const whole = (number) => WHOLE.format(number);
export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
export const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : "—");

/** A share in percent: no decimals from 10 % on, one below. */
export function percent(share) {
  if (!known(share)) return "—";
  const value = 100 * share;
  return `${value.toFixed(value > 0 && value < 9.95 ? 1 : 0)} %`;
}

/** A ratio with two significant digits, such as `3.1`, `0.42` or `120`. */
export function ratio(value) {
  if (!known(value)) return "—";
  return value >= 10 ? WHOLE.format(value) : Number(value.toPrecision(2)).toString();
}

/** Write text only where it differs: screen readers and selections stay undisturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
