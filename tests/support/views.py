"""Views of runs made up for tests of those who show them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.transitions import GroupState, TaskState
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
