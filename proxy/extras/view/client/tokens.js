// A turn token by token: the text coloured by probability, or one row per token.
import { Alternatives } from "./alternatives.js";
import { get } from "./api.js";
import { count, many, number, oneLine, visible } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./page.js";
import { Note } from "./parts.js";
import { link } from "./router.js";
import { COLOURS, Details, difference, heat, Legend, mask, percent, piece, tokenAt } from "./token.js";

/** @typedef {import("./types.d.ts").TokenPage} TokenPage */
/** @typedef {import("./token.js").Token} Token */

const PAGE = 1000;
const ROW = 24;
const CHUNK = 250;

/** @param {{place: import("./router.js").Place}} given */
export function Tokens({ place }) {
  const session = place.id;
  const turn = Number(place.query.get("turn") ?? 0);
  const mode = place.query.get("as") ?? "text";
  const { total, page, need, error } = useTokens(session, turn);
  const first = page(0);
  const start = Number(place.query.get("at") ?? first?.prompt_tokens ?? 0);
  const [chosen, choose] = useState(start);
  useEffect(() => choose(start), [start]);
  useEffect(() => need(0), [need]);
  if (error) return html`<h1>Tokens</h1><${Note} error=${error} />`;
  if (first === null || total === null) return html`<h1>Tokens</h1><${Note} error=${null} />`;
  const token = tokenAt(page, chosen);
  const step = first.trained?.step;
  const colour = place.query.get("colour") ?? "probability";
  const given = { total, page, need, start, chosen, choose, colour, trained: step !== undefined };
  return html`<div class="top"><h1>Tokens of <a href=${link("trial", session, { turn })}><bdi>${visible(session)}</bdi> #${turn}</a></h1>
    <p><span>${many(total, "token")}</span> <span>${count(first.prompt_tokens)} in the prompt</span>
      <span>${count(first.shared_tokens)} shared with the parent</span>
      ${step !== undefined && html`<span>in the batch of step ${step}</span>`}
      ${first.texts === null && html`<span class="quiet">Texts need the model: start with --model FOLDER.</span>`}
      <span class="switch" role="group" aria-label="Form">${["text", "table"].map((each) => html`<a href=${link("tokens", session, { turn, as: each, at: chosen })}
        aria-current=${mode === each ? "true" : null}>${each}</a>`)}</span>
      ${mode === "text" && step !== undefined && html`<span class="switch" role="group" aria-label="Colour">${COLOURS.map((each) => html`<a
        href=${link("tokens", session, { turn, colour: each, at: chosen })} aria-current=${colour === each ? "true" : null}>${each}</a>`)}</span>`}
      <a href=${link("tokens", session, { turn, as: mode, at: first.prompt_tokens })}>answer</a>
      <a href=${link("tokens", session, { turn, as: mode, at: 0 })}>beginning</a></p></div>
    <${Details} token=${token} /><${Alternatives} token=${token} page=${page(chosen)} />
    ${mode === "table" ? html`<${Table} ...${given} />` : html`<${Legend} colour=${colour} masked=${true} /><${Flow} ...${given} />`}`;
}

/** Pages of tokens that were needed, and those that are on their way. @param {string} session @param {number} turn */
function useTokens(session, turn) {
  const pages = useRef(/** @type {Map<number, TokenPage | null>} */ (new Map()));
  const [, changed] = useState(0);
  const [total, setTotal] = useState(/** @type {number | null} */ (null));
  const [error, setError] = useState(/** @type {string | null} */ (null));
  const need = useMemo(() => {
    pages.current = new Map();
    /** @param {number} at */
    return (at) => {
      const start = Math.floor(at / PAGE) * PAGE;
      if (pages.current.has(start)) return;
      pages.current.set(start, null);
      get("tokens", { session, turn, start, count: PAGE }).then((/** @type {TokenPage} */ found) => {
        pages.current.set(start, found);
        setTotal(found.total);
        changed((n) => n + 1);
      }, (refused) => setError(refused.message));
    };
  }, [session, turn]);
  /** @param {number} at */
  const page = (at) => pages.current.get(Math.floor(at / PAGE) * PAGE) ?? null;
  return { total, page, need, error };
}

/** @typedef {{total: number, page: (at: number) => TokenPage | null, need: (at: number) => void,
 *   start: number, chosen: number, choose: (at: number) => void, colour: string, trained: boolean}} Given */

/** @param {KeyboardEvent} event @param {Given} given */
function move(event, { chosen, choose, total, page, need }) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, PageDown: 50, PageUp: -50 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const [start, end] = tokenAt(page, chosen)?.image ?? [chosen, chosen + 1]; // an image is passed in one step
  const next = Math.max(0, Math.min(total - 1, step < 0 ? start + step : end - 1 + step));
  need(next);
  choose(next);
}

/** The text in chunks, of which those near the window are in the page. @param {Given} given */
function Flow(given) {
  const { total, page, need, start, chosen, choose, colour } = given;
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [near, setNear] = useState(/** @type {Set<number>} */ (new Set()));
  const chunks = Math.ceil(total / CHUNK);
  useEffect(() => {
    const watcher = new IntersectionObserver((entries) => {
      setNear((known) => {
        const next = new Set(known);
        for (const entry of entries) {
          const chunk = Number(/** @type {HTMLElement} */ (entry.target).dataset["chunk"]);
          if (entry.isIntersecting) next.add(chunk);
          else next.delete(chunk);
          if (entry.isIntersecting) need(chunk * CHUNK);
        }
        return next;
      });
    }, { root: box.current, rootMargin: "1500px" });
    for (const each of box.current?.children ?? []) watcher.observe(each);
    return () => watcher.disconnect();
  }, [total, need]);
  useEffect(() => {
    box.current?.children[Math.floor(start / CHUNK)]?.scrollIntoView({ block: "nearest" });
  }, [start, total]);
  const shown = near.has(Math.floor(start / CHUNK)) && page(start) !== null;
  useEffect(() => {
    if (shown) box.current?.querySelector(`[data-at="${start}"]`)?.scrollIntoView({ block: "center" });
  }, [start, shown]);
  /** @param {MouseEvent} event */
  const point = (event) => {
    const at = /** @type {HTMLElement} */ (event.target).dataset["at"];
    if (at !== undefined) choose(Number(at));
  };
  return html`<div class="flow" ref=${box} tabindex="0" role="region" aria-label="Tokens; arrow keys choose one"
      onClick=${point} onKeyDown=${/** @param {KeyboardEvent} e */ (e) => move(e, given)}>
    ${Array.from({ length: chunks }, (_, chunk) => html`<div key=${chunk} data-chunk=${chunk}
      class=${near.has(chunk) && page(chunk * CHUNK) ? "chunk" : "chunk left-out"}>${
      near.has(chunk) && page(chunk * CHUNK) && Array.from(
        { length: Math.min(CHUNK, total - chunk * CHUNK) },
        (_, n) => piece(tokenAt(page, chunk * CHUNK + n), chosen, colour),
      )}</div>`)}</div>`;
}

/** One row per token, of which only those in the window exist. @param {Given} given */
function Table(given) {
  const { total, page, need, start, trained } = given;
  const columns = trained ? 12 : 8;
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [top, setTop] = useState(0);
  useEffect(() => {
    if (box.current) box.current.scrollTop = Math.max(0, start * ROW - 100);
  }, [start, total]);
  const first = Math.max(0, Math.floor(top / ROW) - 20);
  const last = Math.min(total, first + 80);
  useEffect(() => {
    need(first);
    need(Math.max(0, last - 1));
  }, [first, last, need]);
  return html`<div class="token-table" ref=${box} tabindex="0" role="region" aria-label="Tokens; arrow keys choose one"
      onScroll=${/** @param {Event} e */ (e) => setTop(/** @type {HTMLElement} */ (e.target).scrollTop)}
      onKeyDown=${/** @param {KeyboardEvent} e */ (e) => move(e, given)}>
    <table aria-rowcount=${total + 1}><thead><tr><th class="n">token</th><th class="n">id</th><th>text</th><th>probability</th>
      <th class="n">log p</th><th class="n">version</th><th class="n">turn</th><th>mask</th>
      ${trained && html`<th class="n">advantage</th><th class="n">log p of the trainer</th><th class="n">difference</th><th class="n">entropy, nats</th>`}</tr></thead>
      <tbody><tr class="gap" aria-hidden="true"><td colspan=${columns} style=${{ height: `${first * ROW}px` }}></td></tr>
      ${Array.from({ length: last - first }, (_, n) => row(tokenAt(page, first + n), first + n, given))}
      <tr class="gap" aria-hidden="true"><td colspan=${columns} style=${{ height: `${(total - last) * ROW}px` }}></td></tr></tbody></table></div>`;
}

/** @param {Token | null} token @param {number} at @param {Given} given */
function row(token, at, { chosen, choose, trained }) {
  if (token === null) return html`<tr key=${at}><td class="n">${at}</td><td colspan=${trained ? 11 : 7}>…</td></tr>`;
  const p = token.logprob === null ? null : Math.exp(token.logprob);
  return html`<tr key=${at} class=${at === chosen ? "chosen" : ""} aria-rowindex=${at + 2} onClick=${() => choose(at)}>
    <td class="n">${at}</td><td class="n">${token.id}</td><td>${token.image === null
      ? html`<code class=${heat(token)}>${token.text === null ? "" : oneLine(token.text)}</code>`
      : html`<span class="tag image">${at === token.image[0] ? `image, ${many(token.image[1] - at, "token")}` : `${count(at - token.image[0] + 1)} of ${count(token.image[1] - token.image[0])}`}</span>`}</td>
    <td>${p !== null && html`<svg class="p" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${p * 100} height="8" /></svg> ${percent(token.logprob)}`}</td>
    <td class="n">${number(token.logprob)}</td><td class="n">${token.version ?? ""}</td><td class="n">${token.turn}</td>
    <td>${mask(token)}</td>${trained && html`<td class="n">${number(token.advantage)}</td><td class="n">${number(token.trainer)}</td>
      <td class="n">${number(difference(token))}</td><td class="n">${number(token.entropy)}</td>`}</tr>`;
}
