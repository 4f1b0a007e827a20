"""Is asynchrony worth it: the loop by turns and at once, on loops whose outcome is known by hand."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from buffer_cli.main import app
from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Fixed, Lengths, Lognormal
from buffer_wire.errors import InvalidField
from rollout_lab.queue_policies import queue_policy
from rollout_lab.worth import Contender, Outcome, Question, Split, in_words, outcomes

N, G = 4, 2
SYNC = queue_policy("sync", N)
SHARED = Contender(name="shared", policy=SYNC, is_sync=True, shares_gpus=True)
APART = Contender(name="apart", policy=SYNC, is_sync=True)
DROP = Contender(name="drop", policy=queue_policy("queue_drop", N))


def asked(
    *contenders: Contender,
    rho: float = 1.0,
    lengths: Lengths | None = None,
    split: Split | None = None,
    switch: float = 0.0,
    concurrency: int = 2,
) -> list[Outcome]:
    workload = Workload(concurrency, G, rho, lengths or Fixed(100))
    question = Question(contenders=contenders, workload=workload, split=split, switch_pause=switch, steps=60, warmup=10)
    return outcomes(question, processes=1)


def test_where_no_response_is_longer_than_others_turns_on_shared_gpus_are_as_fast_as_a_balanced_split() -> None:
    """Eight responses of 100 on two slots: 400 token times to generate and, at ρ = 1, 400 to train."""
    shared, apart, drop = asked(SHARED, APART, DROP, split=Split(1, 1))
    # Four slots, and twice the trainers: 200 and 200.
    assert shared.period == pytest.approx(400)
    assert apart.period == pytest.approx(800)
    assert drop.period == pytest.approx(400)
    assert (shared.speed, apart.speed, drop.speed) == pytest.approx((1, 0.5, 1))
    assert (shared.useful_gpu_share, apart.useful_gpu_share, drop.useful_gpu_share) == pytest.approx((1, 0.5, 1))
    assert shared.result.staleness_max == 0
    assert drop.result.staleness > 0


def test_an_unbalanced_split_loses_what_shared_gpus_do_not() -> None:
    """ρ = 3 on three rollout GPUs to one: κ = 1, and training, not generating, is what takes the time."""
    split = Split(3, 1)
    assert split.kappa(3.0) == pytest.approx(1)
    shared, drop = asked(SHARED, DROP, rho=3.0, split=split, concurrency=6)
    # Apart: 400 / 3 to generate, 400 to train. Together: 8 slots, so 100, and four times the trainers, so 100.
    assert drop.period == pytest.approx(400)
    assert shared.period == pytest.approx(200)
    assert drop.speed == pytest.approx(0.5)
    assert in_words([shared, drop]).startswith("stay synchronous: drop is 0.50 times as fast as shared")


def test_a_switch_between_the_phases_is_paid_every_step() -> None:
    shared, drop = asked(SHARED, DROP, split=Split(1, 1), switch=100)
    assert shared.period == pytest.approx(500)
    assert shared.useful_gpu_share == pytest.approx(0.8)
    # Half of the time slots wait for the trainer, a fifth of it they switch.
    assert shared.slot_idle_share == pytest.approx(0.6)
    assert drop.period == pytest.approx(400)
    assert in_words([shared, drop]).startswith("worth it")


def test_turns_wait_for_the_longest_response_and_a_queue_does_not() -> None:
    lengths = Lognormal.with_mean(100, 0.8)
    shared, drop = asked(SHARED, DROP, lengths=lengths, split=Split(8, 8), concurrency=8)
    assert shared.useful_gpu_share is not None
    assert drop.useful_gpu_share is not None
    assert shared.useful_gpu_share < 0.6
    assert 0.8 < drop.useful_gpu_share <= 1
    assert drop.speed > 1.3


def test_a_small_gain_is_called_small() -> None:
    shared, drop = asked(SHARED, DROP, split=Split(1, 1), switch=10)
    assert 1 < drop.speed < 1.1
    assert in_words([shared, drop]).startswith("hardly worth it")
    assert "nothing asynchronous" in in_words([shared])


def test_without_gpus_a_split_is_compared_with_itself() -> None:
    apart, drop = asked(APART, DROP)
    assert apart.useful_gpu_share is None
    assert drop.speed == pytest.approx(2)


@pytest.mark.parametrize(
    ("contenders", "split", "switch", "field"),
    [((DROP,), None, 0.0, "policy"), ((SHARED, DROP), None, 0.0, "rollout_gpus"), ((APART,), None, -1.0, "switch")],
)
def test_what_cannot_be_answered_is_refused(
    contenders: tuple[Contender, ...], split: Split | None, switch: float, field: str
) -> None:
    with pytest.raises(InvalidField, match=field):
        asked(*contenders, split=split, switch=switch)


def test_shared_gpus_have_as_many_times_the_groups_in_flight_as_slots() -> None:
    split = Workload(128, 8, 1.0, Fixed(100), groups_in_flight=8)
    assert Split(4, 4).shared(split, 0.0).groups_in_flight == 16
    assert Split(4, 4).shared(split, 0.0).concurrency == 256
    assert Split(4, 4).shared(Workload(128, 8, 1.0, Fixed(100)), 0.0).groups_in_flight == 0, "no bound stays none"


def test_a_split_has_gpus_on_both_sides() -> None:
    with pytest.raises(InvalidField, match="train_gpus"):
        Split(4, 0)


# --- as it is typed ---------------------------------------------------------------------------------------------------

SHORT = ("--concurrency", "32", "--groups-per-batch", "8", "--steps", "30", "--warmup", "5")
GPUS = ("--rollout-gpus", "6", "--train-gpus", "2")


def typed(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["worth", *SHORT, *words])


def values(*words: str) -> dict[str, Any]:
    result = typed(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_answer_is_printed_with_periods_idle_shares_and_staleness() -> None:
    result = typed(*GPUS, "--slot-tps", "50")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    for said in ("sync, shared GPUs", "sync, split GPUs", "one_step_off", "queue_drop", "streaming(1)", "κ = 3.75"):
        assert said in shown
    assert "in seconds" in shown
    assert "→ worth it" in shown


def test_json_has_a_row_for_each_policy() -> None:
    found = values(*GPUS, "--slot-tps", "50", "--policy", "queue_drop(2)")
    shared, apart, drop = found["policies"]
    assert found["kappa"] == pytest.approx(3.75)
    assert [row["policy"] for row in (shared, apart, drop)] == [
        "sync, shared GPUs",
        "sync, split GPUs",
        "queue_drop(2)",
    ]
    assert (shared["staleness"], apart["staleness"]) == (0, 0)
    assert drop["speed"] == pytest.approx(min(shared["period"], apart["period"]) / drop["period"])
    assert drop["period_s"] == pytest.approx(drop["period"] / 50)
    assert drop.keys() >= {"trainer_idle_share", "slot_idle_share", "staleness", "staleness_max", "useful_gpu_share"}
    assert found["answer"].startswith("worth it")


def test_without_gpus_there_is_no_shared_row() -> None:
    found = values("--policy", "queue_drop")
    assert [row["policy"] for row in found["policies"]] == ["sync, split GPUs", "queue_drop"]
    assert found["kappa"] is None
    assert found["policies"][0]["period_s"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rollout-gpus", "6"), "--train-gpus"),
        (("--switch-pause", "10"), "--switch-pause"),
        ((*GPUS, "--switch-pause", "-1"), "--switch-pause"),
        (("--rollout-gpus", "0", "--train-gpus", "1"), "--rollout-gpus"),
        (("--slot-tps", "0"), "--slot-tps"),
    ],
)
def test_a_refusal_names_the_option(words: tuple[str, ...], said: str) -> None:
    result = typed(*words)
    assert result.exit_code == 2
    assert f"error: {said}" in result.output


def test_a_lag_of_publishes_and_groups_in_flight_are_options() -> None:
    # What a publish admits waits for engines that have not loaded it yet.
    late = values("--policy", "one_step_off", "--publish-lag", "100")["policies"][1]
    prompt = values("--policy", "one_step_off")["policies"][1]
    assert late["period"] > prompt["period"] + 50
    few = values("--policy", "queue_drop", "--groups-in-flight", "4")["policies"][1]
    many = values("--policy", "queue_drop")["policies"][1]
    assert few["slot_idle_share"] > many["slot_idle_share"] + 0.05
