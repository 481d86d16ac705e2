// Requests to the server, and what happens live.
import { runOf } from "./router.js";

export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What the page shows, and to whom. @returns {Promise<import("./types.d.ts").State>} */
export const getState = () => get("state").then((state) => {
  live.mayEdit = state.may_edit === true;
  return state;
});

/** The command that opens what the page showed, without this server; empty if there is none. */
export function reopen() {
  const [run] = live.state?.runs ?? [];
  return run === undefined ? "" : `agentic-proxy view ${quoted(run.folder)}`;
}

/** @param {string} path */
const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`);

const gone = () => `The server does not answer. ${reopen()
  ? `If the run has ended, this opens it from its folder: ${reopen()}`
  : "If it was that of a training run, the run has ended: `agentic-proxy view RUN` shows it, RUN being its folder."}`;

/** Listeners of "the cookie is not valid (any more)". @type {Set<() => void>} */
export const onLoggedOut = new Set();

/**
 * A request for a session is for the store of the place that shows it.
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} [query]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export const get = async (path, query = {}, signal) =>
  answerOf(await asked(address(path, query), { signal: signal ?? null }));

/** @param {string} path @param {Record<string, string | number | null | undefined>} query */
export function address(path, query) {
  const all = "session" in query ? { ...query, run: runOf() } : query;
  const given = Object.entries(all).filter(([, value]) => value != null && value !== "");
  return `/view/${path}?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}`;
}

/** @param {string} path @param {Record<string, string>} query @returns {Promise<any>} */
export const remove = async (path, query) =>
  answerOf(await asked(`/view/${path}?${new URLSearchParams(query)}`, { method: "DELETE" }));

/**
 * Saves what the server sends, under the name that it gives.
 * @param {string} path @param {Record<string, string>} query
 */
export async function download(path, query) {
  const response = await asked(`/view/${path}?${new URLSearchParams(query)}`, {});
  if (!response.ok) await answerOf(response);
  const name = /filename\*=UTF-8''(\S+)/.exec(response.headers.get("Content-Disposition") ?? "")?.[1];
  const file = document.createElement("a");
  file.href = URL.createObjectURL(await response.blob());
  file.download = decodeURIComponent(name ?? "session.jsonl");
  file.click();
  URL.revokeObjectURL(file.href);
}

/** @param {string} path @param {unknown} body @returns {Promise<any>} */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return answerOf(
    await asked(`/view/${path}`, { method: "POST", headers, body: JSON.stringify(body) }),
  );
}

/** @param {string} url @param {RequestInit} options */
async function asked(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, gone());
  }
}

/** @param {Response} response */
async function answerOf(response) {
  const answer = response.json();
  if (response.ok) {
    // One that breaks off is none: the request was given up, or the server is gone.
    return answer.catch(() => {
      throw new ApiError(0, gone());
    });
  }
  const body = await answer.catch(() => ({}));
  if (response.status === 401) for (const listener of onLoggedOut) listener();
  throw new ApiError(response.status, body?.error?.message ?? `status ${response.status}`);
}

/** @typedef {import("./types.d.ts").Head} Head */
/** @typedef {import("./types.d.ts").News} News */
/** @typedef {import("./types.d.ts").StoredEvent} StoredEvent */

const KEPT = 2000;
/** Turns and events that came last, the newest last; in memory at most KEPT of each. */
export const live = {
  connected: false,
  /** @type {import("./types.d.ts").State | null} */
  state: null,
  /** Whether this reader may rate, tag and delete sessions. */
  mayEdit: false,
  /** @type {Head[]} */
  answered: [],
  /** @type {Map<string, Head>} */
  running: new Map(),
  /** @type {StoredEvent[]} */
  events: [],
  /** When the connection was lost, in Unix seconds; null while there is one, and before the first.
   * @type {number | null} */
  lost: null,
  /** The runs as they ended, once the server has said that it ends.
   * @type {Record<string, import("./types.d.ts").EndOfRun> | null} */
  ends: null,
  /** @type {Set<(news: News | null) => void>} */
  listeners: new Set(),
};

/** The moment that the page shows, in Unix seconds: without a connection, the last one that it knows. */
export const moment = () => live.lost ?? Date.now() / 1000;

/** The name by which the reader knows that moment. */
export const asOf = () =>
  new Date(moment() * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });

/** Whether something can still happen: an engine or a run works. */
export const works = () =>
  (live.state?.engines.length ?? 0) > 0 || (live.state?.runs ?? []).some((run) => run.running);

/** @type {EventSource | null} */
let source = null;
let position = "";
let following = false;
let hiddenSince = 0;
/** Whether the page was away for long: once it is connected, everything is read again. */
let begins = false;
const LONG_AWAY_MS = 600_000;
/** Listeners of "the page was away for long: read everything again". @type {Set<() => void>} */
export const onReturn = new Set();

/** Connects while the page is visible: a browser keeps at most six connections to a server, and a
 * stream holds one for each page. The browser reconnects by itself and says where it was. */
export function follow() {
  following = true;
  if (source === null && !document.hidden) connect();
}

/** Ends it and forgets what it told: who follows next may see other sessions, or another store. */
export function unfollow() {
  following = false;
  disconnect();
  position = "";
  begins = false;
  Object.assign(live, { connected: false, state: null, mayEdit: false, answered: [], events: [], running: new Map(), ends: null, lost: null });
}

function connect() {
  const after = position && !begins && `?after=${position}`;
  const opened = new EventSource(`/view/live${after || ""}`);
  source = opened;
  opened.onopen = () => {
    live.ends = null;
    if (begins) {
      begins = false;
      position = "";
      Object.assign(live, { answered: [], events: [], running: new Map() });
      for (const listener of onReturn) listener();
    }
    tell(null, true);
  };
  opened.onerror = () => {
    tell(null, false);
    if (opened.readyState !== EventSource.CLOSED || source !== opened) return;
    source = null;
    const again = () => following && follow();
    getState().then(() => setTimeout(again, 2000), () => setTimeout(again, 5000));
  };
  opened.onmessage = (event) => {
    position = event.lastEventId || position;
    take(JSON.parse(event.data));
  };
  opened.addEventListener("state", (event) => {
    live.state = JSON.parse(event.data);
    tell(null, true);
  });
  opened.addEventListener("end", (event) => {
    live.ends = JSON.parse(event.data);
    live.running.clear(); // the agents have ended before the server
    tell(null, false);
  });
}

function disconnect() {
  source?.close();
  source = null;
}

addEventListener("visibilitychange", () => (document.hidden ? pause() : resume()));
addEventListener("pagehide", pause);
addEventListener("pageshow", resume);

function pause() {
  hiddenSince ||= Date.now();
  disconnect();
  tell(null, false); // what is shown is as of now
}

function resume() {
  const away = hiddenSince && Date.now() - hiddenSince;
  hiddenSince = 0;
  if (!following || source !== null) return;
  begins ||= away > LONG_AWAY_MS;
  follow();
}

/** @param {News} news */
function take(news) {
  for (const head of news.begun) {
    if (head.status === "open") live.running.set(`${head.session}#${head.index}`, head);
  }
  for (const head of news.answered) {
    live.running.delete(`${head.session}#${head.index}`);
    live.answered.push(head);
  }
  live.events.push(...news.events);
  live.answered.splice(0, live.answered.length - KEPT);
  live.events.splice(0, live.events.length - KEPT);
  tell(news, true);
}

/** @param {News | null} news @param {boolean} connected */
function tell(news, connected) {
  if (live.connected && !connected) live.lost = Date.now() / 1000;
  if (connected) live.lost = null;
  live.connected = connected;
  for (const listener of live.listeners) listener(news);
}
