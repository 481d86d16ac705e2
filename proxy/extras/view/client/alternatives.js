// The most probable tokens at the position of a sampled token, if they are recorded.
import { oneLine } from "./format.js";
import { html } from "./page.js";
import { percent } from "./token.js";

/** @typedef {import("./types.d.ts").TokenPage} TokenPage */
/** @typedef {import("./token.js").Token} Token */

/** The sampled one is marked, and comes last if it is not one of the most probable.
 * @param {{token: Token | null, page: TokenPage | null}} given */
export function Alternatives({ token, page }) {
  const recorded = page?.alternatives;
  if (!token || !page || !recorded) return null;
  const logprobs = recorded.logprobs[token.at - page.start] ?? [];
  const rows = (recorded.ids[token.at - page.start] ?? []).map((id, n) => ({
    id, logprob: logprobs[n] ?? null, text: recorded.texts?.[id] ?? null,
  }));
  if (!rows.length) return html`<p class="alternatives quiet">No alternatives are recorded for this token.</p>`;
  if (!rows.some(({ id }) => id === token.id)) rows.push({ id: token.id, logprob: token.logprob, text: token.text });
  return html`<ol class="alternatives" tabindex="0" aria-label="The most probable tokens at this position">${
    rows.map(({ id, logprob, text }) => html`<li key=${id} class=${id === token.id ? "sampled" : ""}>
      <code>${text === null ? id : oneLine(text)}</code> <span>${percent(logprob)}</span>
      <svg class="p" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * Math.exp(logprob ?? -Infinity)} height="8" /></svg>
      <small>id ${id}${id === token.id && html` <b>sampled</b>`}</small></li>`)}</ol>`;
}
