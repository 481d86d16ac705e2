// The head of a run: how it is doing and what to do, how far it is, and what it is made of.
import { live } from "./api.js";
import { count, duration, many, oneLine, setting, short, visible } from "./format.js";
import { html, useState } from "./page.js";
import { Status, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Run} Run */
/** @typedef {import("./types.d.ts").Metrics} Metrics */
/** @typedef {import("./types.d.ts").Verdict} VerdictOfRun */

const RECENT_STEPS = 5;
/** The settings that name an agent, as in the report (trainer/extras/report/headline.py). */
const AGENTS = ["harbor.agent_name", "harbor.agent_import_path", "command.argv", "python.target", "http.url", "openenv.url", "launcher.target"];

/** @param {{run: Run, metrics: Metrics[]}} given */
export function RunHead({ run, metrics }) {
  const wanted = Number(setting(run.config["trainer.steps"]) ?? 0);
  const left = run.status === "running" ? timeLeft(metrics, wanted - (run.steps ?? 0)) : null;
  const tokens = run.tokens_sampled;
  /** @type {[string, import("./page.js").Child][]} */
  const facts = [
    ["status", html`<${Status} value=${run.status ?? "no status"} />`],
    ["step", wanted ? `${count(run.steps ?? 0)} of ${count(wanted)}` : count(run.steps ?? 0)],
    ["time", duration(run.wall_s)],
    ["left", left === null ? null : `about ${duration(left)}`],
    ["model", named(run.config["model.path"])],
    ["agent", agentOf(run.config)],
    ["algorithm", algorithmOf(run.config)],
    ["tokens", tokens == null ? null : `${short(tokens)} sampled`],
    ["machine", run.machine ? oneLine(run.machine) : null],
    ["machine-hours", hours(run.wall_s)],
    ["GPU-hours", run.gpus ? hours((run.wall_s ?? 0) * run.gpus) : null],
    ["cost", run.wall_s == null ? null : html`<${Cost} hours=${(run.wall_s / 3600) * (run.gpus || 1)} of=${run.gpus ? "GPU-hour" : "machine-hour"} />`],
  ];
  return html`<section class="run-head" aria-label="The run">
    ${run.verdict && html`<${Verdict} verdict=${run.verdict} run=${run} />`}
    ${run.error && html`<p class="error" role="alert">${visible(run.error)}</p>`}
    <dl class="details">${facts.map(([name, value]) => value && html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <p class="links"><a href=${link("trials", run.name)}>trials</a>
      ${run.evaluations.length > 1 && html` <a href=${link("compare", run.name)}>before and after</a>`}
      ${" "}<a href=${`/view/run/trace?run=${encodeURIComponent(run.name)}`} download=${`${run.name}.trace.json`}>trace for Perfetto</a>
      ${run.report && html` <a href=${`/view/run/report?run=${encodeURIComponent(run.name)}`} download=${`${run.name}.html`}>report</a>`}
      ${run.status !== "running" && html` <span class="quiet">report: <code>${visible(run.folder)}/report.html</code></span>`}</p>
    <details class="configuration"><summary>Configuration: ${many(Object.keys(run.config).length, "key")}</summary>
      <div class="scroll" tabindex="0" role="group" aria-label="Configuration"><table><tbody>${Object.entries(run.config).map(([key, value]) => html`<tr key=${key}>
        <td><code>${oneLine(key)}</code></td><td><code>${oneLine(value)}</code></td></tr>`)}</tbody></table></div></details></section>`;
}

/** @param {{verdict: VerdictOfRun, run: Run}} given */
function Verdict({ verdict, run }) {
  const { failures } = verdict;
  return html`<section class=${`verdict verdict-${verdict.verdict.replaceAll(" ", "-")}`} aria-labelledby="verdict-title">
    <h2 id="verdict-title">Verdict: <strong>${verdict.verdict}</strong></h2>
    <p>${visible(verdict.sentence)}</p><p>Cause: ${visible(verdict.cause)}</p>
    ${failures.length > 0 && html`<h3>Failed trials by cause</h3><ul class="failures">${failures.map((each) => html`<li key=${each.cause}>
      ${count(each.trials)} of ${many(each.of, "trial")}: ${visible(each.cause)}
      ${each.trial_id && html`<div class="quiet">the last one: <${TrialLink} id=${each.trial_id} run=${run.name} /> in <code>${visible(each.folder)}</code></div>`}
      ${each.lines.length > 0 && html`<pre class="text code">${visible(each.lines.join("\n"))}</pre>`}</li>`)}</ul>`}
    ${verdict.next.length > 0 && html`<h3>What to do</h3><ol class="next">${verdict.next.map((each) => html`<li key=${each.command}>${visible(each.what)}
      <${Command} text=${each.command} /></li>`)}</ol>`}</section>`;
}

/** What the hours cost, at a price that this browser keeps. @param {{hours: number, of: string}} given */
function Cost({ hours, of }) {
  const key = `price of a ${of}`;
  const [price, setPrice] = useState(() => localStorage.getItem(key) ?? "");
  /** @param {Event} event */
  const changed = (event) => {
    const { value } = /** @type {HTMLInputElement} */ (event.target);
    localStorage.setItem(key, value);
    setPrice(value);
  };
  return html`${price !== "" && html`<span class="cost">${(hours * Number(price)).toFixed(2)}</span> at `}
    <label><input type="number" min="0" step="any" value=${price} onChange=${changed} placeholder="price" aria-label=${key} /> per ${of}</label>`;
}

/** A command to paste into a terminal. @param {{text: string}} given */
export const Command = ({ text }) => html`<div class="command"><code>${visible(text)}</code>
  ${navigator.clipboard && html`<button type="button" class="quiet" onClick=${() => navigator.clipboard.writeText(text)}>copy</button>`}</div>`;

/** Seconds that the other steps will take, at the pace of the last ones. @param {Metrics[]} metrics @param {number} steps */
function timeLeft(metrics, steps) {
  const times = metrics.filter((line) => "time/step_s" in line || "reward/mean" in line).slice(-RECENT_STEPS - 1).map((line) => line["time"] ?? 0);
  const [first, last] = [times[0], times.at(-1)];
  if (first === undefined || last === undefined || times.length < 2 || steps <= 0 || !live.connected) return null;
  const each = (last - first) / (times.length - 1);
  return Math.max(0, steps * each - (Date.now() / 1000 - last));
}

/** @param {number | null} seconds */
const hours = (seconds) => (seconds == null ? null : Number((seconds / 3600).toPrecision(2)).toString());

/** @param {string | undefined} value */
function named(value) {
  const found = setting(value);
  return found === null || found === "" ? null : html`<bdi>${oneLine(Array.isArray(found) ? found.join(" ") : String(found))}</bdi>`;
}

/** @param {Record<string, string>} config */
function agentOf(config) {
  const key = AGENTS.map((each) => `remote_agent.${each}`).find((each) => setting(config[each]));
  if (key !== undefined) return named(config[key]);
  const several = new Set(Object.keys(config).flatMap((each) => /^agents\.([^.]+)\./.exec(each)?.[1] ?? []));
  return several.size > 0 ? [...several].map((each) => oneLine(each)).join(", ") : null;
}

/** @param {Record<string, string>} config */
function algorithmOf(config) {
  if (Object.keys(config).some((key) => key.startsWith("sft."))) return "fine-tuning (SFT)";
  const [preset, advantage, loss] = ["preset", "advantage.name", "loss.name"].map((each) => setting(config[`algorithm.${each}`]));
  const parts = advantage && loss ? `${advantage}, ${loss} loss` : "";
  return oneLine(preset ? `${preset}${parts && ` (${parts})`}` : parts) || null;
}

