"""Tests of what the store records for the estimator and the bias monitor: totals, lengths, environments, and the
window.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import Topic
from buffer_service.domain.window import Window
from buffer_service.rules.totals import LENGTH_BUCKETS, MOST, RELOAD_PHASES, STALENESS_BOUNDS, TOTALS, WINDOW_VERSIONS
from buffer_service.store.keys import index_key
from buffer_wire.limits import MAX_VERSION
from tests.oracle.engines import FORGOTTEN_MS
from tests.store.driver import Run, weights


async def totals(run: Run, *names: str) -> list[int]:
    statistics = (await run.view()).statistics
    return [statistics[name] for name in names]


async def window(run: Run) -> Window:
    found = (await run.view()).window
    assert found is not None
    return found


async def report(run: Run, tokens: int, busy_ms: int, request_ms: int, engine_id: str = "e", **fields: Any) -> int:
    """An engine's counters; the revision after them."""
    said = ops.EngineReport(
        engine_id,
        "w",
        "ready",
        weights(0),
        0,
        0,
        "",
        0,
        decoded_tokens=tokens,
        decode_busy_ms=busy_ms,
        decode_request_ms=request_ms,
        **fields,
    )
    return (await run.store.call(commands.report_engine(run.run_id, said))).revision


ENGINES = ("decoded_tokens", "decode_busy_ms", "decode_request_ms")
TRAINER = ("trainer_busy_ms", "trainer_wait_ms")


# ── groups ───────────────────────────────────────────────────────────────────


async def test_accepted_groups_count_whatever_becomes_of_them(run: Run) -> None:
    await run.create(filter_equal_rewards=True)
    kept = run.group("a", rewards=(0.25, -1.0), lengths=(3, 9), samples=2, turns=5, truncated=1)
    filtered = run.group("b", rewards=(2.0, 2.0), lengths=(4, 4), samples=2, turns=2)
    assert await run.push_kinds(kept, filtered, kept) == ["queued", "filtered", "duplicate"]
    assert await totals(run, *TOTALS[:7]) == [2, 4, 20, 13, 3_250, 7, 1]
    assert await totals(run, *TOTALS[7:14]) == [0] * 7


async def test_assembled_groups_count_when_they_enter_a_step_and_stay_counted(run: Run) -> None:
    await run.create(max_queued_groups=8)
    await run.push(
        run.group("a", rewards=(0.5, 0.0), lengths=(3, 9), samples=2, turns=5, truncated=1),
        run.group("b", rewards=(-2.0, 0.0), lengths=(6, 4), samples=2, turns=2, truncated=2),
        run.group("c"),
    )
    await run.batch(0)
    expected = [2, 4, 22, 15, -1_500, 7, 3]
    assert await totals(run, *TOTALS[7:14]) == expected
    await run.batch(0)
    await run.resume(0, ops.ResumeMode.REQUEUE)
    assert await totals(run, *TOTALS[7:14]) == expected
    await run.batch(0)
    assert (await totals(run, "assembled_groups", "accepted_groups")) == [4, 3]


async def test_token_staleness_weighs_each_group_by_its_response_tokens(run: Run) -> None:
    await run.create()
    await run.publish(3)
    await run.push(run.group("a", head=1, tail=2, mean=1_250, lengths=(10, 20)), run.group("b", mean=0, lengths=(1, 1)))
    await run.batch(0, train_version=3)
    assert await totals(run, "token_staleness_milli_sum") == [30 * 1_750 + 2 * 3_000]


async def test_tokens_newer_than_what_trains_on_them_are_not_stale(run: Run) -> None:
    await run.create(batch_groups=1)
    await run.push(run.group("a", head=0, tail=2, mean=1_000, lengths=(5, 5)))
    await run.batch(0, train_version=0)
    assert await totals(run, "token_staleness_milli_sum", "staleness_sum", "pre_queue_staleness_sum") == [0, 0, 2]


async def test_staleness_is_counted_by_bucket_of_groups_and_of_tokens(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8)
    assert all(set(counts) == {0} for counts in (await run.view()).staleness_counts.values())
    await run.publish(20)
    made = [(weights(1), 3), (weights(15), 4)]
    await run.push(
        run.group("a", head=1, tail=18, mean=11_000, lengths=(12,), version_tokens=made),
        run.group("b", head=15, lengths=(2, 2)),
    )
    await run.batch(0, train_version=20)
    counts = {name: counted(buckets) for name, buckets in (await run.view()).staleness_counts.items()}
    assert counts == {
        "total": {6: 1, None: 1},
        "pre_queue": {0: 1, None: 1},
        "in_queue": {2: 1, 6: 1},
        "token": {2: 5, 6: 4 + 4, None: 3},
    }
    await run.push(run.group("c", head=14, tail=16, mean=15_500, lengths=(3, 4)), run.group("d", head=20))
    await run.batch(1, train_version=20)
    tokens = counted((await run.view()).staleness_counts["token"])
    assert tokens == {0: 5, 2: 5, 4: 7, 6: 8, None: 3}, "without versions all tokens are 4.5 behind: in whole versions"


async def test_tokens_of_an_abandoned_timeline_count_as_its_fork(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=8)
    await run.fill("x", "y")
    await run.batch(0)
    await run.publish(2, commit_through=0)
    await run.batch(1)
    await run.publish(6, commit_through=1)
    before = (await run.view()).staleness_counts["token"]
    made = [(weights(1), 1), (weights(4), 10)]
    waiting = run.group("a", head=1, tail=6, mean=5_000, lengths=(111,), version_tokens=made)
    pushed_late = run.group("b", head=1, tail=6, mean=5_000, lengths=(111,), version_tokens=made)
    await run.push(waiting)
    await run.resume(1)
    await run.push(pushed_late)
    for step in (2, 3):
        await run.batch(step, train_version=5)
    after = (await run.view()).staleness_counts["token"]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert counted(grown) == {3: 2 * 110, 4: 2 * 1}, "versions 4 and 6 are the fork's, version 2"


def counted(buckets: Sequence[int]) -> dict[int | None, int]:
    """Return what was counted, by the upper end of its bucket in versions (None: it has none)."""
    return {end: count for end, count in zip((*STALENESS_BOUNDS, None), buckets, strict=True) if count}


async def test_each_environment_has_sums_of_its_own(run: Run) -> None:
    await run.create(batch_groups=3, max_queued_groups=8)
    await run.publish(2)
    await run.push(
        run.group("a", head=1, tail=2, mean=1_500, lengths=(4, 4), environment="math"),
        run.group("b", head=2, lengths=(1, 2), environment="code"),
        run.group("c", head=0, lengths=(2, 2), environment="code"),
        run.group("d", head=2, lengths=(50, 50), environment="math"),
    )
    await run.batch(0)
    view = await run.view()
    assert view.environment_statistics == {
        "math": {
            "accepted_response_tokens": 108,
            "assembled_groups": 1,
            "assembled_response_tokens": 8,
            "staleness_sum": 1,
            "pre_queue_staleness_sum": 1,
            "in_queue_staleness_sum": 0,
            "token_staleness_milli_sum": 4_000,
        },
        "code": {
            "accepted_response_tokens": 7,
            "assembled_groups": 2,
            "assembled_response_tokens": 7,
            "staleness_sum": 2,
            "pre_queue_staleness_sum": 0,
            "in_queue_staleness_sum": 2,
            "token_staleness_milli_sum": 8_000,
        },
    }
    for name in view.environment_statistics["math"]:
        assert sum(sums[name] for sums in view.environment_statistics.values()) == view.statistics[name]


async def test_response_lengths_are_counted_in_powers_of_two(run: Run) -> None:
    await run.create()
    await run.push(run.group("a", lengths=(0, 1, 2, 3, 4, 5)), run.group("b", lengths=(8, 9, 1 << 22)))
    counts = (await run.view()).response_lengths
    assert len(counts) == LENGTH_BUCKETS
    assert {bucket: samples for bucket, samples in enumerate(counts) if samples} == {
        0: 2,
        1: 1,
        2: 2,
        3: 2,
        4: 1,
        22: 1,
    }


# ── generation ───────────────────────────────────────────────────────────────


async def test_generation_lasts_from_the_lease_to_the_acceptance_whatever_extends_it(run: Run) -> None:
    await run.create(lease_ttl_ms=10_000)
    await run.submit("a", "b")
    lease = await run.one_lease()
    for _ in range(3):
        await run.pass_ms(9_000)
        await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))
    await run.push(run.group(lease), run.group("without-a-lease"))
    assert await totals(run, "generated_groups", "generation_ms", "accepted_groups") == [1, 27_000, 2]


async def test_the_result_of_a_lease_that_was_replaced_has_no_known_beginning(run: Run) -> None:
    await run.create(lease_ttl_ms=1_000, retry_backoff_ms=100)
    await run.submit("a", "b")
    late, second = (await run.lease(2)).grants
    await run.pass_ms(1_500)
    await run.store.sweep()
    await run.pass_ms(500)
    again = await run.one_lease()
    assert again.task_id == late.task_id
    assert await run.push_kinds(run.group(late), run.group(second)) == ["queued", "queued"]
    assert await totals(run, "generated_groups", "generation_ms") == [1, 2_000]


# ── engines ──────────────────────────────────────────────────────────────────


async def test_counters_of_engines_add_up_and_repeats_add_nothing(run: Run) -> None:
    await run.create()
    await report(run, 0, 0, 0)
    await report(run, 100, 10, 40)
    await report(run, 100, 10, 40)
    await report(run, 130, 15, 60)
    await report(run, 0, 0, 0, "other")
    await report(run, 7, 1, 2, "other")
    assert await totals(run, *ENGINES) == [137, 16, 62]
    engines = {one.engine_id: one for one in (await run.view()).engines}
    assert (engines["e"].decoded_tokens, engines["other"].decode_busy_ms) == (130, 1)


async def test_what_an_engine_did_before_the_run_heard_of_it_is_none_of_the_runs(run: Run) -> None:
    await run.create()
    await report(run, 100, 10, 40)
    assert await totals(run, *ENGINES) == [0, 0, 0]
    await report(run, 130, 15, 60)
    assert await totals(run, *ENGINES) == [30, 5, 20]


async def test_a_worker_that_began_anew_counts_from_nothing(run: Run) -> None:
    await run.create()
    await report(run, 0, 0, 0)
    await report(run, 100, 50, 60)
    await report(run, 120, 5, 6)
    assert await totals(run, *ENGINES) == [220, 55, 66], "one smaller counter says that all began anew"


async def test_reloads_of_engines_add_up_by_phase(run: Run) -> None:
    await run.create()
    names = len(RELOAD_PHASES)
    assert list((await run.view()).reload_counters) == [0] * 2 * names
    await report(run, 0, 0, 0, "a", reload_counters=[7, 700] * names)
    await report(run, 0, 0, 0, "b", reload_counters=[0, 0] * names)
    assert list((await run.view()).reload_counters) == [0] * 2 * names, "what was before the run heard of the engine"
    await report(run, 0, 0, 0, "a", reload_counters=[8, 705] * names)
    await report(run, 0, 0, 0, "a")
    await report(run, 0, 0, 0, "b", reload_counters=[2, 10] * names)
    await report(run, 0, 0, 0, "b", reload_counters=[2, 10] * names)
    assert list((await run.view()).reload_counters) == [1 + 2, 5 + 10] * names
    await report(run, 0, 0, 0, "b", reload_counters=[1, 4] * names)
    assert list((await run.view()).reload_counters) == [3 + 1, 15 + 4] * names, "its worker has begun anew"
    await run.pass_ms(FORGOTTEN_MS + 1)
    await run.store.sweep()
    assert await run.hash("engine_reloads") == {}
    assert list((await run.view()).reload_counters) == [4, 19] * names


async def test_counters_alone_raise_no_revision_and_wake_nobody(run: Run) -> None:
    notified = run.store.notifications
    at_first = notified.ticket(run.run_id, Topic.TASKS)
    await run.create()
    before = await report(run, 1, 1, 1)
    # The run's creation and the engine's first report are heard of later than they are answered.
    for heard in range(2):
        await notified.wait(run.run_id, Topic.TASKS, at_first + heard, timeout_s=30.0)
    assert notified.ticket(run.run_id, Topic.TASKS) == at_first + 2
    tickets = {topic: notified.ticket(run.run_id, topic) for topic in Topic}
    assert await report(run, 500, 80, 90) == before
    assert {topic: notified.ticket(run.run_id, topic) for topic in Topic} == tickets
    assert await report(run, 500, 80, 90, membership=4) == before + 1


async def test_an_engine_that_is_forgotten_takes_its_counters_with_it(run: Run) -> None:
    await run.create()
    await report(run, 0, 0, 0)
    await report(run, 100, 10, 10)
    await run.pass_ms(3_600_001)
    await run.store.sweep()
    assert await run.hash("engine_counters") == {}
    await report(run, 150, 20, 20)
    assert await totals(run, "decoded_tokens") == [100]


# ── trainer, window ──────────────────────────────────────────────────────────


async def test_the_trainers_time_adds_up_over_terms(run: Run) -> None:
    await run.create()
    await run.publish(1, clock=(1_000, 400))
    await run.publish(2, clock=(1_500, 450))
    await run.publish(2, clock=(1_500, 450))
    await run.publish(3)
    assert await totals(run, *TRAINER) == [1_500, 450]
    await run.resume()
    await run.publish(4, clock=(2_000, 500))
    assert await totals(run, *TRAINER) == [3_500, 950]


async def test_a_publish_keeps_the_totals_as_they_are_with_it(run: Run) -> None:
    await run.create(batch_groups=1)
    await run.publish(1, clock=(10, 5))
    assert (await run.view()).window is None
    began = run.now
    await run.pass_ms(2_000)
    await run.fill("a", "b")
    await run.batch(0)
    await run.publish(2, commit_through=0, clock=(30, 6))
    await run.fill("later")
    kept = await window(run)
    assert (kept.first.version, kept.last.version, kept.publishes) == (1, 2, 1)
    assert (kept.first.time_ms, kept.seconds) == (began, 2.0)
    grown = {name: kept.grown(name) for name in ("accepted_groups", "assembled_groups", *TRAINER)}
    assert grown == {"accepted_groups": 2, "assembled_groups": 1, "trainer_busy_ms": 20, "trainer_wait_ms": 1}
    await run.publish(2, commit_through=0, clock=(30, 6))
    assert await window(run) == kept, "a repeat is no publish"


async def test_the_window_slides(run: Run) -> None:
    await run.create()
    for version in range(1, WINDOW_VERSIONS + 4):
        await run.publish(version)
    kept = await window(run)
    assert (kept.first.version, kept.last.version, kept.publishes) == (3, WINDOW_VERSIONS + 3, WINDOW_VERSIONS)
    assert await run.command("LLEN", index_key(run.run_id, "snapshots")) == WINDOW_VERSIONS + 1


async def test_another_regime_begins_with_a_resume_and_with_another_policy(run: Run) -> None:
    view = await run.create()
    for version in (1, 2):
        await run.publish(version)
    await run.store.call(commands.update_policy(run.run_id, view.policy))
    assert (await window(run)).publishes == 1, "it is the same policy"
    await run.store.call(commands.update_policy(run.run_id, replace(view.policy, max_queued_groups=8)))
    assert (await run.view()).window is None
    for version in (3, 4):
        await run.publish(version)
    assert (await window(run)).first.version == 3
    await run.resume()
    assert (await run.view()).window is None


async def test_a_total_beyond_32_bits_is_exact(run: Run) -> None:
    await run.create()
    await report(run, 0, 0, 0)
    for restart in range(3):
        await report(run, (1 << 48) - 1, 1 << 47, restart)
        await report(run, 0, 0, 0)
    assert await totals(run, *ENGINES[:2]) == [3 * ((1 << 48) - 1), 3 << 47]


async def test_a_total_stops_where_the_store_can_count_no_further(run: Run) -> None:
    await run.create(batch_groups=1)
    await run.publish(MAX_VERSION)
    await run.push(run.group("a", head=0, mean=0, lengths=(1 << 20, 1 << 20)))
    await run.batch(0)
    assert await totals(run, "token_staleness_milli_sum", "staleness_sum") == [MOST, MAX_VERSION]
    (environment,) = (await run.view()).environment_statistics.values()
    assert environment["token_staleness_milli_sum"] == MOST
