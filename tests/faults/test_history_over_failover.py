"""Tests of the same history over a store whose primary dies: with wait_replicas nothing that was acknowledged is gone,
without it what is gone is told, and the run stands still until a trainer resumes it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.checker.promises import was_told
from tests.chaos.checker.reading import Reading
from tests.faults.cluster import Cluster, running_cluster
from tests.faults.history import History
from tests.faults.history_run import HistoryRun, Size, live_and_check, policy_over_failover
from tests.support.sentinels import Deployment, sentinels

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SEEDS = [int(seed) for seed in os.environ.get("RB_HISTORY_SEEDS", "1 2").split()]
BEFORE = 500
"""Events before the failover."""
UNSEEN = 40
"""Pushes whose acknowledgement the replica knows nothing of."""
REFUSED = 8
"""Calls that wait for a replica in vain."""


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with sentinels() as running:
        yield running


@pytest.fixture
def cluster(deployment: Deployment, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, deployment.url) as running:
        yield running


@pytest.mark.parametrize("seed", SEEDS)
async def test_with_wait_replicas_every_promise_holds_over_a_failover(
    cluster: Cluster, deployment: Deployment, tmp_path: Path, seed: int
) -> None:
    async def failover(history: History) -> None:
        await history.passed(BEFORE)
        deployment.cut_off()
        refused = len(not_replicated(history)) + REFUSED
        await history.until(lambda: len(not_replicated(history)) >= refused, "calls wait for the replica in vain")
        history.note("nemesis", "failover", loses=False)
        deployment.primary.kill()
        deployment.replica.go_on()
        await deployment.promoted()
        await deployment.primary_back()
        history.note("nemesis", "over")

    run = HistoryRun(cluster, "waiting", policy_over_failover(1), seed, Size(crashes=1), disaster=failover)
    await live_and_check(run, tmp_path)
    assert not was_told(Reading(run.history))


def not_replicated(history: History) -> list[object]:
    return [op for op in history.of("met") if op.given["reason"] == "not_replicated"]


@pytest.mark.parametrize("seed", SEEDS)
async def test_without_wait_replicas_what_a_failover_loses_is_told_and_every_other_promise_holds(
    cluster: Cluster, deployment: Deployment, tmp_path: Path, seed: int
) -> None:
    async def failover(history: History) -> None:
        await history.passed(BEFORE)
        deployment.cut_off()
        pushed = len(history.of("push", ok=True)) + UNSEEN
        await history.until(lambda: len(history.of("push", ok=True)) >= pushed, "the replica falls behind")
        history.note("nemesis", "failover", loses=True)
        deployment.primary.kill()
        deployment.replica.go_on()
        await deployment.promoted()
        history.note("nemesis", "over")

    run = HistoryRun(
        cluster, "losing", policy_over_failover(0), seed, Size(crashes=0), disaster=failover, may_lose=True
    )
    await live_and_check(run, tmp_path)
    reading = Reading(run.history)
    assert was_told(reading)
    (failover_,) = run.history.of("failover")
    assert any(failover_.before(resume) for resume in run.history.of("resume", ok=True))
