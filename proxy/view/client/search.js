// Search over all sessions: text, a regular expression, the name of a tool, the cause of a fork.
import { ago, CAUSES, visible, when, words } from "./format.js";
import { usePages } from "./hooks.js";
import { html } from "./page.js";
import { Cause, Choice, Note, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Hit} Hit */

/** @param {{place: import("./router.js").Place}} given */
export function Search({ place }) {
  const query = Object.fromEntries(["text", "regex", "tool", "cause"].map((name) => [name, place.query.get(name)]));
  const asked = Object.values(query).some(Boolean);
  /** @param {Event} event */
  const search = (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.target);
    location.hash = link("search", "", Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)])));
  };
  return html`<h1>Search</h1>
    <form class="filters" role="search" onSubmit=${search}>
      <label>text <input name="text" type="search" value=${query["text"] ?? ""} /></label>
      <label>or regular expression <input name="regex" type="search" value=${query["regex"] ?? ""} placeholder="tests?/.*py" /></label>
      <label>tool <input name="tool" value=${query["tool"] ?? ""} placeholder="shell" /></label>
      <${Choice} name="cause" values=${Object.keys(CAUSES)} chosen=${query["cause"]} />
      <button type="submit">Search</button></form>
    ${asked ? html`<${Hits} key=${JSON.stringify(query)} query=${query} />`
      : html`<p class="quiet">What agents sent and models answered is searched from the newest turn to the oldest.</p>`}`;
}

/** @param {{query: Record<string, string | null>}} given */
function Hits({ query }) {
  const { rows, error, more } = usePages("search", "hits", query);
  const hits = /** @type {Hit[] | null} */ (rows);
  if (error || hits === null) return html`<${Note} error=${error} empty="Searching …" />`;
  return html`${hits.length === 0 && html`<p class="quiet">${more ? "No turn matches among the newest ones." : "No turn matches."}</p>`}
    <ol class="hits">${hits.map((hit) => html`<li key=${`${hit.session}#${hit.index}`}>
      <${TrialLink} id=${hit.session} turn=${hit.index} /> ${hit.cause && html`<${Cause} cause=${hit.cause} /> `}
      <small class="quiet" title=${when(hit.started_at)}>${ago(hit.started_at)}</small>
      ${hit.matches.map(({ role, before, match, after }) => html`<div class="text code" dir="auto"><span class="quiet">${words(role)}: …</span>${
        visible(before)}<mark>${visible(match)}</mark>${visible(after)}…</div>`)}</li>`)}</ol>
    ${more && html`<button type="button" class="more" onClick=${more}>Search older turns</button>`}`;
}
