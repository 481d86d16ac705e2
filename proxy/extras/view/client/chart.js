// Lines over the steps of a run, as SVG: points, an interval, and the values at the chosen step.
import { number, share } from "./format.js";
import { html } from "./page.js";

/** @typedef {[number, number]} Point */
/**
 * @typedef {{name: string, run: number, dash: number, points: Point[], band?: [number, number, number][], area?: [number, number, number][]}} Line
 * `run`: number of its colour; `dash`: number of its pattern; `band`: step, low, high, as bars; `area`: as a surface
 */

const WIDTH = 420;
const HEIGHT = 200;
const LEFT = 68;
const TOP = 8;
const RIGHT = 12;
const BOTTOM = 38;
const MIDDLE = (TOP + HEIGHT - BOTTOM) / 2;
const MOST_POINTS = 500;

/** Few points that look the same: of each stretch the lowest and the highest. @param {Point[]} points */
export function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const size = Math.ceil((points.length * 2) / MOST_POINTS);
  /** @type {Point[]} */
  const kept = [];
  for (let at = 0; at < points.length; at += size) {
    const part = points.slice(at, at + size);
    const low = part.reduce((best, each) => (each[1] < best[1] ? each : best));
    const high = part.reduce((best, each) => (each[1] > best[1] ? each : best));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

/** The lower edge forwards, and the upper one back. @param {[number, number, number][]} area @returns {Point[]} */
const surface = (area) => [
  ...thinned(area.map(([step, low]) => [step, low])), ...thinned(area.map(([step, , high]) => [step, high])).reverse(),
];

/** Round numbers from below `low` to above `high`. @param {number} low @param {number} high @param {number} [most] */
export function ticks(low, high, most = 3) {
  // Differences that the labels cannot show are noise: such values are in the middle of the axis.
  const least = Math.max(Math.abs(low), Math.abs(high)) * 0.05 || 1;
  const span = Math.max(high - low, least);
  if (high - low < least) [low, high] = [(low + high - span) / 2, (low + high + span) / 2];
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 2.5, 5].find((each) => each * power >= rough) ?? 10) * power;
  /** @type {number[]} */
  const found = [];
  for (let n = Math.floor(low / step); n <= Math.ceil(high / step) + 1e-9; n += 1) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

/** @param {number} value */
function axis(value) {
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace(".0e", "e");
  if (Math.abs(value) >= 1e6) return `${number(value / 1e6)}M`;
  return Math.abs(value) >= 1e4 ? `${number(value / 1e3)}k` : number(value);
}

/** Round steps on the axis, from the first to the last one. @param {number} low @param {number} high */
export function stepTicks(low, high) {
  if (low === high) return [low];
  const inner = ticks(low, high, 5).filter((each) => Number.isInteger(each) && each > low && each < high);
  const apart = (high - low) / 8; // labels do not touch
  return [low, ...inner.filter((each) => each - low >= apart && high - each >= apart), high];
}

/** The last point at or before a step. @param {Point[]} points @param {number} step */
const valueAt = (points, step) => points.findLast(([x]) => x <= step)?.[1] ?? null;

/**
 * `range`: values that the axis shows at least; `shares`: they are shares, in percent; `about`: what
 * a reader is told about each metric, line by line.
 * @param {{title: string, unit?: string, lines: Line[], about?: string[][], range?: [number, number] | undefined, shares?: boolean, cursor: number | null,
 *   point: (step: number) => void, open?: ((step: number) => void) | undefined}} given
 */
export function Chart({ title, unit, lines, about, range, shares, cursor, point, open }) {
  const words = shares ? share : number;
  const shown = lines.filter((line) => line.points.length > 0);
  if (shown.length === 0) return null;
  const xs = shown.flatMap((line) => line.points.map(([x]) => x));
  const ys = shown.flatMap((line) => [
    ...line.points.map(([, y]) => y), ...[...(line.band ?? []), ...(line.area ?? [])].flatMap(([, low, high]) => [low, high]),
  ]).concat(range ?? []);
  const [x0, x1] = [extreme(xs, Math.min), extreme(xs, Math.max)];
  const [low, high] = [extreme(ys, Math.min), extreme(ys, Math.max)];
  const round = ticks(low, high);
  const levels = shares && low >= 0 && high <= 1 ? round.filter((each) => each >= 0 && each <= 1) : round;
  const [y0, y1] = [levels[0] ?? 0, levels.at(-1) ?? 1];
  /** @param {number} step */
  const x = (step) => LEFT + ((step - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
  /** @param {number} value */
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0 || 1)) * (HEIGHT - TOP - BOTTOM);
  const at = cursor === null ? x1 : cursor;
  const values = shown.map((line) => `${line.name} ${words(valueAt(line.points, at))}`).join(", ");
  /** @param {PointerEvent} event */
  const stepOf = (event) => {
    const box = /** @type {SVGElement} */ (event.currentTarget).getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH;
    return Math.max(x0, Math.min(x1, Math.round(x0 + ((place - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0))));
  };
  return html`<figure class="chart"><figcaption>${title}</figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${title} at step ${at}: ${values}`}
      onPointerMove=${/** @param {PointerEvent} e */ (e) => point(stepOf(e))}
      onClick=${/** @param {PointerEvent} e */ (e) => open?.(stepOf(e))}>
      ${levels.map((level) => html`<line class="level" x1=${LEFT} x2=${WIDTH - RIGHT} y1=${y(level)} y2=${y(level)} />
        <text x=${LEFT - 6} y=${y(level) + 4} text-anchor="end">${shares ? share(level) : axis(level)}</text>`)}
      ${stepTicks(x0, x1).map((step) => html`<line class="level" x1=${x(step)} x2=${x(step)} y1=${HEIGHT - BOTTOM} y2=${HEIGHT - BOTTOM + 4} />
        <text x=${x(step)} y=${HEIGHT - BOTTOM + 16} text-anchor="middle">${axis(step)}</text>`)}
      <text x=${(LEFT + WIDTH - RIGHT) / 2} y=${HEIGHT - 4} text-anchor="middle">step</text>
      ${unit && html`<text x="12" y=${MIDDLE} text-anchor="middle" transform=${`rotate(-90 12 ${MIDDLE})`}>${unit}</text>`}
      ${cursor !== null && html`<line class="cursor" x1=${x(at)} x2=${x(at)} y1=${TOP} y2=${HEIGHT - BOTTOM} />`}
      ${shown.map((line) => html`<g class=${`line run${line.run % 6} dash${line.dash % 4}`}>
        ${(line.band ?? []).map(([step, low, high]) => html`<line class="interval" x1=${x(step)} x2=${x(step)} y1=${y(low)} y2=${y(high)} />`)}
        ${(line.area ?? []).length > 0 && html`<polygon class="area" points=${surface(line.area ?? []).map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ")} />`}
        <polyline points=${thinned(line.points).map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ")} />
        ${line.points.length < 12 && line.points.map(([a, b]) => html`<circle cx=${x(a)} cy=${y(b)} r="2.6" />`)}</g>`)}
    </svg>
    <ul class="legend">${shown.map((line) => html`<li><svg viewBox="0 0 18 6" width="18" height="6" aria-hidden="true">
      <g class=${`line run${line.run % 6} dash${line.dash % 4}`}><polyline points="0,3 18,3" /></g></svg>
      ${line.name && html`<bdi>${line.name}</bdi>${" "}`}<b>${words(valueAt(line.points, at))}</b></li>`)}</ul>
    ${about !== undefined && about.length > 0 && html`<details class="about"><summary aria-label=${`what is this? ${title}`}>what is this?</summary>
      ${about.map((said) => html`<p>${said.map((each) => html`<span>${each}</span>`)}</p>`)}</details>`}</figure>`;
}

/** `Math.min(...values)` for any number of values. @param {number[]} values @param {(a: number, b: number) => number} of */
const extreme = (values, of) => values.reduce((best, each) => of(best, each), values[0] ?? 0);
