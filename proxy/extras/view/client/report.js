// The report of a run: one file with the page's curves, messages and tokens, and without a server.
import { Curves, Evaluations } from "./curves.js";
import { count, duration, many, oneLine, visible } from "./format.js";
import { MessageView, Text, WHO } from "./messages.js";
import { html, render, useEffect } from "./page.js";
import { Reward, Status } from "./parts.js";
import { Legend } from "./token.js";
import { TokenText } from "./token_text.js";

/** @typedef {import("./types.d.ts").Report} Report */
/** @typedef {import("./types.d.ts").ReportTurn} ReportTurn */

const FIRST_PANELS = 6;

/** @param {{report: Report}} given */
function ReportPage({ report }) {
  useEffect(() => {
    /** What is folded on the screen is printed as well. */
    const open = () => {
      for (const each of document.querySelectorAll("details:not(.unprinted)")) /** @type {HTMLDetailsElement} */ (each).open = true;
    };
    addEventListener("beforeprint", open);
    return () => removeEventListener("beforeprint", open);
  }, []);
  const { curves } = report;
  const run = { name: "", last: curves.last, metrics: Object.keys(curves.metrics), points: (/** @type {string} */ metric) => curves.metrics[metric] ?? [] };
  return html`<${Evaluations} evaluations=${report.evaluations} />
    ${report.evaluations_left_out > 0 && html`<p class="quiet">${count(report.evaluations_left_out)} evaluations between them are left out.</p>`}
    <h2>Curves</h2>
    <${Curves} runs=${[run]} evaluations=${report.evaluations} first=${FIRST_PANELS} />
    ${curves.left_out > 0 && html`<p class="quiet">${count(curves.left_out)} more metrics are in metrics.jsonl.</p>`}
    <${Troubles} troubles=${report.troubles} />
    <${Pairs} report=${report} />
    <${Configuration} report=${report} />`;
}

/** @param {{troubles: Report["troubles"]}} given */
const Troubles = ({ troubles }) => html`<section class="troubles"><h2>What went wrong</h2>
  ${troubles.length === 0 ? html`<p>Nothing that the run has recorded.</p>` : html`<dl>${troubles.map((each) => html`<div class="trouble">
    <dt><strong>${count(each.count)}</strong> ${visible(each.what)}</dt>
    <dd>${each.of && html`<p class="quiet">${visible(each.of)}</p>`}
      ${each.example !== "" && html`<${Text} text=${each.example} session=${null} turn=${0} place="" code=${true} />`}</dd></div>`)}</dl>`}</section>`;

/** @param {{report: Report}} given */
const Pairs = ({ report }) => html`<section class="pairs"><h2>Transcripts</h2>
  ${report.pairs_note && html`<p class="quiet">${visible(report.pairs_note)}</p>`}
  ${report.pairs.length > 0 && html`<p class="quiet">What the policy wrote is coloured, token by token. Point at a token, or choose
    one with the arrow keys, to see its probability.</p>`}
  ${report.pairs.map((pair) => html`<section class="pair"><h3><bdi>${oneLine(pair.title)}</bdi></h3>
    <p class="quiet">${visible(pair.note)}</p>
    <${Legend} colour=${pair.colour} />
    <div class="sides">${pair.sides.map((side) => html`<${Side} side=${side} colour=${pair.colour} />`)}</div></section>`)}</section>`;

/** @param {{side: import("./types.d.ts").ReportSide, colour: string}} given */
const Side = ({ side: { label, trial, turns, left_out, verifier }, colour }) => html`<article class="side" aria-label=${label}>
  <h4>${visible(label)} <${Status} value=${trial.status} /> reward <${Reward} value=${trial.reward} /></h4>
  <p class="quiet"><bdi>${oneLine(trial.trial_id)}</bdi>: ${many(trial.turns, "turn")}, ${many(trial.sampled_tokens ?? 0, "token")} sampled,
    ${" "}${duration(trial.seconds)}</p>
  ${trial.error && html`<p class="error">${visible(trial.error)}</p>`}
  ${turns.map((turn) => html`<${Turn} turn=${turn} colour=${colour} />`)}
  ${left_out && html`<p class="left-out">${left_out}</p>`}
  ${verifier.map(({ name, text }) => html`<div class="verifier"><h5>${oneLine(name)}</h5>
    <${Text} text=${text} session=${null} turn=${0} place="" code=${true} /></div>`)}</article>`;

/** @param {{turn: ReportTurn, colour: string}} given */
const Turn = ({ turn, colour }) => {
  const at = { session: null, turn: turn.index };
  return html`${turn.messages.map((message, n) => html`<${MessageView} message=${message} ...${at} place=${String(n)} />`)}
    ${turn.more_messages > 0 && html`<p class="left-out">and ${count(turn.more_messages)} more messages</p>`}
    ${turn.tokens ? html`<div class="message assistant sampled"><div class="role">${WHO["assistant"]} <span class="tag sampled">sampled</span></div>
        <${TokenText} tokens=${turn.tokens} colour=${colour} />
        ${turn.more_tokens > 0 && html`<p class="left-out">… ${count(turn.more_tokens)} more tokens are left out</p>`}</div>`
      : turn.answer && html`<${MessageView} message=${turn.answer} ...${at} place="answer" sampled=${true} />`}`;
};

/** @param {{report: Report}} given */
const Configuration = ({ report: { config, config_left_out } }) => html`<section class="configuration"><h2>Configuration</h2>
  <details><summary>${count(Object.keys(config).length)} settings</summary><table><tbody>${Object.entries(config).map(([key, value]) => html`<tr>
    <td><code>${oneLine(key)}</code></td><td><code>${oneLine(value)}</code></td></tr>`)}</tbody></table>
    ${config_left_out > 0 && html`<p class="quiet">${count(config_left_out)} more are in config.yaml.</p>`}</details></section>`;

const data = document.getElementById("report-data");
const root = document.getElementById("report");
if (data && root) render(html`<${ReportPage} report=${JSON.parse(data.textContent ?? "")} />`, root);
