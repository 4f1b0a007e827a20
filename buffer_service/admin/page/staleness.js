// Staleness, predicted beside measured, and what it depends on.

import { byId, element, listEach, listFacts, listRows, setAttribute, setText, span, tell } from "./dom.js";
import { NOTHING, amount, count, percent, seconds, versions } from "./format.js";

const PARTS = ["pre_queue", "in_queue"];

export function showStaleness(run) {
  const { estimate, policy } = run;
  const { measured, predicted } = estimate;
  const some = estimate.publishes > 0;
  setText(
    byId("staleness-window"),
    some
      ? `means over the last ${estimate.publishes} publishes, ${seconds(estimate.window_s)}`
      : "nothing is measured before the second publish",
  );
  const gate = policy.max_staleness < 0 ? "no gate" : `max_staleness ${policy.max_staleness}`;
  setText(byId("staleness-gate"), `${gate}; too stale: ${policy.stale_action}`);
  const lowered = run.lowered === "" ? "" : ` In effect: ${run.lowered}.`;
  tell("staleness-target", run.target === "" ? "" : `Target ${run.target}.${lowered}`);
  const prediction = predicted.rough ? "predicted, rough" : "predicted";
  bars(byId("staleness-bars"), [
    [prediction, predicted],
    ["measured", measured],
  ]);
  const means = (name, { pre_queue, in_queue, staleness, tokens }, worst) => ({
    cells: [name, ...[pre_queue, in_queue, staleness, tokens].map(versions), worst],
  });
  const environments = measured.environments.length > 1 ? measured.environments : [];
  listRows(byId("staleness-rows"), [
    means(prediction, predicted, NOTHING), // Of tokens nothing is predicted.
    means("measured", measured, count(measured.worst)),
    ...environments.map((one) => means(`${one.environment || "(none)"}, so far`, one, "")),
  ]);
  const by = predicted.simulated ? "simulated" : "closed form";
  const notes = predicted.form === "" ? "" : `${by}: ${[predicted.form, ...predicted.notes].join("; ")}`;
  setText(byId("staleness-form"), notes);
  showQuantities(estimate);
}

/** A bar a line: its parts as long as their share of the longest line. */
function bars(holder, lines) {
  const longest = Math.max(0.01, ...lines.map(([, mean]) => mean.staleness ?? 0));
  const line = () => {
    const parts = PARTS.map((part) => span(`part ${part}`));
    return element("div", { class: "bar-line" }, span("bar-label"), span("bar", ...parts), span("bar-value"));
  };
  listEach(holder, lines, line, ({ children: [name, bar, value] }, [label, mean]) => {
    setText(name, label);
    PARTS.forEach((part, index) => {
      bar.children[index].style.width = `${(100 * Math.max(0, mean[part] ?? 0)) / longest}%`;
    });
    setText(value, versions(mean.staleness));
  });
  setAttribute(holder, "aria-hidden", "true"); // The table below says the same.
}

function showQuantities({ quantities: known, unknown }) {
  const facts = [
    ["ρ, engines over trainer", amount(known.rho)],
    ["engines decode, while they decode", unit(known.rollout_tokens_per_s, "tokens/s")],
    ["the trainer trains, while it works", unit(known.train_tokens_per_s, "tokens/s")],
    ["engines busy", percent(known.engine_busy_share)],
    ["trainer idle", percent(known.trainer_idle_share)],
    ["trained, over all", unit(known.trained_tokens_per_s, "tokens/s")],
    ["a batch every", seconds(known.train_period_s)],
    ["C, requests at once", amount(known.concurrency)],
    ["C/B", amount(known.concurrency_ratio)],
    ["q, queue over batch", amount(known.queue_factor)],
    ["M, tailness", amount(known.tailness)],
    ["mean response", unit(known.mean_length, "tokens")],
    ["a group takes", seconds(known.group_generation_s)],
    ["groups that pass the filter", percent(known.pass_share)],
  ];
  listFacts(byId("quantities"), facts);
  const reasons = new Map();
  for (const { name, reason } of unknown) {
    reasons.set(reason, [...(reasons.get(reason) ?? []), name.replaceAll("_", " ")]);
  }
  const missing = [...reasons].map(([reason, names]) => `not known: ${names.join(", ")}: ${reason}`);
  tell("unknown", missing.join(". "));
}

const unit = (value, name) => (value === null ? "–" : `${amount(value)} ${name}`);
