// The live page of `ttapca serve`: asks for all streams and for the chosen one every second.

import { AlarmList } from "./alarm_list.js";
import { Api, Refused, Unreachable, streamPath } from "./api.js";
import { Records } from "./records.js";
import { StreamDetails } from "./stream_details.js";
import { StreamList } from "./stream_list.js";
import { clock, say } from "./words.js";

const EVERY = 1000; // milliseconds between two rounds
const LONGEST = 15_000; // between two attempts at a server that does not answer
const AT_ONCE = 500; // streams of one request
const MOST = 1000; // streams that are watched even where nothing has shifted
const MOST_ALARMS = 5000; // others that are watched since they have
const SHARE = 0.2; // of the time that may be spent on the list of streams

const element = (id) => document.getElementById(id);
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

const api = new Api();
const records = new Records();
const alarms = new AlarmList(records);
const list = new StreamList(records, choose);
const details = new StreamDetails(api, records, show);

let total = 0; // streams of the server
let damaged = []; // names of streams that the server cannot read
let listDue = 0; // when the list is asked for again, by performance.now()
let failures = 0; // rounds in a row without an answer
let lostSince = null;
let hurried = false; // whether the next round begins without a pause
let wake = () => {}; // ends a pause that has begun

function hurry() {
  hurried = true;
  wake();
}

/** Choose a stream, in the list and in the address, so that a link leads to it. */
function choose(name, { byHand = false } = {}) {
  details.choose(name);
  list.mark(name);
  const hash = `#${encodeURIComponent(name)}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
  show();
  hurry();
  const below = element("details").offsetTop > element("list").offsetTop + element("list").offsetHeight;
  if (byHand && below) element("details").scrollIntoView(); // on a phone it lies under the list
}

function show() {
  const now = api.now();
  element("live").hidden = false;
  element("nothing").hidden = records.all.size > 0;
  alarms.show(now);
  list.show(now, total, damaged);
  details.show(now);
}

async function askInfo() {
  const info = await api.json("v1/info");
  say(element("model"), info.model);
  say(element("about"), [info.filter && `filter ${info.filter}`, info.version && `ttapca ${info.version}`].filter(Boolean).join(" · "));
  details.classes = info.classes ?? [];
  const here = new URL(".", location.href).href.replace(/\/$/, "");
  say(element("how-to-begin"), `ttapca feed ${here} --data digits\ncurl -F images=@picture.png '${here}/v1/predict?stream=camera-1'`);
}

async function askList() {
  const began = performance.now();
  if (began < listDue) return;
  const asked = api.now();
  const first = await askPages("", MOST);
  ({ total, damaged } = first);
  const shifted = total > first.streams.length + damaged.length ? await askPages("&shifted=true", MOST_ALARMS) : { streams: [] };
  for (const status of [...first.streams, ...shifted.streams]) records.take(status, asked, api.now());
  const names = (part) => new Set(part.streams.map((status) => status.stream));
  records.keep(names(first), names(shifted), details.name, api.now());
  listDue = began + Math.max(0.9 * EVERY, (performance.now() - began) / SHARE);
}

/** The first streams of a list, those of them that are damaged, and how many it has in all. */
async function askPages(query, most) {
  const streams = [];
  const damaged = [];
  for (let offset = 0; ; offset += AT_ONCE) {
    const part = await api.json(`v1/streams?brief=true${query}&offset=${offset}&limit=${AT_ONCE}`);
    streams.push(...part.streams);
    damaged.push(...part.damaged);
    if (offset + AT_ONCE >= Math.min(part.total, most)) return { streams, damaged, total: part.total };
  }
}

async function askChosen() {
  const { name } = details;
  if (name === null) return;
  const asked = api.now();
  try {
    // Pictures come in JSON: an <img> could not send a token, nor get both of the same image.
    const [status, pictures] = await Promise.all([api.json(streamPath(name)), api.json(streamPath(name, "/pictures"))]);
    records.take(status, asked, api.now());
    details.showPictures(name, pictures);
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 404) throw error; // else it was deleted
    records.all.delete(name);
  }
}

/** The name after the # of the address; a damaged one names nothing. */
function inAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

/** Choose what the address names, else the newest alarm, else the first stream. */
function chooseOne() {
  const wanted = inAddress();
  const first = records.alarms().find((alarm) => alarm.ended === null)?.name ?? records.sorted()[0]?.name;
  const name = records.get(wanted) ? wanted : records.get(details.name) ? details.name : first;
  if (name !== undefined && name !== details.name) choose(name);
}

async function round() {
  if (element("model").dataset.known !== "true") {
    await askInfo();
    element("model").dataset.known = "true";
  }
  await Promise.all([askList(), askChosen()]);
  chooseOne();
  show();
}

function connected() {
  failures = 0;
  lostSince = null;
  element("lost").hidden = true;
  document.body.classList.remove("stale");
  element("link").className = "good";
  say(element("link-text"), "live");
  element("forget-token").hidden = !api.token;
}

/** What has gone wrong: one word, a title, and the reason if there is more to say. */
function trouble(error) {
  if (error instanceof Refused) return ["refused", "The server refuses", `${error.message} `];
  if (error instanceof Unreachable) return ["lost", "Connection lost", ""];
  console.error(error); // a mistake in this page
  return ["failed", "This page has failed", `(${error.message}) `];
}

/** Say that what is shown is old; return how long to wait before the next attempt. */
function lost(error) {
  failures += 1;
  lostSince ??= Date.now() / 1000;
  const told = 1000 * (error.retryAfter ?? 0);
  const wait = Math.min(LONGEST, Math.max(told, EVERY * 2 ** (failures - 1)));
  const [state, title, reason] = trouble(error);
  document.body.classList.add("stale");
  element("link").className = "bad";
  element("forget-token").hidden = !api.token; // it may be the wrong one
  say(element("link-text"), state);
  say(element("lost-title"), title);
  say(element("lost-text"), `${reason}since ${clock(lostSince)}. What you see is from then; the next attempt is in ${Math.round(wait / 1000)} s.`);
  element("lost").hidden = false;
  return wait;
}

/** Ask for a token and wait until one is given. */
function askToken() {
  element("live").hidden = true;
  element("lost").hidden = true;
  element("link").className = "waiting";
  say(element("link-text"), "needs a token");
  say(element("model"), "Locked");
  say(element("token-refused"), api.token ? "— the last one was refused" : "");
  api.keepToken(null);
  element("forget-token").hidden = true;
  const form = element("token-form");
  form.hidden = false;
  element("token").focus();
  return new Promise((done) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      api.keepToken(element("token").value.trim());
      element("token").value = "";
      form.hidden = true;
      done();
    }, { once: true });
  });
}

async function run() {
  for (;;) {
    const began = performance.now();
    let wait = EVERY;
    hurried = false;
    try {
      await round();
      connected();
      wait = Math.max(100, EVERY - (performance.now() - began));
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        await askToken();
        element("model").dataset.known = "false";
        hurry();
      } else {
        wait = lost(error);
      }
    }
    if (!hurried) await Promise.race([pause(wait), new Promise((done) => { wake = done; })]);
  }
}

element("try-now").addEventListener("click", () => hurry());
element("forget-token").addEventListener("click", () => {
  api.keepToken(null);
  hurry();
});
addEventListener("hashchange", () => {
  chooseOne();
  element("name").focus(); // whoever follows a link wants to read on there
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) hurry(); // browsers slow down pages that nobody sees
});
run();
