// The views' URLs, after `#`: `#/trial/SESSION?turn=3`. They can be sent to a colleague.

/** @typedef {{view: string, id: string, query: URLSearchParams}} Place */

/** @param {string} hash @returns {Place} */
export function parse(hash) {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", ...rest] = path.split("/");
  return { view: view || "now", id: safely(rest.join("/")), query: new URLSearchParams(search) };
}

/** Views of one run, whose name is their id; the sessions in them are that run's. */
const OF_A_RUN = ["trials", "group", "compare"];

/** The run in whose store the sessions of a place are; null: that of the page. @param {Place} [place] */
export const runOf = (place = parse(location.hash)) =>
  (OF_A_RUN.includes(place.view) ? place.id : place.query.get("run")) || null;

/**
 * A link to a session stays in the store of the place that has it.
 * @param {string} view
 * @param {string} [id]
 * @param {Record<string, string | number | null | undefined>} [query]
 */
export function link(view, id = "", query = {}) {
  const stays = view === "trial" || view === "tokens" ? { run: runOf() } : {};
  const given = Object.entries({ ...stays, ...query }).filter(([, value]) => value != null && value !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  const tail = id && `/${encodeURIComponent(id)}`;
  return `#/${view}${tail}${search.size ? `?${search}` : ""}`;
}

/** @param {string} text */
function safely(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
