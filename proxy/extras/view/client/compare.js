// Before and after: the same held-out task in two evaluations of a run.
import { many, number, oneLine } from "./format.js";
import { Aligned } from "./group.js";
import { useGet } from "./hooks.js";
import { html } from "./page.js";
import { Note, Reward } from "./parts.js";
import { link } from "./router.js";
import { LeftOut, mean } from "./run.js";

/** @typedef {import("./types.d.ts").RunTrial} RunTrial */
/** @typedef {import("./types.d.ts").Run} Run */

/** @param {{place: import("./router.js").Place}} given */
export function Compare({ place }) {
  const name = place.id;
  const { data, error } = useGet("run", { run: name });
  const run = /** @type {Run | null} */ (data);
  if (run === null) return html`<h1>Before and after</h1><${Note} error=${error} />`;
  const known = run.evaluations.map((each) => each.name);
  if (known.length < 2) return html`<h1>Before and after</h1><p class="quiet">The run has ${many(known.length, "evaluation")}; two are needed.</p>`;
  const a = place.query.get("a") ?? known[0] ?? "";
  const b = place.query.get("b") ?? known.at(-1) ?? "";
  /** @param {Event} event */
  const choose = (event) => {
    const form = /** @type {HTMLFormElement} */ (/** @type {HTMLElement} */ (event.target).closest("form"));
    const task = place.query.get("task");
    location.hash = link("compare", name, { ...Object.fromEntries([...new FormData(form)].map(([key, value]) => [key, String(value)])), task });
  };
  return html`<h1>Before and after: <a href=${link("run", name)}><bdi>${oneLine(name)}</bdi></a></h1>
    <form class="filters" onChange=${choose}>${[["a", a, "evaluation"], ["b", b, "against"]].map(([field, chosen, label]) => html`<label>${label}
      <select name=${field} value=${chosen}>${known.map((each) => html`<option value=${each}>${oneLine(each)}</option>`)}</select></label>`)}</form>
    <${Tasks} run=${run} a=${a} b=${b} task=${place.query.get("task")} />`;
}

/** @param {Run} run @param {string} name */
const stepOf = (run, name) => run.evaluations.find((each) => each.name === name)?.step ?? 0;

/** @param {{run: Run, a: string, b: string, task: string | null}} given */
function Tasks({ run, a, b, task }) {
  const before = useGet("run/step", { run: run.name, step: stepOf(run, a), kind: "eval" });
  const after = useGet("run/step", { run: run.name, step: stepOf(run, b), kind: "eval" });
  if (before.data === null || after.data === null) return html`<${Note} error=${before.error ?? after.error} />`;
  const [first, second] = [tasksOf(before.data, a), tasksOf(after.data, b)];
  const rows = [...first].flatMap(([id, trials]) => {
    const others = second.get(id);
    return others ? [{ id, a: trials, b: others, from: mean(trials, "reward"), to: mean(others, "reward") }] : [];
  }).sort((one, other) => (changeOf(other) ?? -Infinity) - (changeOf(one) ?? -Infinity) || 0);
  const more = [before.data, after.data].some((each) => /** @type {{left_out: boolean}} */ (each).left_out);
  const shown = rows.find((row) => row.id === task) ?? rows[0];
  if (shown === undefined) return html`<p class="quiet">No task has trials in both evaluations.</p>`;
  const changes = rows.map((row) => Math.sign(changeOf(row) ?? NaN));
  const of = (/** @type {number} */ sign) => changes.filter((each) => each === sign).length;
  const unknown = changes.filter(Number.isNaN).length;
  return html`${more && html`<${LeftOut} />`}<p>${many(rows.length, "task")}: ${of(1)} better, ${of(-1)} worse, ${of(0)} with the same reward${unknown > 0 && `, ${unknown} not judged in both`}.</p>
    <div class="scroll tasks" tabindex="0" role="region" aria-label="Held-out tasks"><table>
      <thead><tr><th>task</th><th class="n">${oneLine(a)}</th><th class="n">${oneLine(b)}</th><th class="n">change</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.id} class=${row === shown ? "chosen" : ""}>
        <td><a href=${link("compare", run.name, { a, b, task: row.id })} aria-current=${row === shown ? "true" : null}><bdi>${oneLine(row.id)}</bdi></a></td>
        <td class="n"><${Reward} value=${row.from} /></td><td class="n"><${Reward} value=${row.to} /></td>
        <td class="n">${signed(changeOf(row))}</td></tr>`)}</tbody></table></div>
    <h2><bdi>${oneLine(shown.id)}</bdi></h2>
    <${Aligned} trials=${[...shown.a.map((trial) => ({ trial, note: a })), ...shown.b.map((trial) => ({ trial, note: b }))]} />`;
}

/** Null: one of both has no reward. @param {{from: number | null, to: number | null}} row */
const changeOf = ({ from, to }) => (from === null || to === null ? null : to - from);

/** @param {number | null} change */
const signed = (change) => (change !== null && change > 0 ? `+${number(change)}` : number(change));

/** @param {unknown} data @param {string} evaluation @returns {Map<string, RunTrial[]>} */
function tasksOf(data, evaluation) {
  const { trials } = /** @type {{trials: RunTrial[]}} */ (data);
  const own = trials.filter((trial) => trial.kind === "eval" && (trial.evaluation ?? evaluation) === evaluation);
  return Map.groupBy(own, (trial) => trial.task_id);
}
