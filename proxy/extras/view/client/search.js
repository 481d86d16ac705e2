// Search over all sessions: text, a regular expression, the name of a tool, the cause of a fork, edits
// of tests; and the searches that are saved as rules, which mark sessions.
import { CAUSES, visible, when, words } from "./format.js";
import { post } from "./api.js";
import { Ago, useGet, useLast, usePages } from "./hooks.js";
import { html, useState } from "./page.js";
import { Cause, Choice, Note, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Hit} Hit */
/** @typedef {import("./types.d.ts").Rule} Rule */

const TERMS = ["text", "regex", "tool", "cause", "edits_tests", "answers_only"];
const SWITCHES = ["edits_tests", "answers_only"];

/** @param {{place: import("./router.js").Place}} given */
export function Search({ place }) {
  const query = Object.fromEntries(TERMS.map((name) => [name, place.query.get(name)]));
  const asked = Object.entries(query).some(([name, value]) => value && name !== "answers_only");
  /** @param {Event} event */
  const search = (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.target);
    location.hash = link("search", "", Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)])));
  };
  return html`<h1>Search</h1>
    <form class="filters" role="search" onSubmit=${search}>
      <label>text <input key=${query["text"]} name="text" type="search" defaultValue=${query["text"] ?? ""} /></label>
      <label>or regular expression <input key=${query["regex"]} name="regex" type="search" defaultValue=${query["regex"] ?? ""} placeholder="tests?/.*py" /></label>
      <label>tool <input key=${query["tool"]} name="tool" defaultValue=${query["tool"] ?? ""} placeholder="shell" /></label>
      <${Choice} name="cause" values=${Object.keys(CAUSES)} chosen=${query["cause"]} />
      <label><input name="edits_tests" type="checkbox" value="yes" checked=${query["edits_tests"] === "yes"} /> edits tests</label>
      <label><input name="answers_only" type="checkbox" value="yes" checked=${query["answers_only"] === "yes"} /> only in answers</label>
      <button type="submit">Search</button></form>
    <${Rules} query=${asked ? query : null} />
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
      <small class="quiet" title=${when(hit.started_at)}><${Ago} at=${hit.started_at} /></small>
      ${hit.matches.map(({ role, before, match, after }) => html`<div class="text code" dir="auto"><span class="quiet">${words(role)}: …</span>${
        visible(before)}<mark>${visible(match)}</mark>${visible(after)}…</div>`)}</li>`)}</ol>
    ${more && html`<button type="button" class="more" onClick=${more}>Search older turns</button>`}`;
}

/** The rules, and a form that saves the search as one. @param {{query: Record<string, string | null> | null}} given */
function Rules({ query }) {
  const [changes, changed] = useState(0);
  const [error, setError] = useState("");
  const { data } = useGet("rules", {}, changes);
  const found = useLast(/** @type {{rules: Rule[], may_save: boolean} | null} */ (data));
  if (found === null || !(found.rules.length || (query && found.may_save))) return "";
  /** @param {string} path @param {unknown} body */
  const change = (path, body) =>
    post(path, body).then(() => { setError(""); changed((n) => n + 1); }, (refused) => setError(refused.message));
  /** @param {Event} event */
  const save = (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.target);
    const name = String(new FormData(form).get("name"));
    const given = Object.entries(query ?? {}).filter(([, value]) => value);
    change("rules", { name, query: Object.fromEntries(given.map(([term, value]) => [term, SWITCHES.includes(term) || value])) });
  };
  return html`<section aria-labelledby="rules-title" class="rules"><h2 id="rules-title">Rules</h2>
    ${query && found.may_save && html`<form class="filters" onSubmit=${save}>
      <label>Mark every session that matches from now on, as <input name="name" required pattern="[A-Za-z0-9][\\w.\\-]{0,63}" placeholder="edits-tests" /></label>
      <button type="submit">Save as a rule</button></form>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <ul class="quiet">${found.rules.map((rule) => html`<li key=${rule.name}>
      <a href=${link("sessions", "", { marked: rule.name })}>${rule.name}</a>${" "}
      <a class="tag" href=${link("search", "", asTerms(rule.query))}>${visible(JSON.stringify(rule.query))}</a>${" "}
      ${words(rule.action)}${rule.configured && ", configured"}
      ${!rule.configured && found.may_save && html` <button type="button" aria-label=${`Remove the rule ${rule.name}`}
        onClick=${() => change("rules/remove", { name: rule.name })}>Remove</button>`}</li>`)}</ul></section>`;
}

/** @param {Rule["query"]} query */
const asTerms = (query) =>
  Object.fromEntries(Object.entries(query).map(([term, value]) => [term, value === true ? "yes" : String(value)]));
