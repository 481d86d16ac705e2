// The page: its frame, log-in, and which view is shown.
import { follow, get, live, onLoggedOut, onReturn, post, unfollow } from "./api.js";
import { Compare } from "./compare.js";
import { Group } from "./group.js";
import { useLive } from "./hooks.js";
import { Now } from "./now.js";
import { html, render, useEffect, useState } from "./page.js";
import { link, parse, runOf } from "./router.js";
import { RunView } from "./run.js";
import { Search } from "./search.js";
import { Forks, Sessions } from "./sessions.js";
import { Tokens } from "./tokens.js";
import { Trial } from "./trial.js";
import { Trials } from "./trials.js";

/** @type {Record<string, (given: {place: import("./router.js").Place}) => import("./page.js").Child>} */
const VIEWS = {
  now: Now, run: RunView, trials: Trials, group: Group, compare: Compare,
  search: Search, sessions: Sessions, forks: Forks, trial: Trial, tokens: Tokens,
};
const MENU = [["now", "Now"], ["sessions", "Sessions"], ["forks", "Forks"], ["search", "Search"]];
const menu = () => (live.state?.runs?.length ? [["run", "Run"], ...MENU] : MENU);

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
    const enter = () => get("state").then((/** @type {import("./types.d.ts").State} */ state) => {
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
    if (!openLink()) get("state").then(() => setInside(true), () => setInside(false));
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
    document.title = `${place.id || place.view} · agentic-proxy`;
    document.getElementById("main")?.focus({ preventScroll: true });
  }, [place.view, place.id]);
  if (inside === null) return html`<p class="waiting">Loading …</p>`;
  if (!inside) return html`<${LogIn} error=${error} done=${() => setInside(true)} />`;
  const View = VIEWS[place.view] ?? Now;
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <${Bar} place=${place} leave=${() => post("log_out", {}).then(() => get("state"))} />
    <main id="main" tabindex="-1" class=${`view-${place.view}`}>
      <${View} key=${[place.view, place.id, runOf(place), returns].join()} place=${place} />
    </main>`;
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
      <span class=${live.connected ? "dot on" : "dot off"}></span>${live.connected ? "live" : "not connected"}
    </span>
    <button type="button" class="quiet" onClick=${leave}>Log out</button>
  </header>`;
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
    <p>Open the link that <code>agentic-proxy serve</code> printed when it started, or give a key:
      one of <code>agentic-proxy view-key create NAME</code>, or the admin key.</p>
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
