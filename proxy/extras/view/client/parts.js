// Small pieces that several views are made of.
import { CAUSES, number, oneLine, visible, words } from "./format.js";
import { html } from "./page.js";
import { link } from "./router.js";

/** @param {{cause: string}} given */
export const Cause = ({ cause }) =>
  html`<span class="tag fork" title=${CAUSES[cause] ?? ""}>${words(cause)}</span>`;

/** What search rules say of a session. @param {{session: string, marks: import("./types.d.ts").Mark[] | undefined}} given */
export const Marks = ({ session, marks }) => (marks ?? []).map((mark) =>
  html` <a class="tag mark" href=${link("trial", session, { turn: mark.turn })}
    title=${`${ACTIONS[mark.action] ?? mark.action}${mark.found && `: ${visible(mark.found)}`}`}>${oneLine(mark.rule)}${
    mark.action === "mark" ? "" : ` (${words(mark.action)})`}</a>`);

/** @type {Record<string, string>} */
const ACTIONS = {
  mark: "Matches this search rule", end: "This search rule has ended the trial",
  zero_reward: "This search rule makes the reward 0",
};

/** @param {{value: string}} given */
export const Status = ({ value }) => html`<span class=${`tag status-${value}`}>${value}</span>`;

/**
 * `run`: whose trial it is, if that is not the place's own.
 * @param {{id: string, turn?: number | null, run?: string}} given
 */
export const TrialLink = ({ id, turn, run }) =>
  html`<a class="id" href=${link("trial", id, { turn, ...(run === undefined ? {} : { run }) })}><bdi>${visible(id)}</bdi>${
    turn == null ? "" : ` #${turn}`}</a>`;

/** @param {{error: string | null, empty?: string}} given */
export const Note = ({ error, empty }) =>
  error ? html`<p class="error" role="alert">${error}</p>` : html`<p class="waiting">${empty ?? "Loading …"}</p>`;

/** @param {{name: string, values: string[], chosen: string | null | undefined}} given */
export const Choice = ({ name, values, chosen }) => html`<label>${name}
  <select name=${name} value=${chosen ?? ""}>
    <option value="">any</option>${values.map((value) => html`<option value=${value}>${value}</option>`)}
  </select></label>`;

/** @param {{value: number | null}} given */
export const Reward = ({ value }) =>
  html`<span class=${value === null ? "none" : value > 0 ? "good" : "bad"}>${number(value)}</span>`;
