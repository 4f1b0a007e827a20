"""`rollout-buffer plan` and `simulate` as they are typed."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from buffer_cli.main import app

SETTING = ("--concurrency", "120", "--groups-per-batch", "15", "--group-size", "8", "--queue-factor", "1")
SHORT = ("--steps", "40", "--warmup", "20")


def typed(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(words))


def values(*words: str) -> dict[str, Any]:
    result = typed(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_plan_predicts() -> None:
    plan = values("plan", *SETTING, "--rho", "0.67", "--tailness", "1.42")
    assert plan["pqs"] == pytest.approx(1.42)
    assert plan["iqs"] == pytest.approx(0.67)
    assert plan["staleness"] == pytest.approx(2.09)
    assert (plan["tailness"], plan["train_period_ratio"]) == (1.42, 1.0)
    assert "simulated" not in plan


def test_near_balance_a_plan_simulates_too_and_says_why() -> None:
    words = (*SETTING, "--rho", "1.07", "--tailness", "1.42", *SHORT)
    plan = values("plan", *words)
    assert "rough" in plan["note"]
    assert plan["simulated"].keys() >= {"pqs", "iqs", "staleness", "tailness", "train_period_ratio"}
    shown = typed("plan", *words)
    assert shown.exit_code == 0
    assert "simulated" in shown.stdout
    assert "the closed form is rough" in " ".join(shown.stdout.split())


def test_a_budget_is_planned() -> None:
    budget = ("--gpus", "8", "--rollout-tps-per-gpu", "3000", "--train-tps-per-gpu", "9000", "--length-mean", "1400")
    words = ("plan", *SETTING, "--tailness", "1.42", *budget, *SHORT)
    plan = values(*words)
    assert plan["kappa"] == pytest.approx(3)
    assert plan["kappa_threshold"] == 0.5
    assert plan["train_bound_wins"] == []
    assert plan["recommended"] in plan["frontier"]
    assert all(choice["simulated"] for choice in plan["frontier"] if 0.8 < choice["rho"] < 1.2)
    shown = " ".join(typed(*words).stdout.split())
    assert "recommended" in shown
    assert plan["side"] in shown
    # Half of C = 120 over the six GPUs of the balanced split, but for whole slots.
    assert {round(choice["concurrency_per_gpu"]) for choice in plan["frontier"]} == {10}
    in_all = values(*words, "--total-concurrency")
    assert in_all["total_concurrency"]
    assert {choice["concurrency"] for choice in in_all["frontier"]} <= {60, 120, 240}
    assert in_all["train_bound_wins"]


@pytest.mark.parametrize(
    "policy",
    [("queue_drop",), ("queue_max", "--max-staleness", "2"), ("streaming", "--micro-batch", "3"), ("areal(1)",)],
)
def test_a_simulation_measures(policy: tuple[str, ...]) -> None:
    words = ("--length-mean", "500", "--length-sigma", "0.6", "--length-cap", "4000", "--seed", "5", *SHORT)
    found = values("simulate", *SETTING[:-2], "--rho", "1.1", *words, "--policy", *policy)
    assert found.keys() >= {
        *("pqs", "iqs", "staleness", "tailness", "train_period_ratio", "sampled_mean_length", "trained_mean_length"),
        *("sampled_max_length", "trained_max_length", "dropped_groups", "staleness_max"),
    }
    assert found["sampled_mean_length"] == pytest.approx(500, rel=0.05)
    assert found["sampled_max_length"] <= 4_000
    assert found["staleness"] == pytest.approx(found["pqs"] + found["iqs"])
    assert (found["steps"], found["warmup"], found["seed"]) == (40, 20, 5)


def test_a_simulation_is_shown_with_its_warm_up() -> None:
    shown = typed("simulate", *SETTING, *SHORT)
    assert shown.exit_code == 0
    assert "pre-queue" in shown.stdout
    assert "20 steps of warm-up before were not counted" in " ".join(shown.stdout.split())


def test_equal_lengths() -> None:
    found = values("simulate", *SETTING, *SHORT, "--length-sigma", "0", "--length-mean", "300")
    assert (found["tailness"], found["sampled_max_length"]) == (1.0, 300)


def test_recorded_lengths_come_from_text_and_from_recordings(tmp_path: Path) -> None:
    text = tmp_path / "lengths.txt"
    text.write_text("# tokens\n10, 90\n50 50\n", encoding="utf-8")
    recording = tmp_path / "recording"
    (recording / "groups").mkdir(parents=True)
    table = pa.table({"response_lengths": pa.array([[10, 90], [50, 50]], pa.list_(pa.uint32()))})
    pq.write_table(table, recording / "groups" / "0-0.parquet")
    small = ("--concurrency", "16", "--groups-per-batch", "4", "--group-size", "2", *SHORT)
    from_text = values("simulate", *small, "--lengths", str(text))
    assert from_text["sampled_max_length"] == 90
    for path in (recording, recording / "groups" / "0-0.parquet"):
        assert values("simulate", *small, "--lengths", str(path)) == from_text
    plan = values("plan", *small, "--lengths", str(text), "--rho", "0.5")
    assert plan["tailness"] == pytest.approx(1.4)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", *SETTING, "--rho", "0.7", "--tailness", "1.42"),
        ("plan", *SETTING, "--rho", "1.0", "--tailness", "1.42", *SHORT),
        ("simulate", *SETTING, *SHORT),
        (
            *("plan", "--tailness", "1.4", "--gpus", "4", "--rollout-tps-per-gpu", "3", "--train-tps-per-gpu", "2"),
            *("--length-mean", "1000", *SHORT),
        ),
    ],
)
def test_pictures_are_drawn(words: tuple[str, ...], tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    assert typed(*words, "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("matplotlib", ("simulate", *SHORT, "--plot", "picture.png")),
        ("pyarrow", ("simulate", *SHORT, "--lengths", "recording.parquet")),
    ],
)
def test_a_missing_extra_is_named(library: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    refused = typed(*words)
    assert refused.exit_code == 2
    assert "install rollout-buffer[lab]" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--tailness", ("plan",)),
        ("--tailness", ("plan", "--tailness", "9")),
        ("--rho", ("plan", "--tailness", "1.4", "--rho", "0")),
        ("--policy", ("plan", "--tailness", "1.4", "--policy", "queue_max")),
        ("--train-tps-per-gpu", ("plan", "--tailness", "1.4", "--gpus", "8", "--rollout-tps-per-gpu", "1")),
        ("--lengths", ("plan", "--lengths", "nowhere.txt")),
        ("--max-staleness", ("simulate", "--policy", "queue_max")),
        ("--policy", ("simulate", "--policy", "best")),
        ("--length-cap", ("simulate", "--length-cap", "10")),
        ("--group-size", ("simulate", "--group-size", "0")),
        ("--steps", ("simulate", "--steps", "0")),
        ("--plot", ("simulate", *SHORT, "--plot", "/nowhere/picture.png")),
    ],
)
def test_options_that_cannot_be_are_named(option: str, words: tuple[str, ...]) -> None:
    refused = typed(*words)
    assert refused.exit_code == 2
    assert option in refused.stderr
    assert "Traceback" not in refused.output
