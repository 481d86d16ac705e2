// The rollouts of one task next to each other, aligned where they part.
import { get } from "./api.js";
import { count, duration, many, named, number, oneLine, visible } from "./format.js";
import { useGet } from "./hooks.js";
import { MessageView } from "./messages.js";
import { html, useEffect, useState } from "./page.js";
import { Note, Reward, Status, TrialLink } from "./parts.js";
import { link } from "./router.js";
import { conversation } from "./trial.js";

/** @typedef {import("./types.d.ts").RunTrial} RunTrial */
/** @typedef {import("./types.d.ts").Message} Message */
/** @typedef {{turn: number, place: string, sampled: boolean, message: Message, key: string}} Item */
/** @typedef {{items: Item[], error: string | null}} Line */

const MOST_COLUMNS = 16;
const MOST_TURNS = 100;

/** @param {{place: import("./router.js").Place}} given */
export function Group({ place }) {
  const run = place.id;
  const step = Number(place.query.get("step") ?? 0);
  const group = place.query.get("group");
  const { data, error } = useGet("run/step", { run, step, group });
  const found = /** @type {{trials: RunTrial[]} | null} */ (data);
  if (found === null) return html`<h1>Group</h1><${Note} error=${error} />`;
  const trials = found.trials.filter((each) => each.kind === "train" && (each.group ?? each.task_id) === group);
  if (trials.length === 0) return html`<h1>Group</h1><p class="quiet">Step ${step} has no group ${oneLine(group ?? "")}.</p>`;
  return html`<h1>Group <bdi>${oneLine(trials[0]?.task_id ?? "")}</bdi></h1>
    <p>${many(trials.length, "rollout")} of one task in <a href=${link("run", run, { step })}>step ${step}</a>: ${trainedOf(trials)}</p>
    <${Rewards} trials=${trials} />
    <${Aligned} trials=${trials.map((trial) => ({ trial, note: "" }))} />`;
}

/** What the step did with a group. @param {RunTrial[]} trials */
export function trainedOf(trials) {
  const known = trials.filter((each) => each.trained_tokens != null);
  const trained = known.filter((each) => (each.trained_tokens ?? 0) > 0);
  if (known.length === 0) return "what was trained of it is not recorded";
  if (trained.length > 0) return `${count(trained.length)} of ${count(trials.length)} were trained`;
  const rewards = new Set(trials.flatMap((each) => (each.reward === null ? [] : [each.reward])));
  return rewards.size < 2 ? "none was trained, because their rewards are equal" : "none was trained";
}

/** Reward and advantage of each rollout. @param {{trials: RunTrial[]}} given */
const Rewards = ({ trials }) => html`<div class="scroll" tabindex="0" role="region" aria-label="Rewards and advantages"><table class="rewards">
  <thead><tr><th class="n">rollout</th><th>trial</th><th>status</th><th class="n">reward</th><th class="n">advantage</th><th class="n">trained tokens</th></tr></thead>
  <tbody>${trials.map((trial, n) => html`<tr key=${trial.trial_id}><td class="n">${n + 1}</td><td><${TrialLink} id=${trial.trial_id} /></td>
    <td><${Status} value=${trial.status} /></td><td class="n"><${Reward} value=${trial.reward} /></td>
    <td class="n">${trial.advantage == null ? "–" : html`<span class=${trial.advantage > 0 ? "good" : trial.advantage < 0 ? "bad" : "none"}>${signed(trial.advantage)}</span>`}</td>
    <td class="n">${trial.trained_tokens == null ? "–" : `${count(trial.trained_tokens)} of ${count(trial.sampled_tokens ?? 0)}`}</td></tr>`)}</tbody></table></div>`;

/** @param {number} value */
const signed = (value) => (value > 0 ? `+${number(value)}` : number(value).replace("-", "−"));

/** @param {{trials: {trial: RunTrial, note: string}[]}} given */
export function Aligned({ trials }) {
  const shown = trials.slice(0, MOST_COLUMNS);
  const ids = shown.map(({ trial }) => trial.trial_id);
  const lines = useConversations(ids);
  if (lines === null) return html`<${Note} error=${null} />`;
  const known = lines.filter((line) => line.items.length > 0);
  const longest = Math.max(0, ...lines.map((line) => line.items.length));
  const same = known.length > 1 ? shared(known.map((line) => line.items)) : 0;
  const common = Math.min(same, Math.max(0, longest - 1)); // if all are equal, the last message is shown
  const twins = lines.map((line, n) => twin(lines, n));
  return html`<details class="shared" open=${common > 0}><summary>${same === 0 ? "They differ from the first message on."
        : same === longest ? "All messages are the same." : `The first ${same} messages are the same in all.`}</summary>
      ${known[0]?.items.slice(0, common).map((item) => cell(ids[lines.indexOf(/** @type {Line} */ (known[0]))] ?? "", item))}</details>
    ${trials.length > MOST_COLUMNS && html`<p class="quiet">The first ${MOST_COLUMNS} of ${trials.length} are shown.</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Rollouts next to each other"><table class="aligned">
      <thead><tr>${shown.map(({ trial, note }, n) => html`<th scope="col"><span class="quiet">${n + 1}</span> <${TrialLink} id=${trial.trial_id} />
        <div>${note && html`<span class="tag">${oneLine(note)}</span> `}<${Status} value=${trial.status} /> reward <${Reward} value=${trial.reward} /></div>
        <div class="quiet">${many(trial.turns, "turn")}, ${many(trial.sampled_tokens ?? 0, "token")}, ${duration(trial.seconds)}</div>
        ${trial.error && html`<div class="words">${oneLine(trial.error)}</div>`}</th>`)}</tr></thead>
      <tbody>${Array.from({ length: Math.max(1, longest - common) }, (_, row) => html`<tr key=${row}>${lines.map((line, n) => {
    const at = common + row;
    const item = line.items[at];
    if (line.error !== null) return html`<td>${row === 0 && html`<p class="quiet">${line.error}</p>`}</td>`;
    if (item === undefined) return html`<td class="ended">${at === line.items.length && html`<p class="quiet">ended, reward ${number(shown[n]?.trial.reward ?? null)}</p>`}</td>`;
    const as = twins[n];
    if (as && at < as.items) return html`<td><p class="quiet">as in ${as.column + 1}</p></td>`;
    return html`<td>${row === 0 && parting(lines, at)}${cell(ids[n] ?? "", item)}</td>`;
  })}</tr>`)}</tbody></table></div>`;
}

/** @param {string} session @param {Item} item */
const cell = (session, { turn, place, sampled, message }) => html`<div class="cell">
  <a class="quiet" href=${link(sampled ? "tokens" : "trial", session, { turn })}>#${turn}${sampled ? " tokens" : ""}</a>
  <${MessageView} message=${message} session=${session} turn=${turn} place=${place} sampled=${sampled} /></div>`;

/** Number of messages with which all of them begin. @param {Item[][]} all */
export function shared(all) {
  const [first = [], ...others] = all;
  let at = 0;
  while (at < first.length && others.every((items) => items[at]?.key === first[at]?.key)) at += 1;
  return at;
}

/** The column to the left that shares most messages with a column. @param {Line[]} lines @param {number} n */
function twin(lines, n) {
  /** @type {{column: number, items: number} | null} */
  let best = null;
  for (let column = 0; column < n; column += 1) {
    const items = shared([lines[column]?.items ?? [], lines[n]?.items ?? []]);
    if (items > (best?.items ?? 0)) best = { column, items };
  }
  return best;
}

/** The end of the text up to which the messages at a place agree. @param {Line[]} lines @param {number} at */
export function parting(lines, at) {
  const texts = lines.flatMap((line) => (line.items[at] ? [textOf(line.items[at].message)] : []));
  const [first = "", ...others] = texts;
  let end = 0;
  while (end < first.length && others.every((text) => text[end] === first[end])) end += 1;
  const same = others.every((text) => text === first);
  return end > 0 && others.length > 0 && !same && html`<p class="parting">they part after <q>${oneLine(visible(first.slice(Math.max(0, end - 60), end)))}</q></p>`;
}

/** @param {Message} message */
const textOf = ({ text }) => named(typeof text === "string" ? text : text.text);

/**
 * The main conversation of each session: the one with the longest path.
 * @param {string[]} ids
 */
function useConversations(ids) {
  const [found, set] = useState(/** @type {{key: string, lines: Line[]} | null} */ (null));
  const key = ids.join("\n");
  useEffect(() => {
    let stopped = false;
    Promise.all(ids.map((id) => main(id).then(
      (items) => ({ items, error: items.length ? null : "no call was recorded" }),
      (refused) => ({ items: [], error: String(refused.message) }),
    ))).then((lines) => stopped || set({ key, lines }));
    return () => {
      stopped = true;
    };
  }, [key]);
  return found?.key === key ? found.lines : null;
}

/** @param {string} session @returns {Promise<Item[]>} */
async function main(session) {
  const heads = (await get("heads", { session })).turns;
  /** @param {import("./types.d.ts").Head} head */
  const length = (head) => (head.status === "open" ? -1 : head.shared + head.new + head.sampled);
  const last = heads.reduce((/** @type {number} */ best, /** @type {import("./types.d.ts").Head} */ head, /** @type {number} */ n) =>
    (length(head) >= length(heads[best]) ? n : best), 0);
  const blocks = conversation(heads, last).slice(0, MOST_TURNS);
  /** @type {Item[]} */
  const items = [];
  for (let at = 0; at < blocks.length; at += 20) {
    const part = blocks.slice(at, at + 20);
    const { turns } = await get("turns", { session, turns: part.map((block) => block.turn).join(",") });
    for (const { turn, answer } of part) {
      const recorded = turns.find((/** @type {import("./types.d.ts").Turn} */ each) => each.index === turn);
      recorded?.messages.forEach((/** @type {Message} */ message, /** @type {number} */ n) =>
        items.push({ turn, place: String(n), sampled: false, message, key: keyOf(message) }));
      if (answer && recorded?.answer) {
        items.push({ turn, place: "answer", sampled: true, message: recorded.answer, key: keyOf(recorded.answer) });
      }
    }
  }
  return items;
}

/** Messages with the same key are the same; ids of tool calls differ from trial to trial. @param {Message} message */
const keyOf = ({ role, text, reasoning, tool_calls: calls }) =>
  JSON.stringify([role, text, reasoning, calls.map((call) => [call.name, call.arguments])]);
