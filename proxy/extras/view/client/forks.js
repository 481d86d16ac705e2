// Why a turn forks: what the agent sent against what was recorded.
import { CAUSES, count, oneLine, visible, words } from "./format.js";
import { useGet } from "./hooks.js";
import { MessageView } from "./messages.js";
import { html } from "./page.js";
import { Note } from "./parts.js";
import { link } from "./router.js";
import { imageChip } from "./token.js";

/** @typedef {import("./types.d.ts").Fork} Fork */
/** @typedef {import("./types.d.ts").Shown} Shown */

/** @param {{session: string, turn: number}} given */
export function ForkView({ session, turn }) {
  const { data, error } = useGet("fork", { session, turn });
  const fork = /** @type {Fork | null} */ (data);
  if (fork === null) return html`<${Note} error=${error} />`;
  const against = fork.against;
  return html`<div class="why">
    <p>${CAUSES[fork.cause] ?? words(fork.cause)}</p>
    ${against !== null && html`<p class="quiet">Compared with turn${" "}
      <a href=${link("trial", session, { turn: against })}>#${against}</a>: the first ${count(fork.common ?? 0)} of
      ${" "}${count(fork.sent_messages ?? 0)} sent messages are the same (it had ${count(fork.recorded_messages ?? 0)}).</p>`}
    ${(fork.changes ?? []).map(({ field, parts }) => html`<figure class="diff"><figcaption>${field}:${" "}
      <del>recorded</del>${" "}<ins>sent</ins></figcaption><div class="text code" dir="auto">${parts.map(([mark, text]) => part(mark, text))}</div></figure>`)}
    ${against !== null && !fork.changes?.length && html`<${Sides} fork=${fork} session=${session} />`}
    ${fork.tokens && html`<${TokenDiff} fork=${fork} session=${session} />`}
  </div>`;
}

/** @param {string} mark @param {string} text */
function part(mark, text) {
  if (mark === "-") return html`<del>${visible(text)}</del>`;
  if (mark === "+") return html`<ins>${visible(text)}</ins>`;
  return mark === "…" ? html`<span class="left-out">⋯ ${text} ⋯</span>` : visible(text);
}

/** The next message of each side, where one has none. @param {{fork: Fork, session: string}} given */
const Sides = ({ fork, session }) => html`<div class="sides">
  <section><h3>Recorded next, turn #${fork.against}</h3>${fork.recorded
    ? html`<${MessageView} message=${fork.recorded} session=${null} turn=${fork.against} place="x" />`
    : html`<p class="quiet">nothing: the conversation ended here</p>`}</section>
  <section><h3>Sent, turn #${fork.index}</h3>${fork.sent
    ? html`<${MessageView} message=${fork.sent} session=${null} turn=${fork.index} place="x" />`
    : html`<p class="quiet">nothing: the request ends here</p>`}</section></div>`;

/** @param {{fork: Fork, session: string}} given */
function TokenDiff({ fork, session }) {
  const tokens = fork.tokens;
  if (tokens === null) return null;
  return html`<figure class="token-diff"><figcaption>Tokens: the prompt shares the first${" "}
    <a href=${link("tokens", `${session}`, { turn: fork.index, at: tokens.shared })}>${count(tokens.shared)}</a> of turn #${tokens.parent}’s path.</figcaption>
    <dl><dt>shared</dt><dd><${Ids} shown=${tokens.before} /></dd>
      <dt><del>recorded</del></dt><dd><${Ids} shown=${tokens.recorded} /></dd>
      <dt><ins>sent</ins></dt><dd><${Ids} shown=${tokens.sent} /></dd></dl></figure>`;
}

/** @param {{shown: Shown}} given */
const Ids = ({ shown }) =>
  shown.ids.length === 0
    ? html`<span class="quiet">nothing</span>`
    : shown.ids.map((id, at) => {
      const [, tokens, sha256] = shown.images.find(([place]) => place === at) ?? [];
      if (tokens !== undefined && sha256 !== undefined) return imageChip(tokens, sha256);
      return html`<span class="token" title=${`id ${id}`}>${shown.texts === null ? id : oneLine(shown.texts[at] ?? "") || "·"}</span>`;
    });
