// What a person does with a session: rate, tag, export, delete.
import { download, live, post, remove } from "./api.js";
import { number, oneLine, visible } from "./format.js";
import { html, useState } from "./page.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Session} Session */

/** Entries of the metadata that the recorder sets. */
const RECORDED = ["agent", "folder", "git_branch"];
const FORMATS = ["messages", "tokens", "atif"];
const THUMBS = /** @type {[string, number][]} */ ([["Good", 1], ["Bad", 0]]);
/** Of a thumb that points upwards, in a square of 24. */
const THUMB = "M2 10h4v11H2zM8 10l4-8c1.7 0 3 1.3 3 3l-.6 4H20a2 2 0 0 1 2 2.3l-1.3 8a2 2 0 0 1-2 1.7H8z";

/** The last part of a path. @param {unknown} path */
export const folderName = (path) =>
  typeof path === "string" ? oneLine(path.replace(/\/+$/, "").split("/").at(-1)) : "";

/** @param {Session} session */
export const ratingOf = (session) => session.rewards.find((each) => each.key === "rating" && each.turn === null)?.value ?? null;

/** @param {string} session @param {Record<string, unknown>} said */
const keep = (session, said) => post(`session/curation?${new URLSearchParams({ session })}`, said);

/**
 * Two buttons, of which the rating's is pressed; a reader who may not rate sees the rating.
 * @param {{session: Session, changed: () => void, failed: (message: string) => void}} given
 */
export function Thumbs({ session, changed, failed }) {
  const rating = ratingOf(session);
  if (!live.mayEdit) return rating === null ? null : html`<span class="rated" title="rating">${shown(rating)}</span>`;
  return html`<span class="thumbs" role="group" aria-label="Rating">${THUMBS.map(([name, value]) =>
    html`<button type="button" aria-pressed=${rating === value ? "true" : "false"} aria-label=${name} title=${name}
      onClick=${() => keep(session.id, { value }).then(changed, (refused) => failed(refused.message))}><${Thumb} down=${value === 0} /></button>`)}
    ${rating !== null && rating !== 0 && rating !== 1 && html`<span class="rated">${number(rating)}</span>`}</span>`;
}

/** @param {number} rating */
const shown = (rating) => (rating === 0 || rating === 1 ? html`<${Thumb} down=${rating === 0} />` : number(rating));

/** @param {{down: boolean}} given */
const Thumb = ({ down }) => html`<svg class="thumb" viewBox="0 0 24 24" width="14" height="14" role="img" aria-label=${down ? "bad" : "good"}>
  <path d=${THUMB} transform=${down ? "rotate(180 12 12)" : null} /></svg>`;

/**
 * Beneath a session: the rating, and on demand the comment, tags, export and deletion.
 * @param {{session: Session, changed: () => void}} given
 */
export function Curation({ session, changed }) {
  const [open, setOpen] = useState(false);
  const [error, setError] = useState("");
  /** @param {Promise<unknown>} work */
  const done = (work) => void work.then(() => {
    setError("");
    changed();
  }, (refused) => setError(refused.message));
  const rating = ratingOf(session);
  return html`<section class="curation" aria-label="Rate, tag and export">
    <p><${Thumbs} session=${session} changed=${changed} failed=${setError} />
      ${session.rating?.comment && html`<q class="comment" dir="auto">${visible(session.rating.comment)}</q>`}
      ${tagsOf(session).map(([name, value]) => html`<span class="tag"><bdi>${oneLine(name)}</bdi>=<bdi>${oneLine(String(value))}</bdi>
        ${live.mayEdit && html`<button type="button" class="quiet" aria-label=${`Remove the tag ${oneLine(name)}`}
          onClick=${() => done(keep(session.id, { tags: { [name]: "" } }))}>×</button>`}</span>`)}
      <button type="button" class="quiet" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>
        ${live.mayEdit ? "comment, tag, export, delete" : "export"}</button></p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${open && html`<div class="edit">
      ${live.mayEdit ? html`<${Forms} session=${session} rating=${rating} done=${done} />` : html`<p class="quiet">This browser only reads.
        To rate, tag or delete, log in with the admin key, or open the page with <code>agentic-proxy view --edit</code>.</p>`}
      <p>Export ${FORMATS.map((format) => html`<button type="button"
        onClick=${() => download("session/export", { session: session.id, format }).catch((refused) => setError(refused.message))}>${format}</button> `)}
        ${live.mayEdit && html`<${Delete} session=${session} failed=${setError} />`}</p></div>`}
  </section>`;
}

/** @param {Session} session */
const tagsOf = (session) => Object.entries(session.metadata).filter(([name, value]) => !RECORDED.includes(name) && typeof value !== "object");

/** @param {{session: Session, rating: number | null, done: (work: Promise<unknown>) => void}} given */
function Forms({ session, rating, done }) {
  /** @param {SubmitEvent} event */
  const rate = (event) => {
    const given = fields(event);
    const value = given["value"] === "" ? null : Number(given["value"]);
    done(keep(session.id, { value, comment: given["comment"] ?? "" }));
  };
  /** @param {SubmitEvent} event */
  const tag = (event) => {
    const given = fields(event);
    done(keep(session.id, { tags: { [given["name"] ?? ""]: given["value"] ?? "" } }));
    /** @type {HTMLFormElement} */ (event.target).reset();
  };
  // What is typed stays while the session goes on: a new value of the rating begins the form again.
  return html`<form key=${`${rating} ${session.rating?.comment}`} onSubmit=${rate}>
      <label>rating <input name="value" type="number" step="any" defaultValue=${rating ?? ""} /></label>
      <label class="wide">comment <input name="comment" maxlength="4000" defaultValue=${session.rating?.comment ?? ""} dir="auto" /></label>
      <button type="submit">Keep</button></form>
    <form onSubmit=${tag}><label>tag <input name="name" required maxlength="80" /></label>
      <label>value <input name="value" required maxlength="500" defaultValue="yes" /></label><button type="submit">Add</button></form>`;
}

/** What a form holds. @param {SubmitEvent} event @returns {Record<string, string>} */
function fields(event) {
  event.preventDefault();
  const form = /** @type {HTMLFormElement} */ (event.target);
  return Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)]));
}

/** Asks again before it deletes. @param {{session: Session, failed: (message: string) => void}} given */
function Delete({ session, failed }) {
  const [sure, setSure] = useState(false);
  const gone = () => remove("session", { session: session.id }).then(
    () => {
      location.hash = link("sessions");
    },
    (refused) => {
      setSure(false);
      failed(refused.message);
    },
  );
  if (!sure) return html`<button type="button" onClick=${() => setSure(true)}>Delete …</button>`;
  return html`<span role="group" aria-label="Delete the session">Delete the session and its record?
    <button type="button" class="danger" onClick=${gone}>Delete</button> <button type="button" onClick=${() => setSure(false)}>Keep it</button></span>`;
}
