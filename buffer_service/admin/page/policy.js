// The effective policy: every field as it holds now.

import { byId, listFacts, setText } from "./dom.js";
import { bytes, count } from "./format.js";

const UNSET = -1;
const NO_REWARD_BOUND = 1e12;

export function showPolicy(run) {
  const names = Object.keys(run.policy).sort();
  const changed = names.filter((name) => run.policy_changed.includes(name));
  const rest = names.filter((name) => !run.policy_changed.includes(name));
  const facts = (some, kind) => some.map((name) => [name, said(name, run.policy[name]), kind]);
  listFacts(byId("policy-changed"), facts(changed, "changed"));
  listFacts(byId("policy"), facts(rest, null));
  const preset = run.policy.preset === "" ? "" : `preset ${run.policy.preset}; `;
  setText(byId("policy-summary"), `${preset}${changed.length === 0 ? "nothing was set" : `what was set: ${changed.length} of ${names.length} fields`}`);
  setText(byId("policy-rest"), `${rest.length} fields as by default`);
}

function said(name, value) {
  if (name === "environments") {
    return value.length === 0 ? "no rules" : value.map(rule).join("; ");
  }
  if (value === UNSET || Math.abs(value) === NO_REWARD_BOUND) {
    return "no bound";
  }
  if (typeof value === "boolean") {
    return value ? "yes" : "no";
  }
  if (typeof value === "number") {
    return name.endsWith("_bytes") && value > 0 ? `${count(value)} (${bytes(value)})` : count(value);
  }
  return value === "" ? "none" : value;
}

function rule({ environment, ...fields }) {
  const parts = Object.keys(fields).filter((name) => fields[name] !== UNSET);
  return `${environment}: ${parts.map((name) => `${name} ${fields[name]}`).join(", ")}`;
}
