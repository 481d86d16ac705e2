// What the trainer knows of a session: its trial's end, and what its agent and verifier wrote.
import { get } from "./api.js";
import { count, oneLine, visible } from "./format.js";
import { html, useEffect, useState } from "./page.js";
import { Reward, Status } from "./parts.js";
import { link } from "./router.js";

/** @typedef {import("./types.d.ts").FilePiece} FilePiece */
/** @typedef {import("./types.d.ts").TrialOfRun} TrialOfRun */

/** Bytes of a file that is shown without being asked for. */
const SHORT = 500;

/** Where the run says something of the session that its record does not. @param {{known: TrialOfRun | null}} given */
export function EndOfTrial({ known }) {
  const { run, trial } = known ?? {};
  if (!run || !trial) return null;
  const group = trial.group && html`<a href=${link("group", run, { step: trial.step, group: trial.group })}>its group</a>`;
  return html`<p class="of-run">In <a href=${link("run", run, { step: trial.step })}><bdi>${oneLine(run)}</bdi>, step ${trial.step}</a>: <${Status}
    value=${trial.status} /> reward <strong><${Reward} value=${trial.reward} /></strong> ${group} ${trial.error && html`<span class="words" dir="auto">${oneLine(trial.error)}</span>`}</p>`;
}

/** @param {{session: string, files: FilePiece[]}} given */
export const TrialFiles = ({ session, files }) => files.length > 0 && html`<div class="files">${files.map((end) =>
  html`<${File} key=${end.name} session=${session} end=${end} />`)}</div>`;

/** A file, of which the end is shown first. @param {{session: string, end: FilePiece}} given */
function File({ session, end }) {
  const [earlier, setEarlier] = useState(/** @type {FilePiece | null} */ (null));
  const [error, setError] = useState("");
  // The file has grown: what was read before its new end is read again when it is asked for.
  useEffect(() => setEarlier(null), [end.from, end.bytes]);
  const from = earlier?.from ?? end.from;
  const load = () => get("run/file", { session, name: end.name, before: from }).then(
    (piece) => setEarlier({ ...piece, text: piece.text + (earlier?.text ?? "") }),
    (refused) => setError(refused.message),
  );
  return html`<details open=${end.bytes <= SHORT}><summary>${end.name} <span class="quiet">${count(end.bytes)} bytes</span></summary>
    ${from > 0 && html`<button type="button" class="more" onClick=${load}>${count(from)} bytes before</button>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="text code" dir="auto" tabindex="0" role="region" aria-label=${end.name}>${printed((earlier?.text ?? "") + end.text)}</div></details>`;
}

/** What a terminal prints, without colours and movements of the cursor. @param {string} text */
const printed = (text) => visible(text.replace(/\u001b\[[0-?]*[ -/]*[@-~]/g, "").replaceAll("\r\n", "\n"));
