"""Metrics of runs, from views that the test makes up."""

from buffer_service.admin.metrics.runs import RunCollector
from buffer_service.domain.ops import Amount, EngineReport, RelayingClient, RunView, WeightVersion
from buffer_service.domain.policy import RunPolicy
from tests.support.views import make_engines, make_view


def values(view: RunView) -> dict[tuple[str, ...], float]:
    """Values by metric name and labels' values, without that of the run."""
    return {
        (
            sample.name.removeprefix("rollout_buffer_"),
            *(v for k, v in sample.labels.items() if k != "run"),
        ): sample.value
        for family in RunCollector([view]).collect()
        for sample in family.samples
    }


TWO, THREE = Amount(groups=2, samples=4, tokens=40, bytes=400), Amount(groups=3, samples=6, tokens=60, bytes=600)


def test_environments_have_ledgers_of_their_own() -> None:
    seen = values(make_view(environments={"math": {"queued": TWO, "trained": THREE}, "code": {"filtered": TWO}}))
    assert seen["environment_groups", "math", "accepted"] == 5
    assert seen["environment_tokens", "math", "trained"] == 60
    assert seen["environment_bytes", "code", "filtered"] == 400
    assert seen["environment_samples", "code", "queued"] == 0


def test_a_filter_that_starves_the_run_raises_the_alarm() -> None:
    policy = RunPolicy(filter_equal_rewards=True, min_acceptance_milli=200)
    numbers = {"recent_acceptance_ppm": 150_000, "filtered_equal_rewards": 7, "filtered_response_tokens": 1}
    seen = values(make_view(policy, statistics=numbers))
    assert seen["filter_starves",] == 1
    assert seen["recent_acceptance_ratio",] == 0.15
    assert seen["filtered_groups_total", "equal_rewards"] == 7
    assert seen["filtered_groups_total", "response_tokens"] == 1
    assert seen["filtered_groups_total", "mean_reward"] == 0
    fine = values(make_view(policy, statistics={**numbers, "recent_acceptance_ppm": 200_000}))
    assert fine["filter_starves",] == 0
    assert values(make_view(statistics=numbers))["filter_starves",] == 0, "nothing is filtered any more"


def test_quotas_are_shown_with_what_they_count() -> None:
    held = {"queued": TWO, "forming": THREE, "delivered": TWO, "trained": THREE}
    seen = values(make_view(RunPolicy(quota_groups=100), groups=held))
    assert seen["quota_used_groups",] == 7
    assert seen["quota_used_bytes",] == 1_400
    assert seen["quota_limit_groups",] == 100
    assert ("quota_limit_tokens",) not in seen


def test_cancelled_leases_and_pauses_are_counted() -> None:
    numbers = {"leases_cancelled": 4, "partial_rollouts_beyond_spread": 2}
    seen = values(make_view(statistics=numbers, paused="operator", draining=True))
    assert seen["leases_cancelled_total",] == 4
    assert seen["partial_rollouts_beyond_spread_total",] == 2
    assert seen["paused", "operator"] == 1
    assert seen["draining",] == 1
    assert values(make_view())["draining",] == 0


def test_the_longest_silence_of_an_engine_that_should_speak_is_shown() -> None:
    def report(name: str, state: str, silent_ms: int) -> EngineReport:
        return EngineReport(name, "w", state, WeightVersion(1, 3), 0, 0, "", 0, silent_ms=silent_ms)

    engines = [report("a", "ready", 1_500), report("b", "quarantined", 700), report("c", "stopped", 90_000)]
    seen = values(make_view(engines=engines, published=WeightVersion(1, 5)))
    assert (seen["engine_silent_max_seconds",], seen["engine_lag_max_versions",]) == (1.5, 2)
    gone = values(make_view(engines=[report("a", "ready", 60_000)], published=WeightVersion(1, 5)))
    assert gone["engine_silent_max_seconds",] == 60
    assert ("engine_lag_max_versions",) not in gone
    assert ("engine_silent_max_seconds",) not in values(make_view(engines=engines[2:]))


def test_engines_that_are_not_heard_of_count_as_silent_whatever_they_said() -> None:
    engines = [*make_engines(2), *make_engines(1, silent_ms=60_000), *make_engines(1, "stopped", silent_ms=90_000)]
    seen = values(make_view(engines=engines))
    assert (seen["engines", "ready"], seen["engines", "silent"], seen["engines", "stopped"]) == (2, 1, 1)


def test_ledgers_that_do_not_add_up_are_shown() -> None:
    view = make_view(groups={"queued": TWO}, tasks={"pending": 1})
    assert values(view)["ledger_balanced", "groups"] == values(view)["ledger_balanced", "tasks"] == 1
    view.groups["queued"] = THREE
    assert (values(view)["ledger_balanced", "groups"], values(view)["ledger_balanced", "tasks"]) == (0, 1)
    view.tasks["submitted"] = 2
    assert values(view)["ledger_balanced", "tasks"] == 0


def test_last_reloads_are_those_of_engines_that_are_heard_of_and_have_reloaded() -> None:
    def report(reloads: int, last_reload_ms: int, silent_ms: int = 0) -> EngineReport:
        return EngineReport("e", "w", "ready", WeightVersion(1, 3), reloads, last_reload_ms, "", 0, silent_ms=silent_ms)

    seen = values(make_view(engines=[report(1, 1_000), report(2, 3_000), report(0, 0), report(1, 9_000, 60_000)]))
    assert (seen["engine_last_reload_mean_seconds",], seen["engine_last_reload_max_seconds",]) == (2, 3)
    assert ("engine_last_reload_max_seconds",) not in values(make_view(engines=[report(0, 0)]))


def test_clients_that_relay_are_counted_by_what_is_relayed_for_them() -> None:
    clients = [RelayingClient(name, writes=True, why="refused", silent_ms=0) for name in ("w1", "w2")]
    seen = values(make_view(relaying=clients))
    assert (seen["relaying_clients", "pushes"], seen["relaying_clients", "pulls"]) == (2, 0)
