// A session: its turns as a tree, and the conversation that leads to one of them.
import { get, live } from "./api.js";
import { count, duration, many, number, oneLine, short, visible } from "./format.js";
import { Curation, folderName } from "./curation.js";
import { ForkView } from "./forks.js";
import { Ago, useGet, useLast } from "./hooks.js";
import { MessageView } from "./messages.js";
import { html, useEffect, useMemo, useRef, useState } from "./page.js";
import { Cause, Marks, Note, Reward, Status } from "./parts.js";
import { link, runOf } from "./router.js";
import { Tags, took } from "./sessions.js";
import { Tree } from "./tree.js";
import { EndOfTrial, TrialFiles } from "./trial_files.js";

/** @typedef {import("./types.d.ts").Head} Head */
/** @typedef {import("./types.d.ts").Session} Session */
/** @typedef {import("./types.d.ts").TrialOfRun} TrialOfRun */
/** @typedef {import("./types.d.ts").Turn} Turn */
/** @typedef {{turn: number, answer: boolean}} Block */

/** @param {{place: import("./router.js").Place}} given */
export function Trial({ place }) {
  const id = place.id;
  const { heads, changes, error } = useHeads(id);
  const [edits, setEdits] = useState(0);
  const { data, error: missing } = useGet("session", { session: id }, `${changes}.${edits}`);
  const session = useLast(/** @type {Session | null} */ (data));
  const known = useLast(/** @type {TrialOfRun | null} */ (useGet("run/trial", { session: id }, changes).data));
  const given = Number(place.query.get("turn") ?? "-1");
  const selected = heads?.[given] ? given : (heads?.length ?? 0) - 1;
  const blocks = useMemo(() => conversation(heads ?? [], selected), [heads, selected]);
  if (missing || error) return html`<h1>Trial</h1><${Note} error=${missing ?? error} />`;
  if (session === null || heads === null) return html`<h1>Trial</h1><${Note} error=${null} />`;
  return html`<${Top} session=${session} known=${known} />
    <${TrialFiles} session=${id} files=${known?.files ?? []} />
    ${heads.length === 0 ? html`<p class="quiet">${session.refused ? "No call was answered." : "No call yet."}</p>` : html`<div class="trial">
      <${Tree} session=${id} heads=${heads} selected=${selected} shown=${new Set(blocks.map((b) => b.turn))} />
      <${Conversation} session=${id} heads=${heads} blocks=${blocks} selected=${selected} asked=${given >= 0} />
    </div>`}
    ${runOf() === null && html`<${Curation} session=${session} changed=${() => setEdits(edits + 1)} />`}`;
}

/**
 * The heads of all turns, page by page, and again for turns that begin or end.
 * @param {string} id
 */
function useHeads(id) {
  const [heads, setHeads] = useState(/** @type {Head[] | null} */ (null));
  const [changes, setChanges] = useState(0);
  const [error, setError] = useState(/** @type {string | null} */ (null));
  useEffect(() => {
    let stopped = false;
    /** @type {Head[]} */
    const known = [];
    /** @param {number} since */
    const load = async (since) => {
      /** @type {number | null} */
      let from = since;
      while (from !== null && !stopped) {
        const found = await get("heads", { session: id, since: from });
        for (const head of found.turns) known[head.index] = head;
        from = found.next;
        if (!stopped) setHeads([...known]);
      }
    };
    let loading = load(0).catch((refused) => setError(refused.message));
    /** @param {import("./types.d.ts").News | null} news */
    const heard = (news) => {
      const ours = [...(news?.begun ?? []), ...(news?.answered ?? [])].filter((h) => h.session === id);
      const rewarded = news?.events.some((event) => event.session_id === id);
      if (!ours.length && !rewarded) return;
      const since = Math.min(known.length, ...ours.map((head) => head.index));
      loading = loading.then(() => load(since)).then(() => setChanges((n) => n + 1), () => {});
    };
    live.listeners.add(heard);
    return () => {
      stopped = true;
      live.listeners.delete(heard);
    };
  }, [id]);
  return { heads, changes, error };
}

/**
 * The turns whose messages lead to a turn, from the first one. Of a request that another turn
 * repeats, the answer is not part of the conversation.
 * @param {Head[]} heads @param {number} selected
 */
export function conversation(heads, selected) {
  /** @type {Block[]} */
  const blocks = [];
  /** @type {Block | null} */
  let next = heads[selected] ? { turn: selected, answer: true } : null;
  while (next !== null) {
    blocks.unshift(next);
    /** @type {Head | undefined} */
    const head = heads[next.turn];
    if (head?.same_as != null) next = { turn: head.same_as, answer: false };
    else next = head?.after != null ? { turn: head.after, answer: true } : null;
  }
  return blocks;
}

/** @param {{session: Session, known: TrialOfRun | null}} given */
const Top = ({ session, known }) => html`<div class="top">
  <h1><bdi>${visible(session.id)}</bdi></h1>
  ${session.asked && html`<p class="asked" dir="auto">${oneLine(session.asked)}</p>`}
  <p><${Status} value=${session.status} /> <span class="tag">${session.kind}</span>
    ${(session.reward !== null || !known?.trial) && html`<span title="reward of the whole trial, as it was reported to the proxy">reward
      <strong><${Reward} value=${session.reward} /></strong></span>`}
    ${session.rewards.flatMap((reward) => Object.entries(reward.parts)).map(([name, value]) =>
      html`<span class="meta"><bdi>${visible(name)}</bdi> ${number(value)}</span> `)}
    <span>${many(session.turns, "turn")}</span> <span>${short(session.sampled_tokens)} tokens sampled</span>
    <span>longest path ${count(session.longest_path)}</span> <span>took ${took(session)}</span>
    ${session.metadata["folder"] && html`<span title=${visible(String(session.metadata["folder"]))}>in <bdi>${folderName(session.metadata["folder"])}</bdi>
      ${session.metadata["git_branch"] && html` on <bdi>${oneLine(String(session.metadata["git_branch"]))}</bdi>`}</span>`} <span>last call <${Ago} at=${session.last_at} /></span>
    ${session.origin && html`<a href=${link("trial", session.origin.session, { turn: session.origin.turn - 1 })}>branch of
      <bdi>${visible(session.origin.session)}</bdi> at turn ${session.origin.turn}</a>`}
    <${Marks} session=${session.id} marks=${session.marks} /> ${runOf() !== null && html`<${Tags} metadata=${session.metadata} />`}</p>
  ${session.refused && html`<p class="error refused" dir="auto">A call was refused with ${session.refused.status}: ${visible(session.refused.message)}</p>`}
  <${EndOfTrial} known=${known} /></div>`;

/**
 * @param {{session: string, heads: Head[], blocks: Block[], selected: number, asked: boolean}} given
 */
function Conversation({ session, heads, blocks, selected, asked }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const { turns, see } = useTurns(session, heads);
  const moved = useRef(false);
  const wanted = asked ? selected : null;
  useEffect(() => {
    moved.current = false;
    const move = () => {
      moved.current = true;
    };
    const kinds = ["wheel", "touchmove", "keydown", "pointerdown"];
    for (const kind of kinds) addEventListener(kind, move, { passive: true });
    return () => kinds.forEach((kind) => removeEventListener(kind, move));
  }, [session, wanted]);
  useEffect(() => {
    // Again when turns above it have grown, until the reader moves.
    if ((asked || blocks.length > 1) && !moved.current) box.current?.querySelector(`#turn-${selected}`)?.scrollIntoView({ block: "start" });
  }, [session, selected, asked, turns]);
  useEffect(() => {
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) see(Number(/** @type {HTMLElement} */ (entry.target).dataset["turn"]));
      }
    }, { rootMargin: "1200px" });
    for (const each of box.current?.children ?? []) watcher.observe(each);
    return () => watcher.disconnect();
  }, [blocks, see]);
  return html`<div class="conversation" ref=${box}>${blocks.map(({ turn, answer }) => {
    const head = heads[turn];
    return head && html`<${TurnBlock} key=${`${turn}${answer}`} session=${session} head=${head} turn=${turns.get(turn) ?? null}
      answer=${answer} selected=${turn === selected} />`;
  })}</div>`;
}

const AGAIN_MS = 3000;

/**
 * The messages of the turns that were seen. `see` asks for one; requests are gathered, and one that
 * fails is made again.
 * @param {string} session @param {Head[]} heads
 */
function useTurns(session, heads) {
  const [turns, setTurns] = useState(/** @type {Map<number, Turn>} */ (new Map()));
  const asked = useRef(/** @type {Map<number, string>} */ (new Map()));
  const failed = useRef(/** @type {Set<number>} */ (new Set()));
  const current = useRef(heads);
  current.current = heads;
  const see = useMemo(() => {
    /** @type {Set<number>} */
    const wanted = new Set();
    /** @param {number} turn */
    return (turn) => {
      const status = current.current[turn]?.status ?? "";
      if (asked.current.get(turn) === status) return;
      asked.current.set(turn, status);
      if (wanted.size === 0) queueMicrotask(async () => {
        const all = [...wanted];
        wanted.clear();
        for (let at = 0; at < all.length; at += 20) {
          const part = all.slice(at, at + 20);
          try {
            const found = await get("turns", { session, turns: part.join(",") });
            setTurns((known) => new Map([...known, ...found.turns.map((/** @type {Turn} */ t) => [t.index, t])]));
          } catch {
            for (const each of part) {
              asked.current.delete(each);
              failed.current.add(each);
            }
            setTimeout(() => {
              for (const each of part) if (failed.current.delete(each)) see(each);
            }, AGAIN_MS);
          }
        }
      });
      wanted.add(turn);
    };
  }, [session]);
  useEffect(() => {
    for (const [turn, status] of asked.current) if (status !== heads[turn]?.status) see(turn);
  }, [heads]);
  return { turns, see };
}

/**
 * @param {{session: string, head: Head, turn: Turn | null, answer: boolean, selected: boolean}} given
 */
function TurnBlock({ session, head, turn, answer, selected }) {
  const [why, setWhy] = useState(selected && head.fork !== null);
  useEffect(() => setWhy(selected && head.fork !== null), [selected]);
  const version = head.versions.map(([each]) => each).join(" → ");
  return html`<section id=${`turn-${head.index}`} data-turn=${head.index} class=${selected ? "turn selected" : "turn"}
      aria-label=${`Turn ${head.index}`}>
    <h2><a href=${link("trial", session, { turn: head.index })}>#${head.index}</a>
      ${head.fork && html`<${Cause} cause=${head.fork} />`} ${head.status !== "done" && html`<${Status} value=${head.status} />`}
      <span class="facts">${head.dialect}${head.agent ? html` · <bdi>${visible(head.agent)}</bdi>` : ""} · ${short(head.shared + head.new)} in ·
        ${" "}${short(head.sampled)} out · ${duration(head.duration_s)}${version && ` · version ${version}`}
        ${head.finish && ` · ${head.finish}`}</span>
      <a class="quiet" href=${link("tokens", session, { turn: head.index })}>tokens</a>
      ${head.fork && html`<button type="button" class="quiet" aria-expanded=${why ? "true" : "false"} onClick=${() => setWhy(!why)}>why it forks</button>`}</h2>
    ${why && html`<${ForkView} session=${session} turn=${head.index} />`}
    ${turn === null ? html`<p class="waiting">Loading …</p>` : html`
      ${!turn.recorded && html`<p class="quiet">The request has no messages that were recorded (a plain completion, or an older
        version); <a href=${link("tokens", session, { turn: head.index })}>its tokens</a> were.</p>`}
      ${turn.tools.length > 0 && html`<p class="tools quiet">tools: ${turn.tools.map((name) => html`<code>${visible(name)}</code> `)}</p>`}
      ${turn.messages.map((message, n) => html`<${MessageView} message=${message} session=${session} turn=${head.index} place=${String(n)} />`)}
      ${turn.more_messages > 0 && html`<p class="quiet">and ${count(turn.more_messages)} more messages</p>`}
      ${answer && turn.answer && html`<${MessageView} message=${turn.answer} session=${session} turn=${head.index} place="answer" sampled=${true} />`}
      ${answer && !turn.answer && head.status === "open" && html`<p class="waiting">sampling …</p>`}`}
  </section>`;
}
