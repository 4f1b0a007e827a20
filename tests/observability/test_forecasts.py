"""Tests of simulations that are made beside the process: nobody waits, and what is asked again is known."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from subprocess import SubprocessError

from buffer_service.domain.policy import EnvironmentRule, OverflowAction, RunPolicy
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.questions import Cause, Effect, Played, Question
from buffer_service.observability.forecasts import MOST_AT_ONCE, Forecasts, in_a_child
from tests.support.views import make_loop


def question(step: float = 1.0, policy: RunPolicy | None = None) -> Question:
    return Question(
        policy=policy or RunPolicy(batch_groups=4),
        group_size=2,
        tailness=1.2,
        concurrency=8.0,
        leased=8.0,
        spare=False,
        step=step,
        idle=0.0,
    )


def played(staleness: float) -> Played:
    return Played(Prediction(staleness, 0.0))


class Player:
    """Simulates when it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Question]] = []
        self.began = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, asked: Sequence[Question]) -> list[Played | None]:
        self.asked.append(list(asked))
        self.began.release()
        assert self.go_on.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        return [played(one.step) for one in asked]


def eventually(forecasts: Forecasts, run_id: str, asked: Question) -> Played | None:
    """The answer, when it is there."""
    pause = threading.Event()
    for _ in range(2_000):
        found, pending = forecasts.play(run_id, asked)
        if not pending:
            return found
        pause.wait(0.005)
    raise AssertionError("no answer")


def test_nobody_waits_and_the_answer_is_kept() -> None:
    player = Player()
    forecasts = Forecasts(player, rests=0)
    assert forecasts.play("r", question()) == (None, True)
    assert player.began.acquire(timeout=10)
    assert forecasts.play("r", question()) == (None, True), "still under way"
    player.go_on.release(2)
    assert eventually(forecasts, "r", question()) == played(1.0)
    assert forecasts.play("other", question()) == (played(1.0), False), "the same question, of another run"


def test_meanwhile_the_last_answer_under_the_same_policy_stands() -> None:
    player = Player()
    forecasts = Forecasts(player, rests=0)
    player.go_on.release()
    forecasts.play("r", question())
    eventually(forecasts, "r", question())
    assert forecasts.play("r", question(1.5)) == (played(1.0), True)
    assert forecasts.play("r", question(1.02)) == (played(1.0), False), "which stands for it"
    assert forecasts.play("r", question(policy=RunPolicy(batch_groups=5))) == (None, True)
    assert forecasts.play("s", question(2.5)) == (None, True)
    player.go_on.release(9)


def test_a_run_asks_for_its_newest_state_alone_and_a_child_for_a_few_runs() -> None:
    player = Player()
    forecasts = Forecasts(player, rests=0)
    forecasts.play("first", question())
    assert player.began.acquire(timeout=10)
    for number in range(20):
        forecasts.play(f"r{number}", question(10 + number))
        forecasts.play(f"r{number}", question(100 + number))
    player.go_on.release(9)
    assert eventually(forecasts, "r0", question(100.0)) == played(100.0)
    assert [len(asked) for asked in player.asked[1:3]] == [MOST_AT_ONCE] * 2
    assert min(one.step for asked in player.asked[1:] for one in asked) == 100


def test_where_nothing_can_be_simulated_there_is_no_answer() -> None:
    player = Player()
    player.error = SubprocessError("killed")
    player.go_on.release()
    forecasts = Forecasts(player, rests=0)
    assert eventually(forecasts, "r", question()) is None


def test_questions_and_answers_travel_as_lines() -> None:
    policy = RunPolicy(
        batch_groups=4, environments=(EnvironmentRule(environment="a", share=2, priority=1),), reserve_queue_space=True
    )
    asked = replace(question(0.7, policy), knobs=Knobs(lookahead_milli=1_250))
    assert Question.from_json(asked.to_json()) == asked
    found = Played(Prediction(1.0, 0.25, 1.1), (Effect(Cause.LOADS, 0.5, -0.01),))
    assert Played.from_json(found.to_json()) == found


def test_what_has_no_answer_keeps_its_place_among_those_that_have() -> None:
    endless = RunPolicy(batch_groups=4, max_queued_groups=4, overflow_action=OverflowAction.REJECT)
    without, found = in_a_child([replace(question(1.0, endless), leased=0.0), question(1.0)])
    assert without is None
    assert found is not None


def test_a_run_is_simulated_in_a_child() -> None:
    forecasts = Forecasts(in_a_child, rests=0)
    view = make_loop(rho=1.0)
    pause = threading.Event()
    while (predicted := forecasts.estimate(view).predicted).pending:
        pause.wait(0.02)
    assert predicted.simulated
    assert forecasts.estimate(view).predicted == predicted
