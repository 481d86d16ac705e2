// Policies that are learned from daily sessions: what is served now, and what was decided, and why.
import { asOf, live } from "./api.js";
import { count, many, number, oneLine, share, visible, when } from "./format.js";
import { useLive, usePages } from "./hooks.js";
import { html, useEffect } from "./page.js";
import { Note, TrialLink } from "./parts.js";

/** @typedef {import("./types.d.ts").Learner} Learner */
/** @typedef {import("./types.d.ts").Decision} Decision */

export function Learning() {
  useLive(1);
  const learners = live.state?.learners ?? [];
  if (live.state === null) return html`<h1>Learning</h1><${Note} error=${null} />`;
  return html`<h1>Learning</h1>
    ${learners.length === 0 && html`<p class="quiet">Nothing is learned from these sessions: <code>agentic-proxy serve --learn learn.yaml</code> begins it.</p>`}
    ${learners.map((each) => html`<${Policy} key=${each.policy} learner=${each} />`)}`;
}

/** @param {{learner: Learner}} given */
function Policy({ learner }) {
  const { rows, error, more, again } = usePages("decisions", "decisions", { policy: learner.policy });
  const written = learner.journal.join();
  useEffect(() => {
    if (rows !== null) again();
  }, [written]);
  const title = `decisions-${learner.policy}`;
  return html`<section aria-labelledby=${title}><h2 id=${title}><bdi>${visible(learner.policy)}</bdi></h2>
    <p class="served">${served(learner)}</p>
    <p class="quiet">${stand(learner)}</p>
    ${rows === null ? html`<${Note} error=${error} />` : rows.length === 0 && !more
      ? html`<p class="quiet">Nothing is decided yet: an adapter waits for sessions with evidence.</p>`
      : html`<div class="scroll" tabindex="0" role="group" aria-labelledby=${title}><table class="decisions">
        <thead><tr><th>when</th><th class="n">adapter</th><th>decision</th><th>by</th><th>why</th></tr></thead>
        <tbody>${/** @type {Decision[]} */ (rows).map((each) => html`<tr key=${`${each.at} ${each.kind}`}>
          <td title=${when(each.at)}>${when(each.at)}</td><td class="n">${each.adapter ?? ""}</td>
          <td><span class=${`tag ${COLOURS[each.kind] ?? ""}`}>${neverServed(each) ? "discarded" : NAMES[each.kind] ?? oneLine(each.kind)}</span></td>
          <td>${by(each)}</td><td class="words"><${Why} decision=${each} /></td></tr>`)}</tbody></table></div>`}
    ${more && html`<button type="button" class="more" onClick=${more}>Older decisions</button>`}</section>`;
}

/** @type {Record<string, string>} */
const NAMES = {
  update: "trained", failed: "not trained", gate: "passed its gates", refused: "refused by a gate",
  canary: "became the canary", promote: "promoted",
  rollback: "rolled back", order: "ordered", freeze: "frozen", thaw: "thawed", forgot: "forgotten",
};
/** @type {Record<string, string>} */
const COLOURS = { canary: "status-open", promote: "status-done", rollback: "status-cut", refused: "status-cut", failed: "status-cut", freeze: "fork" };

/** Measures of the gates (trainer/extras/learn/gates.py). @type {Record<string, string>} */
const MEASURES = { kl: "KL", entropy: "entropy (of before)", held_out: "held-out sessions" };

/** Whether it ends an adapter that was never a canary. @param {Decision} decision */
function neverServed({ kind, by: cause }) {
  return kind === "rollback" && ["gate", "engine", "interrupted"].includes(cause);
}

/** @param {Decision} decision */
function by({ kind, by: cause, person }) {
  if (kind === "forgot") return "person";
  const learner = ["", "undecided", "newer", "interrupted"].includes(cause);
  return oneLine(person) || (learner ? "learner" : oneLine(cause));
}

/** What new sessions get. @param {Learner} learner */
function served({ stable, canary, share: part, frozen, order }) {
  const name = stable === 0 ? "the model as it is" : `adapter ${stable}`;
  const beside = canary === null || frozen ? `New sessions get ${name}`
    : `New sessions get ${name}, and ${share(part)} of them the canary, adapter ${canary}`;
  const waits = order && `; a person has ordered to ${order === "rollback" ? "roll it back" : oneLine(order)}`;
  return `${beside}${waits}.${frozen ? ` Frozen${canary === null ? "" : `, adapter ${canary} waits`}: nothing is promoted or trained.` : ""}`;
}

/** Of which moment the decisions are. @param {Learner} learner */
function stand({ running, journal_at: at }) {
  if (live.lost !== null) return `As of ${asOf()}.`;
  if (running) return "The learner runs.";
  return at === null ? "The learner has not run yet." : `The learner does not run: as of ${when(at)}.`;
}

/** @param {{decision: Decision}} given */
function Why({ decision }) {
  const { kind, why, sessions, more_sessions: further } = decision;
  const said = kind === "rollback" && decision.by === "gate" ? [] : why;  // the gate's own row has it
  const words = [...told(decision), ...said.map(oneLine)].join("; ");
  const all = sessions.length + further;
  return html`${words}${all > 0 && html`<details><summary>${{ update: "trained on", failed: "from" }[kind] ?? "compared"} ${many(all, "session")}</summary>
    ${sessions.map((id) => html`<${TrialLink} id=${id} /> `)}${further > 0 && `and ${count(further)} more`}</details>`}`;
}

/** The figures of a decision, as sentences. @param {Decision} decision @returns {string[]} */
function told({ kind, by: cause, beside, figures, went_well: well, why }) {
  const { better, worse, alpha, share: part, replayed, set_aside: aside } = figures;
  const again = replayed ? [`with ${many(replayed, "earlier session")} again`] : [];
  if (kind === "update" || kind === "failed") return [beside ? `from adapter ${beside}` : "from the model as it is", ...again];
  if (kind === "canary") return [`${share(part)} of new sessions, compared with ${beside ? `adapter ${beside}` : "the model as it is"}`];
  if (kind === "forgot") return [many(figures["count"] ?? 0, "session")];
  if (kind === "gate" || kind === "refused") return [Object.entries(figures).map(([name, value]) => `${MEASURES[name] ?? oneLine(name).replaceAll("_", " ")} ${number(value)}`).join(", ")].filter(Boolean);
  const went = Object.entries(well).map(([name, [good, of]]) => `${oneLine(name)} ${count(good ?? 0)} of ${count(of ?? 0)}`);
  const compared = Object.values(well).reduce((sum, [, of]) => sum + (of ?? 0), 0);
  return [
    ...(kind === "rollback" && cause === "undecided" ? [`undecided after ${many(compared, "session")}`] : []),
    ...(kind === "rollback" && cause === "newer" ? [`gave way, after ${many(compared, "session")}, to one that has learned from more`] : []),
    ...(cause === "interrupted" && why.length === 0 ? ["the learner was stopped before it was finished"] : []),
    ...(went.length ? [`went well: ${went.join(", ")}`] : []),
    ...(better === undefined ? [] : [`evidence that it is better ${number(better)}, that it is worse ${number(worse)}${alpha ? ` (${number(1 / alpha)} decides)` : ""}`]),
    ...(aside ? [`its ${many(aside, "session")} will not be trained again`] : []),
  ];
}
