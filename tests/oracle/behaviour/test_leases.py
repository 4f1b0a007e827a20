import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseState, LeaseWait, ReturnOutcome, WeightVersion
from tests.oracle.behaviour.world import RUN, World


def granted(leased: ops.Leased) -> list[str]:
    return [grant.task_id for grant in leased.grants]


def engine(state: str, name: str = "engine") -> ops.EngineReport:
    return ops.EngineReport(name, "worker", state, WeightVersion(1, 0), 0, 0, "", 0)


def test_a_lease_names_task_incarnation_and_attempt() -> None:
    world = World()
    world.submit("a")
    leased = world.lease()
    (grant,) = leased.grants
    assert (grant.lease_id, grant.incarnation, grant.attempt) == ("a/0/1", 0, 1)
    assert (grant.spec, grant.partial_rollout) == (b"spec of a", b"")
    assert (leased.wait, leased.ttl_ms) == (None, 60_000)
    assert world.tasks("leased") == world.statistic("leases_granted") == 1


def test_higher_priority_goes_first_and_equals_go_in_order() -> None:
    world = World()
    world.submit("low", "low2")
    world.submit("high", "high2", priority=9)
    assert granted(world.lease(4)) == ["high", "high2", "low", "low2"]


def test_a_task_that_came_back_goes_before_fresh_ones_of_its_priority() -> None:
    world = World()
    world.submit("a", "b")
    world.submit("urgent", priority=1)
    leases = {grant.task_id: grant.lease_id for grant in world.lease(3).grants}
    world.submit("fresh")
    world.interrupt(leases["b"])
    world.interrupt(leases["urgent"])
    assert granted(world.lease(4)) == ["urgent", "b", "fresh"]


def test_what_is_missing_is_explained() -> None:
    world = World()
    assert world.lease(2).wait is LeaseWait.NO_TASKS
    world.submit("a")
    short = world.lease(2)
    assert (granted(short), short.wait) == (["a"], LeaseWait.NO_TASKS)


def test_a_repeated_request_gets_its_live_leases_again() -> None:
    world = World()
    world.submit("a", "b", "c")
    first = world.lease(3, request_id="again")
    world.interrupt("b/0/1")
    world.push(first.grants[2])
    world.now += 30_000
    repeat = world.lease(3, request_id="again")
    assert [grant.lease_id for grant in repeat.grants] == ["a/0/1"]
    assert repeat.wait is None
    world.now += 30_001
    assert world.extend("a/0/1") == [LeaseState.LOST], "a repeat does not prolong"


def test_a_repeat_leaves_out_a_task_that_is_leased_anew() -> None:
    world = World()
    world.submit("a")
    world.lease(request_id="one")
    world.interrupt("a/0/1")
    world.lease(request_id="two", worker="other")
    assert granted(world.lease(request_id="one")) == []


def test_a_request_that_got_nothing_may_be_asked_again() -> None:
    world = World()
    assert granted(world.lease(request_id="poll")) == []
    world.submit("a")
    assert granted(world.lease(request_id="poll")) == ["a"]


def test_a_new_process_of_a_worker_releases_the_leases_of_the_old_one() -> None:
    world = World()
    world.submit("a", "b")
    world.lease()
    world.lease(worker="other")
    assert granted(world.lease(2, instance="process-2")) == ["a"]
    assert world.extend("a/0/1") == [LeaseState.LOST]
    assert world.extend("a/0/2", instance="process-2") == [LeaseState.LIVE]
    assert world.extend("b/0/1", worker="other") == [LeaseState.LIVE]
    assert world.statistic("leases_returned") == 1


def test_a_released_lease_keeps_the_partial_rollout() -> None:
    world = World()
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far")
    world.lease()
    (grant,) = world.lease(instance="process-2").grants
    assert grant.partial_rollout == b"so far"


def test_a_paused_run_leases_nothing() -> None:
    world = World(max_attempts=1, failure_budget=0)
    world.submit("a", "b")
    world.fail_for_good()
    assert world.lease().wait is LeaseWait.PAUSED


def test_a_quarantined_engine_gets_nothing_until_it_reports_otherwise() -> None:
    world = World()
    world.submit("a")
    world.do(world.model.report_engine, engine("quarantined"))
    assert world.lease().wait is LeaseWait.QUARANTINED
    assert world.lease(engine="other").wait is None
    world.do(world.model.report_engine, engine("ready"))
    world.submit("b")
    assert granted(world.lease()) == ["b"]


def test_an_engine_whose_weights_are_too_old_is_told_what_it_needs() -> None:
    world = World(batch_groups=1, max_staleness=1)
    world.train(3, head=3)
    world.submit("a")
    stale = world.lease(loaded=WeightVersion(1, 1))
    assert (stale.wait, stale.required_version, stale.published) == (LeaseWait.ENGINE_STALE, 2, WeightVersion(1, 3))
    assert granted(world.lease(loaded=WeightVersion(1, 2))) == ["a"]


def test_assembled_steps_that_are_not_published_yet_count_for_the_engine() -> None:
    world = World(batch_groups=1, max_staleness=1)
    world.submit("a")
    world.queue(1)
    world.batch()
    world.queue(1)
    world.batch(train_version=1)
    assert world.lease().wait is LeaseWait.ENGINE_STALE


def test_weights_of_an_abandoned_timeline_count_as_the_fork() -> None:
    world = World(batch_groups=1, max_staleness=1)
    world.train(4, head=4)
    world.resume(2)
    world.train(2, head=4)
    world.submit("a")
    abandoned = world.lease(loaded=WeightVersion(1, 4))
    assert (abandoned.wait, abandoned.required_version) == (LeaseWait.ENGINE_STALE, 3)


def one_step_off() -> World:
    """Version 1 has just been published, and the groups of the next batch are queued."""
    world = World(batch_groups=2, max_queued_groups=4, max_lookahead=1, max_staleness=1, overflow_action="block")
    world.train()
    world.submit("a", "b", "c")
    world.queue(2)
    return world


def test_an_engine_that_is_behind_starts_nothing_that_is_stale_at_its_turn() -> None:
    world = one_step_off()
    stale = world.lease(loaded=WeightVersion(1, 0))
    assert (granted(stale), stale.wait, stale.required_version) == ([], LeaseWait.ENGINE_STALE, 1)
    assert granted(world.lease(2, loaded=WeightVersion(1, 1))) == ["a", "b"], "others are not held back"
    assert world.lease(loaded=WeightVersion(1, 0)).wait is LeaseWait.AT_CAPACITY, "nor is it the lag alone any more"


def test_an_engine_that_is_behind_starts_what_the_next_batch_still_needs() -> None:
    world = World(batch_groups=2, max_queued_groups=4, max_lookahead=1, max_staleness=1, overflow_action="block")
    world.train()
    world.submit("a", "b", "c")
    world.queue(1)
    partly = world.lease(3, loaded=WeightVersion(1, 0))
    assert (granted(partly), partly.wait, partly.required_version) == (["a"], LeaseWait.ENGINE_STALE, 1)


def test_the_lag_is_no_reason_where_no_task_could_be_leased() -> None:
    world = one_step_off()
    world.lease(2, loaded=WeightVersion(1, 1))
    world.batch()
    world.publish(2, commit=1)
    world.queue(2, head=1)
    late = WeightVersion(1, 1)
    world.change(max_lookahead=3, max_staleness=3)
    assert granted(world.lease(loaded=late)) == ["c"]
    world.change(max_lookahead=1, max_staleness=1)
    assert world.lease(loaded=late).wait is LeaseWait.AT_CAPACITY
    world.change(max_lookahead=2, max_staleness=2)
    assert world.lease(loaded=late).wait is LeaseWait.NO_TASKS
    world.submit("d")
    assert world.lease(loaded=late).wait is LeaseWait.ENGINE_STALE
    assert granted(world.lease(loaded=WeightVersion(1, 2))) == ["d"]


@pytest.mark.parametrize("policy", [{"max_staleness": -1}, {"max_staleness": 2}, {"order": "lifo"}], ids=str)
def test_a_lag_that_does_no_harm_costs_no_lease(policy: dict[str, object]) -> None:
    world = one_step_off()
    world.change(**policy)
    assert granted(world.lease(loaded=WeightVersion(1, 0))) == ["a"]


def test_leases_in_flight_are_capped() -> None:
    world = World(max_inflight_groups=2)
    world.submit("a", "b", "c")
    capped = world.lease(3)
    assert (granted(capped), capped.wait) == (["a", "b"], LeaseWait.AT_CAPACITY)
    assert world.lease().wait is LeaseWait.AT_CAPACITY
    world.push(capped.grants[0])
    assert granted(world.lease()) == ["c"]


def test_reserved_queue_space_counts_queued_and_leased() -> None:
    world = World(batch_groups=1, max_queued_groups=2, reserve_queue_space=True)
    world.submit("a", "b", "c")
    world.queue(1)
    assert granted(world.lease(3)) == ["a"]
    world.batch()
    assert granted(world.lease(3)) == ["b"]


def test_lookahead_counts_what_was_assembled_and_is_raised_by_publishing() -> None:
    world = World(batch_groups=1, max_lookahead=1, max_queued_groups=9)
    world.submit("a", "b", "c", "d")
    leased = world.lease(4)
    assert (granted(leased), leased.wait) == (["a", "b"], LeaseWait.AT_CAPACITY)
    world.push(leased.grants[0])
    world.batch()
    assert world.lease(4).wait is LeaseWait.AT_CAPACITY
    world.publish(1, commit=0)
    assert granted(world.lease(4)) == ["c"]


def test_a_dropped_group_frees_lookahead() -> None:
    world = World(batch_groups=1, max_lookahead=0)
    world.submit("a", "b")
    world.push(world.lease_one())
    assert world.lease().wait is LeaseWait.AT_CAPACITY
    world.pull(train_version=9)
    assert world.lease().wait is LeaseWait.AT_CAPACITY, "assembled now"
    world = World(batch_groups=1, max_lookahead=0, max_staleness=0)
    world.submit("a", "b")
    world.push(world.lease_one())
    world.pull(train_version=9)
    assert granted(world.lease()) == ["b"]


# ── expiry ──


def test_a_lease_lives_through_its_last_millisecond() -> None:
    world = World(lease_ttl_ms=1_000)
    world.submit("a")
    world.lease()
    world.now += 1_000
    assert world.expire() == 0
    assert world.extend("a/0/1") == [LeaseState.LIVE]
    world.now += 1_001
    assert world.extend("a/0/1") == [LeaseState.LOST], "lost before anybody noticed the expiry"
    assert world.expire() == 1
    assert world.statistic("leases_expired") == world.tasks("pending") == 1


def test_an_expired_task_backs_off_and_is_leased_to_whoever_asks_then() -> None:
    world = World(lease_ttl_ms=1_000, retry_backoff_ms=500)
    world.submit("a")
    world.lease()
    world.now += 1_001
    assert world.lease(worker="other").wait is LeaseWait.BACKING_OFF
    world.now += 499
    assert world.lease(worker="other").wait is LeaseWait.BACKING_OFF
    world.now += 1
    assert [grant.lease_id for grant in world.lease(worker="other").grants] == ["a/0/2"]


def test_time_that_goes_back_stands_still() -> None:
    world = World(lease_ttl_ms=1_000)
    world.submit("a")
    world.now += 5_000
    world.lease()
    world.now -= 5_000
    assert world.extend("a/0/1") == [LeaseState.LIVE]
    world.now += 6_001
    assert world.extend("a/0/1") == [LeaseState.LOST], "the clock went on from the latest time seen"


# ── extend and return ──


@pytest.mark.parametrize(
    ("worker", "instance", "lease_id"),
    [
        ("other", "process-1", "a/0/1"),
        ("worker", "process-2", "a/0/1"),
        ("worker", "process-1", "a/0/2"),
        ("worker", "process-1", "a/1/1"),
        ("worker", "process-1", "b/0/1"),
        ("worker", "process-1", "malformed"),
    ],
)
def test_only_the_holder_of_a_live_lease_may_extend_or_return_it(worker: str, instance: str, lease_id: str) -> None:
    world = World()
    world.submit("a")
    world.lease()
    before = world.view
    assert world.extend(lease_id, worker=worker, instance=instance) == [LeaseState.LOST]
    given = ops.LeaseReturn(lease_id, ops.ReturnKind.FAILED, "no", b"", None, 0)
    assert world.do(world.model.give_back, worker, instance, [given]).outcomes == [ReturnOutcome.LOST]
    assert world.view == before


def test_an_interrupted_task_is_pending_at_once_and_keeps_its_failures() -> None:
    world = World(max_attempts=2, retry_backoff_ms=0)
    world.submit("a")
    world.fail(world.lease_one().lease_id)
    for _ in range(3):
        assert world.interrupt(world.lease_one().lease_id) is ReturnOutcome.PENDING
    assert world.fail(world.lease_one().lease_id) is ReturnOutcome.FAILED


def test_the_next_attempt_gets_the_partial_rollout_of_the_last_one_that_left_any() -> None:
    world = World()
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"first")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"second")
    world.interrupt(world.lease_one().lease_id)
    assert world.lease_one().partial_rollout == b"second"


def test_a_partial_rollout_that_is_too_stale_is_given_up_and_counted() -> None:
    world = World(batch_groups=1, max_staleness=1)
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far", head=0, tokens=70)
    world.train(2, head=2)
    grant = world.lease_one()
    assert (grant.partial_rollout, grant.incarnation, grant.attempt) == (b"", 0, 2)
    assert world.statistic("partial_rollout_tokens_discarded") == 70


def test_a_failing_task_backs_off_longer_each_time_and_fails_at_the_attempt_cap() -> None:
    world = World(max_attempts=3, retry_backoff_ms=100)
    world.submit("a")
    for wait_ms in (100, 200):
        assert world.fail(world.lease_one().lease_id) is ReturnOutcome.PENDING
        world.now += wait_ms - 1
        assert world.lease().wait is LeaseWait.BACKING_OFF
        world.now += 1
    assert world.fail(world.lease_one().lease_id, "third error") is ReturnOutcome.FAILED
    assert world.lease().wait is LeaseWait.NO_TASKS
    assert list(world.view.failures) == [ops.TaskFailure("a", 3, "third error", world.now)]


def test_expiries_count_towards_the_attempt_cap() -> None:
    world = World(max_attempts=2, retry_backoff_ms=0, lease_ttl_ms=1_000)
    world.submit("a")
    for _ in range(2):
        world.lease()
        world.now += 1_001
        world.expire()
    assert world.tasks("failed") == 1
    assert [failure.error for failure in world.view.failures] == ["lease expired"]


def test_failures_are_shown_newest_first() -> None:
    world = World(max_attempts=1)
    world.submit("a", "b")
    world.fail_for_good()
    world.fail_for_good()
    assert [failure.task_id for failure in world.view.failures] == ["b", "a"]


def test_returning_the_same_lease_twice_in_a_call_works_once() -> None:
    world = World()
    world.submit("a")
    lease_id = world.lease_one().lease_id
    given = ops.LeaseReturn(lease_id, ops.ReturnKind.INTERRUPTED, "", b"", None, 0)
    outcomes = world.model.give_back(RUN, "worker", "process-1", [given, given]).outcomes
    assert outcomes == [ReturnOutcome.PENDING, ReturnOutcome.LOST]
