// The curves of runs, drawn over each other, and the evaluations of one of them.
import { Chart } from "./chart.js";
import { number, oneLine, share, shares } from "./format.js";
import { METRICS } from "./metrics.js";
import { html, useEffect, useState } from "./page.js";

/** @typedef {import("./types.d.ts").Evaluation} Evaluation */
/** @typedef {import("./chart.js").Line} Line */
/**
 * @typedef {{name: string, last: number, metrics: string[], points: (metric: string) => [number, number][], spread?: (metric: string) => [number, number, number][], colour?: number}} RunCurves
 * `last`: its last step; `metrics`: their names; `spread`: step, lowest and highest of several runs;
 * `colour`: its number, where that is not its place among the curves
 */

/** Title, unit, and the metrics by their names in the legend. @type {[string, string, Record<string, string>][]} */
const PANELS = [
  ["Success", "share of trials", { training: "rollout/success", "held out": "eval/success" }],
  ["Reward", "mean per trial", { training: "reward/mean", "held out": "eval/reward" }],
  ["Imitation", "loss, nats per token", { training: "sft/loss", "held out": "sft/held_out_loss" }],
  ["Length", "sampled tokens per trial", { "": "rollout/tokens_per_trial" }],
  ["Turns", "turns per trial", { "": "rollout/turns" }],
  ["Entropy", "nats per token", { "": "actor/entropy" }],
  ["KL", "nats per token", { reference: "kl/reference", update: "actor/policy_kl" }],
  ["Mismatch of trainer and engine", "mean |Δ log p|", { "": "mismatch/logp_abs_mean", "replayed routing": "mismatch/with_replay_abs_mean", "own routing": "mismatch/without_replay_abs_mean" }],
  ["Balance of the routers", "auxiliary loss", { "": "actor/router_aux_loss" }],
  ["Effective sample size", "share of tokens", { "": "mismatch/ess" }],
  ["Clipped", "share of tokens", { "": "actor/clip_fraction" }],
  ["Gradient norm", "L2 norm", { "": "actor/grad_norm", imitation: "sft/grad_norm" }],
  ["Loss", "loss per token", { policy: "actor/policy_loss", critic: "critic/loss" }],
  ["Staleness", "updates", { mean: "staleness/mean", max: "staleness/max" }],
  ["Throughput", "tokens per second", { all: "throughput/tokens_per_s", training: "throughput/train" }],
  ["Time of a step", "seconds", { all: "time/step_s", sampling: "time/sample_s", training: "time/train_s", weights: "time/sync_s" }],
  ["Memory", "GiB, peak of the trainer", { "": "memory/peak_gib" }],
  ["Groups with a signal", "share of groups", { "": "group/with_signal" }],
  ["Failed and truncated trials", "share of trials", { failed: "rollout/failed", truncated: "rollout/truncated" }],
];
/** The panel whose axis always has all shares, so that small differences look small. */
const WHOLE = "Success";
const MOST_OTHERS = 60;
/** How the unit of a panel begins whose values are shares. */
const SHARES = "share of";

/**
 * `evaluations`: those of the first run; `open`: shows a step; `first`: number of panels that are
 * shown before the reader asks for the others (none: all).
 * @param {{runs: RunCurves[], evaluations: Evaluation[], open?: (step: number) => void, first?: number}} given
 */
export function Curves({ runs, evaluations, open, first }) {
  const [cursor, point] = useState(/** @type {number | null} */ (null));
  const last = Math.max(0, ...runs.map((run) => run.last));
  /** @param {KeyboardEvent} event */
  const key = (event) => {
    if (/** @type {Element} */ (event.target).tagName === "SUMMARY") return;
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (move !== undefined) point(Math.max(0, Math.min(last, (cursor ?? last) + move)));
    else if (event.key === "Enter" && open) open(cursor ?? last);
    else return;
    event.preventDefault();
  };
  /** @param {Record<string, string>} wanted @returns {Line[]} */
  const lines = (wanted) => runs.flatMap((run, n) => Object.entries(wanted).map(([label, metric], m) => ({
    name: [runs.length > 1 ? run.name : "", label].filter(Boolean).join(" "),
    run: runs.length > 1 ? run.colour ?? n : m, dash: runs.length > 1 ? m : 0,
    points: run.points(metric),
    area: run.spread?.(metric) ?? [],
    band: n === 0 && !run.spread ? intervals(evaluations, metric) : [],
  })));
  if (runs.every((run) => run.metrics.length === 0)) return html`<p class="quiet">No step has ended yet.</p>`;
  const all = [...new Set(runs.flatMap((run) => run.metrics))];
  const panels = withPolicies(all);
  const named = new Set(panels.flatMap(([, , wanted]) => Object.values(wanted)));
  const others = all.filter((metric) => !named.has(metric) && metric !== "step" && metric !== "time").sort();
  const known = panels.filter(([, , wanted]) => runs.some((run) => Object.values(wanted).some((metric) => run.points(metric).length > 0)));
  const given = { cursor, point, open };
  /** @param {[string, string, Record<string, string>][]} panels */
  const charts = (panels) => html`<div class="charts" tabindex="0" role="group"
      aria-label=${`Curves; left and right choose a step${open ? ", Enter opens its groups" : ""}`} onKeyDown=${key}>
    ${panels.map(([title, unit, wanted]) => html`<${Chart} key=${title} title=${title} unit=${unit} lines=${lines(wanted)} about=${about(wanted)} range=${title === WHOLE ? [0, 1] : undefined} shares=${unit.startsWith(SHARES)} ...${given} />`)}</div>`;
  const folded = known.slice(first ?? known.length);
  return html`<section aria-label="Curves">${charts(known.slice(0, first))}
    ${folded.length > 0 && html`<${Folded} title=${`${folded.length} more curves`} printed=${true}>${() => charts(folded)}<//>`}
    ${others.length > 0 && html`<${Folded} title=${`${others.length} more metrics`}>${() => html`
      ${charts(others.slice(0, MOST_OTHERS).map((metric) => [oneLine(metric), "", { "": metric }]))}
      ${others.length > MOST_OTHERS && html`<p class="quiet">The first ${MOST_OTHERS} are shown; all are in metrics.jsonl.</p>`}`}<//>`}</section>`;
}

/**
 * The panels; in a run with several policies, also with the metrics `policies/NAME/…` of each of them.
 * @param {string[]} metrics @returns {[string, string, Record<string, string>][]}
 */
function withPolicies(metrics) {
  const known = new Set(metrics);
  const policies = [...new Set(metrics.map((metric) => /^policies\/([^/]+)\//.exec(metric)?.[1] ?? ""))].filter(Boolean).sort();
  return PANELS.map(([title, unit, wanted]) => [title, unit, { ...wanted, ...Object.fromEntries(policies.flatMap((policy) =>
    Object.entries(wanted).map(([label, metric]) => [[policy, label].filter(Boolean).join(" "), `policies/${policy}/${metric}`])
      .filter(([, metric]) => metric !== undefined && known.has(metric)))) }]);
}

/** What is known of the metrics, each once. @param {Record<string, string>} wanted @returns {string[][]} */
const about = (wanted) => [...new Set(Object.values(wanted).map((metric) => metric.replace(/^policies\/[^/]+\//, "")))]
  .flatMap((metric) => (METRICS[metric] ? [METRICS[metric]] : []));

/**
 * What is made when the reader opens it, or prints the page.
 * @param {{title: string, printed?: boolean, children: () => import("./page.js").Child}} given
 */
function Folded({ title, printed, children }) {
  const [open, setOpen] = useState(false);
  useEffect(() => {
    const show = () => setOpen(true);
    if (printed) addEventListener("beforeprint", show);
    return () => removeEventListener("beforeprint", show);
  }, [printed]);
  return html`<details class=${printed ? "others" : "others unprinted"} open=${open} onToggle=${/** @param {Event} e */ (e) => setOpen(/** @type {HTMLDetailsElement} */ (e.target).open)}>
    <summary>${title}</summary>${open && children()}</details>`;
}

/** The 95 % intervals of a metric of evaluations. @param {Evaluation[]} evaluations @param {string} metric */
const intervals = (evaluations, metric) => evaluations.flatMap((each) => {
  const found = metric === "eval/success" ? each.interval : metric === "eval/reward" ? each.reward_interval : undefined;
  return found?.length === 2 ? [/** @type {[number, number, number]} */ ([each.step, found[0], found[1]])] : [];
});

/** @param {{evaluations: Evaluation[]}} given */
export function Evaluations({ evaluations }) {
  if (evaluations.length === 0) return null;
  return html`<section aria-labelledby="evaluations-title"><h2 id="evaluations-title">Evaluation on held-out tasks</h2>
    <div class="scroll" tabindex="0" role="group" aria-labelledby="evaluations-title"><table>
    <thead><tr><th>evaluation</th><th class="n">step</th><th class="n">success</th><th class="n">95 % interval</th><th class="n">reward</th>
      <th class="n">trials</th><th class="n">failed</th></tr></thead>
    <tbody>${evaluations.map((each) => html`<tr key=${each.name}><td>${oneLine(each.name)}</td><td class="n">${each.step}</td><${Numbers} score=${each} /></tr>
      ${(each.sources ?? []).map((source) => html`<tr key=${`${each.name}/${source.name}`} class="source"><td><span class="meta">source</span> <bdi>${
        oneLine(source.name)}</bdi></td><td></td><${Numbers} score=${source} /></tr>`)}`)}</tbody></table></div></section>`;
}

/** @param {{score: import("./types.d.ts").Score}} given */
const Numbers = ({ score }) => html`
  <td class="n">${share(score.success)}</td><td class="n">${score.trials === 0 ? "–" : shares(score.interval)}</td>
  <td class="n">${number(score.reward)}</td><td class="n">${score.trials ?? "–"}</td><td class="n">${score.failed ?? "–"}</td>`;
