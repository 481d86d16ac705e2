// An answer as text, whose colours show its tokens; the token that is pointed at is described.
import { count } from "./format.js";
import { html, useMemo, useState } from "./page.js";
import { Details, piece, tokenAt } from "./token.js";

/** @typedef {import("./types.d.ts").TokenPage} TokenPage */

/** Pointing at a token, or arrow keys, choose it. @param {{tokens: TokenPage, colour: string}} given */
export function TokenText({ tokens, colour }) {
  const { start } = tokens;
  const end = start + tokens.ids.length;
  const [chosen, choose] = useState(/** @type {number | null} */ (null));
  const all = useMemo(() => tokens.ids.map((_, n) => tokenAt(() => tokens, start + n)), [tokens]);
  /** @param {Event} event */
  const point = (event) => {
    const at = /** @type {HTMLElement} */ (event.target).dataset["at"];
    if (at !== undefined) choose(Number(at));
  };
  /** @param {KeyboardEvent} event */
  const key = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -end, End: end }[event.key];
    if (move !== undefined) {
      choose(chosen === null ? start : Math.max(start, Math.min(end - 1, chosen + move)));
      event.preventDefault();
    } else if (event.key === "Escape") choose(null);
  };
  return html`<div class="answer" onMouseLeave=${() => choose(null)}><div class="tokens" tabindex="0" role="group"
      aria-label=${`Answer of ${count(tokens.ids.length)} tokens; arrow keys choose one`} onMouseOver=${point} onClick=${point}
      onFocus=${() => choose((known) => known ?? start)} onBlur=${() => choose(null)} onKeyDown=${key}>
      ${all.map((token) => piece(token, chosen ?? -1, colour))}</div>
    ${chosen !== null && html`<${Details} token=${all[chosen - start] ?? null} masked=${tokens.trained !== undefined} />`}</div>`;
}
