// The views' URLs, after `#`: `#/trial/SESSION?turn=3`. They can be sent to a colleague.

/** @typedef {{view: string, id: string, query: URLSearchParams}} Place */

/** @param {string} hash @returns {Place} */
export function parse(hash) {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", ...rest] = path.split("/");
  return { view: view || "now", id: safely(rest.join("/")), query: new URLSearchParams(search) };
}

/**
 * @param {string} view
 * @param {string} [id]
 * @param {Record<string, string | number | null | undefined>} [query]
 */
export function link(view, id = "", query = {}) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
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
