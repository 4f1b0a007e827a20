"""Views of runs made up for tests of those who show them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.transitions import GroupState, TaskState
from buffer_service.domain.window import TOTALS, Snapshot, Window
from rollout_buffer.v1 import runs_pb2


def ledger(**amounts: ops.Amount) -> dict[str, ops.Amount]:
    """A balanced group ledger with these entries."""
    entries = {state.value: amounts.get(state, ops.Amount()) for state in GroupState}
    accepted = ops.Amount(
        *(sum(getattr(entry, unit) for entry in entries.values()) for unit in ("groups", "samples", "tokens", "bytes"))
    )
    return {"accepted": accepted, **entries}


def make_view(
    policy: RunPolicy | None = None,
    *,
    groups: Mapping[str, ops.Amount] | None = None,
    environments: Mapping[str, Mapping[str, ops.Amount]] | None = None,
    tasks: Mapping[str, int] | None = None,
    statistics: Mapping[str, int] | None = None,
    **fields: Any,
) -> ops.RunView:
    """A run with these groups, tasks and statistics, and nothing else; it balances."""
    counts = {state.value: (tasks or {}).get(state, 0) for state in TaskState}
    numbers = {field.name: 0 for field in runs_pb2.RunStatistics.DESCRIPTOR.fields}
    view = ops.RunView(
        run_id="r",
        policy=policy or RunPolicy(),
        revision=1,
        created_ms=1,
        epoch=1,
        published=ops.WeightVersion(1, 0),
        next_step=0,
        committed_steps=0,
        checkpointed_steps=0,
        world_size=0,
        cursor=0,
        paused="",
        draining=False,
        groups=ledger(**(groups or {})),
        environments={name: ledger(**entries) for name, entries in (environments or {}).items()},
        tasks={"submitted": sum(counts.values()), **counts},
        statistics={**numbers, "recent_acceptance_ppm": 1_000_000, **(statistics or {})},
        engines=[],
        failures=[],
    )
    return replace(view, **fields)


def make_window(
    *,
    publishes: int = 20,
    seconds: float = 100.0,
    versions: int | None = None,
    before: Mapping[str, int] | None = None,
    **grown: int,
) -> Window:
    """A window in which the totals grew by so much; versions: by how many the published one rose, else one each."""
    start = {**dict.fromkeys(TOTALS, 0), **(before or {})}
    unknown = grown.keys() - start.keys()
    if unknown:
        raise KeyError(*unknown)
    return Window(
        Snapshot(1_000, 5, start),
        Snapshot(
            1_000 + round(1_000 * seconds),
            5 + (publishes if versions is None else versions),
            {name: total + grown.get(name, 0) for name, total in start.items()},
        ),
        publishes,
    )


def make_engines(count: int, state: str = "ready", silent_ms: int = 0) -> list[ops.EngineReport]:
    """So many engines."""
    version = ops.WeightVersion(1, 1)
    return [ops.EngineReport(f"e{i}", "w", state, version, 0, 0, "", 0, silent_ms=silent_ms) for i in range(count)]
