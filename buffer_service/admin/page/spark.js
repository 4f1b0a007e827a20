// A small curve of the last minutes, from 0 to its own highest value. It fills its width as soon as there is a minute.

import { element, setAttribute, setText, shape, span } from "./dom.js";
import { amount, seconds } from "./format.js";
import { SERIES_S } from "./history.js";

const WIDTH = 240;
const HEIGHT = 36;
const LEAST_MS = 60_000;

/** A tile: a name, the present value with its unit, a note, and the curve. */
export class Tile {
  constructor(holder, label, unit) {
    this.value = span("number");
    this.note = element("p", { class: "note" });
    this.area = shape("path", { class: "area" });
    this.line = shape("path", { class: "curve" });
    this.curve = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, this.line);
    this.label = label;
    holder.append(
      element(
        "article",
        { class: "tile" },
        element("h3", {}, label, " ", span("unit", unit)),
        element("p", { class: "value" }, this.value),
        this.curve,
        this.note,
      ),
    );
  }

  show(text, note, series, nowMs) {
    setText(this.value, text);
    setText(this.note, note);
    const spanMs = Math.min(1000 * SERIES_S, Math.max(LEAST_MS, nowMs - (series[0]?.timeMs ?? nowMs)));
    const { area, highest, line } = drawn(series, nowMs, spanMs);
    setAttribute(this.area, "d", area);
    setAttribute(this.line, "d", line);
    setAttribute(this.curve, "aria-label", `${this.label}, last ${seconds(spanMs / 1000)}: now ${text}, highest ${amount(highest)}`);
  }
}

function drawn(series, nowMs, spanMs) {
  const values = series.map(({ value }) => value).filter((value) => value !== null);
  const highest = Math.max(0, ...values);
  const scale = highest === 0 ? 1 : highest;
  let line = "";
  let area = "";
  let piece = [];
  const close = () => {
    if (piece.length > 1) {
      const path = piece.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      line += `M${path}`;
      area += `M${piece[0][0].toFixed(1)} ${HEIGHT}L${path}L${piece.at(-1)[0].toFixed(1)} ${HEIGHT}Z`;
    }
    piece = [];
  };
  for (const { timeMs, value } of series) {
    if (value === null) {
      close();
    } else {
      const x = WIDTH * (1 - (nowMs - timeMs) / spanMs);
      piece.push([x, HEIGHT - 2 - (HEIGHT - 4) * (value / scale)]);
    }
  }
  close();
  return { line, area, highest };
}
