// How the page talks to its server: JSON, pictures, a token, and what a refusal says.

const KEPT = "ttapca-token";
const PATIENCE = 10_000; // milliseconds without an answer

/** An answer that is no success. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

/** No answer at all. */
export class Unreachable extends Error {}

export class Api {
  constructor() {
    this.token = sessionStorage.getItem(KEPT);
    this.ahead = 0; // seconds by which the server's clock is ahead of this one
  }

  keepToken(token) {
    this.token = token;
    if (token) sessionStorage.setItem(KEPT, token);
    else sessionStorage.removeItem(KEPT);
  }

  /** Now, by the server's clock: it says when alarms began. */
  now() {
    return Date.now() / 1000 + this.ahead;
  }

  async json(path, options) {
    return read((await this.send(path, options)).json());
  }

  async send(path, { method = "GET", body } = {}) {
    const headers = {};
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      signal: AbortSignal.timeout(PATIENCE),
    }).catch((error) => {
      throw new Unreachable(error.message);
    });
    const date = Date.parse(response.headers.get("Date") ?? "");
    // The header has whole seconds; a difference of under two is the header's, not the clock's.
    const ahead = (date + 500 - Date.now()) / 1000;
    if (Number.isFinite(ahead)) this.ahead = Math.abs(ahead) < 2 ? 0 : ahead;
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

export const streamPath = (name, rest = "") => `v1/streams/${encodeURIComponent(name)}${rest}`;

/** The body of an answer, which can break off like the connection. */
function read(body) {
  return body.catch((error) => {
    throw new Unreachable(error.message);
  });
}

async function refusal(response) {
  let message = response.statusText || `status ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // no JSON: a proxy has answered, and its status says enough
  }
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new Refused(response.status, message, Number.isFinite(wait) ? wait : null);
}
