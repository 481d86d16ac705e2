// One token: what is known of it, the colour that shows it, and its text.
import { count, many, number, oneLine, visible } from "./format.js";
import { html } from "./page.js";

/** @typedef {import("./types.d.ts").TokenPage} TokenPage */
/** @typedef {{at: number, id: number, text: string | null, logprob: number | null, turn: number,
 *   sampled: boolean, trained: boolean, version: number | null, advantage: number | null,
 *   trainer: number | null, entropy: number | null, used: boolean | null,
 *   image: [number, number, string] | null}} Token
 * `trainer`: its log-probability; `entropy`: of its policy, in nats; `used`: whether the algorithm
 * trained the token
 */

/** @param {(at: number) => TokenPage | null} page @param {number} at @returns {Token | null} */
export function tokenAt(page, at) {
  const found = page(at);
  const id = found?.ids[at - (found?.start ?? 0)];
  if (found === null || id === undefined) return null;
  const span = found.spans.find(([start, end]) => start <= at && at < end);
  return {
    at, id, text: found.texts?.[at - found.start] ?? null, logprob: found.logprobs[at - found.start] ?? null,
    turn: span?.[2] ?? -1, sampled: span?.[3] ?? false, trained: span?.[4] ?? false, version: span?.[5] ?? null,
    advantage: found.trained?.advantages?.[at - found.start] ?? null,
    trainer: found.trained?.logprobs?.[at - found.start] ?? null,
    entropy: found.trained?.entropies?.[at - found.start] ?? null,
    used: found.trained?.trained?.[at - found.start] ?? null,
    image: found.images?.find(([start, end]) => start <= at && at < end) ?? null,
  };
}

/** What the colour of a token shows. */
export const COLOURS = ["probability", "advantage", "difference", "entropy"];

/** The class of a token's colour. @param {Token} token @param {string} [colour] */
export function heat(token, colour = "probability") {
  if (!token.sampled) return "given";
  return `${COLOUR[colour]?.(token) ?? ""}${token.trained && token.used !== false ? "" : " masked"}`;
}

/** @type {Record<string, (token: Token) => string>} */
const COLOUR = {
  probability: ({ logprob }) => `heat${level(-(logprob ?? 0), [0.05, 0.35, 1.2, 3])}`,
  advantage: ({ advantage }) =>
    advantage === null || advantage === 0 ? "" : `${advantage > 0 ? "up" : "down"}${level(Math.abs(advantage), [0.3, 1])}`,
  difference: (token) => (token.trainer === null ? "" : `heat${level(Math.abs(difference(token) ?? 0), [0.001, 0.01, 0.05, 0.2])}`),
  entropy: ({ entropy }) => (entropy === null ? "" : `heat${level(entropy, [0.1, 0.5, 1, 2])}`),
};

/** The meaning of the colours. @type {Record<string, [string, string][]>} */
const LEGENDS = {
  probability: [["heat0", "> 95 %"], ["heat1", "> 70 %"], ["heat2", "> 30 %"], ["heat3", "> 5 %"], ["heat4", "less"]],
  advantage: [["up2", "reinforced: advantage ≥ 1"], ["up1", "≥ 0.3"], ["up0", "> 0"], ["down0", "discouraged: < 0"],
    ["down1", "≤ −0.3"], ["down2", "≤ −1"]],
  difference: [["heat0", "|Δ log p| < 0.001"], ["heat1", "< 0.01"], ["heat2", "< 0.05"], ["heat3", "< 0.2"], ["heat4", "more"]],
  entropy: [["heat0", "< 0.1 nats"], ["heat1", "< 0.5"], ["heat2", "< 1"], ["heat3", "< 2"], ["heat4", "more"]],
};

/** @param {{colour: string, masked?: boolean}} given `masked`: whether tokens that were not trained are marked */
export const Legend = ({ colour, masked }) => html`<ul class="legend key" aria-label=${`Colours: ${colour}`}>${
  (LEGENDS[colour] ?? []).map(([name, label]) => html`<li><span class=${`swatch ${name}`}></span> ${label}</li>`)}${
  masked && html`<li><span class="swatch masked"></span> not trained</li>`}</ul>`;

/** Number of bounds that a value reaches. @param {number} value @param {number[]} bounds */
const level = (value, bounds) => bounds.filter((bound) => value >= bound).length;

/** log p of the trainer minus log p of the engine. @param {Token} token */
export const difference = ({ trainer, logprob }) => (trainer === null || logprob === null ? null : trainer - logprob);

/** @param {number | null} logprob */
export const percent = (logprob) => (logprob === null ? "–" : `${(100 * Math.exp(logprob)).toPrecision(3)} %`);

/** @param {Token} token */
function textOf({ at, text, image }) {
  if (image !== null) return `(${count(at - image[0] + 1)} of the ${many(image[1] - image[0], "token")} of image ${image[2].slice(0, 12)})`;
  return text === null ? "–" : oneLine(text) || "(part of the character before)";
}

/** The tokens of an image as one. @param {number} tokens @param {string} sha256 */
export const imageChip = (tokens, sha256) =>
  html`<span class="tag image" title=${`image ${sha256}`}>image ${sha256.slice(0, 12)}, ${many(tokens, "token")}</span>`;

/** `masked`: whether the mask is worth saying. @param {{token: Token | null, masked?: boolean}} given */
export const Details = ({ token, masked = true }) => html`<dl class="details" aria-live="polite" aria-label="The chosen token">${
  token === null ? html`<dt>token</dt><dd>loading …</dd>` : html`
  <div><dt>token</dt><dd>${count(token.at)}</dd></div><div><dt>id</dt><dd>${token.id}</dd></div>
  <div><dt>text</dt><dd><code>${textOf(token)}</code></dd></div>
  <div><dt>probability</dt><dd>${percent(token.logprob)}</dd></div>
  <div><dt>log-probability</dt><dd>${number(token.logprob)}</dd></div>
  <div><dt>version</dt><dd>${token.version ?? "–"}</dd></div>
  <div><dt>turn</dt><dd>#${token.turn}</dd></div>
  ${masked && html`<div><dt>mask</dt><dd>${mask(token)}</dd></div>`}
  ${token.used !== null && html`<div><dt>advantage</dt><dd>${number(token.advantage)}</dd></div>
  <div><dt>trainer’s probability</dt><dd>${percent(token.trainer)}</dd></div>
  <div><dt>difference of log p</dt><dd>${number(difference(token))}</dd></div>
  <div><dt>entropy</dt><dd>${token.entropy === null ? "–" : `${number(token.entropy)} nats`}</dd></div>`}`}</dl>`;

/** @param {Token} token */
export function mask(token) {
  if (!token.sampled) return "prompt";
  if (token.used === false) return "left out by the algorithm";
  return token.trained ? (token.used ? "trained" : "trainable") : "sampled, not trained";
}

/** @param {Token | null} token @param {number} chosen @param {string} colour */
export function piece(token, chosen, colour) {
  if (token === null) return null;
  if (token.image !== null) return imageAt(token, token.image, chosen);
  const text = token.text === null ? `${token.id} ` : token.text;
  return html`<span data-at=${token.at} class=${`token ${heat(token, colour)}${token.at === chosen ? " chosen" : ""}`}>${
    visible(text).replaceAll("\n", "↵\n")}</span>`;
}

/** All tokens of an image, in the place of its first one. @param {Token} token @param {[number, number, string]} image @param {number} chosen */
function imageAt({ at }, [start, end, sha256], chosen) {
  if (at !== start) return null;
  const is = start <= chosen && chosen < end ? " chosen" : "";
  return html`<span data-at=${at} class=${`token given tag image${is}`} title=${`image ${sha256}`}>image, ${many(end - start, "token")}</span>`;
}
