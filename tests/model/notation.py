"""Notation of a history: one JSON object per operation, on a line of its own.

    {"op": "lease", "args": [{"LeaseAsk": {"worker_id": "w1", ...}}]}

`op` is the name of a RunStore operation (without the run id), or `time` (milliseconds pass) or `sweep`. Values of the
domain's types are tagged with their type and leave out what is as in PLAIN, or as the type's default; weights are
[term, version] under "w", bytes latin-1 text under "b". A pushed group gets a name (`as`), by which later retries and
abandons mean it; `by` is the replica that does it; `ahead` is by how much the caller's seen revision exceeds the run's,
negative where its proof is wrong. What is reported lost is [group id, which of the keys under which it was read, 0 the
newest].
Invariant: `entry(line(e)) == e`.
"""

import dataclasses
import enum
import json
from collections.abc import Iterable
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, RunPolicy
from buffer_service.domain.steering.decisions import Decision, Outcome
from buffer_service.domain.steering.knobs import Knobs

PLAIN: dict[str, dict[str, Any]] = {
    "NewTask": {"group_size": 2, "priority": 0, "environment": "math", "spec": b"", "expected_tokens": 0},
    "Submit": {"term": 1, "expected_cursor": 0, "cursor": 0, "feeder_state": b""},
    "LeaseReturn": {"error": "", "partial_rollout": b"", "head": None, "tokens": 0},
    "GroupFacts": {
        "incarnation": 0,
        "lease_id": "",
        "environment": "math",
        "samples": 1,
        "tokens": 5,
        "loss_tokens": 0,
        "size_bytes": 100,
        "head": ops.WeightVersion(1, 0),
        "tail": ops.WeightVersion(1, 0),
        "spans_versions": False,
        "mean_milli": 0,
        "equal_rewards": False,
        "mean_reward_milli": 500,
        "response_lengths": b"",
        "rewards": b"",
        "min_response_tokens": 5,
        "max_response_tokens": 5,
        "response_tokens": 5,
        "reward_milli": 500,
        "turns": 1,
        "truncated_samples": 0,
        "failed_samples": 0,
        "version_tokens": (),
        "stored": False,
    },
    "EngineReport": {"reloads": 0, "last_reload_ms": 0, "last_error": "", "errors": 0},
}
"""Values that go without saying. Stored histories lean on them: add to them, never change one."""

_DATA: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Decision,
        EnvironmentRule,
        Knobs,
        RunPolicy,
        ops.EngineReport,
        ops.GroupFacts,
        ops.LeaseAsk,
        ops.LeaseReturn,
        ops.NewGroup,
        ops.NewTask,
        ops.PlanCollective,
        ops.Publish,
        ops.Pull,
        ops.Reject,
        ops.Resume,
        ops.StageAsk,
        ops.Submit,
        ops.TrainerClock,
    )
}
_ENUMS: dict[str, type[enum.StrEnum]] = {kind.__name__: kind for kind in (Outcome, ops.ResumeMode, ops.ReturnKind)}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One operation of a history. For push `names` are those of its groups; for retry_push and abandon_push those of
    the groups that are meant, and there are no args.
    """

    operation: str
    args: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    replica: int = 0
    ahead: int = 0


def line(entry: Entry) -> str:
    """The entry as one line of JSON."""
    written: dict[str, Any] = {"op": entry.operation}
    if entry.args:
        written["args"] = [_plain(arg) for arg in entry.args]
    if entry.names:
        written["as"] = list(entry.names)
    if entry.replica:
        written["by"] = entry.replica
    if entry.ahead:
        written["ahead"] = entry.ahead
    return json.dumps(written, ensure_ascii=True)


def entry(text: str) -> Entry:
    """The entry that a line says."""
    read = json.loads(text)
    args = tuple(_value(arg) for arg in read.get("args", ()))
    return Entry(read["op"], args, tuple(read.get("as", ())), read.get("by", 0), read.get("ahead", 0))


def lines(entries: Iterable[Entry]) -> str:
    """A whole history."""
    return "".join(f"{line(one)}\n" for one in entries)


def defaults(kind: type) -> dict[str, Any]:
    """Values that fields of that type leave unsaid."""
    own = {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    return own | PLAIN.get(kind.__name__, {})


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": value.decode("latin-1")}
    if isinstance(value, ops.WeightVersion):
        return {"w": [value.term, value.version]}
    if isinstance(value, enum.StrEnum):
        return {type(value).__name__: value.value} if type(value).__name__ in _ENUMS else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        unsaid = defaults(type(value))
        said = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        said = {k: v for k, v in said.items() if k not in unsaid or unsaid[k] != v}
        return {type(value).__name__: {k: _plain(v) for k, v in said.items()}}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, said),) = plain.items()
    if tag in _DATA:
        kind = _DATA[tag]
        fields = defaults(kind) | {k: _value(v) for k, v in said.items()}
        return _policy(fields) if kind is RunPolicy else kind(**fields)
    if tag in _ENUMS:
        return _ENUMS[tag](said)
    return said.encode("latin-1") if tag == "b" else ops.WeightVersion(*said)


def _policy(fields: dict[str, Any]) -> RunPolicy:
    rules = [rule.to_store() for rule in fields["environments"]]
    return RunPolicy.from_store(fields | {"environments": rules})
