// The picture of the loop: who holds what, what flows between them, and on whom the run waits.

import { setAttribute, setText, shape } from "./dom.js";
import { dropRate, dropped } from "./history.js";
import { amount, count, counted, percent, seconds, short, versions } from "./format.js";

// Boxes are [x, y, width, height]; arrows [path, x, y, anchor of its label].
const WIDE = {
  size: [1180, 300],
  boxes: { workers: [2, 34, 290, 212], service: [440, 34, 300, 212], trainer: [888, 34, 290, 212] },
  arrows: {
    leases: ["M440 95H294", 366, 86, "middle"],
    tasks: ["M888 95H742", 814, 86, "middle"],
    groups: ["M292 140H438", 366, 131, "middle"],
    batches: ["M740 140H886", 814, 131, "middle"],
    loads: ["M440 194H294", 366, 185, "middle"],
    publishes: ["M888 194H742", 814, 185, "middle"],
    drops: ["M590 246V286", 604, 274, "start"],
  },
  notes: { loads: [366, 212], publishes: [814, 212], drops: [604, 292], batches: [814, 158], groups: [366, 158] },
};

const TALL = {
  size: [360, 690],
  boxes: { workers: [10, 24, 340, 140], service: [10, 244, 340, 196], trainer: [10, 520, 340, 140] },
  arrows: {
    leases: ["M28 244V167", 38, 200, "start"],
    groups: ["M142 164V241", 152, 200, "start"],
    loads: ["M268 244V167", 278, 200, "start"],
    tasks: ["M28 520V443", 38, 476, "start"],
    batches: ["M142 440V517", 152, 476, "start"],
    publishes: ["M268 520V443", 278, 476, "start"],
  },
  notes: { loads: [278, 217], publishes: [278, 493], batches: [152, 493], groups: [152, 217] },
};

const TITLES = { workers: "Workers and engines", service: "Service", trainer: "Trainer" };
const WEIGHTS = ["loads", "publishes"];

/** Who is meant by the words before the colon of `waits_on`. */
const PARTIES = {
  "the trainer": "trainer",
  "the trainer's commits": "trainer",
  "the feeder": "trainer",
  generation: "workers",
  workers: "workers",
  weights: "workers",
};

export const partyOf = (waitsOn) => PARTIES[waitsOn.split(":")[0]] ?? "service";

export class Loop {
  #holder;
  #tall;
  #svg = null;

  constructor(holder) {
    this.#holder = holder;
    this.#tall = window.matchMedia("(max-width: 860px)");
    this.#tall.addEventListener("change", () => this.#draw());
    this.#draw();
  }

  /** Show a run. `rate(name)` is a total's growth a second, or null. */
  show(run, rate) {
    this.#shown = [run, rate];
    const { estimate, groups, policy, statistics, tasks } = run;
    const known = estimate.quantities;
    const alive = run.engines.filter((one) => one.state !== "stopped");
    const loaded = alive.map((one) => one.loaded.version);
    const drops = dropRate(rate);
    this.#lines("workers", [
      `${counted(tasks.leased, "task")} being generated`,
      `${amount(rate("decoded_tokens"))} tokens/s decoded`,
      `${counted(alive.length, "engine")}, ${count(known.engines)} in service`,
      known.engine_busy_share === null ? "" : `engines busy ${percent(known.engine_busy_share)}`,
    ]);
    this.#lines("service", [
      `${short(tasks.pending)} of at most ${short(policy.max_pending_tasks)} tasks pending`,
      `queue: ${count(groups.queued.groups)} of ${short(policy.max_queued_groups)} groups`,
      `version ${run.published.version} is published`,
      this.#tall.matches ? `${amount(drops)} groups/s not trained, ${short(dropped(groups))} so far` : "",
    ]);
    this.#gauge(groups.queued.groups / policy.max_queued_groups, policy.batch_groups / policy.max_queued_groups);
    this.#lines("trainer", [
      `${counted(run.committed_steps, "step")} committed`,
      `${amount(rate("assembled_response_tokens"))} tokens/s trained`,
      known.trainer_idle_share === null ? "" : `waits ${percent(known.trainer_idle_share)} of its time`,
      known.train_period_s === null ? "" : `${seconds(known.train_period_s)} a batch`,
    ]);
    this.#arrow("leases", rate("leases_granted"), "leases/s");
    this.#arrow("tasks", rate("submitted_tasks"), "tasks/s");
    this.#arrow("groups", rate("accepted_groups"), "groups/s");
    this.#arrow("batches", rate("assembled_groups"), "groups/s");
    const published = rate("published_version");
    const perMinute = amount(published === null ? null : 60 * published);
    this.#arrow("publishes", published, "", this.#tall.matches ? `${perMinute} /min` : `${perMinute} versions/min`);
    this.#arrow("loads", published, "", `${loaded.length === 0 ? "none" : range(loaded)}`);
    this.#arrow("drops", drops, "groups/s not trained");
    this.#note("loads", this.#tall.matches ? "loaded" : "loaded version");
    this.#note("publishes", this.#tall.matches ? "versions" : "");
    this.#note("drops", `${short(dropped(groups))} so far, by reason below`);
    this.#note("batches", this.#tall.matches ? "batches" : `in batches of ${count(policy.batch_groups)}`);
    this.#note("groups", staleness(estimate, this.#tall.matches));
    const party = partyOf(run.waits_on);
    for (const [name, box] of Object.entries(this.#boxes)) {
      setAttribute(box, "data-awaited", name === party ? "" : null);
    }
    setAttribute(this.#svg, "aria-label", this.#said(run));
  }

  #shown = null;
  #boxes = {};
  #texts = {};

  #said(run) {
    const parts = Object.entries(TITLES).map(([name, title]) => {
      const lines = this.#texts[name].map((text) => text.textContent).filter((text) => text !== "");
      return `${title}: ${lines.join(", ")}.`;
    });
    const flows = Object.keys(WIDE.arrows).map((name) => this.#texts[`arrow ${name}`]?.textContent).filter((text) => text !== undefined);
    return `The loop. ${parts.join(" ")} Between them: ${flows.join(", ")}. The run waits on ${run.waits_on}.`;
  }

  #lines(box, texts) {
    this.#texts[box].forEach((line, index) => setText(line, texts[index]));
  }

  #arrow(name, rate, unit, text = null) {
    if (this.#texts[`arrow ${name}`] === undefined) {
      return; // Said in a line of the narrow picture.
    }
    setText(this.#texts[`arrow ${name}`], text ?? `${amount(rate)} ${unit}`);
    setAttribute(this.#texts[`path ${name}`], "data-moves", rate > 0 ? "" : null);
  }

  #note(name, text) {
    const note = this.#texts[`note ${name}`];
    if (note !== undefined) {
      setText(note, text);
    }
  }

  #gauge(full, batch) {
    const { fill, mark, width, x } = this.#texts.gauge;
    setAttribute(fill, "width", (width * Math.min(1, full)).toFixed(1));
    const at = (x + width * Math.min(1, batch)).toFixed(1);
    setAttribute(mark, "x1", at);
    setAttribute(mark, "x2", at);
  }

  #draw() {
    const { arrows, boxes, notes, size } = this.#tall.matches ? TALL : WIDE;
    this.#texts = {};
    this.#boxes = {};
    this.#svg = shape("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img", class: "loop" });
    const marker = (id) =>
      shape("marker", { id, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto" },
        shape("path", { d: "M0 0L10 5L0 10z", class: id }));
    this.#svg.append(shape("defs", {}, marker("head"), marker("head-weights")));
    for (const [name, [path, x, y, anchor]] of Object.entries(arrows)) {
      const weights = WEIGHTS.includes(name);
      const line = shape("path", {
        d: path,
        class: weights ? "arrow weights" : "arrow",
        "marker-end": `url(#${weights ? "head-weights" : "head"})`,
      });
      const label = shape("text", { x, y, "text-anchor": anchor, class: weights ? "flow weights" : "flow" });
      this.#texts[`path ${name}`] = line;
      this.#texts[`arrow ${name}`] = label;
      this.#svg.append(line, label);
      if (notes[name] !== undefined) {
        const note = shape("text", { x: notes[name][0], y: notes[name][1], "text-anchor": anchor, class: "note" });
        this.#texts[`note ${name}`] = note;
        this.#svg.append(note);
      }
    }
    for (const [name, box] of Object.entries(boxes)) {
      this.#svg.append(this.#box(name, box));
    }
    this.#holder.replaceChildren(this.#svg);
    if (this.#shown !== null) {
      this.show(...this.#shown);
    }
  }

  #box(name, [x, y, width, height]) {
    const box = shape("g", { class: `box ${name}` });
    const lines = name === "service" && !this.#tall.matches ? 3 : 4;
    const step = (height - 50) / lines;
    box.append(
      shape("rect", { x, y, width, height, rx: 10 }),
      shape("text", { x: x + 16, y: y + 28, class: "title" }),
      shape("text", { x: x + width / 2, y: y - 10, "text-anchor": "middle", class: "awaited" }),
    );
    box.children[1].textContent = TITLES[name];
    box.children[2].textContent = "▼ the run waits here";
    this.#texts[name] = Array.from({ length: lines }, (_, index) => {
      const text = shape("text", { x: x + 16, y: y + 40 + step * (index + 0.55), class: "line" });
      box.append(text);
      return text;
    });
    if (name === "service") {
      const at = { x: x + 16, y: y + 40 + step * 1.77, width: width - 32, height: 9, rx: 4.5 };
      const fill = shape("rect", { ...at, class: "gauge-fill" });
      const mark = shape("line", { y1: at.y - 3, y2: at.y + at.height + 3, class: "gauge-mark" });
      mark.append(shape("title", {}, "groups of a batch"));
      box.append(shape("rect", { ...at, class: "gauge" }), fill, mark);
      this.#texts.gauge = { fill, mark, x: at.x, width: at.width };
    }
    this.#boxes[name] = box;
    return box;
  }
}

function range(numbers) {
  const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
  return least === most ? `${least}` : `${least} to ${most}`;
}

function staleness(estimate, narrow) {
  const measured = estimate.measured.staleness;
  if (measured === null) {
    return narrow ? "groups" : "generated groups";
  }
  return narrow ? `${versions(measured)} stale` : `${versions(measured)} versions stale`;
}
