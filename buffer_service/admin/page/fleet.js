// The engines as their workers report them; those that need somebody first.

import { byId, listRows, setText, show } from "./dom.js";
import { count, counted, seconds } from "./format.js";

/** As buffer_service.observability.diagnosis has it: workers report their engines twice as often at least. */
const SILENT_MS = 60_000;

const MARKS = { ready: "●", loading: "◐", starting: "○", quarantined: "✕", stopped: "■", silent: "?" };
const KINDS = { quarantined: "bad", silent: "bad", loading: "busy", starting: "busy", ready: "good", stopped: "off" };
const ORDER = ["quarantined", "silent", "starting", "loading", "ready", "stopped"];

/** `passedMs`: time since the run was told. */
export function showFleet(run, passedMs) {
  const engines = run.engines.map((one) => {
    const silentMs = one.silent_ms + passedMs;
    return { ...one, silentMs, standing: one.state !== "stopped" && silentMs >= SILENT_MS ? "silent" : one.state };
  });
  engines.sort((one, other) => ORDER.indexOf(one.standing) - ORDER.indexOf(other.standing) || compared(one.engine_id, other.engine_id));
  show(byId("no-engines"), engines.length === 0);
  show(byId("engines"), engines.length > 0);
  setText(byId("fleet-summary"), summary(engines));
  setText(byId("worker-command"), `rollout-buffer worker --run ${run.run_id} …`);
  listRows(
    byId("engines-rows"),
    engines.map((one) => ({ kind: KINDS[one.standing] ?? null, cells: cells(one, run.published) })),
  );
}

function cells(engine, published) {
  const said = engine.standing === "silent" ? `not heard of (was ${engine.state})` : engine.state;
  return [
    { text: engine.engine_id, title: `of worker ${engine.worker_id}` },
    { text: `${MARKS[engine.standing] ?? "?"} ${said}`, kind: KINDS[engine.standing] ?? null },
    version(engine, published),
    samples(engine),
    group(engine),
    count(engine.reloads),
    engine.reloads === 0 ? "–" : seconds(engine.last_reload_ms / 1000),
    `${Math.floor(engine.silentMs / 1000)} s`,
    { text: count(engine.errors), kind: engine.errors > 0 ? "bad" : null },
    engine.last_error || "–",
  ];
}

function version({ loaded, standing }, published) {
  const behind = published.version - loaded.version;
  if (standing === "stopped" || loaded.term !== published.term || behind <= 0) {
    return loaded.term === published.term ? `${loaded.version}` : `${loaded.version} of term ${loaded.term}`;
  }
  return { text: `${loaded.version}, ${behind} behind`, kind: behind > 1 ? "late" : null };
}

function samples({ running_samples, max_running_samples, kv_usage_milli }) {
  const most = max_running_samples > 0 ? ` of ${count(max_running_samples)}` : "";
  return { text: `${count(running_samples)}${most}`, title: `KV cache ${Math.round(kv_usage_milli / 10)} % in use` };
}

function group({ membership, prepared }) {
  if (membership === 0) {
    return "–";
  }
  return prepared === null ? `${membership}` : `${membership}, ready for ${prepared.version}`;
}

function summary(engines) {
  if (engines.length === 0) {
    return "";
  }
  const parts = ORDER.map((standing) => [standing, engines.filter((one) => one.standing === standing).length])
    .filter(([, number]) => number > 0)
    .map(([standing, number]) => `${number} ${standing === "silent" ? `not heard of for ${SILENT_MS / 1000} s` : standing}`);
  return `${counted(engines.length, "engine")}: ${parts.join(", ")}`;
}

const compared = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
