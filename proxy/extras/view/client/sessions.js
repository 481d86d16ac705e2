// All sessions, the newest first, and all forks of a cause; both page by page.
import { live } from "./api.js";
import { folderName, Thumbs } from "./curation.js";
import { CAUSES, count, duration, oneLine, short, visible, when, words } from "./format.js";
import { Ago, usePages } from "./hooks.js";
import { html, useEffect, useState } from "./page.js";
import { Cause, Choice, Marks, Note, Reward, Status, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Session} Session */
/** @typedef {import("./types.d.ts").Head} Head */
/** @typedef {import("./router.js").Place} Place */

/** @param {{place: Place}} given */
export function Sessions({ place }) {
  const query = Object.fromEntries(
    ["status", "kind", "prefix", "marked"].map((name) => [name, place.query.get(name)]),
  );
  const { rows, error, more, again } = usePages("sessions", "sessions", query);
  const [fresh, setFresh] = useState(false);
  useEffect(() => {
    /** @param {import("./types.d.ts").News | null} news */
    const heard = (news) => news && (news.begun.length > 0 || news.events.some(({ kind }) => ["marked", "rating", "refused", "tagged"].includes(kind))) && setFresh(true);
    live.listeners.add(heard);
    return () => void live.listeners.delete(heard);
  }, []);
  return html`<h1>Sessions</h1>
    <form class="filters" onSubmit=${/** @param {Event} e */ (e) => e.preventDefault()} onChange=${choose} role="search">
      <label>id begins with <input key=${query["prefix"]} name="prefix" defaultValue=${query["prefix"] ?? ""} placeholder="task/" /></label>
      <${Choice} name="status" values=${["open", "completed", "expired"]} chosen=${query["status"]} />
      <${Choice} name="kind" values=${["train", "eval"]} chosen=${query["kind"]} />
      <label>marked by <input key=${query["marked"]} name="marked" defaultValue=${query["marked"] ?? ""} placeholder="rule, or * for any" /></label>
      ${fresh && html`<button type="button" onClick=${() => { setFresh(false); again(); }}>There is something new: read again</button>`}
    </form>
    ${rows === null ? html`<${Note} error=${error} />` : rows.length === 0
      ? html`<p class="quiet">No session matches.</p>`
      : html`<${SessionTable} rows=${/** @type {Session[]} */ (rows)} again=${again} />`}
    ${more && html`<button type="button" class="more" onClick=${more}>Older sessions</button>`}`;
}

/** @param {Event} event */
function choose(event) {
  const form = /** @type {HTMLFormElement} */ (/** @type {HTMLElement} */ (event.target).closest("form"));
  location.hash = link("sessions", "", Object.fromEntries([...new FormData(form)].map(([k, v]) => [k, String(v)])));
}

/** @param {{rows: Session[], again: () => void}} given */
function SessionTable({ rows, again }) {
  const [error, setError] = useState("");
  const placed = rows.some((each) => each.metadata["folder"]);
  return html`${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Sessions"><table class="sessions">
    <thead><tr><th>session</th>${placed && html`<th>folder</th>`}<th>status</th><th>rating</th><th class="n">reward</th><th class="n">turns</th><th class="n">took</th>
      <th class="n">sampled</th><th class="n">longest path</th><th>forks</th><th class="n">created</th></tr></thead>
    <tbody>${rows.map((each) => html`<tr key=${each.id}>
      <td>${each.asked && html`<a class="asked" dir="auto" href=${link("trial", each.id)}>${oneLine(each.asked)}</a>`}
        <${TrialLink} id=${each.id} />${" "}${each.kind === "eval" && html`<span class="tag">eval</span>`}
        ${each.origin && html`<span class="tag" title=${`begins with ${each.origin.turn} turns of ${visible(each.origin.session)}`}>branch</span>`}
        <${Marks} session=${each.id} marks=${each.marks} /> <${Tags} metadata=${each.metadata} /></td>
      ${placed && html`<td title=${visible(String(each.metadata["folder"] ?? ""))}><bdi>${folderName(each.metadata["folder"])}</bdi>
        ${each.metadata["git_branch"] && html`<span class="meta"><bdi>${oneLine(String(each.metadata["git_branch"]))}</bdi></span>`}</td>`}
      <td><${Status} value=${each.status} />${" "}${each.cut > 0 && html`<span class="tag status-cut">${each.cut} cut</span>`}
        ${each.refused && html`<span class="tag status-cut" title=${visible(each.refused.message)}>refused</span>`}</td>
      <td title=${visible(each.rating?.comment)}><${Thumbs} session=${each} changed=${again} failed=${setError} /></td>
      <td class="n"><${Reward} value=${each.reward} /></td>
      <td class="n">${count(each.turns)}</td><td class="n">${took(each)}</td>
      <td class="n">${short(each.sampled_tokens)}</td><td class="n">${short(each.longest_path)}</td>
      <td>${Object.entries(each.forks).map(([cause, n]) => html`<${Cause} cause=${cause} />${n > 1 ? `×${n} ` : " "}`)}</td>
      <td class="n" title=${when(each.created_at)}><${Ago} at=${each.created_at} /></td></tr>`)}</tbody></table></div>`;
}

/** From its beginning to its end, or to its last call. @param {Session} session */
export const took = (session) => duration(Math.max(0, (session.completed_at ?? session.last_at ?? session.created_at) - session.created_at));

/** @param {{metadata: Record<string, unknown>}} given */
export const Tags = ({ metadata }) => Object.entries(metadata).filter(([name]) => name !== "folder" && name !== "git_branch").slice(0, 4).map(([name, value]) =>
  html`<span class="meta"><bdi>${oneLine(name).slice(0, 40)}</bdi>=<bdi>${
    oneLine(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 40)}</bdi></span> `);

/** @param {{place: Place}} given */
export function Forks({ place }) {
  const cause = place.query.get("cause") ?? "";
  const { rows, error, more } = usePages("forks", "turns", { cause });
  /** @param {Event} event */
  const chosen = (event) => {
    location.hash = link("forks", "", { cause: /** @type {HTMLSelectElement} */ (event.target).value });
  };
  return html`<h1>Forks</h1>
    <form class="filters"><label>cause <select value=${cause} onChange=${chosen}>
      <option value="">any</option>${Object.keys(CAUSES).map((each) => html`<option value=${each}>${words(each)}</option>`)}</select></label>
      <span class="quiet">${CAUSES[cause] ?? ""}</span></form>
    ${rows === null ? html`<${Note} error=${error} />` : rows.length === 0
      ? html`<p class="quiet">${cause ? "No turn of this store forks for this cause." : "No turn of this store forks: every call continues the one before it."}</p>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Forks"><table>
        <thead><tr><th>turn</th><th>cause</th><th class="n">shared tokens</th><th class="n">new tokens</th><th>agent</th><th class="n">when</th></tr></thead>
        <tbody>${/** @type {Head[]} */ (rows).map((head) => html`<tr key=${`${head.session}#${head.index}`}>
          <td><${TrialLink} id=${head.session} turn=${head.index} /></td><td>${head.fork && html`<${Cause} cause=${head.fork} />`}</td><td class="n">${count(head.shared)}</td>
          <td class="n">${count(head.new)}</td><td>${head.agent ? oneLine(head.agent) : "–"}</td>
          <td class="n" title=${when(head.started_at)}><${Ago} at=${head.started_at} /></td></tr>`)}</tbody></table></div>`}
    ${more && html`<button type="button" class="more" onClick=${more}>Older forks</button>`}`;
}
