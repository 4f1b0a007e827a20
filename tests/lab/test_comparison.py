"""The policy lab: policies on one workload, each with the engines that keep the first one's pace."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from buffer_cli.main import app
from buffer_cli.staleness.lab import candidate
from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Lognormal
from buffer_wire.errors import InvalidField
from rollout_lab.comparison import TOLERANCE, Candidate, Comparison, Trial, compare
from rollout_lab.queue_policies import queue_policy

N = 8


def named(name: str, written: str) -> Candidate:
    return Candidate(name, queue_policy(written, N))


DROP = named("drop", "queue_drop")


def compared(*candidates: Candidate, rho: float = 1.1, steps: int = 120, processes: int = 1) -> list[Trial]:
    workload = Workload(concurrency=64, group_size=8, rho=rho, lengths=Lognormal.with_mean(500, 0.8))
    comparison = Comparison(candidates=candidates, workload=workload, steps=steps, warmup=30)
    return compare(comparison, processes=processes)


def test_a_policy_that_throws_work_away_gets_the_engines_that_keep_the_pace() -> None:
    pace, strict = compared(DROP, named("max 2", "queue_max(2)"))
    assert (pace.engines, pace.keeps_pace) == (1.0, True)
    assert strict.keeps_pace
    assert strict.engines > 1.2
    assert strict.period <= pace.period * (1 + TOLERANCE)
    assert strict.result.staleness_max <= 2
    assert strict.result.length_bias < -0.02 < pace.result.length_bias


def test_a_policy_that_is_as_fast_stays_on_the_engines_given() -> None:
    pace, streamed = compared(DROP, named("streamed", "streaming(4)"), rho=1.5)
    assert streamed.engines == 1.0
    assert streamed.result.staleness < pace.result.staleness


def test_a_policy_that_never_keeps_the_pace_says_so_and_shows_what_it_is_on_the_engines_given() -> None:
    pace, sync = compared(DROP, named("sync", "sync"))
    assert not sync.keeps_pace
    assert sync.engines == 1.0
    assert sync.period > pace.period
    assert sync.result.staleness_max == 0


def test_a_period_is_over_what_the_trainer_alone_needs() -> None:
    # ρ = 0.5: engines take twice as long for a batch as the trainer.
    pace, _ = compared(DROP, named("drop 2", "queue_drop(2)"), rho=0.5)
    assert pace.period == pytest.approx(2.0, rel=0.05)


def test_progress_counts_policies_and_processes_change_nothing() -> None:
    workload = Workload(concurrency=32, group_size=4, rho=0.8, lengths=Lognormal.with_mean(100, 0.5))
    three = (DROP, named("drop 2", "queue_drop(2)"), named("streamed", "streaming(2)"))
    comparison = Comparison(candidates=three, workload=workload, steps=20, warmup=5)
    told: list[int] = []
    alone = compare(comparison, processes=1, done=told.append)
    assert told == [1, 2, 3]
    assert compare(comparison, processes=2) == alone


@pytest.mark.parametrize(("candidates", "limit"), [((DROP,), "two or more"), ((DROP, DROP), "named once")])
def test_what_cannot_be_compared_is_refused(candidates: tuple[Candidate, ...], limit: str) -> None:
    with pytest.raises(InvalidField, match=limit):
        compared(*candidates)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_not_simulated_is_refused_with_the_policys_name(processes: int) -> None:
    budgeted = Candidate("budgeted", queue_policy("queue_drop", N, batch_tokens=5))
    with pytest.raises(InvalidField, match="batch_tokens") as refused:
        compared(DROP, named("drop 2", "queue_drop(2)"), budgeted, processes=processes)
    assert "policy 'budgeted'" in refused.value.__notes__


def test_a_candidate_may_set_what_a_worker_decides() -> None:
    one = candidate("streaming(2) order=lifo estimate_error=0.5", N)
    assert (one.policy.order, one.workload) == ("lifo", {"estimate_error": 0.5})
    with pytest.raises(InvalidField, match="estimate_error"):
        candidate("streaming(2) estimate_error=large", N)


def test_a_target_of_staleness_is_held_while_policies_are_compared() -> None:
    plain, held = compared(named("streamed", "streaming(2)"), candidate("streaming(2) target_staleness_milli=800", N))
    assert plain.result.staleness > 1.2
    assert held.result.staleness == pytest.approx(0.8, abs=0.15)


# --- as it is typed ---------------------------------------------------------------------------------------------------

SHORT = ("--concurrency", "32", "--groups-per-batch", "8", "--steps", "20", "--warmup", "5")


def typed(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["lab", *SHORT, *words])


def test_policies_are_typed_as_presets_with_fields() -> None:
    result = typed("--policy", "queue_drop(2)", "--policy", "streaming(2) order=lifo max_queued_groups=6", "--json")
    assert result.exit_code == 0, result.output
    drop, streamed = json.loads(result.stdout)["policies"]
    assert drop["policy"] == "queue_drop(2)"
    assert (drop["engines"], drop["keeps_pace"]) == (1.0, True)
    assert drop.keys() >= {"staleness", "staleness_p95", "staleness_max", "length_bias", "wasted_token_share", "period"}
    assert streamed["policy"] == "streaming(2) order=lifo max_queued_groups=6"


def test_without_policies_a_selection_is_compared_and_drawn(tmp_path: Path) -> None:
    result = typed("--plot", str(tmp_path / "lab.png"))
    assert result.exit_code == 0, result.output
    assert "streaming(1) order=lifo" in result.stdout
    assert "keep the pace of queue_drop;" in " ".join(result.stdout.split())
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("policy", "said"),
    [("streaming(2) lifo", "field=value"), ("fastest", "queue_drop"), ("queue_drop order=best", "order")],
)
def test_a_policy_that_is_none_is_refused_by_name(policy: str, said: str) -> None:
    result = typed("--policy", "queue_drop", "--policy", policy)
    assert result.exit_code != 0
    assert said in result.output


def test_a_refusal_says_which_policy_it_is_about() -> None:
    result = typed("--policy", "queue_drop", "--policy", "queue_drop(2)", "--policy", "streaming(1) batch_tokens=5")
    assert result.exit_code == 1
    assert "error: policy.batch_tokens is" in result.output
    assert "policy 'streaming(1) batch_tokens=5'" in result.output
