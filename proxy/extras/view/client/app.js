// The page: its frame, log-in, and which view is shown.
import { asOf, follow, getState, live, onLoggedOut, onReturn, post, reopen, unfollow, works } from "./api.js";
import { Compare } from "./compare.js";
import { visible } from "./format.js";
import { Group } from "./group.js";
import { useLive } from "./hooks.js";
import { Learning } from "./learning.js";
import { Now } from "./now.js";
import { html, render, useEffect, useState } from "./page.js";
import { link, parse, runOf } from "./router.js";
import { RunView } from "./run.js";
import { Command } from "./run_head.js";
import { Search } from "./search.js";
import { Forks, Sessions } from "./sessions.js";
import { Tokens } from "./tokens.js";
import { Trial } from "./trial.js";
import { Trials } from "./trials.js";

/** @type {Record<string, (given: {place: import("./router.js").Place}) => import("./page.js").Child>} */
const VIEWS = {
  now: Now, run: RunView, trials: Trials, group: Group, compare: Compare,
  search: Search, sessions: Sessions, forks: Forks, trial: Trial, tokens: Tokens, learning: Learning,
};
/** Seconds without a connection that a restart takes, and that are not worth saying. */
const PATIENCE_S = 3;
const MENU = [["now", "Now"], ["sessions", "Sessions"], ["forks", "Forks"], ["search", "Search"]];
const menu = () => [
  ...(live.state?.runs?.length ? [["run", "Run"]] : []), ...MENU, ...(live.state?.learners?.length ? [["learning", "Learning"]] : []),
];

function App() {
  const [place, setPlace] = useState(() => parse(location.hash));
  const [inside, setInside] = useState(/** @type {boolean | null} */ (null));
  const [error, setError] = useState("");
  const [returns, setReturns] = useState(0);
  useEffect(() => {
    const changed = () => {
      if (!openLink()) setPlace(parse(location.hash));
    };
    const out = () => {
      unfollow();
      setInside(false);
    };
    /** A link's secret, which is used up and taken out of the address. */
    const openLink = () => {
      const found = /^#(?:link|key)=([\w-]+)$/.exec(location.hash);
      if (found === null) return false;
      history.replaceState(null, "", link("now"));
      setPlace(parse(location.hash));
      logIn(found[1] ?? "");
      return true;
    };
    /** @param {string} secret */
    const logIn = (secret) =>
      post("log_in", { secret }).then(enter, (refused) => enter().catch(() => setError(refused.message)));
    /** A recorded run, at which no engine works, is shown first. */
    const enter = () => getState().then((state) => {
      if (state.engines.length === 0 && (state.runs ?? []).length > 0 && parse(location.hash).view === "now") {
        history.replaceState(null, "", link("run"));
        setPlace(parse(location.hash));
      }
      setInside(true);
    });
    addEventListener("hashchange", changed);
    const returned = () => setReturns((n) => n + 1);
    onReturn.add(returned);
    onLoggedOut.add(out);
    if (!openLink()) getState().then(() => setInside(true), () => setInside(false));
    return () => {
      removeEventListener("hashchange", changed);
      onReturn.delete(returned);
      onLoggedOut.delete(out);
    };
  }, []);
  useEffect(() => {
    if (inside) follow();
  }, [inside]);
  useEffect(() => {
    document.title = `${titleOf(place)} · agentic-proxy`;
    document.getElementById("main")?.focus({ preventScroll: true });
  }, [place.view, place.id]);
  if (inside === null) return html`<p class="waiting">Loading …</p>`;
  if (!inside) return html`<${LogIn} error=${error} done=${() => getState().then(() => setInside(true))} />`;
  const View = VIEWS[place.view] ?? Missing;
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <${Bar} place=${place} leave=${() => post("log_out", {}).then(() => getState())} />
    <${Lost} />
    <main id="main" tabindex="-1" class=${`view-${place.view}`}>
      <${View} key=${[place.view, place.id, runOf(place), returns].join()} place=${place} />
    </main>`;
}

/** @type {Record<string, string>} */
const TITLES = {
  now: "Now", run: "Run", trials: "Trials of", group: "Group", compare: "Before and after:",
  search: "Search", sessions: "Sessions", forks: "Forks", trial: "Trial", tokens: "Tokens of",
  learning: "Learning",
};

/** What the browser shows in the tab. @param {import("./router.js").Place} place */
function titleOf({ view, id, query }) {
  const name = TITLES[view];
  if (name === undefined) return "Not found";
  const part = { group: `${query.get("group") ?? ""} of step ${query.get("step") ?? ""}, run ${id}`, tokens: `${id} #${query.get("turn") ?? 0}` }[view];
  return [name, part ?? id].filter(Boolean).join(" ");
}

/** @param {{place: import("./router.js").Place}} given */
const Missing = ({ place }) => html`<h1>Not found</h1><p>This page has no view <q>${visible(place.view)}</q>. It has:</p>
  <ul>${menu().map(([view, name]) => html`<li><a href=${link(view ?? "")}>${name}</a></li>`)}</ul>`;

/** What the reader sees is old, and how to go on. */
function Lost() {
  useLive(1);
  if (live.lost === null || (live.ends === null && Date.now() / 1000 - live.lost < PATIENCE_S)) return null;
  const command = reopen();
  return html`<div class="lost" role="alert"><p>${live.ends ? "The server has ended" : `No connection since ${asOf()}`}: everything here is as of <strong>${asOf()}</strong>.
    ${command && " This opens the run from its folder:"}</p>${command && html`<${Command} text=${command} />`}</div>`;
}

/** @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

/** @param {{place: import("./router.js").Place, leave: () => void}} given */
function Bar({ place, leave }) {
  useLive(1);
  return html`<header>
    <span class="brand"><img src="/view/static/icon.svg" alt="" width="20" height="20" /> agentic-proxy</span>
    <nav aria-label="Views">${menu().map(([view, name]) => html`<a href=${link(view ?? "")}
      aria-current=${place.view === view ? "page" : null}>${name}</a>`)}</nav>
    <span class="connection" role="status">
      <span class=${live.connected ? (works() ? "dot on" : "dot on still") : "dot off"}></span>${connection()}
    </span>
    <button type="button" class="quiet" onClick=${leave}>Log out</button>
  </header>`;
}

/** Whether what is shown is of this moment. */
function connection() {
  if (!live.connected) return live.lost === null ? "connecting" : `as of ${asOf()}`;
  return works() ? "live" : "recorded";
}

/** @param {{error: string, done: () => void}} given */
function LogIn({ error, done }) {
  const [wrong, setWrong] = useState(error);
  useEffect(() => setWrong(error), [error]);
  /** @param {SubmitEvent} event */
  const send = (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.target);
    post("log_in", { secret: String(new FormData(form).get("secret")) }).then(
      done,
      (refused) => setWrong(refused.message),
    );
  };
  return html`<main class="login">
    <h1>agentic-proxy</h1>
    <p>Open the link that was printed at the start, which works once, or give a key: of
      <code>agentic-proxy view-key create NAME --store URL</code>, with the store of this page, or a proxy's admin key.</p>
    <form onSubmit=${send}>
      <label for="secret">Key</label>
      <input id="secret" name="secret" type="password" autocomplete="current-password" required />
      <button type="submit">Open</button>
    </form>
    ${wrong && html`<p class="error" role="alert">${wrong}</p>`}
  </main>`;
}

const root = document.getElementById("app");
if (root) {
  root.textContent = "";
  render(html`<${App} />`, root);
}
