// The picture of the loop: who holds what, what flows between them, and on whom the run waits.

import { setAttribute, setText, shape } from "./dom.js";
import { DROPS } from "./history.js";
import { amount, count, counted, percent, seconds, short, versions } from "./format.js";

// Boxes are [x, y, width, height]; arrows [path, x, y, anchor of its label].
const WIDE = {
  size: [1180, 300],
  boxes: { workers: [2, 34, 290, 212], service: [440, 34, 300, 212], trainer: [888, 34, 290, 212] },
  arrows: {
    leases: ["M440 98H294", 366, 88, "middle"],
    tasks: ["M888 98H742", 814, 88, "middle"],
    groups: ["M292 152H438", 366, 142, "middle"],
    batches: ["M740 152H886", 814, 142, "middle"],
    loads: ["M440 206H294", 366, 196, "middle"],
    publishes: ["M888 206H742", 814, 196, "middle"],
    drops: ["M590 246V286", 604, 274, "start"],
  },
  notes: { loads: [366, 224], publishes: [814, 224], drops: [604, 292], batches: [814, 170], groups: [366, 170] },
};

const TALL = {
  size: [360, 700],
  boxes: { workers: [10, 24, 340, 140], service: [10, 254, 340, 160], trainer: [10, 534, 340, 140] },
  arrows: {
    leases: ["M52 254V166", 62, 190, "start"],
    groups: ["M166 164V252", 176, 214, "start"],
    loads: ["M280 254V166", 290, 190, "start"],
    tasks: ["M52 534V416", 62, 520, "start"],
    batches: ["M166 414V532", 176, 500, "start"],
    publishes: ["M280 534V416", 290, 520, "start"],
    drops: ["M36 414V444", 48, 434, "start"],
  },
  notes: { loads: [290, 206], publishes: [290, 504], drops: [48, 450], batches: [176, 484], groups: [176, 230] },
};

const TITLES = { workers: "Workers and engines", service: "Service", trainer: "Trainer" };
const LINES = { workers: 4, service: 3, trainer: 4 };
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
    ]);
    this.#gauge(groups.queued.groups / policy.max_queued_groups, policy.batch_groups / policy.max_queued_groups);
    this.#lines("trainer", [
      `${counted(run.committed_steps, "step")} committed`,
      `${amount(rate("assembled_response_tokens"))} tokens/s trained`,
      known.trainer_idle_share === null ? "" : `waits ${percent(known.trainer_idle_share)} of its time`,
      known.train_period_s === null ? "" : `${seconds(known.train_period_s)} a batch`,
    ]);
    const dropped = DROPS.map(rate);
    const drops = dropped.includes(null) ? null : dropped.reduce((sum, one) => sum + one, 0);
    this.#arrow("leases", rate("leases_granted"), "leases/s");
    this.#arrow("tasks", rate("submitted_tasks"), "tasks/s");
    this.#arrow("groups", rate("accepted_groups"), "groups/s");
    this.#arrow("batches", rate("assembled_groups"), "groups/s");
    const published = rate("published_version");
    this.#arrow("publishes", published, "", `${amount(published === null ? null : 60 * published)} versions/min`);
    this.#arrow("loads", published, "", `${loaded.length === 0 ? "none" : range(loaded)}`);
    this.#arrow("drops", drops, "groups/s dropped");
    this.#note("loads", this.#tall.matches ? "loaded" : "loaded version");
    this.#note("publishes", "");
    this.#note("drops", `${short(sum(groups, DROPS))} so far, by reason below`);
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
    const flows = ["leases", "tasks", "groups", "batches", "publishes", "drops"].map((name) => this.#texts[`arrow ${name}`].textContent);
    return `The loop. ${parts.join(" ")} Between them: ${flows.join(", ")}. The run waits on ${run.waits_on}.`;
  }

  #lines(box, texts) {
    texts.forEach((text, index) => setText(this.#texts[box][index], text));
  }

  #arrow(name, rate, unit, text = null) {
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
    const step = (height - 50) / LINES[name];
    box.append(
      shape("rect", { x, y, width, height, rx: 10 }),
      shape("text", { x: x + 16, y: y + 28, class: "title" }),
      shape("text", { x: x + width / 2, y: y - 10, "text-anchor": "middle", class: "awaited" }),
    );
    box.children[1].textContent = TITLES[name];
    box.children[2].textContent = "▼ the run waits here";
    this.#texts[name] = Array.from({ length: LINES[name] }, (_, index) => {
      const text = shape("text", { x: x + 16, y: y + 40 + step * (index + 0.55), class: "line" });
      box.append(text);
      return text;
    });
    if (name === "service") {
      const at = { x: x + 16, y: y + 50 + step * 1.65, width: width - 32, height: 9, rx: 4.5 };
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

const sum = (groups, states) => states.reduce((total, state) => total + groups[state].groups, 0);

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
