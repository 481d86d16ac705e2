// Hooks that several views use.
import { get, live } from "./api.js";
import { useEffect, useState } from "./page.js";

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
