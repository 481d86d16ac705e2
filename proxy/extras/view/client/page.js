// preact with htm, and what every view needs of them.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export * from "./vendor/hooks.js";
export { render };
export const html = htm.bind(h);
/** @typedef {import("./vendor/preact.js").Child} Child */
/** @typedef {import("./vendor/preact.js").VNode} VNode */
