// Messages as a person reads them. All text is what agents and models wrote: it is only ever text.
import { address, get } from "./api.js";
import { count, IMAGE, oneLine, visible } from "./format.js";
import { html, useState } from "./page.js";

/** @typedef {import("./types.d.ts").Message} Message */
/** @typedef {import("./types.d.ts").Cut} Cut */

/**
 * A text, of which the server sends the beginning; the reader asks for the rest. Without a `session`,
 * in a saved page, the rest is left out. `images`: whether it can have images.
 * @param {{text: Cut, session: string | null, turn: number, place: string, code?: boolean, images?: boolean}} given
 */
export function Text({ text, session, turn, place, code, images }) {
  const whole = typeof text === "string";
  const [more, setMore] = useState("");
  const shown = (whole ? text : text.text) + more;
  const [failed, setFailed] = useState("");
  const have = whole ? 0 : charsOf(shown);
  const left = whole ? 0 : text.chars - have;
  const load = () => {
    setFailed("");
    get("text", { session, turn, place, from: have }).then(
      (piece) => setMore((known) => (known === more ? known + piece.text : known)),
      (error) => setFailed(error.message),
    );
  };
  return html`<div class=${code ? "text code" : "text"} dir="auto">${images ? withImages(shown, session) : visible(shown)}${
    left > 0 && (session === null ? html`<span class="left-out"> … ${count(left)} more characters are left out</span>`
      : html`<button type="button" class="more" onClick=${load}>${count(left)} more characters</button>${failed && html` <span class="error">${visible(failed)}</span>`}`)
  }</div>`;
}

/** Length as the server counts it, in characters. @param {string} text */
const charsOf = (text) => [...text].length;

/** @param {string} text @param {string | null} session */
const withImages = (text, session) =>
  text.split(IMAGE).map((part, n) => (n % 2 ? html`<${Picture} sha256=${part} session=${session} />` : visible(part)));

/** An image that an agent sent: small, or as large as the window. In a saved page, a word.
 * @param {{sha256: string, session: string | null}} given */
function Picture({ sha256, session }) {
  const [large, enlarge] = useState(false);
  const [lost, lose] = useState(false);
  const name = `image ${sha256.slice(0, 12)}`;
  if (session === null || lost) return html`<span class="tag image" title=${sha256}>${lost ? `${name} cannot be shown` : "image"}</span>`;
  return html`<button type="button" class=${large ? "picture large" : "picture"} aria-expanded=${large ? "true" : "false"} title=${name}
    onClick=${() => enlarge(!large)}><img src=${address("image", { session, sha256 })} alt=${name} onError=${() => lose(true)} /></button>`;
}

/**
 * @param {{message: Message, session: string | null, turn: number, place: string, sampled?: boolean}} given
 */
export function MessageView({ message, session, turn, place, sampled }) {
  const at = { session, turn };
  const who = WHO[message.role] ?? message.role;
  return html`<article class=${`message ${message.role}${sampled ? " sampled" : ""}`} aria-label=${who}>
    <div class="role">${who}${sampled && html`<span class="tag sampled" title="The policy sampled it">sampled</span>`}
      ${message.tool_call_id && html`<code class="quiet">${oneLine(message.tool_call_id)}</code>`}</div>
    ${message.reasoning && html`<details class="reasoning" open=${!message.text && !message.tool_calls.length}>
      <summary>Reasoning</summary><${Text} text=${message.reasoning} ...${at} place=${`${place}.reasoning`} /></details>`}
    ${message.role === "system" && lengthOf(message.text) > FOLDED ? html`<details class="folded">
      <summary>${count(lengthOf(message.text))} characters</summary><${Text} text=${message.text} ...${at} place=${`${place}.text`} /></details>`
      : message.text !== "" && html`<${Text} text=${message.text} ...${at} place=${`${place}.text`} code=${message.role === "tool"} images=${HAVE_IMAGES.includes(message.role)} />`}
    ${message.tool_calls.map((call, n) => html`<div class="call">
      <code class="name">${oneLine(call.name)}</code>
      <${Text} text=${pretty(call.arguments)} ...${at} place=${`${place}.calls.${n}`} code=${true} /></div>`)}
    ${message.more_calls > 0 && html`<p class="quiet">and ${count(message.more_calls)} more calls</p>`}
  </article>`;
}

/** Characters of a system prompt that is shown at once. */
const FOLDED = 300;

/** @param {Cut} text */
const lengthOf = (text) => (typeof text === "string" ? text.length : text.chars);

/** The roles whose texts have images. */
const HAVE_IMAGES = ["user", "tool"];

/** Whose message it is. @type {Record<string, string>} */
export const WHO = { tool: "tool result", assistant: "assistant" };

/** Short JSON arguments, one per line. @param {Cut} text @returns {Cut} */
function pretty(text) {
  if (typeof text !== "string") return text;
  try {
    const value = JSON.parse(text);
    if (typeof value !== "object" || value === null || Array.isArray(value)) return text;
    return Object.entries(value)
      .map(([name, each]) => `${name}: ${typeof each === "string" ? each : JSON.stringify(each)}`)
      .join("\n");
  } catch {
    return text;
  }
}
