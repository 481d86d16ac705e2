// The turns of a session as a tree: one row per turn, one lane per line of turns that continue each
// other, as tools draw the history of a repository.
import { count, duration, oneLine, short, words } from "./format.js";
import { html, useEffect, useRef } from "./page.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").Head} Head */
/** @typedef {{lane: number, from: {row: number, lane: number} | null}} Row */

const LANE = 14;
const HEIGHT = 30;
const MOST_LANES = 8;

/**
 * Where each turn is drawn. A lane is free again after the last turn on it.
 * @param {Head[]} heads in order of index, from 0
 * @returns {Row[]}
 */
export function layOut(heads) {
  /** Turn → the turn that continues it in the same lane. @type {Map<number, number>} */
  const next = new Map();
  for (const head of heads) {
    if (head.parent !== null && !head.fork && !next.has(head.parent)) next.set(head.parent, head.index);
  }
  /** Lane → the last row that needs it. @type {number[]} */
  const busy = [];
  /** @type {Row[]} */
  const rows = [];
  for (const head of heads) {
    const row = rows.length;
    const parentRow = isRoot(head) ? null : head.parent;
    const parent = parentRow === null ? undefined : rows[parentRow];
    let lane = 0;
    if (parent && parentRow !== null && next.get(parentRow) === row) lane = parent.lane;
    else {
      // The line from the parent runs in this lane, which nothing else may cross.
      const since = parentRow ?? row - 1;
      while ((busy[lane] ?? -1) > since || (parent && lane === parent.lane)) lane += 1;
    }
    busy[lane] = next.get(row) ?? row;
    rows.push({ lane, from: parent && parentRow !== null ? { row: parentRow, lane: parent.lane } : null });
  }
  return rows;
}

/** A turn that shares at most the system prompt begins a line of its own. @param {Head} head */
const isRoot = (head) => head.parent === null || head.fork === "new_conversation";

/** @param {number} lane */
const x = (lane) => 8 + Math.min(lane, MOST_LANES) * LANE;
/** @param {number} row */
const y = (row) => row * HEIGHT + HEIGHT / 2;

/**
 * @param {{session: string, heads: Head[], selected: number | null, shown: Set<number>}} given
 * `shown`: the turns of the conversation that is shown
 */
export function Tree({ session, heads, selected, shown }) {
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    list.current?.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
  }, [selected, heads.length]);
  const rows = layOut(heads);
  const width = x(Math.min(MOST_LANES, Math.max(0, ...rows.map((row) => row.lane)))) + 12;
  /** @param {KeyboardEvent} event */
  const key = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    const rowsShown = [...(list.current?.querySelectorAll("a") ?? [])];
    const at = rowsShown.indexOf(/** @type {HTMLAnchorElement} */ (document.activeElement));
    if (step === undefined || at < 0) return;
    event.preventDefault();
    rowsShown[at + step]?.focus();
  };
  return html`<nav class="tree" aria-label="Turns" ref=${list} onKeyDown=${key}>
    <svg width=${width} height=${heads.length * HEIGHT} aria-hidden="true">
      ${rows.map(({ lane, from }, row) => from && html`<path class=${`edge lane${lane % 5}`} d=${edge(from, row, lane)} />`)}
      ${rows.map(({ lane }, row) => html`<circle cx=${x(lane)} cy=${y(row)} r="5"
        class=${`node lane${lane % 5} ${heads[row]?.status ?? ""}`} />`)}
    </svg>
    <ol style=${{ marginLeft: `${width}px` }}>${heads.map((head) => html`<li key=${head.index}>
      <a href=${link("trial", session, { turn: head.index })} aria-current=${head.index === selected ? "true" : null}
        class=${shown.has(head.index) ? "shown" : ""} title=${title(head)}>
        <span class="index">#${head.index}</span>
        <span class="what">${head.fork ? html`<span class="tag fork">${words(head.fork)}</span>` : ""}
          ${head.status !== "done" && html`<span class=${`tag status-${head.status}`}>${head.status}</span>`}
          ${head.agent && html`<span class="tag">${oneLine(head.agent)}</span>`}</span>
        <span class="n">+${short(head.new)} → ${short(head.sampled)}</span></a></li>`)}</ol>
  </nav>`;
}

/** @param {Head} head */
const title = (head) =>
  `turn ${head.index}, ${head.dialect}, ${head.status}: ${count(head.shared)} shared + ${count(head.new)} new prompt tokens, ` +
  `${count(head.sampled)} sampled, ${duration(head.duration_s)}`;

/** @param {{row: number, lane: number}} from @param {number} row @param {number} lane */
function edge(from, row, lane) {
  if (from.lane === lane) return `M${x(lane)} ${y(from.row)}V${y(row)}`;
  const turn = y(from.row) + HEIGHT;
  return `M${x(from.lane)} ${y(from.row)}C${x(from.lane)} ${turn} ${x(lane)} ${y(from.row)} ${x(lane)} ${turn}V${y(row)}`;
}
