// The trials of a run, the latest first, by kind, status, reward, source, length, error, text and rule.
import { duration, oneLine, short } from "./format.js";
import { usePages } from "./hooks.js";
import { html } from "./page.js";
import { Choice, Marks, Note, Reward, Status, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").RunTrial} RunTrial */

const FILTERS = ["kind", "status", "source", "task", "text", "marked", "min_reward", "max_reward", "min_tokens", "errors"];

/** @param {{place: import("./router.js").Place}} given */
export function Trials({ place }) {
  const run = place.id;
  const query = Object.fromEntries(FILTERS.map((name) => [name, place.query.get(name)]));
  const { rows, error, more } = usePages("run/trials", "trials", { run, ...query });
  /** @param {Event} event */
  const choose = (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (/** @type {HTMLElement} */ (event.target).closest("form"));
    location.hash = link("trials", run, Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)])));
  };
  const trials = /** @type {RunTrial[] | null} */ (rows);
  return html`<h1>Trials of <a href=${link("run", run)}><bdi>${oneLine(run)}</bdi></a></h1>
    <form class="filters" role="search" onSubmit=${choose} onChange=${choose}>
      <${Choice} name="kind" values=${["train", "eval"]} chosen=${query["kind"]} />
      <${Choice} name="status" values=${["done", "truncated", "failed", "aborted"]} chosen=${query["status"]} />
      <label>reward from <input key=${query["min_reward"]} name="min_reward" type="number" step="any" defaultValue=${query["min_reward"] ?? ""} /></label>
      <label>to <input key=${query["max_reward"]} name="max_reward" type="number" step="any" defaultValue=${query["max_reward"] ?? ""} /></label>
      <label>tokens from <input key=${query["min_tokens"]} name="min_tokens" type="number" min="0" defaultValue=${query["min_tokens"] ?? ""} /></label>
      <label>source <input key=${query["source"]} name="source" defaultValue=${query["source"] ?? ""} /></label>
      <label>task <input key=${query["task"]} name="task" defaultValue=${query["task"] ?? ""} /></label>
      <label>text <input key=${query["text"]} name="text" defaultValue=${query["text"] ?? ""} placeholder="id, task, agent, error" /></label>
      <label>marked by <input key=${query["marked"]} name="marked" defaultValue=${query["marked"] ?? ""} placeholder="rule, or * for any" /></label>
      <label><input name="errors" type="checkbox" value="yes" checked=${query["errors"] === "yes"} /> with an error</label>
    </form>
    ${trials === null ? html`<${Note} error=${error} />` : html`<${TrialTable} run=${run} trials=${trials} />`}
    ${more && html`<button type="button" class="more" onClick=${more}>Earlier trials</button>`}`;
}

/** @param {{run: string, trials: RunTrial[]}} given */
function TrialTable({ run, trials }) {
  if (trials.length === 0) return html`<p class="quiet">No trial matches among those that were read.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Trials"><table class="run-trials">
    <thead><tr><th>trial</th><th>task</th><th class="n">step</th><th>status</th><th class="n">reward</th><th class="n">turns</th>
      <th class="n">tokens</th><th class="n">took</th><th>error</th></tr></thead>
    <tbody>${trials.map((trial) => html`<tr key=${trial.trial_id}>
      <td><${TrialLink} id=${trial.trial_id} /><${Marks} session=${trial.trial_id} marks=${trial.marks} />${trial.kind === "eval" && html` <span class="tag">eval</span>`}</td>
      <td><bdi>${oneLine(trial.task_id)}</bdi>${trial.source && html` <span class="meta"><bdi>${oneLine(trial.source)}</bdi></span>`}</td>
      <td class="n"><a href=${link("run", run, { step: trial.step })}>${trial.step}</a></td><td><${Status} value=${trial.status} /></td>
      <td class="n"><${Reward} value=${trial.reward} /></td><td class="n">${trial.turns}</td><td class="n">${short(trial.sampled_tokens ?? 0)}</td>
      <td class="n">${duration(trial.seconds)}</td><td class="words"><bdi>${trial.error ? oneLine(trial.error) : ""}</bdi></td></tr>`)}</tbody></table></div>`;
}
