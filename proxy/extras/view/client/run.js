// A training run: its curves as they come, over those of other runs; evaluations; groups of a step.
import { get, live } from "./api.js";
import { Curves, Evaluations } from "./curves.js";
import { number, oneLine, visible } from "./format.js";
import { useGet, useLast, useLive } from "./hooks.js";
import { html, useEffect, useRef, useState } from "./page.js";
import { Note, Reward, Status } from "./parts.js";
import { link } from "./router.js";
import { RunHead } from "./run_head.js";
import { Several, repetitions, stampOf, together, useRuns } from "./several.js";

/** @typedef {import("./types.d.ts").Run} Run */
/** @typedef {import("./types.d.ts").Metrics} Metrics */
/** @typedef {import("./types.d.ts").RunTrial} RunTrial */
/** @typedef {import("./curves.js").RunCurves} RunCurves */

/** @param {{place: import("./router.js").Place}} given */
export function RunView({ place }) {
  useLive(1);
  const runs = live.state?.runs ?? [];
  const name = place.id || (runs[0]?.name ?? "");
  if (live.state === null) return html`<h1>Run</h1><${Note} error=${null} />`;
  if (name === "") return html`<h1>Run</h1><p class="quiet">This page shows no run: start it with <code>agentic-proxy view RUN</code>.</p>`;
  return html`<${OneRun} key=${name} name=${name} place=${place} />`;
}

/** @param {{name: string, place: import("./router.js").Place}} given */
function OneRun({ name, place }) {
  const chosen = (place.query.get("with") ?? "").split(",").filter((each) => each && each !== name);
  const others = (live.state?.runs ?? []).map((run) => run.name).filter((each) => each !== name);
  const names = [name, ...chosen];
  const { data, error } = useSummary(name);
  const run = useLast(/** @type {Run | null} */ (data));
  const metrics = useMetrics(names);
  const step = place.query.get("step");
  const runs = useRuns(names);
  const [asOne, setAsOne] = useState(false);
  const groups = runs === null ? [] : repetitions(runs);
  const repeated = groups.some((group) => group.length > 1);
  const curves = names.map((each) => curvesOf(each, metrics.get(each) ?? []));
  const drawn = asOne && repeated ? groups.map((group) => ({ ...together(curves.filter((each) => group.includes(each.name))), colour: names.indexOf(group[0] ?? "") })) : curves;
  /** @param {string} other @param {boolean} on */
  const choose = (other, on) => {
    const next = on ? [...chosen, other] : chosen.filter((each) => each !== other);
    location.hash = link("run", name, { with: next.join(","), step });
  };
  /** @param {number} at */
  const open = (at) => {
    location.hash = link("run", name, { step: at, with: chosen.join(",") });
    document.getElementById("step")?.scrollIntoView({ block: "nearest" });
  };
  if (run === null) return html`<h1>Run ${name}</h1><${Note} error=${error} />`;
  return html`<h1><bdi>${visible(name)}</bdi></h1>
    <${RunHead} run=${run} metrics=${metrics.get(name) ?? []} />
    ${others.length > 0 && html`<form class="filters" aria-label="Other runs">${others.map((other) => html`<label><input type="checkbox"
      checked=${chosen.includes(other)} onChange=${/** @param {Event} e */ (e) => choose(other, /** @type {HTMLInputElement} */ (e.target).checked)} />
      <bdi>${visible(other)}</bdi></label>`)}</form>`}
    ${runs !== null && html`<${Several} runs=${runs} />`}
    ${repeated && html`<form class="filters"><label><input type="checkbox" name="as-one" checked=${asOne}
      onChange=${/** @param {Event} e */ (e) => setAsOne(/** @type {HTMLInputElement} */ (e.target).checked)} />
      one curve for runs that differ in their seeds only: the mean, and from the lowest to the highest</label></form>`}
    <${Curves} runs=${drawn} evaluations=${run.evaluations} open=${open} />
    <${Evaluations} evaluations=${run.evaluations} />
    <${Step} run=${name} metrics=${metrics.get(name) ?? []} asked=${step === null ? null : Number(step)} chosen=${chosen} />`;
}

/** A run's summary, read again when it changes. @param {string} name */
function useSummary(name) {
  const found = useGet("run", { run: name }, stampOf(name));
  const end = live.ends?.[name];
  return end ? { data: end.run, error: null } : found;
}

/** The metrics of each run, read on from where they were when the file grows. @param {string[]} names */
function useMetrics(names) {
  /** @typedef {{file: number, next: number, steps: Metrics[], busy: boolean}} Known */
  const known = useRef(/** @type {Map<string, Known>} */ (new Map()));
  const [, changed] = useState(0);
  const stamps = names.map((name) => live.state?.runs?.find((run) => run.name === name)?.metrics ?? [0, 0]);
  useEffect(() => {
    let stopped = false;
    names.forEach(async (name, n) => {
      const [file = 0, size = 0] = stamps[n] ?? [];
      const mine = known.current.get(name) ?? { file, next: 0, steps: [], busy: false };
      known.current.set(name, mine);
      if (mine.file !== file) Object.assign(mine, { file, next: 0, steps: [] });
      if (mine.busy) return;
      mine.busy = true;
      try {
        while (!stopped && mine.next < size) {
          const found = await get("run/metrics", { run: name, from: mine.next });
          if (found.next <= mine.next) break;
          mine.steps = [...mine.steps, ...found.steps];
          mine.next = found.next;
          changed((times) => times + 1);
        }
      } catch {
        // The next change of the file asks again.
      } finally {
        mine.busy = false;
      }
    });
    return () => {
      stopped = true;
    };
  }, [names.join(), stamps.join()]);
  return new Map(names.map((name) => {
    const { next, steps } = known.current.get(name) ?? { next: 0, steps: [] };
    const last = (live.ends?.[name]?.lines ?? []).filter(([start]) => start >= next).map(([, line]) => line);
    return [name, last.length ? [...steps, ...last] : steps];
  }));
}

/** @type {WeakMap<Metrics[], string[]>} */
const namesOfSteps = new WeakMap();

/** The metrics that any of the lines has; the view asks each second. @param {Metrics[]} steps */
function namesOf(steps) {
  const found = namesOfSteps.get(steps) ?? [...new Set(steps.flatMap((line) => Object.keys(line)))];
  namesOfSteps.set(steps, found);
  return found;
}

/** @param {string} name @param {Metrics[]} steps @returns {RunCurves} */
const curvesOf = (name, steps) => ({
  name,
  last: steps.at(-1)?.step ?? 0,
  metrics: namesOf(steps),
  points: (metric) => steps.flatMap((line) =>
    (typeof line[metric] === "number" ? [/** @type {[number, number]} */ ([line.step, line[metric]])] : [])),
});

/**
 * The groups of one step.
 * @param {{run: string, metrics: Metrics[], asked: number | null, chosen: string[]}} given
 */
function Step({ run, metrics, asked, chosen }) {
  const last = metrics.findLast((line) => "reward/mean" in line || "rollout/trials" in line)?.step ?? null;
  const step = asked ?? last;
  // Trials of a step that is not over are written meanwhile.
  const written = step !== null && step >= (last ?? 0) && live.state?.runs?.find((each) => each.name === run)?.trials.join();
  const { data, error } = useGet("run/step", { run, step: step ?? 0, kind: "train" }, [step === null, written].join());
  const found = useLast(/** @type {{step: number, trials: RunTrial[], left_out: boolean} | null} */ (data));
  if (step === null) return null;
  /** @param {number} to */
  const at = (to) => link("run", run, { step: to, with: chosen.join(",") });
  /** @param {Event} event */
  const go = (event) => {
    location.hash = at(Number(/** @type {HTMLInputElement} */ (event.target).value));
  };
  return html`<section id="step" aria-labelledby="step-title"><h2 id="step-title">Groups of step ${step}</h2>
    <p class="filters"><a href=${at(Math.max(0, step - 1))}>earlier</a> <label>step <input key=${step} type="number" min="0" defaultValue=${step} onChange=${go} /></label>
      <a href=${at(step + 1)}>later</a></p>
    ${found === null || found.step !== step ? html`<${Note} error=${error} />` : html`${found.left_out && html`<${LeftOut} />`}<${Groups} run=${run} step=${step} trials=${found.trials} />`}</section>`;
}

/** More trials than one answer has. */
export const LeftOut = () => html`<p class="left-out">The step has more trials than these; the file trials.jsonl has them all.</p>`;

/** @param {RunTrial[]} trials @returns {Map<string, RunTrial[]>} */
const grouped = (trials) =>
  Map.groupBy(trials.filter((each) => each.kind === "train"), (each) => each.group ?? each.task_id);

/** @param {{run: string, step: number, trials: RunTrial[]}} given */
function Groups({ run, step, trials }) {
  const groups = [...grouped(trials)];
  if (groups.length === 0) return html`<p class="quiet">No group was trained in this step.</p>`;
  const rewards = trials.flatMap((trial) => (trial.reward === null ? [] : [trial.reward]));
  const [low, high] = [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
  return html`<div class="scroll" tabindex="0" role="group" aria-labelledby="step-title"><table class="groups">
    <thead><tr><th>task</th><th>rewards</th><th class="n">mean</th><th class="n">spread</th><th class="n">trials</th><th class="n">turns</th>
      <th class="n">tokens</th><th class="n">seconds</th><th>ended</th></tr></thead>
    <tbody>${groups.map(([group, members]) => html`<tr key=${group}>
      <td><a class="id" href=${link("group", run, { step, group })}><bdi>${oneLine(members[0]?.task_id ?? group)}</bdi></a></td>
      <td><${Spread} trials=${members} low=${low} high=${high} /></td>
      <td class="n"><${Reward} value=${mean(members, "reward")} /></td><td class="n">${number(deviation(members))}</td>
      <td class="n">${members.length}</td><td class="n">${number(mean(members, "turns"))}</td>
      <td class="n">${range(members, "sampled_tokens")}</td><td class="n">${range(members, "seconds")}</td>
      <td>${Object.entries(Object.groupBy(members, (each) => each.status)).map(([status, all]) => html`<${Status} value=${status} />${(all?.length ?? 0) > 1 ? `×${all?.length} ` : " "}`)}</td>
    </tr>`)}</tbody></table></div>`;
}

/** One dot per trial over the range of the step. @param {{trials: RunTrial[], low: number, high: number}} given */
function Spread({ trials, low, high }) {
  const label = `rewards ${trials.map((trial) => number(trial.reward)).join(", ")}`;
  /** @type {Map<number, number>} */
  const seen = new Map();
  return html`<svg class="spread" viewBox="0 0 110 24" width="110" height="24" role="img" aria-label=${label}>
    <line x1="4" x2="106" y1="20" y2="20" />${trials.map((trial) => {
    if (trial.reward === null) return null;
    const x = 4 + Math.round((102 * (trial.reward - low)) / (high - low || 1));
    const above = seen.get(x) ?? 0;
    seen.set(x, above + 1);
    return html`<circle cx=${x} cy=${17 - Math.min(above, 4) * 3.6} r="2.4" />`;
  })}</svg>`;
}

/** @param {RunTrial[]} trials @param {"reward" | "turns" | "sampled_tokens" | "seconds"} field */
function values(trials, field) {
  return trials.flatMap((trial) => (trial[field] === null ? [] : [/** @type {number} */ (trial[field])]));
}

/** @param {RunTrial[]} trials @param {"reward" | "turns"} field */
export function mean(trials, field) {
  const known = values(trials, field);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}

/** @param {RunTrial[]} trials */
function deviation(trials) {
  const middle = mean(trials, "reward");
  const known = values(trials, "reward");
  return middle === null ? null : Math.sqrt(known.reduce((sum, each) => sum + (each - middle) ** 2, 0) / known.length);
}

/** @param {RunTrial[]} trials @param {"sampled_tokens" | "seconds"} field */
function range(trials, field) {
  const known = values(trials, field);
  if (known.length === 0) return "–";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
}
