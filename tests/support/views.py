"""Views of runs made up for tests of those who show them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.window import Snapshot, Window
from buffer_service.rules.totals import TOTALS
from buffer_service.rules.transitions import GroupState, TaskState
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
        term=1,
        published=ops.WeightVersion(1, 0),
        next_step=0,
        committed_steps=0,
        published_steps=0,
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
    # A trainer that publishes what it commits, unless the test says otherwise.
    return replace(view, **{"published_steps": fields.get("committed_steps", 0), **fields})


def make_window(
    *,
    publishes: int = 20,
    seconds: float = 100.0,
    before: Mapping[str, int] | None = None,
    grown: Mapping[str, int] | None = None,
) -> Window:
    """A window in which the totals grew by so much, and the version by one with each publish."""
    start = {**dict.fromkeys(TOTALS, 0), **(before or {})}
    grown = {**dict.fromkeys(TOTALS, 0), **(grown or {})}
    return Window(
        Snapshot(1_000, 5, start),
        Snapshot(
            1_000 + round(1_000 * seconds),
            5 + publishes,
            {name: start[name] + growth for name, growth in grown.items()},
        ),
        publishes,
    )


def make_engines(count: int, state: str = "ready", silent_ms: int = 0) -> list[ops.EngineReport]:
    """So many engines."""
    version = ops.WeightVersion(1, 1)
    return [ops.EngineReport(f"e{i}", "w", state, version, 0, 0, "", 0, silent_ms=silent_ms) for i in range(count)]


MEAN_LENGTH = 1_000
SLOT_TOKENS_PER_S = 100


def make_loop(
    policy: RunPolicy | None = None,
    *,
    rho: float = 0.7,
    concurrency: int = 128,
    tailness: float = 1.5,
    pre_queue: float = 1.5,
    in_queue: float = 0.7,
    publishes: int = 20,
    grown: Mapping[str, int] | None = None,
    **fields: Any,
) -> ops.RunView:
    """A run in a steady state: two engines that always decode, at 100 tokens/s a request; groups of 8 samples of 1,000
    tokens on average; batches of the policy's groups (16 unless it is given); a trainer that waits only for batches.

    `grown` replaces what totals grew by; pre_queue and in_queue are what is measured, in versions.
    """
    policy = policy or RunPolicy(batch_groups=16)
    rollout = SLOT_TOKENS_PER_S * concurrency
    train = rollout / rho
    groups = publishes * policy.batches_per_publish * policy.batch_groups
    tokens = groups * 8 * MEAN_LENGTH
    seconds = tokens / min(rollout, train)
    accepted = round(rollout * seconds / 8 / MEAN_LENGTH)
    totals = {
        **_of_stage("accepted", accepted, tailness),
        **_of_stage("assembled", groups, tailness),
        "staleness_sum": round((pre_queue + in_queue) * groups),
        "pre_queue_staleness_sum": round(pre_queue * groups),
        "in_queue_staleness_sum": round(in_queue * groups),
        "token_staleness_milli_sum": round((pre_queue / 2 + in_queue) * 1_000 * tokens),
        "generated_groups": accepted,
        "generation_ms": round(accepted * tailness * MEAN_LENGTH / SLOT_TOKENS_PER_S * 1_000),
        "decoded_tokens": round(rollout * seconds),
        "decode_busy_ms": round(2 * seconds * 1_000),
        "decode_request_ms": round(concurrency * seconds * 1_000),
        "trainer_busy_ms": round(tokens / train * 1_000),
        "trainer_wait_ms": round((seconds - tokens / train) * 1_000),
        **(grown or {}),
    }
    window = make_window(publishes=publishes, seconds=seconds, grown=totals)
    lengths = (0,) * 8 + (accepted,) * 4
    return make_view(policy, **{"window": window, "engines": make_engines(2), "response_lengths": lengths, **fields})


def _of_stage(stage: str, groups: int, tailness: float) -> dict[str, int]:
    totals = {
        "groups": groups,
        "samples": 8 * groups,
        "response_tokens": 8 * groups * MEAN_LENGTH,
        "longest_tokens": round(groups * tailness * MEAN_LENGTH),
        "reward_milli": 8 * groups * 500,
        "turns": 8 * groups,
        "truncated_samples": groups // 2,
    }
    return {f"{stage}_{name}": total for name, total in totals.items()}
