import pytest

from buffer_service.domain.ops import Amount, WeightVersion
from buffer_service.domain.policy import RunPolicy
from tests.oracle.rules.failures import backoff_ms, over_budget
from tests.oracle.rules.identity import LeaseId, group_id
from tests.oracle.rules.quota import within_quotas
from tests.oracle.rules.spread import too_spread
from tests.oracle.rules.timeline import Timeline


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


@pytest.mark.parametrize(("head", "spread"), [(4, False), (3, True)])
def test_too_spread_is_what_exceeds_the_bound(head: int, spread: bool) -> None:
    assert too_spread(RunPolicy(max_version_spread=2), loaded_version=6, head_version=head) is spread
    assert not too_spread(RunPolicy(), loaded_version=6, head_version=head)


@pytest.mark.parametrize("field", ["groups", "tokens", "bytes"])
def test_quotas_bound_groups_tokens_and_bytes_each_up_to_the_last_one(field: str) -> None:
    mib = 1 << 20
    quotas = RunPolicy(
        batch_groups=1,
        max_queued_tokens=1,
        max_queued_bytes=mib,
        quota_groups=2 * mib,
        quota_tokens=2 * mib,
        quota_bytes=2 * mib,
    )
    assert within_quotas(quotas, Amount(**{field: 2 * mib}))
    assert not within_quotas(quotas, Amount(**{field: 2 * mib + 1}))
    assert within_quotas(RunPolicy(), Amount(**{field: 1 << 60}))


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


def test_means_are_clamped_by_forks_after_the_term_of_the_newest_token() -> None:
    timeline = Timeline()
    timeline.fork(2, 5)
    timeline.fork(3, 2)
    assert timeline.effective_milli(4_700, 1) == 2_000
    assert timeline.effective_milli(1_999, 2) == 1_999
    assert timeline.effective_milli(4_700, 3) == 4_700
