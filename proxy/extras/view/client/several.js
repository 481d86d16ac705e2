// Several runs next to each other: held-out success with differences, what their configurations
// do not share, and runs that differ in their seeds as one curve with its spread.
import { get, live } from "./api.js";
import { many, oneLine, share, shares, visible } from "./format.js";
import { html, useEffect, useRef, useState } from "./page.js";

/** @typedef {import("./types.d.ts").Run} Run */
/** @typedef {import("./curves.js").RunCurves} RunCurves */

/** Settings in which runs may differ that repeat each other. */
const OF_A_REPETITION = /(^|\.)seed$|^trainer\.run_dir$/;

/** What changes when a run's summary does. @param {string} name */
export function stampOf(name) {
  const stamps = live.state?.runs?.find((run) => run.name === name);
  return [stamps?.summary, stamps?.running].join();
}

/** The summaries of several runs, each read again when it changes; null until all are read, and of
 * one run. @param {string[]} names @returns {Run[] | null} */
export function useRuns(names) {
  const [read, set] = useState(/** @type {Map<string, Run>} */ (new Map()));
  const asked = useRef(/** @type {Map<string, string>} */ (new Map()));
  const wanted = names.length > 1 ? names : [];
  const stamps = wanted.map(stampOf);
  useEffect(() => {
    wanted.forEach(async (name, n) => {
      const stamp = stamps[n] ?? "";
      if (asked.current.get(name) === stamp) return;
      asked.current.set(name, stamp);
      try {
        const run = await get("run", { run: name });
        // An answer that a later one has overtaken is older.
        if (asked.current.get(name) === stamp) set((known) => new Map(known).set(name, run));
      } catch {
        asked.current.delete(name); // the next change asks again
      }
    });
  }, [wanted.join(), stamps.join(";")]);
  const found = wanted.flatMap((name) => live.ends?.[name]?.run ?? read.get(name) ?? []);
  return found.length > 1 && found.length === wanted.length ? found : null;
}

/** @param {{runs: Run[]}} given */
export const Several = ({ runs }) => html`<${HeldOut} runs=${runs} /><${Differences} runs=${runs} />`;

/**
 * A share minus another one, of other tasks or trials, with its 95 % interval: Newcombe's, from the
 * two intervals (Statistics in Medicine 17, 1998, method 10).
 * @param {{success: number, interval: number[]}} first @param {{success: number, interval: number[]}} other
 * @returns {[number, number, number]}
 */
export function difference(first, other) {
  const [p = 0, low = 0, high = 0] = [first.success, ...first.interval];
  const [q = 0, from = 0, to = 0] = [other.success, ...other.interval];
  return [q - p, q - p - Math.hypot(q - from, high - p), q - p + Math.hypot(to - q, p - low)];
}

/** The last evaluation of each run, and its difference to the first one's. @param {{runs: Run[]}} given */
function HeldOut({ runs }) {
  const lasts = runs.map((run) => run.evaluations.at(-1));
  const known = lasts.map((each) => (each?.success != null && each.interval?.length === 2 ? { success: each.success, interval: each.interval } : null));
  if (!known.some(Boolean)) return null;
  const [first] = known;
  return html`<section aria-labelledby="held-out-title"><h2 id="held-out-title">Held-out success of ${many(runs.length, "run")}</h2>
    <div class="scroll" tabindex="0" role="group" aria-labelledby="held-out-title"><table class="held-out">
    <thead><tr><th>run</th><th>evaluation</th><th class="n">success <small>95 % interval</small></th>
      <th class="n">difference to the first <small>95 % interval</small></th></tr></thead>
    <tbody>${runs.map((run, n) => {
    const own = known[n];
    const change = n > 0 && first && own ? difference(first, own) : null;
    return html`<tr key=${run.name}><td><span class=${`swatch run${n % 6}`}></span> <bdi>${visible(run.name)}</bdi></td><td>${oneLine(lasts[n]?.name ?? "–")}</td>
      <td class="n">${own ? html`${share(own.success)} <small>${shares(own.interval)}</small>` : "–"}</td>
      <td class="n">${change ? html`${signed(change[0])} points <small>${signed(change[1])} to ${signed(change[2])}</small>` : "–"}</td></tr>`;
  })}</tbody></table></div></section>`;
}

/** A difference of shares in points: "+12". @param {number} value */
const signed = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value * 100).toFixed(0)}`;

/** The keys of the configurations that are not the same in all runs. @param {{runs: Run[]}} given */
function Differences({ runs }) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))]
    .filter((key) => runs.some((run) => run.config[key] !== runs[0]?.config[key])).sort();
  return html`<section aria-labelledby="differences-title"><h2 id="differences-title">Configuration: ${many(keys.length, "difference")}</h2>
    ${keys.length > 0 && html`<div class="scroll" tabindex="0" role="group" aria-labelledby="differences-title"><table>
      <thead><tr><th>key</th>${runs.map((run, n) => html`<th><span class=${`swatch run${n % 6}`}></span> <bdi>${visible(run.name)}</bdi></th>`)}</tr></thead>
      <tbody>${keys.map((key) => html`<tr key=${key}><td><code>${oneLine(key)}</code></td>
        ${runs.map((run) => html`<td><code>${oneLine(run.config[key] ?? "–")}</code></td>`)}</tr>`)}</tbody></table></div>`}</section>`;
}

/** The runs as groups that differ in their seeds only, in the order of their first. @param {Run[]} runs @returns {string[][]} */
export function repetitions(runs) {
  /** @type {Map<string, string[]>} */
  const groups = new Map();
  for (const run of runs) {
    const rest = Object.entries(run.config).filter(([key]) => !OF_A_REPETITION.test(key)).sort();
    const key = JSON.stringify(rest);
    groups.set(key, [...(groups.get(key) ?? []), run.name]);
  }
  return [...groups.values()];
}

/**
 * One curve of several runs: the mean, and the lowest and the highest, at the steps that all have.
 * @param {RunCurves[]} runs @returns {RunCurves}
 */
export function together(runs) {
  const [first] = runs;
  if (first === undefined || runs.length === 1) return first ?? { name: "", last: 0, metrics: [], points: () => [] };
  /** @param {string} metric @returns {[number, number[]][]} */
  const values = (metric) => {
    const known = runs.map((run) => new Map(run.points(metric)));
    return [...(known[0]?.keys() ?? [])].flatMap((step) => {
      const found = known.flatMap((each) => each.get(step) ?? []);
      return found.length === runs.length ? [/** @type {[number, number[]]} */ ([step, found])] : [];
    });
  };
  return {
    name: `${first.name}, ${many(runs.length, "run")}`,
    last: Math.max(...runs.map((run) => run.last)),
    metrics: [...new Set(runs.flatMap((run) => run.metrics))],
    points: (metric) => values(metric).map(([step, found]) => [step, found.reduce((sum, each) => sum + each, 0) / found.length]),
    spread: (metric) => values(metric).map(([step, found]) => [step, Math.min(...found), Math.max(...found)]),
  };
}
