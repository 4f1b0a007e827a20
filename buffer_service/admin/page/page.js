// The page: which run is shown, what is known of it, how fresh that is.

import { byId, element, setAttribute, setText, show, tell } from "./dom.js";
import { showFleet } from "./fleet.js";
import { amount, count, versions } from "./format.js";
import { History, dropRate, dropped, totalsOf } from "./history.js";
import { showEnvironments, showLedger } from "./ledger.js";
import { Loop } from "./loop.js";
import { showPolicy } from "./policy.js";
import { showRollouts } from "./rollouts.js";
import { Tile } from "./spark.js";
import { showStaleness } from "./staleness.js";
import { Refused, RunStream, fetchJson, token } from "./stream.js";
import { showVerdict, titleOf } from "./verdict.js";

const LIST_MS = 5_000;
const TICK_MS = 1_000;
/** The service says something every 5 s. */
const LATE_MS = 8_000;

const tiles = {
  decoded: new Tile(byId("tiles"), "Decoded", "tokens/s"),
  trained: new Tile(byId("tiles"), "Trained", "tokens/s"),
  accepted: new Tile(byId("tiles"), "Accepted", "groups/s"),
  queued: new Tile(byId("tiles"), "Queue", "groups"),
  staleness: new Tile(byId("tiles"), "Staleness", "versions"),
  dropped: new Tile(byId("tiles"), "Not trained", "groups/s"),
};
const loop = new Loop(byId("loop"));

/** Of the run that is shown; times by performance.now(), which no clock change moves. */
const shown = { name: null, stream: null, run: null, timeMs: 0, toldAt: 0, heardAt: 0, connectedAt: 0, live: false, history: new History() };

/** A run that the service said is not there. */
let missing = "";

/** Runs that the service said it cannot read: nobody is shown them unasked while there are others. */
const unreadable = new Set();

// --- connection -----------------------------------------------------------------------------------------------

function state(kind, text) {
  setAttribute(byId("connection"), "data-kind", kind);
  setText(byId("connection-state"), text);
}

function open(name) {
  shown.stream?.close();
  missing = "";
  byId("run").value = name;
  show(byId("empty"), false);
  Object.assign(shown, { name, run: null, live: false, heardAt: performance.now(), history: new History() });
  show(byId("board"), false);
  show(byId("fault"), false);
  state("busy", "connecting");
  const mine = (act) => (...told) => {
    if (shown.name === name && shown.stream === stream) {
      act(...told);
    }
  };
  const stream = new RunStream(name, {
    connected: mine(() => {
      shown.live = shown.run !== null;
      shown.connectedAt = shown.heardAt = performance.now();
      show(byId("fault"), false);
      state("good", "live");
    }),
    heard: mine(() => {
      shown.heardAt = performance.now();
    }),
    told: mine(told),
    lost: mine((why) => {
      interrupted();
      state("bad", `disconnected: ${why}`);
    }),
    refused: mine(refused),
  });
  shown.stream = stream;
}

function close() {
  shown.stream?.close();
  Object.assign(shown, { name: null, stream: null, run: null, live: false });
  show(byId("board"), false);
  document.title = "rollout-buffer";
}

function told(event, values) {
  if (event === "fault") {
    interrupted();
    tell("fault", `What is shown is old: ${values.message}`);
    state("bad", "the store fails");
    return;
  }
  if (event !== "run") {
    return; // Of a newer service.
  }
  const { run, time_ms: timeMs } = values;
  if (shown.run !== null && shown.run.created_ms !== run.created_ms) {
    shown.history = new History(); // Another run of that name.
  }
  Object.assign(shown, { run, timeMs, toldAt: performance.now(), live: true });
  shown.history.add(timeMs, totalsOf(run));
  show(byId("fault"), false);
  state("good", "live");
  tick(); // Not at the next second: new numbers are not to be greyed as old ones.
}

function interrupted() {
  shown.live = false;
  shown.history.interrupt();
}

function refused(error) {
  if (error.status === 401) {
    close();
    askForToken(error);
    return;
  }
  missing = shown.name;
  const another = error.reason === "layout_changed" && !unreadable.has(missing);
  if (another) {
    unreadable.add(missing);
  }
  close();
  byId("run").value = "";
  if (error.status === 404) {
    empty(`There is no run ${missing}`, "It was deleted, or the address of this page names a run that never was.", "");
  } else {
    empty(`Run ${missing} is not shown`, error.message, "");
  }
  state("bad", error.status === 404 ? "no such run" : "refused");
  if (another) {
    lookForRuns(); // Nobody named it: one that can be read is shown at once.
  }
}

// --- token ----------------------------------------------------------------------------------------------------

function askForToken(error) {
  const had = token.get() !== null;
  token.forget();
  show(byId("forget"), false);
  show(byId("empty"), false);
  show(byId("fault"), false);
  show(byId("switch"), false);
  show(byId("door"), true);
  tell("token-error", had ? error.message : "");
  state("busy", "a token is needed");
  setText(byId("heard"), "");
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[!-~]+$/.test(given)) {
    // A header cannot carry it: the request would fail as if the service were not there.
    tell("token-error", "A token has letters, digits and signs of ASCII alone, without spaces; copy it once more.");
    return;
  }
  token.set(given);
  show(byId("door"), false);
  state("busy", "connecting");
  lookForRuns();
});

byId("forget").addEventListener("click", () => {
  token.forget();
  location.reload(); // Nothing that it showed stays in the page.
});

// --- runs -----------------------------------------------------------------------------------------------------

/** The list of runs, as often as LIST_MS, and the one to show. */
async function lookForRuns() {
  if (!byId("door").hidden) {
    return; // Somebody types a token; asking without one would only be refused.
  }
  let index;
  try {
    index = await fetchJson("/api");
  } catch (error) {
    if (error instanceof Refused && error.status < 500) {
      close();
      askForToken(error);
    } else if (shown.name === null) {
      state("bad", error instanceof Refused ? error.message : "the service cannot be reached");
    }
    return;
  }
  show(byId("forget"), token.get() !== null);
  const names = index.runs.map((path) => path.slice("/api/runs/".length));
  offer(names);
  missing = names.includes(missing) ? "" : missing;
  if (shown.name !== null) {
    return;
  }
  shown.heardAt = performance.now();
  const wanted = named() || missing || (names.find((name) => !unreadable.has(name)) ?? names[0]);
  if (wanted === undefined) {
    empty(
      "No run yet",
      `The service at ${index.address} serves. A trainer creates a run with its first session; it appears here by itself:`,
      `with BufferClient("${index.address}") as client:\n    session = client.session("math", policy=Policy(batch_groups=32), tasks=tasks, …)`,
    );
    state("good", "live");
  } else if (wanted !== missing) {
    open(wanted);
  }
}

/** The run that the page's address names, or nothing. */
const named = () => new URLSearchParams(location.hash.slice(1)).get("run") ?? "";

function offer(names) {
  const select = byId("run");
  const present = [...select.options].map((option) => option.value);
  if (names.length !== present.length || names.some((name, index) => name !== present[index])) {
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    select.value = shown.name ?? "";
  }
  show(byId("switch"), names.length > 0);
}

byId("run").addEventListener("change", (event) => {
  location.hash = new URLSearchParams({ run: event.target.value });
});

window.addEventListener("hashchange", () => {
  const name = named();
  if (name !== "" && name !== shown.name) {
    open(name);
  }
});

function empty(title, next, code) {
  setText(byId("empty-title"), title);
  setText(byId("empty-next"), next);
  tell("empty-code", code);
  show(byId("empty"), true);
}

// --- drawing --------------------------------------------------------------------------------------------------

/** The service's clock now, by what it told last. */
const serviceMs = () => shown.timeMs + performance.now() - shown.toldAt;

function render() {
  const { history, run } = shown;
  const nowMs = serviceMs();
  const rate = (name) => (shown.live ? history.rate(name, nowMs) : null);
  show(byId("board"), true);
  show(byId("empty"), false);
  document.title = titleOf(run);
  showVerdict(run);
  const span = Math.floor(history.span(nowMs));
  setText(byId("rates"), span >= 3 ? `rates over the last ${span} s` : "rates come in a few seconds");
  loop.show(run, rate);
  showTiles(run, rate, nowMs);
  showStaleness(run);
  showLedger(run, rate);
  showEnvironments(run);
  showFleet(run, performance.now() - shown.toldAt);
  showPolicy(run);
  showRollouts(run);
}

function showTiles(run, rate, nowMs) {
  const { groups, policy } = run;
  const { predicted, measured } = run.estimate;
  const values = {
    decoded: rate("decoded_tokens"),
    trained: rate("assembled_response_tokens"),
    accepted: rate("accepted_groups"),
    queued: groups.queued.groups,
    staleness: measured.staleness,
    dropped: dropRate(rate),
  };
  if (shown.live) {
    shown.history.note(nowMs, values);
  }
  const notes = {
    decoded: "by all engines",
    trained: "response tokens of batches",
    accepted: `${count(groups.accepted.groups)} so far`,
    queued: `of ${count(policy.max_queued_groups)}; a batch is ${count(policy.batch_groups)}`,
    staleness: predicted.staleness === null ? "measured; no prediction yet" : `measured; predicted ${versions(predicted.staleness)}${predicted.rough ? ", rough" : ""}`,
    dropped: `${count(dropped(groups))} so far`,
  };
  for (const [name, tile] of Object.entries(tiles)) {
    const text = name === "staleness" ? versions(values[name]) : name === "queued" ? count(values[name]) : amount(values[name]);
    tile.show(text, notes[name], shown.history.series(name), nowMs);
  }
}

function tick() {
  if (shown.name === null) {
    return;
  }
  const silentS = Math.floor((performance.now() - shown.heardAt) / 1000);
  const late = 1000 * silentS >= LATE_MS;
  byId("board").classList.toggle("old", !shown.live || late);
  setText(byId("heard"), late || !shown.live ? `last heard ${silentS} s ago` : "");
  if (late && byId("connection").dataset.kind === "good") {
    state("bad", "nothing comes from the service");
  } else if (!late && shown.live && byId("connection").dataset.kind === "bad") {
    state("good", "live");
  }
  if (shown.run !== null) {
    // Connected again, and nothing was told: the totals are what they were.
    if (shown.live && shown.history.span(serviceMs()) === 0 && performance.now() - shown.connectedAt > 2 * TICK_MS) {
      shown.history.add(serviceMs(), totalsOf(shown.run));
    }
    render();
  }
}

lookForRuns();
setInterval(lookForRuns, LIST_MS);
setInterval(tick, TICK_MS);
window.addEventListener("online", () => shown.stream?.retryNow());
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && shown.stream?.retryNow());
