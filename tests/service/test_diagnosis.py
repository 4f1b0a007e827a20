"""The words for on whom a run waits."""

from dataclasses import replace

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import Amount, EngineReport, WeightVersion
from buffer_service.domain.policy import RunPolicy
from buffer_service.observability.diagnosis import Situation, waits_on
from tests.support.views import make_view

IDLE = Situation(paused="", queued=0, needed=4, pending=0, leased=0, engines=())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the feeder: no task is pending"),
        ({"paused": "store_rolled_back"}, "a resume: the run is paused (store_rolled_back)"),
        ({"paused": "operator"}, "an operator: the run is held until it is continued"),
        (
            {"paused": "failure_budget_exceeded", "queued": 4},
            "an operator: more tasks failed than the policy's failure_budget allows",
        ),
        ({"queued": 4}, "the trainer: 4 groups are queued, 4 make a batch"),
        ({"queued": 5, "unit": "micro-batch"}, "the trainer: 5 groups are queued, 4 make a micro-batch"),
        ({"queued": 1, "ready": True}, "the trainer: 1 group is queued, whose tokens make a batch"),
        ({"queued": 4, "draining": True}, "the trainer: 4 groups are queued, 4 make a batch"),
        (
            {"leased": 2, "draining": True},
            "generation: 2 tasks are being generated, the last ones of a run that is being drained",
        ),
        ({"pending": 2, "draining": True}, "nobody: the run is drained, and what is left makes no batch"),
        ({"leased": 2, "filter": "the filter: too strict"}, "the filter: too strict"),
        ({"leased": 2, "room": "the trainer's commits: full"}, "the trainer's commits: full"),
        ({"leased": 1, "pending": 3}, "generation: 1 task is being generated"),
        ({"pending": 3}, "workers: no worker holds a lease"),
        ({"pending": 3, "engines": [("a", "stopped", 7)]}, "workers: no worker holds a lease"),
        ({"pending": 3, "engines": [("a", "ready", 0)]}, "workers: no worker holds a lease"),
        ({"pending": 3, "engines": [("a", "ready", 0)], "silent": 1}, "workers: no worker holds a lease"),
        ({"pending": 3, "silent": 2}, "workers: 2 engines are not heard of any more, and there is no other"),
        (
            {"pending": 3, "engines": [("a", "quarantined", 7)]},
            "weights: 1 engine is quarantined, none is left: their last errors say why",
        ),
        (
            {"pending": 3, "engines": [("a", "loading", 2), ("b", "ready", 4)], "required_version": 5},
            "weights: work starts with version 5, and no engine has loaded it: b has 4, a has 2",
        ),
        (
            {
                "pending": 3,
                "engines": [("a", "ready", 4), *((name, "ready", 3) for name in "bcdefg")],
                "required_version": 5,
            },
            "weights: work starts with version 5, and no engine has loaded it: a has 4, "
            + ", ".join(f"{name} has 3" for name in "bcde")
            + ", and 2 more",
        ),
        ({"pending": 3, "engines": [("a", "ready", 5)], "required_version": 5}, "workers: no worker holds a lease"),
    ],
    ids=str,
)
def test_whoever_is_waited_on_is_named(changes: dict[str, object], words: str) -> None:
    assert waits_on(replace(IDLE, **changes)) == words  # type: ignore[arg-type]


def test_an_engine_that_has_been_silent_for_a_minute_counts_no_more() -> None:
    def report(name: str, state: str, silent_ms: int) -> EngineReport:
        return EngineReport(name, "w", state, WeightVersion(1, 3), 0, 0, "", 0, silent_ms=silent_ms)

    engines = [report("a", "ready", 60_000), report("b", "ready", 59_999), report("c", "stopped", 90_000)]
    situation = Situation.of(make_view(engines=engines))
    assert (situation.engines, situation.silent) == ([("b", "ready", 3)], 1)


FILTERING = RunPolicy(batch_groups=4, filter_equal_rewards=True)
STARVED = {"recent_acceptance_ppm": 30_000, "filtered_equal_rewards": 812, "filtered_mean_reward": 0}


def test_a_filter_that_lets_too_little_through_is_named_with_its_reasons() -> None:
    view = make_view(FILTERING, tasks={"leased": 4}, statistics=STARVED)
    words = "the filter: 97% of the recent groups are filtered (so far 812 for equal_rewards)"
    assert waits_on(Situation.of(view)) == words


def test_a_filter_is_not_blamed_when_enough_passes_or_none_is_set() -> None:
    enough = make_view(FILTERING, tasks={"leased": 4}, statistics={"recent_acceptance_ppm": 100_000})
    switched_off = make_view(RunPolicy(batch_groups=4), tasks={"leased": 4}, statistics=STARVED)
    never = make_view(replace(FILTERING, min_acceptance_milli=0), tasks={"leased": 4}, statistics=STARVED)
    for view in (enough, switched_off, never):
        assert waits_on(Situation.of(view)) == "generation: 4 tasks are being generated"


def test_a_quota_that_uncommitted_batches_fill_is_waited_for_at_the_trainer() -> None:
    policy = RunPolicy(batch_groups=4, quota_groups=10)
    held = {"delivered": Amount(groups=8), "queued": Amount(groups=2)}
    view = make_view(policy, groups=held, tasks={"leased": 1})
    assert waits_on(Situation.of(view)) == (
        "the trainer's commits: what is queued, forming and delivered fills quota_groups (10)"
    )
    room = make_view(policy, groups={**held, "queued": Amount(groups=1)}, tasks={"leased": 1})
    assert waits_on(Situation.of(room)) == "generation: 1 task is being generated"


def test_a_queue_that_is_full_before_it_holds_a_batch_is_an_operators_affair() -> None:
    policy = RunPolicy(batch_groups=4, max_queued_tokens=1_000)
    view = make_view(policy, groups={"queued": Amount(groups=2, tokens=800)}, tasks={"leased": 4})
    assert waits_on(Situation.of(view)) == (
        "an operator: 2 queued groups fill max_queued_tokens (1000), and 4 make a batch"
    )


def test_a_micro_batch_is_ready_before_its_batch() -> None:
    policy = RunPolicy(batch_groups=16, micro_batch_groups=2, max_queued_groups=8)
    view = make_view(policy, groups={"queued": Amount(groups=4)}, world_size=2)
    assert waits_on(Situation.of(view)) == "the trainer: 4 groups are queued, 4 make a micro-batch"
    last = make_view(policy, groups={"queued": Amount(groups=1), "forming": Amount(groups=15)}, world_size=2)
    assert waits_on(Situation.of(last)) == "the trainer: 1 group is queued, 1 make a micro-batch"


def test_a_token_budget_makes_a_batch_of_fewer_groups_ready() -> None:
    policy = RunPolicy(batch_groups=16, batch_tokens=500)
    view = make_view(policy, groups={"queued": Amount(groups=3, tokens=501)})
    assert waits_on(Situation.of(view)) == "the trainer: 3 groups are queued, whose tokens make a batch"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            RunPolicy(batch_groups=4, max_staleness=1, prefetch_batches=1),
            "the trainer: work starts with version 7, which is not published",
        ),
        (
            RunPolicy(batch_groups=4, max_lookahead=1, prefetch_batches=1),
            "the trainer: max_lookahead 1 lets nothing start before a publish",
        ),
    ],
)
def test_a_trainer_that_runs_ahead_of_its_publishes_is_named(policy: RunPolicy, words: str) -> None:
    ahead = make_view(policy, tasks={"pending": 9}, published=ops.WeightVersion(1, 6), next_step=8, committed_steps=6)
    assert words in waits_on(Situation.of(ahead))
    published = make_view(
        policy, tasks={"pending": 9}, published=ops.WeightVersion(1, 6), next_step=7, committed_steps=6
    )
    assert "the trainer" not in waits_on(Situation.of(published))
    committing = replace(ahead, committed_steps=8)
    assert words in waits_on(Situation.of(committing))
    assert "2 steps are assembled and not published, 2 of them committed" in waits_on(Situation.of(committing))


def test_the_stage_that_holds_back_what_a_batch_lacks_is_named() -> None:
    def stage(name: str, waiting: int, leased: int, asked_ms: int | None = 500) -> ops.StageState:
        return ops.StageState(name, waiting, leased, 0, 0, 0, asked_ms)

    policy = RunPolicy(batch_groups=4, max_queued_groups=8, stages=("a", "b"))
    view = make_view(policy, groups={"queued": Amount(5, 5, 5, 5)}, tasks={"leased": 3})
    held = replace(view, stages=[stage("a", 1, 0), stage("b", 2, 1)])
    assert waits_on(Situation.of(held)) == "stage b: 2 groups are waiting in it, 1 group is held by its workers"
    missing = replace(view, stages=[stage("a", 4, 0, None), stage("b", 0, 0, None)])
    assert waits_on(Situation.of(missing)).endswith("and no worker of it has ever asked for groups")
    silent = replace(view, stages=[stage("a", 4, 0, 90_000), stage("b", 0, 0)])
    assert waits_on(Situation.of(silent)).endswith(", and none has asked for 90 s")
    few = replace(
        view, groups=view.groups | {"queued": Amount(3, 3, 3, 3)}, stages=[stage("a", 2, 0), stage("b", 0, 0)]
    )
    assert waits_on(Situation.of(few)) == "generation: 3 tasks are being generated"
    ready = replace(view, stages=[stage("a", 1, 0), stage("b", 0, 0)])
    assert waits_on(Situation.of(ready)) == "the trainer: 4 groups are queued, 4 make a batch"
