// Numbers, times and texts as a reader wants them.

const grouped = new Intl.NumberFormat("en");

/** @param {number} value */
export const count = (value) => grouped.format(value);

/** 1234 → "1.2k" @param {number} value */
export function short(value) {
  if (value < 1000) return String(value);
  if (value < 100_000) return `${(value / 1000).toFixed(1)}k`;
  return value < 1_000_000 ? `${Math.round(value / 1000)}k` : `${(value / 1e6).toFixed(1)}M`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;
}

/** @param {number | null} at Unix seconds @param {number} [now] */
export function ago(at, now = Date.now() / 1000) {
  if (at == null) return "–";
  const passed = now - at;
  return passed < 2 ? "now" : `${duration(passed)} ago`;
}

/** @param {number} at Unix seconds */
export const when = (at) => new Date(at * 1000).toLocaleString();

/** @param {number | null | undefined} value */
export const number = (value) => {
  if (value == null) return "–";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : Number(value.toPrecision(4)).toString();
};

/** 0.42 → "42 %", 0.996 → "99.6 %", as proxy/run_files/formats.py. @param {number | null | undefined} value */
export const share = (value) => {
  if (value == null) return "–";
  const near = (value > 0 && value < 0.01) || (value > 0.99 && value < 1);
  return `${(value * 100).toFixed(near ? 1 : 0)} %`;
};

/** An interval of shares. @param {[number, number] | number[] | undefined} bounds */
export const shares = (bounds) => (bounds?.length === 2 ? `${share(bounds[0])} to ${share(bounds[1])}` : "–");

/** 1 → "1 step", 36 → "36 steps". @param {number} n @param {string} what */
export const many = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

/** A value of the configuration, which is JSON. @param {string | undefined} text @returns {any} */
export function setting(text) {
  try {
    return text === undefined ? null : JSON.parse(text);
  } catch {
    return text ?? null;
  }
}

const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufdd0-\ufdef\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}]/gu;

/**
 * Makes characters visible that control a terminal, change the direction of text, or have no shape,
 * such as the tags (U+E0000 to U+E007F) with which text can be hidden from people.
 * Nothing, as a trial of another trainer may lack its name, is an empty text.
 * @param {string | null | undefined} text
 */
export function visible(text) {
  return (text ?? "").replace(INVISIBLE, (char) => {
    const code = /** @type {number} */ (char.codePointAt(0));
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** What stands for an image in a text: its sha256 (proxy/conversation/images.py). */
export const IMAGE = /\ufdd1([0-9a-f]{64})\ufdd1/;
/** A text with the first digits of each image, for comparisons. @param {string} text */
export const named = (text) => text.replace(new RegExp(IMAGE, "g"), (_, sha256) => `[image ${sha256.slice(0, 12)}]`);

/** A token on one line. @param {string | null | undefined} text */
export const oneLine = (text) => visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥");

/** What each cause of a fork means (proxy/records.py, ForkCause). @type {Record<string, string>} */
export const CAUSES = {
  edited: "A recorded message came back with other content.",
  rolled_back: "The request continues an earlier turn that other turns have already continued.",
  tool_arguments: "The recorded answer came back with other arguments in its tool calls.",
  calls_changed: "The recorded answer came back with other tool calls.",
  text_dropped: "The recorded answer came back without the text next to its tool calls.",
  white_space: "The recorded answer came back with different white space.",
  tools_changed: "The agent’s tools differ from those of the recorded request.",
  image_changed: "A recorded message came back with another image.",
  system_changed: "The system messages differ from those of the recorded request.",
  reasoning_dropped: "Sampled reasoning is missing.",
  reasoning_changed: "Sampled reasoning came back changed.",
  reasoning_moved: "Sampled reasoning came back within the answer’s text.",
  compaction: "The history was replaced by a summary.",
  foreign_assistant: "The history has an assistant message that the policy did not sample.",
  unprovable_bridge: "The renderer could not show that the new prompt starts with the recorded tokens.",
  new_conversation: "Shares at most the template and the system prompt: a sub-agent or a side call.",
  sibling: "Another sample of a prompt that was sampled before.",
  call_required: "The answer ended without the tool call that the agent requires, and goes on with one.",
  diverged: "In a branch: the request is not the one that was recorded at this point.",
};
/** @param {string} cause */
export const words = (cause) => cause.replaceAll("_", " ");
