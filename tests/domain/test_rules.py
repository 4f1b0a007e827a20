import pytest

from buffer_service.domain.admission import capacity
from buffer_service.domain.failures import backoff_ms, over_budget
from buffer_service.domain.gate import oldest_useful_version, too_stale
from buffer_service.domain.identity import LeaseId, group_id
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.timeline import Timeline, next_train_version


def test_a_lease_id_comes_apart_as_it_was_put_together() -> None:
    assert LeaseId.parse("env:task-1.a/3/12") == LeaseId("env:task-1.a", 3, 12)
    assert str(LeaseId("env:task-1.a", 3, 12)) == "env:task-1.a/3/12"
    assert group_id("env:task-1.a", 3) == "env:task-1.a/3"


@pytest.mark.parametrize(
    "malformed",
    ["", "task", "task/0", "/0/1", "task/0/0", "task/00/1", "task/0/01", "task/-1/1", "a/b/0/1", "task/0/1\n"],
)
def test_a_malformed_lease_id_has_no_parts(malformed: str) -> None:
    assert LeaseId.parse(malformed) is None


def test_without_caps_there_is_no_capacity_to_run_out_of() -> None:
    assert capacity(RunPolicy(), published_version=0, assembled=99, queued=99, leased=99) is None


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        ({"max_inflight_groups": 10}, 10 - 3),
        ({"max_queued_groups": 20, "reserve_queue_space": True}, 20 - (5 + 3)),
        ({"max_lookahead": 2}, (2 + 4 + 1) * 4 - (7 + 5 + 3)),
        ({"max_lookahead": 2, "batches_per_publish": 3}, (2 + 4 + 1) * 4 * 3 - (7 + 5 + 3)),
        ({"max_lookahead": 2, "max_inflight_groups": 4}, 4 - 3),
    ],
)
def test_capacity_is_the_smallest_room_under_the_caps_that_are_set(policy: dict[str, int], room: int) -> None:
    rules = RunPolicy(batch_groups=4, **policy)  # type: ignore[arg-type]
    assert capacity(rules, published_version=4, assembled=7, queued=5, leased=3) == room


@pytest.mark.parametrize(("head", "stale"), [(5, False), (4, False), (3, True)])
def test_too_stale_is_what_exceeds_the_bound(head: int, stale: bool) -> None:
    assert too_stale(RunPolicy(max_staleness=2), train_version=6, head_version=head) is stale


def test_without_a_bound_nothing_is_too_stale() -> None:
    assert not too_stale(RunPolicy(), train_version=1_000_000, head_version=0)
    assert oldest_useful_version(RunPolicy(), 1_000_000) == 0


def test_the_oldest_useful_version_is_never_negative() -> None:
    assert oldest_useful_version(RunPolicy(max_staleness=4), 3) == 0
    assert oldest_useful_version(RunPolicy(max_staleness=4), 9) == 5


def test_back_off_doubles_up_to_sixty_four_times() -> None:
    policy = RunPolicy(retry_backoff_ms=500)
    assert [backoff_ms(policy, failures) // 500 for failures in range(1, 10)] == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_the_budget_is_exceeded_by_one_more_than_it_allows() -> None:
    assert not over_budget(RunPolicy(failure_budget=2), 2)
    assert over_budget(RunPolicy(failure_budget=2), 3)
    assert over_budget(RunPolicy(failure_budget=0), 1)
    assert not over_budget(RunPolicy(), 1_000)


def test_versions_of_an_abandoned_timeline_count_as_the_fork() -> None:
    timeline = Timeline()
    timeline.fork(2, 5)
    assert timeline.effective(WeightVersion(1, 9)) == 5
    assert timeline.effective(WeightVersion(1, 4)) == 4
    assert timeline.effective(WeightVersion(2, 9)) == 9


def test_a_version_is_clamped_by_every_later_fork() -> None:
    timeline = Timeline()
    timeline.fork(2, 5)
    timeline.fork(3, 2)
    timeline.fork(4, 7)
    assert timeline.effective(WeightVersion(1, 9)) == 2
    assert timeline.effective(WeightVersion(2, 9)) == 2
    assert timeline.effective(WeightVersion(3, 9)) == 7


def test_the_next_train_version_rises_with_every_batches_per_publish_unpublished_steps() -> None:
    assert [next_train_version(3, steps, 2) for steps in range(5)] == [3, 3, 4, 4, 5]
