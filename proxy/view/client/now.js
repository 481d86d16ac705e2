// What happens at this moment: rates, engines, running sessions, errors with their cause.
import { ago, count, duration, number, oneLine, share, short } from "./format.js";
import { useLive } from "./hooks.js";
import { html } from "./page.js";
import { Cause, Status, TrialLink } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Head} Head */

const BAR_S = 3;
const BARS = 60;
const ACTIVE_S = 600;

/** @param {Head} head */
const ended = (head) => head.started_at + (head.duration_s ?? 0);

export function Now() {
  const live = useLive();
  const now = Date.now() / 1000;
  const last = live.answered.filter((head) => now - ended(head) < 10);
  const running = [...live.running.values()].filter((head) => now - head.started_at < 3600);
  const refused = live.events.filter((event) => event.kind === "refused" && now - event.at < 3600);
  const sessions = active(live.answered, running, now);
  const busy = sessions.filter((each) => now - each.at < 60).length;
  return html`<h1>Now</h1>
    <ul class="tiles">
      <${Tile} name="calls per second" value=${(last.length / 10).toFixed(1)} note="of the last 10 s" />
      <${Tile} name="tokens per second" value=${short(Math.round(sum(last, (h) => h.sampled) / 10))} note="sampled" />
      <${Tile} name="calls running" value=${running.length} note=${running.length ? `the oldest ${duration(now - Math.min(...running.map((h) => h.started_at)))}` : "none"} />
      <${Tile} name="calls waiting" value=${live.state?.waiting ?? 0} note="for room in a cache" />
      <${Tile} name="active sessions" value=${busy} note="in the last minute" />
      <${Tile} name="refused calls" value=${refused.length} note="in the last hour" warn=${refused.length > 0} />
    </ul>
    <${Rate} answered=${live.answered} now=${now} />
    <div class="columns">
      <section aria-labelledby="engines-title"><h2 id="engines-title">Engines</h2>
        <${Engines} state=${live.state} /></section>
      <section aria-labelledby="errors-title"><h2 id="errors-title">Errors</h2>
        <${Errors} events=${refused.slice(-20).reverse()} now=${now} />
        <${RuleFaults} faults=${live.state?.rule_faults ?? []} now=${now} /></section>
    </div>
    <section aria-labelledby="active-title"><h2 id="active-title">Sessions at work</h2>
      <${Active} sessions=${sessions.slice(0, 30)} now=${now} /></section>`;
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
  const label = `${total} calls ended in the last ${(BARS * BAR_S) / 60} minutes, at most ${(most / BAR_S).toFixed(1)} per second`;
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
 * @returns {{id: string, at: number, last: Head, calls: number, tokens: number, running: number}[]}
 */
function active(answered, running, now) {
  /** @type {Map<string, {id: string, at: number, last: Head, calls: number, tokens: number, running: number}>} */
  const found = new Map();
  for (const head of [...answered, ...running]) {
    const at = ended(head);
    if (now - at > ACTIVE_S && head.status !== "open") continue;
    const known = found.get(head.session) ?? { id: head.session, at, last: head, calls: 0, tokens: 0, running: 0 };
    known.calls += 1;
    known.tokens += head.sampled;
    known.running += head.status === "open" ? 1 : 0;
    if (at >= known.at) Object.assign(known, { at, last: head });
    found.set(head.session, known);
  }
  return [...found.values()].sort((a, b) => b.at - a.at);
}

/** @param {{sessions: ReturnType<typeof active>, now: number}} given */
function Active({ sessions, now }) {
  if (!sessions.length) {
    return html`<p class="quiet">No call in the last ten minutes. <a href=${link("sessions")}>All sessions</a></p>`;
  }
  return html`<div class="scroll" tabindex="0" role="group" aria-labelledby="active-title"><table>
    <thead><tr><th>session</th><th>last turn</th><th class="n">calls</th><th class="n">tokens</th><th class="n">took</th><th class="n">last</th></tr></thead>
    <tbody>${sessions.map(({ id, at, last, calls, tokens, running }) => html`<tr key=${id}>
      <td><${TrialLink} id=${id} turn=${last.index} /></td>
      <td><${Status} value=${running ? "running" : last.status} /> ${last.fork && html`<${Cause} cause=${last.fork} />`}
        ${last.agent && html`<span class="tag">${oneLine(last.agent)}</span>`}</td>
      <td class="n">${count(calls)}</td><td class="n">${short(tokens)}</td>
      <td class="n">${duration(last.duration_s)}</td><td class="n">${ago(at, now)}</td></tr>`)}</tbody>
  </table></div>`;
}
