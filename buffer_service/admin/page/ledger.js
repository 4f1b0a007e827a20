// The two ledgers: what became of every group and of every task; drops by reason.

import { byId, element, listEach, listFacts, listRows, setAttribute, setText, show, span, tell } from "./dom.js";
import { amount, bytes, count, percent, seconds, short } from "./format.js";
import { DROPS, dropped } from "./history.js";

const ALWAYS = ["accepted", "queued", "delivered", "trained"];
const STATES = ["accepted", "queued", "forming", "delivered", "trained", ...DROPS];
const WHY = {
  dropped_overflow: "the queue was full",
  dropped_stale: "too stale when its batch was made",
  recycled: "too stale, its task started anew",
  filtered: "by the run's filter",
  rejected: "by the trainer",
  discarded: "by a resume",
  lost: "by the store",
};
const FILTERED = "filtered_";

function whereTo(run) {
  const shards = run.payload_shards;
  return shards > 0 ? `, to a cluster of ${shards} shard${shards > 1 ? "s" : ""}` : "";
}

export function showLedger(run, rate) {
  const { groups, tasks } = run;
  badge(byId("groups-balance"), run.groups_balanced);
  listRows(
    byId("groups-rows"),
    STATES.filter((state) => ALWAYS.includes(state) || groups[state].groups > 0).map((state) => ({
      kind: state === "accepted" ? "total" : null,
      cells: [state, count(groups[state].groups), short(groups[state].samples), short(groups[state].tokens), bytes(groups[state].bytes)],
    })),
  );
  showDrops(run, rate);
  badge(byId("tasks-balance"), run.tasks_balanced);
  const statistics = run.statistics;
  listFacts(byId("tasks"), [
    ...["submitted", "pending", "leased", "completed", "failed", "cancelled"].map((state) => [state, count(tasks[state])]),
    ["feeder's cursor", count(run.cursor)],
    ...["granted", "returned", "expired", "cancelled"].map((end) => [`leases ${end}`, count(statistics[`leases_${end}`])]),
    ["pushed directly", `${count(statistics.written_groups)} of ${count(groups.accepted.groups)} groups${whereTo(run)}`],
    ...(run.blob_bytes > 0 ? [["blobs", `${bytes(run.blob_bytes)} of ${bytes(run.max_blob_bytes)}`]] : []),
  ]);
  listFacts(byId("steps"), [
    ["weights", `version ${run.published.version} of term ${run.term}`],
    ["steps assembled", count(run.next_step)],
    ["steps committed", count(run.committed_steps)],
    ["steps checkpointed", count(run.checkpointed_steps)],
    ...uses(run),
  ]);
  show(byId("failures-card"), run.failures.length > 0);
  listRows(
    byId("failures-rows"),
    run.failures.slice(0, 20).map((one) => ({ cells: [one.task_id, count(one.attempts), one.error] })),
  );
}

// Uses of groups beyond their own steps, where there are any or may be.
function uses({ policy, reuse }) {
  if (policy.max_uses === 1 && reuse.drawn === 0) {
    return [];
  }
  const ends = `${count(reuse.trained)} trained, ${count(reuse.given_back)} given back, ${count(reuse.lost)} lost`;
  return [
    ["groups that may be used again", count(reuse.reusable_groups)],
    ["uses again", `${count(reuse.drawn)} drawn: ${ends}`],
  ];
}

function badge(node, balanced) {
  setText(node, balanced ? "✓ balanced" : "✕ NOT BALANCED");
  setAttribute(node, "data-kind", balanced ? "good" : "bad");
}

function showDrops(run, rate) {
  const accepted = run.groups.accepted.groups;
  const shown = DROPS.filter((state) => run.groups[state].groups > 0);
  const most = Math.max(1, ...shown.map((state) => run.groups[state].groups));
  const none = accepted === 0 ? "No group was accepted yet." : "None: every accepted group is queued, delivered or trained.";
  tell("no-drops", shown.length > 0 ? "" : none);
  const drop = () => {
    const bar = element("span", { class: "bar", "aria-hidden": "true" }, span("part dropped"));
    return element("li", {}, span("drop-name"), span("drop-count"), bar, span("note"));
  };
  listEach(byId("drops"), shown, drop, ({ children: [name, number, bar, note] }, state) => {
    const groups = run.groups[state].groups;
    setText(name, state);
    setText(number, `${count(groups)}, ${percent(groups / accepted)} of accepted`);
    bar.firstElementChild.style.width = `${(100 * groups) / most}%`;
    const why = state === "filtered" ? `${WHY[state]}: ${filtered(run.statistics)}` : WHY[state];
    setText(note, `${why}; ${amount(rate(state))} groups/s`);
  });
}

const filtered = (statistics) =>
  Object.keys(statistics)
    .filter((name) => name.startsWith(FILTERED) && statistics[name] > 0)
    .sort()
    .map((name) => `${count(statistics[name])} for ${name.slice(FILTERED.length)}`)
    .join(", ");

// What its tasks took: leases, failed ones, samples with a named failure, and how long its limit holds it.
function work(run, name) {
  const one = run.environment_work.find(({ environment }) => environment === name);
  if (one === undefined) {
    return ["", "", "", ""];
  }
  const next = one.limited_for_ms > 0 ? `in ${amount(one.limited_for_ms / 1000)} s` : "";
  return [count(one.starts), count(one.failed_attempts), count(one.failed_samples), next];
}

export function showEnvironments(run) {
  const names = Object.keys(run.environments).sort();
  const shown = names.some((name) => name !== "");
  show(byId("environments-card"), shown);
  const states = ["accepted", "queued", "delivered", "trained"];
  listRows(
    byId("environments-rows"),
    (shown ? names : []).map((name) => ({
      cells: [
        name || "(none)",
        ...states.map((state) => count(run.environments[name][state].groups)),
        count(dropped(run.environments[name])),
        ...work(run, name),
      ],
    })),
  );
  show(byId("stages-card"), run.stages.length > 0);
  listRows(
    byId("stages-rows"),
    run.stages.map((one) => ({
      kind: one.waiting > 0 && one.asked_ms === null ? "bad" : null,
      cells: [
        one.name,
        ...[one.waiting, one.leased, one.added, one.failed].map(count),
        one.added > 0 ? seconds(one.busy_ms / one.added / 1000) : "–",
        one.asked_ms === null ? "by nobody yet" : `${Math.floor(one.asked_ms / 1000)} s ago`,
      ],
    })),
  );
  show(byId("evaluations-card"), run.evaluations.length > 0);
  listRows(
    byId("evaluations-rows"),
    run.evaluations.map((one) => ({
      cells: [one.eval_id, count(one.version.version), `${count(one.finished)} of ${count(one.tasks)}`, ...[one.failed, one.leased, one.pending].map(count)],
    })),
  );
}
