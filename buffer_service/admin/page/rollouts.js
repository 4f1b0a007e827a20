// Single rollouts, looked at when somebody asks: their tokens by version and loss mask, as text with a tokenizer.

import { byId, element, listEach, setAttribute, setText, show, span, tell } from "./dom.js";
import { counted } from "./format.js";
import { fetchJson } from "./stream.js";
import { Tokenizer } from "./tokenizer.js";

/** Colours of versions in the style sheet; a sample of more begins anew with the first. */
const COLOURS = 6;

const looked = { run: null, path: "", sample: null, index: 0, tokenizer: null };

/** The run that is shown; another one has nothing that was looked at. */
export function showRollouts(run) {
  const same = looked.run !== null && looked.run.run_id === run.run_id && looked.run.created_ms === run.created_ms;
  looked.run = run;
  if (!same) {
    looked.sample = null;
    show(byId("rollout"), false);
    tell("rollouts-error", "");
  }
  byId("rollouts-batch").disabled = run.next_step === 0;
}

byId("rollouts-batch").addEventListener("click", () => list(`?step=${looked.run.next_step - 1}`, `step ${looked.run.next_step - 1}`));
byId("rollouts-queue").addEventListener("click", () => list("", "the queue"));
byId("rollout-group").addEventListener("change", () => look(0));
byId("rollout-sample").addEventListener("change", (event) => look(Number(event.target.value)));
byId("tokenizer").addEventListener("change", async (event) => {
  try {
    looked.tokenizer = new Tokenizer(JSON.parse(await event.target.files[0].text()));
    tell("rollouts-error", "");
  } catch {
    tell("rollouts-error", "That file is no tokenizer.json of a model.");
  }
  draw();
});

/** What `ask` answers, or nothing and the reason in the page. */
async function asked(path) {
  const run = looked.run;
  try {
    const answer = await fetchJson(`/api/runs/${encodeURIComponent(run.run_id)}/groups${path}`);
    tell("rollouts-error", "");
    return looked.run.run_id === run.run_id ? answer : null;
  } catch (error) {
    tell("rollouts-error", error.message);
    return null;
  }
}

async function list(query, where) {
  const answer = await asked(query);
  if (answer === null) {
    return;
  }
  setText(byId("rollouts-of"), `${counted(answer.groups.length, "group")} of ${where}`);
  options(byId("rollout-group"), answer.groups.map((one) => [one.group_id, `${one.group_id}, reward ${one.reward.toFixed(3)}`]));
  show(byId("rollout"), answer.groups.length > 0);
  if (answer.groups.length > 0) {
    await look(0);
  }
}

async function look(index) {
  const group = byId("rollout-group").value;
  const answer = await asked(`/${group}?sample=${index}`);
  if (answer === null || group !== byId("rollout-group").value) {
    return;
  }
  Object.assign(looked, { sample: answer, index });
  options(byId("rollout-sample"), answer.samples.map((one, at) => [String(at), `${at}, reward ${one.reward.toFixed(3)}`]));
  byId("rollout-sample").value = String(index);
  draw();
}

function options(select, items) {
  select.replaceChildren(...items.map(([value, text]) => element("option", { value }, text)));
}

function draw() {
  if (looked.sample === null) {
    return;
  }
  const { sample, index, tokenizer } = looked;
  const facts = sample.samples[index];
  const parts = segments(facts, sample);
  const failure = facts.failure ? `, ${facts.failure}` : "";
  const cut = sample.token_ids.length < facts.tokens ? `; the first ${sample.token_ids.length} of ${facts.tokens} tokens` : "";
  setText(byId("rollout-facts"), `reward ${facts.reward.toFixed(3)}, ended by ${facts.ended_by}${failure}, worker ${sample.worker_id || "?"}${cut}`);
  const kinds = [...new Map(parts.map((part) => [part.title, part])).values()];
  listEach(byId("rollout-legend"), kinds, () => element("li", {}, span("")), (line, part) => {
    setText(line.firstElementChild, part.title);
    setAttribute(line.firstElementChild, "class", part.kind);
  });
  const text = ({ ids }) => (tokenizer === null ? `${ids.join(" ")} ` : tokenizer.decode(ids));
  byId("rollout-text").replaceChildren(...parts.map((part) => element("span", { class: part.kind, title: part.title }, text(part))));
}

/** Tokens that lie together and are alike: {kind, title, ids}. */
export function segments(facts, { token_ids: ids, loss_mask: mask }) {
  const versions = [...new Set(facts.spans.map((one) => one.version))];
  const parts = [];
  ids.forEach((id, at) => {
    const version = facts.spans.find((one) => one.start <= at && at < one.end)?.version;
    const colour = version === undefined ? "" : `token v${versions.indexOf(version) % COLOURS}`;
    const [kind, title] =
      at < facts.prompt_len ? ["token prompt", "the prompt"] : mask[at] === 0 ? [`${colour} left-out`, `not trained on, version ${version}`] : [colour, `version ${version}`];
    if (parts.at(-1)?.title !== title) {
      parts.push({ kind, title, ids: [] });
    }
    parts.at(-1).ids.push(id);
  });
  return parts;
}
