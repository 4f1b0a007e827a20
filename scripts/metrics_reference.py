"""Writes docs/metrics.md: every metric that the service has, as its collectors declare it.

usage: metrics_reference.py [--check]   (--check: write nothing, fail if the page is out of date)
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from buffer_service.admin.metrics.control import ControlCollector
from buffer_service.admin.metrics.doors import DoorCollector
from buffer_service.admin.metrics.evaluations import EvaluationCollector
from buffer_service.admin.metrics.runs import RunCollector
from buffer_service.admin.metrics.staleness import StalenessCollector
from buffer_service.admin.metrics.store import StoreCollector
from buffer_service.admin.reading import UNREAD
from buffer_service.domain.ops import PushKind
from buffer_service.domain.policy import MAX_ENVIRONMENTS, TargetMeasure
from buffer_service.domain.steering.decisions import Outcome
from buffer_service.observability.control import KNOBS
from buffer_service.observability.metrics import (
    DIRECTIONS,
    EVALUATION_OUTCOMES,
    FOUND,
    OF_RESULTS,
    REFUSALS,
    RpcMetrics,
)
from buffer_service.observability.relaying import RELAYED
from buffer_service.observability.store_metrics import STORE_ERRORS, StoreMetrics
from buffer_service.rules.filters import REASONS
from buffer_service.rules.pauses import Pause
from buffer_service.rules.totals import RELOAD_PHASES
from buffer_service.rules.transitions import GroupState, TaskState
from buffer_service.security.doors import Doors
from buffer_service.security.gate import Gate
from buffer_service.security.roles import RULES
from buffer_service.store.scripts import load_scripts
from buffer_wire.enums import words
from rollout_buffer.v1 import weights_pb2
from rollout_workers.fleet.metrics import WorkerCollector

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/metrics.md"
PREFIX = "rollout_buffer_"

OPEN = {
    "run": "the run's name",
    "environment": f"the groups' environment, at most {MAX_ENVIRONMENTS} in a run",
    "method": "the RPC, without its service",
    "engine": "the engine's id",
    "cause": "why nobody trains on them, as in the worker's log",
    "failure": "the name that a rollout or reward function gave",
    "stage_name": "the stage's name, at most 8 in a policy",
    "server": "host:port of a primary of the payload cluster",
}
"""Labels whose values come from users, or are too many to list."""

METHODS = {*(method.rpartition("/")[2] for method in RULES), "reflection", "unknown"}

_ENGINE_STATES = list(words(weights_pb2.EngineState))
CLOSED: Mapping[tuple[str, str], Sequence[str]] = {
    ("*", "disposition"): ("accepted", *GroupState),
    ("*", "stage"): ("accepted", "assembled"),
    ("tasks", "state"): ("submitted", *TaskState),
    ("stage_groups", "state"): ("waiting", "held"),
    ("group_uses", "state"): ("drawn", "delivered", "trained", "given_back", "lost"),
    ("evaluation_tasks", "state"): ("pending", "leased", "finished", "failed"),
    ("engines", "state"): (*_ENGINE_STATES, "silent"),
    ("worker_engine_state", "state"): _ENGINE_STATES,
    ("*", "work"): ("training", "evaluation"),
    ("*", "answer"): (
        "queued",
        "duplicate",
        "closed",
        "filtered",
        "invalid",
        "refused",
        "rejected_full",
        "payload_missing",
    ),
    ("*", "way"): ("direct", "relayed"),
    ("*", "kind"): ("interrupted", "failed"),
    ("*", "ledger"): ("groups", "tasks", "uses"),
    ("filtered_groups", "reason"): REASONS,
    ("*", "phase"): RELOAD_PHASES,
    ("paused", "reason"): tuple(Pause),
    ("refused_calls", "reason"): REFUSALS,
    ("runs_unread", "reason"): UNREAD,
    ("group_staleness_versions", "part"): ("total", "pre_queue", "in_queue"),
    ("*", "part"): ("pre_queue", "in_queue"),
    ("control_outcome", "outcome"): tuple(Outcome),
    ("control_in_effect", "field"): KNOBS,
    ("staleness_target_versions", "measure"): tuple(TargetMeasure),
    ("relaying_clients", "of"): tuple(RELAYED.values()),
    ("held_bytes", "direction"): DIRECTIONS,
    ("lost_payloads", "found"): FOUND,
    ("rpcs", "code"): sorted(code.name for code in grpc.StatusCode),
    ("pushed_groups", "outcome"): tuple(kind for kind in PushKind if kind not in OF_RESULTS),
    ("evaluation_leases_ended", "outcome"): EVALUATION_OUTCOMES,
    # `claim` is part of the call that comes after it.
    ("store_call_seconds", "operation"): (
        *sorted(load_scripts().keys() - {"claim"}),
        "fetch",
        "put",
        "delete",
        "command",
    ),
    ("store_errors", "kind"): STORE_ERRORS,
    ("security_file_broken", "file"): ("tokens", "certificates"),
}
"""Values of labels, by metric (without prefix; * for all others) and label."""

UNITS = {
    "tokens_per_second": "tokens per second",
    "seconds": "seconds",
    "bytes": "bytes",
    "tokens": "tokens",
    "versions": "versions",
    "version": "version",
    "groups": "groups",
    "samples": "samples",
    "ratio": "ratio",
    "ranks": "ranks",
    "steps": "steps",
    "step": "step",
    "requests": "requests",
    "turns": "turns",
    "groups_spanning_versions": "groups",
}
"""Units by how a name ends; the longest end counts."""

INTRODUCTION = """\
# Metrics

`/metrics` of the admin page, in Prometheus' text format. This page is written from the code by
`python -m scripts.metrics_reference`.

All names begin with `rollout_buffer_`; counters have `_total` at their end, and histograms are `_bucket`, `_sum` and
`_count`. No label of the service names a worker, an engine, a task or a sample. What is not known yet, or has no limit,
is absent.

Where a service has several replicas, everything that is read from the store is the same at each of them: take
`max by (run)`; and `sum` for what the processes count.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics of one source."""

    title: str
    source: str
    collectors: Sequence[Collector]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` without prefix, and without a counter's `_total`."""

    name: str
    kind: str
    text: str
    labels: Sequence[str]

    @property
    def written_name(self) -> str:
        """Name as it is queried."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """Empty where it counts things or is a state."""
        ends = [end for end in UNITS if self.name.endswith(f"_{end}")]
        return UNITS[max(ends, key=len)] if ends else ""

    def values(self, label: str) -> Sequence[str]:
        """The values that a label can have; empty for one of OPEN. Raises KeyError for one that is not known."""
        if label in OPEN:
            return ()
        return CLOSED.get((self.name, label)) or CLOSED["*", label]


def sections() -> Sequence[Section]:
    """Everything there is."""
    once, open_doors = "the store, read once per scrape", Doors(Gate(None), None, None)
    return (
        Section("Runs", once, [RunCollector([])]),
        Section(
            "Staleness and throughput",
            f"{once}; estimates by [staleness](staleness.md)",
            [StalenessCollector([]), ControlCollector([])],
        ),
        Section("Evaluations", once, [EvaluationCollector({})]),
        Section("The store", "its `INFO`, once per scrape", [StoreCollector(None, {})]),
        Section(
            "Processes",
            "the rpc processes, summed over those of a service; they begin at 0 when it starts, and are written "
            "half a second late at most",
            _instruments(),
        ),
        Section(
            "Workers",
            "each worker, at the address of its `--metrics-listen`",
            [WorkerCollector("", "", {}, [])],
        ),
        Section("Tokens and certificates", "the process of the admin page", [DoorCollector(open_doors)]),
    )


def families(section: Section) -> Iterator[Family]:
    """The metrics of a section, in the order of their names."""
    found = []
    for collector in section.collectors:
        for metric in collector.collect():
            # The library keeps the names of labels to itself, and samples, which have them, need runs.
            labels = vars(collector if isinstance(collector, MetricWrapperBase) else metric)["_labelnames"]
            found.append(Family(metric.name.removeprefix(PREFIX), metric.type, metric.documentation, labels))
    return iter(sorted(found, key=lambda family: family.name))


def _instruments() -> list[Collector]:
    registry = CollectorRegistry()
    holders: list[object] = [RpcMetrics(registry), StoreMetrics(registry)]
    del holders
    return list(registry._collector_to_names)  # noqa: SLF001 - there is no public way from a registry to its metrics


def page() -> str:
    """The page's text."""
    parts = [INTRODUCTION]
    for section in sections():
        parts.append(f"\n## {section.title}\n\nFrom {section.source}.\n\n")
        parts.append("| metric | type | unit | labels | |\n|---|---|---|---|---|\n")
        parts += [_row(family) for family in families(section)]
    parts.append("\n## Labels\n\n| label | of | values |\n|---|---|---|\n")
    parts += _label_rows()
    return "".join(parts)


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.written_name}` | {family.kind} | {family.unit} | {labels} | {family.text} |\n"


def _label_rows() -> Iterator[str]:
    known = [family for section in sections() for family in families(section)]
    for label in sorted({label for family in known for label in family.labels}):
        having = [family for family in known if label in family.labels]
        if label in OPEN:
            yield f"| `{label}` | {len(having)} metrics | {OPEN[label]} |\n"
            continue
        by_values: dict[tuple[str, ...], list[str]] = {}
        for family in having:
            by_values.setdefault(tuple(map(str, family.values(label))), []).append(f"`{family.written_name}`")
        for values, names in by_values.items():
            yield f"| `{label}` | {', '.join(names)} | {', '.join(f'`{value}`' for value in values)} |\n"


def main(arguments: list[str]) -> int:
    """Writes or checks the page; returns an exit code."""
    text = page()
    if "--check" not in arguments:
        TARGET.write_text(text)
        return 0
    if not TARGET.exists() or TARGET.read_text() != text:
        print(f"{TARGET.relative_to(ROOT)} is out of date; run `python -m scripts.metrics_reference`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
