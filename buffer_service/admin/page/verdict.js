// What an operator reads first: on whom the run waits, the verdict, the advice.

import { byId, listTexts, setAttribute, setText, show, tell } from "./dom.js";

const BOUNDS = { rollout: "rollout-bound", train: "train-bound", balanced: "balanced" };

const NO_PREDICTION = "None: it takes a prediction, and something that this depends on is not known; see below.";
const NOTHING_GAINED = "None: nothing would gain a tenth of the staleness or a twentieth of the throughput.";

export function showVerdict(run) {
  const { advice, unknown, verdict } = run.estimate;
  const known = verdict.sentences.length > 0;
  const reason = unknown.length > 0 ? unknown[0].reason : "nothing was measured";
  setText(byId("headline"), known ? verdict.sentences[0] : `no verdict yet: ${reason}`);
  setAttribute(byId("verdict"), "data-bound", verdict.bound);
  setText(byId("waits-on"), run.waits_on);
  const relayed = Object.entries(run.relayed).map(([what, clients]) => `Payloads of ${what} are relayed for ${clients}`);
  listTexts(byId("sentences"), [...verdict.sentences.slice(1), ...relayed, ...run.passed_over]);
  tell("next", known ? "" : nextStep(run));
  show(byId("advice-card"), known);
  show(byId("advice"), advice.length > 0);
  listTexts(byId("advice"), advice.slice(0, 4).map((one) => one.text));
  const without = run.estimate.predicted.staleness === null ? NO_PREDICTION : NOTHING_GAINED;
  tell("no-advice", advice.length > 0 ? "" : without);
  listTexts(byId("states"), [...statesOf(run)]);
  show(byId("states"), byId("states").children.length > 0);
}

/** How the tab is named. */
export function titleOf(run) {
  const bound = BOUNDS[run.estimate.verdict.bound];
  return `${run.run_id}${bound === undefined ? "" : `: ${bound}`}${run.paused === "" ? "" : ", paused"} – rollout-buffer`;
}

function* statesOf(run) {
  if (run.paused !== "") {
    yield `paused: ${run.paused}`;
  }
  if (run.draining) {
    yield "draining";
  }
  if (run.filter_starves) {
    yield "the filter lets too few pass";
  }
  if (!run.groups_balanced || !run.tasks_balanced) {
    yield "ledger NOT BALANCED";
  }
}

/** What to do where there is nothing to judge yet. */
function nextStep(run) {
  const alive = run.engines.filter((one) => one.state !== "stopped");
  if (run.tasks.submitted === 0 && run.groups.accepted.groups === 0) {
    return "Nothing was fed yet: start the trainer with its tasks (client.session(…, tasks=…)), or push groups.";
  }
  if (alive.length === 0 && run.groups.accepted.groups === 0) {
    return `No engine has reported: start a worker with rollout-buffer worker --run ${run.run_id} …`;
  }
  if (run.groups.trained.groups === 0) {
    return "Nothing is trained yet: the verdict comes with the trainer's second publish.";
  }
  return "The verdict comes when the trainer has published twice under the present policy.";
}
