// Hooks that several views use.
import { get, live, moment } from "./api.js";
import { ago } from "./format.js";
import { html, useEffect, useRef, useState } from "./page.js";

/**
 * The server's answer to a request, again whenever the request changes.
 * @template T
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} query
 * @param {unknown} [again] the request is repeated when this changes
 * @returns {{data: T | null, error: string | null}}
 */
export function useGet(path, query, again) {
  const key = JSON.stringify([path, query]);
  const [found, set] = useState(
    /** @type {{key: string, data: T | null, error: string | null}} */ ({
      key: "", data: null, error: null,
    }),
  );
  useEffect(() => {
    const stop = new AbortController();
    get(path, query, stop.signal).then(
      (data) => set({ key, data, error: null }),
      (error) => stop.signal.aborted || set({ key, data: null, error: error.message }),
    );
    return () => stop.abort();
  }, [key, again]);
  return found.key === key ? found : { data: null, error: null };
}

/** Renders again when something happens, at most `perSecond` times per second, and each second. */
export function useLive(perSecond = 2) {
  const [, tick] = useState(0);
  useEffect(() => {
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let due;
    const later = () => {
      due ??= setTimeout(() => {
        due = undefined;
        tick((n) => n + 1);
      }, 1000 / perSecond);
    };
    live.listeners.add(later);
    const clock = setInterval(later, 1000);
    return () => {
      live.listeners.delete(later);
      clearInterval(clock);
      clearTimeout(due);
    };
  }, []);
  return live;
}

/** How long ago it was, as of now. @param {{at: number | null}} given */
export function Ago({ at }) {
  useLive(1);
  return html`${ago(at, moment())}`;
}

/** Keeps what was shown while it is read again. @template T @param {T | null} value */
export function useLast(value) {
  const last = useRef(value);
  if (value !== null) last.current = value;
  return last.current;
}

/**
 * The rows of a list that grows page by page.
 * @template T
 * @param {string} path @param {string} name of the rows in the answer
 * @param {Record<string, string | null>} query
 */
export function usePages(path, name, query) {
  const key = JSON.stringify(query);
  const [rows, setRows] = useState(/** @type {T[] | null} */ (null));
  const [next, setNext] = useState(/** @type {string | number | null} */ (null));
  const [error, setError] = useState(/** @type {string | null} */ (null));
  /** @param {string | number | null} before */
  const load = (before) =>
    get(path, { ...query, before }).then(
      (found) => {
        setRows((known) => (before ? [...(known ?? []), ...found[name]] : found[name]));
        setNext(found.next);
      },
      (refused) => setError(refused.message),
    );
  useEffect(() => {
    setRows(null);
    load(null);
  }, [key]);
  return { rows, error, more: next === null ? null : () => load(next), again: () => load(null) };
}
