// What happens at this moment: rates, engines, running sessions, errors with their cause.
import { asOf, moment } from "./api.js";
import { ago, count, duration, number, oneLine, share, short, visible } from "./format.js";
import { useGet, useLive } from "./hooks.js";
import { html } from "./page.js";
import { Cause, Status, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Head} Head */

const BAR_S = 3;
const BARS = 60;
const ACTIVE_S = 600;
/** Calls that a page knows at first, if the store has more. */
const FIRST = 500;
const OVER = ["completed", "expired", "deleted"];

/** @param {Head} head */
const ended = (head) => head.started_at + (head.duration_s ?? 0);

export function Now() {
  const live = useLive();
  const now = moment();
  const last = live.answered.filter((head) => now - ended(head) < 10);
  const running = [...live.running.values()].filter((head) => now - head.started_at < 3600);
  const refused = live.events.filter((event) => event.kind === "refused" && now - event.at < 3600);
  const sessions = active(live.answered, running, now);
  const busy = sessions.filter((each) => now - each.at < 60).length;
  const over = new Set(live.events.filter(({ kind }) => OVER.includes(kind)).map((event) => event.session_id));
  const engines = live.state?.engines.length ?? 0;
  const newest = newestVersion(live.state);
  const open = sessions.filter((each) => each.running > 0 || (now - each.at < 60 && !over.has(each.id)));
  const behind = Math.max(-1, ...open.map((each) => staleness(each, newest) ?? -1));
  const runs = (live.state?.runs ?? []).filter((run) => run.now !== null);
  return html`<h1>${live.lost === null ? "Now" : `As of ${asOf()}`}</h1>
    <ul class="tiles">
      <${Tile} name="calls per second" value=${(last.length / 10).toFixed(1)} note="of the last 10 s" />
      <${Tile} name="tokens per second" value=${short(Math.round(sum(last, (h) => h.sampled) / 10))} note="sampled" />
      <${Tile} name="calls running" value=${running.length} note=${running.length ? `the oldest ${duration(now - Math.min(...running.map((h) => h.started_at)))}` : "none"} />
      <${Tile} name="calls waiting" value=${live.state?.waiting ?? 0} note="for room in a cache" />
      <${Tile} name="active sessions" value=${busy} note="in the last minute" />
      ${engines > 0 && html`<${Tile} name="staleness" value=${behind < 0 ? "–" : behind} note=${newest === null ? "several policies" : `versions behind the newest, ${newest}`} />`}
      <${Tile} name="refused calls" value=${refused.length} note="in the last hour" warn=${refused.length > 0} />
    </ul>
    <${Rate} answered=${live.answered} now=${now} />
    ${runs.map((run) => html`<${Training} key=${run.name} run=${run} now=${now} />`)}
    <div class="columns">
      <section aria-labelledby="engines-title"><h2 id="engines-title">Engines</h2>
        <${Engines} state=${live.state} /></section>
      <section aria-labelledby="errors-title"><h2 id="errors-title">Errors</h2>
        <${Errors} events=${refused.slice(-20).reverse()} now=${now} />
        <${RuleFaults} faults=${live.state?.rule_faults ?? []} now=${now} /></section>
    </div>
    <section aria-labelledby="active-title"><h2 id="active-title">Latest sessions</h2>
      <${Active} sessions=${sessions.slice(0, 30)} over=${over} now=${now} newest=${newest} /></section>`;
}

/** The newest version that is sampled from; null if several policies have versions of their own. @param {import("./types.d.ts").State | null} state */
function newestVersion(state) {
  const policies = state?.policies ?? [];
  if (policies.length > 1) return null;
  return Math.max(0, ...(state?.engines ?? []).map((engine) => engine.version), ...policies.map((policy) => policy.version));
}

/** Versions by which the oldest sampled token of a session is behind. @param {{oldest: number | null}} session @param {number | null} newest */
const staleness = ({ oldest }, newest) => (newest === null || oldest === null ? null : Math.max(0, newest - oldest));

/** What a run does, and what it waits for. @param {{run: import("./types.d.ts").RunStamps, now: number}} given */
function Training({ run, now }) {
  // A run that was killed leaves its last state: whether its process lives is asked once a minute.
  const { data } = useGet("run", { run: run.name }, Math.floor(now / 60));
  const status = /** @type {import("./types.d.ts").Run | null} */ (data)?.status;
  const doing = run.now;
  if (doing === null || (status !== "running" && status !== undefined)) return null;
  const { groups } = doing;
  const missing = groups && Math.max(0, groups.needed - groups.ready);
  return html`<section class="training" aria-label=${`The run ${visible(run.name)}`}><h2><a href=${link("run", run.name)}><bdi>${oneLine(run.name)}</bdi></a></h2>
    <p>step ${doing.step}: <strong>${oneLine(doing.phase)}</strong> for ${duration(now - doing.started_at)}${
      (doing.ended > 0 || doing.trials > 0) && html`, ${count(doing.ended)}${doing.trials > 0 && html` of ${count(doing.trials)}`} trials ended${doing.failed > 0 && html`, ${count(doing.failed)} failed`}`}</p>
    ${groups && html`<p>${doing.phase === "sampling" && missing ? `The trainer waits for ${missing} more ${missing === 1 ? "group" : "groups"}: ` : "The next batch: "}${
      count(groups.ready)} of ${count(groups.needed)} groups are ready, ${count(groups.running)} run; they may be ${count(groups.max_staleness)} versions old.</p>`}
    ${doing.phase === "sampling" && !groups && html`<p>The trainer waits for the trials of this step.</p>`}
    ${doing.errors.length > 0 && html`<h3>Trials that failed</h3><ul class="errors">${[...doing.errors].reverse().map((failed) => html`<li>
      <${TrialLink} id=${failed.trial_id} run=${run.name} /> <div class="words" dir="auto">${oneLine(failed.error)}</div></li>`)}</ul>`}
  </section>`;
}

/** @template T @param {T[]} items @param {(item: T) => number} of */
const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

/** @param {{name: string, value: string | number, note: string, warn?: boolean}} given */
const Tile = ({ name, value, note, warn }) =>
  html`<li class=${warn ? "tile warn" : "tile"}><span>${name}</span><strong>${value}</strong><small>${note}</small></li>`;

/** Calls per second as bars, the newest at the right. @param {{answered: Head[], now: number}} given */
function Rate({ answered, now }) {
  const bars = new Array(BARS).fill(0);
  const failed = new Array(BARS).fill(0);
  for (const head of answered) {
    const at = BARS - 1 - Math.floor((now - ended(head)) / BAR_S);
    if (at < 0 || at >= BARS) continue;
    bars[at] += 1;
    if (head.status === "cut") failed[at] += 1;
  }
  const most = Math.max(1, ...bars);
  const total = sum(bars, (n) => n);
  const since = answered[0] ? now - ended(answered[0]) : 0;
  const all = answered.length < FIRST || since > BARS * BAR_S;
  const label = `${all ? "" : "at least "}${total} calls ended in the last ${(BARS * BAR_S) / 60} minutes${total > 0 ? `, at most ${(most / BAR_S).toFixed(1)} per second` : ""}`;
  return html`<figure class="rate">
    <svg viewBox=${`0 0 ${BARS * 10} 60`} preserveAspectRatio="none" role="img" aria-label=${label}>
      ${bars.map((n, at) => html`<rect class="bar" x=${at * 10 + 1} width="8" y=${60 - (n / most) * 58} height=${(n / most) * 58} />`)}
      ${failed.map((n, at) => n > 0 && html`<rect class="bar cut" x=${at * 10 + 1} width="8" y=${60 - (n / most) * 58} height=${(n / most) * 58} />`)}
    </svg>
    <figcaption>${label}</figcaption>
  </figure>`;
}

/** @param {{state: import("./types.d.ts").State | null}} given */
function Engines({ state }) {
  if (!state) return html`<p class="waiting">Loading …</p>`;
  if (!state.engines.length) return html`<p class="quiet">No engine is connected.</p>`;
  return html`${state.paused && html`<p class="error" role="status">The engines are paused: calls wait.</p>`}
    <div class="scroll" tabindex="0" role="group" aria-labelledby="engines-title"><table>
      <thead><tr><th>name</th><th>model</th><th>state</th><th class="n">calls</th><th class="n">queued</th><th class="n">cache</th><th class="n">hits</th><th class="n">version</th><th class="n">context</th></tr></thead>
      <tbody>${state.engines.map((engine) => html`<tr>
        <td title=${engine.url}>${oneLine(engine.name)}</td><td>${oneLine(engine.model ?? "–")}</td>
        <td><span class=${engine.healthy ? "tag status-done" : "tag status-cut"}>${engine.healthy ? "healthy" : "failed"}</span></td>
        <td class="n">${engine.in_flight}</td><td class="n">${number(engine.details.queued)}</td>
        <td class="n">${share(engine.details.cache_used)}</td><td class="n">${share(engine.details.cache_hits)}</td>
        <td class="n">${engine.version}</td>
        <td class="n">${engine.max_context_tokens ? short(engine.max_context_tokens) : "–"}</td></tr>`)}</tbody>
    </table></div>`;
}

/** @param {{events: import("./types.d.ts").StoredEvent[], now: number}} given */
function Errors({ events, now }) {
  if (!events.length) return html`<p class="quiet">No call was refused in the last hour.</p>`;
  return html`<ul class="errors">${events.map((event) => html`<li>
    <span class="tag status-cut">${String(event["status"] ?? "?")}</span>${" "}
    <${TrialLink} id=${event.session_id} /> <small>${ago(event.at, now)}</small>
    <div class="words" dir="auto">${oneLine(String(event["message"] ?? event["code"] ?? ""))}</div></li>`)}</ul>`;
}

/** Errors of search rules, the latest first. @param {{faults: import("./types.d.ts").RuleFault[], now: number}} given */
const RuleFaults = ({ faults, now }) => faults.length > 0 && html`<h3>Search rules that failed</h3>
  <ul class="errors">${[...faults].reverse().map((fault) => html`<li>
    <span class="tag status-cut">${fault.rule ? oneLine(fault.rule) : "all rules"}</span>${" "}
    ${fault.session && html`<${TrialLink} id=${fault.session} turn=${fault.turn < 0 ? null : fault.turn} />`} <small>${ago(fault.at, now)}</small>
    <div class="words" dir="auto">${oneLine(fault.error)}</div></li>`)}</ul>`;

/**
 * @param {Head[]} answered @param {Head[]} running @param {number} now
 * @returns {{id: string, at: number, last: Head, calls: number, tokens: number, running: number, oldest: number | null}[]}
 */
function active(answered, running, now) {
  /** @type {Map<string, {id: string, at: number, last: Head, calls: number, tokens: number, running: number, oldest: number | null}>} */
  const found = new Map();
  for (const head of [...answered, ...running]) {
    const at = ended(head);
    if (now - at > ACTIVE_S && head.status !== "open") continue;
    const known = found.get(head.session) ?? { id: head.session, at, last: head, calls: 0, tokens: 0, running: 0, oldest: null };
    for (const [version] of head.versions) known.oldest = Math.min(version, known.oldest ?? version);
    known.calls += 1;
    known.tokens += head.sampled;
    known.running += head.status === "open" ? 1 : 0;
    if (at >= known.at) Object.assign(known, { at, last: head });
    found.set(head.session, known);
  }
  return [...found.values()].sort((a, b) => b.at - a.at);
}

/** @param {{sessions: ReturnType<typeof active>, over: Set<string>, now: number, newest: number | null}} given `over`: the sessions that have ended */
function Active({ sessions, over, now, newest }) {
  if (!sessions.length) {
    return html`<p class="quiet">No call in the last ten minutes. <a href=${link("sessions")}>All sessions</a></p>`;
  }
  return html`<div class="scroll" tabindex="0" role="group" aria-labelledby="active-title"><table>
    <thead><tr><th>session</th><th>last turn</th><th>waits for</th><th class="n">calls</th><th class="n">tokens</th><th class="n">behind</th><th class="n">took</th><th class="n">last</th></tr></thead>
    <tbody>${sessions.map(({ id, at, last, calls, tokens, running, oldest }) => html`<tr key=${id}>
      <td><${TrialLink} id=${id} turn=${last.index} /></td>
      <td><${Status} value=${running ? "running" : last.status} /> ${last.fork && html`<${Cause} cause=${last.fork} />`}
        ${last.agent && html`<span class="tag">${oneLine(last.agent)}</span>`}</td>
      <td>${running ? "the engine" : over.has(id) ? "–" : "its agent"}</td>
      <td class="n">${count(calls)}</td><td class="n">${short(tokens)}</td><td class="n">${staleness({ oldest }, newest) ?? "–"}</td>
      <td class="n">${duration(last.duration_s)}</td><td class="n">${ago(at, now)}</td></tr>`)}</tbody>
  </table></div>`;
}
