"""Tests of what each preset promises: the documented behaviour of the system that it is named after, in numbers."""

import re
from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.presets import PRESETS, fields_of
from buffer_wire.errors import InvalidField
from tests.oracle.behaviour.pipeline import Pipeline, Unchecked
from tests.oracle.behaviour.world import World

N = 4


def preset(text: str, batch_groups: int = N, **more: Any) -> dict[str, Any]:
    return {"batch_groups": batch_groups, **fields_of(text, batch_groups), **more}


def pipeline(text: str, *, slots: int = 4 * N, train_ms: int = 500, **more: Any) -> Pipeline:
    return Pipeline(preset(text), slots=slots, train_ms=train_ms, **more)


def feed(world: World, count: int) -> None:
    first = world.view.cursor
    world.submit(*(f"task-{first + i}" for i in range(count)))


# ── how presets are written ──────────────────────────────────────────────────


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("batch_groups", [1, 32, 512])
def test_every_preset_is_a_policy_for_any_batch(name: str, batch_groups: int) -> None:
    numbers = {"areal": "(4)", "queue_drop": "(1)", "queue_max": "(4)", "streaming": "(1)"}
    text = name + numbers.get(name, "")
    fields = fields_of(text, batch_groups)
    assert fields.pop("preset") == text
    effective = RunPolicy(batch_groups=batch_groups, preset=text, **fields)  # type: ignore[arg-type]
    assert {field: getattr(effective, field) for field in fields} == fields


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nobody",
        "areal",
        "areal()",
        "areal(1, 2)",
        "areal(1001)",
        "areal(-1)",
        "sync(0)",
        "queue_drop(0)",
        "miles 4",
    ],
)
def test_a_wrong_preset_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(InvalidField) as refused:
        fields_of(text)
    assert refused.value.attributes["field"] == "policy.preset"
    known = refused.value.attributes["limit"]
    assert all(name in known for name in PRESETS)
    assert "areal(staleness 0 to 1,000)" in known
    assert "streaming(groups 1 to 65,536[, world_size 1 to 4,096, default 1])" in known


def test_a_preset_is_kept_as_it_was_written_but_for_blanks() -> None:
    assert fields_of("streaming( 4 ,2 )")["preset"] == "streaming(4, 2)"
    assert fields_of("prime_rl")["preset"] == "prime_rl"
    bare = fields_of("prime_rl")
    assert bare == {**fields_of("prime_rl(1, 8)"), "preset": "prime_rl"}
    assert (bare["max_lookahead"], bare["max_staleness"], bare["cancel_stale_leases"]) == (1, 8, True)


# ── paced: sync, one_step_off, prime_rl (areal: test_preset_areal) ───────────


@pytest.mark.parametrize("train_ms", [100, 1_500], ids=["slow rollouts", "slow training"])
def test_sync_trains_only_on_groups_of_the_present_version(train_ms: int) -> None:
    run = pipeline("sync", train_ms=train_ms, spread=1.0).run(12)
    assert [batch.train_version for batch in run.trained] == list(range(12))
    assert run.staleness == [[0] * N] * 12
    assert max(run.ahead) == N, "no group of the next batch is begun before the weights are there"
    assert run.world.groups("accepted") == 12 * N, "nothing is generated in vain"


@pytest.mark.parametrize("train_ms", [100, 1_500], ids=["slow rollouts", "slow training"])
def test_one_step_off_trains_exactly_one_version_behind(train_ms: int) -> None:
    run = pipeline("one_step_off", train_ms=train_ms).run(12)
    assert run.staleness == [[0] * N] + [[1] * N] * 11
    assert max(run.ahead) == 2 * N, "the batch to come, and the one after it"
    assert run.world.groups("dropped_stale") == run.world.groups("dropped_overflow") == 0


def test_one_step_off_is_never_further_behind_however_lengths_spread() -> None:
    run = pipeline("one_step_off", spread=1.0).run(30)
    assert max(max(batch) for batch in run.staleness) == 1
    assert max(run.ahead) == 2 * N


@pytest.mark.parametrize("level", [0, 1, 2, 4])
@pytest.mark.parametrize("train_ms", [100, 1_500], ids=["slow rollouts", "slow training"])
def test_prime_rl_trains_step_n_on_policy_n_minus_k_or_newer(level: int, train_ms: int) -> None:
    run = pipeline(f"prime_rl({level}, {level})", slots=8 * N, train_ms=train_ms, spread=0.5).run(15)
    for step, batch in enumerate(run.trained):
        policies = [group.head_version for group in batch.shard]
        assert min(policies) >= max(0, step - level)
    late = run.trained[level:]
    if train_ms == 1_500:
        assert {batch.step - group.head_version for batch in late for group in batch.shard} == {level}, (
            "as far as it may"
        )
    assert max(run.ahead) == (level + 1) * N, "generation runs at most k batches ahead"


@pytest.mark.parametrize(("text", "survives"), [("prime_rl(1, 1)", 1), ("prime_rl(1, 3)", 3), ("prime_rl", 8)])
def test_prime_rl_cancels_rollouts_that_are_too_many_steps_off(text: str, survives: int) -> None:
    world = World(**preset(text, batch_groups=1))
    world.submit("slow")
    slow = world.lease_one()
    for version in range(1, survives + 2):
        world.train()
        expected = ops.LeaseState.LIVE if version <= survives else ops.LeaseState.CANCELLED
        assert world.extend(slow.lease_id) == [expected]
    again = world.lease_one()
    assert (again.task_id, again.attempt, again.partial_rollout) == ("slow", 2, b"")
    assert world.push(again, head=survives + 1) is ops.PushKind.QUEUED
    assert world.statistic("leases_cancelled") == 1


# ── Miles ────────────────────────────────────────────────────────────────────


def miles_log(world: World) -> list[str]:
    """The lines that Miles logs, out of the state of a run."""
    view = world.view
    steps = view.statistics
    average = steps["staleness_sum"] / max(1, steps["assembled_groups"])
    recycled = view.groups["recycled"].groups
    return [
        f"Global worker queue size: {view.groups['queued'].groups}",
        f"Staleness stats: recycled={recycled}, avg_staleness={average:.2f}, max_staleness={steps['staleness_max']}",
    ]


def test_miles_caps_what_is_in_flight_and_what_is_queued() -> None:
    world = World(**preset("miles"))
    feed(world, 50)
    for filled in range(4, 5 * N + 1, N):
        grants = world.lease(50).grants
        assert len(grants) == N, "MAX_INFLIGHT_GROUPS"
        assert [world.push(grant) for grant in grants] == [ops.PushKind.QUEUED] * N
        assert world.groups("queued") == filled
    assert world.groups("queued") == (4 + 1) * N, "QUEUE_CAP_GROUPS"
    grants = world.lease(50).grants
    blocked = [world.push_facts(world.facts(grant))[0] for grant in grants]
    assert [one.kind for one in blocked] == [ops.PushKind.BLOCKED] * N
    assert world.lease(50).wait is ops.LeaseWait.AT_CAPACITY
    world.batch()
    assert world.retry(world.facts(grants[0]), blocked[0]).kind is ops.PushKind.QUEUED


def test_miles_drops_at_dequeue_what_is_more_than_four_behind_and_keeps_leftovers() -> None:
    world = World(**preset("miles"))
    oldest = world.queue(2, head=0)
    younger = world.queue(6, head=1)
    world.publish(5)
    assert world.groups("queued") == 8, "only a batch looks at versions"
    batch = world.batch()
    assert [group.group_id for group in batch.shard] == younger[:N]
    assert (batch.staleness_sum, batch.staleness_max) == (4 * N, 4)
    assert world.groups("dropped_stale") == len(oldest)
    assert world.groups("recycled") == 0
    assert miles_log(world) == [
        "Global worker queue size: 2",
        "Staleness stats: recycled=0, avg_staleness=4.00, max_staleness=4",
    ]
    short = world.pull()
    assert isinstance(short, ops.Short)
    assert (short.queued, short.needed) == (2, N), "No progress: Queue size: 2, Collected: 2/4"


def test_miles_resumes_groups_that_were_interrupted() -> None:
    world = World(**preset("miles"))
    feed(world, 10)
    grants = world.lease(N).grants
    world.interrupt(grants[1].lease_id, partial_rollout=b"half of it", head=0, tokens=7)
    (resumed,) = world.lease(50).grants
    assert (resumed.task_id, resumed.partial_rollout) == (grants[1].task_id, b"half of it")
    assert world.push(resumed) is ops.PushKind.QUEUED


def test_miles_trains_without_ever_being_more_than_four_behind() -> None:
    run = pipeline("miles", train_ms=1_500, spread=0.5).run(30)
    assert max(max(batch) for batch in run.staleness) == 4
    assert max(run.ahead) <= 6 * N


def test_miles_docs_recycles_what_is_too_stale() -> None:
    world = World(**{**preset("miles_docs(2)"), "max_inflight_groups": 6})
    assert world.view.policy.max_queued_groups == 1_000
    feed(world, 6)
    first = world.lease(6).grants
    for grant in first:
        assert world.push(grant, head=0) is ops.PushKind.QUEUED
    world.publish(3)
    short = world.pull()
    assert isinstance(short, ops.Short)
    assert (short.queued, short.needed, short.pending) == (0, N, 6)
    assert miles_log(world)[1] == "Staleness stats: recycled=6, avg_staleness=0.00, max_staleness=0"
    again = world.lease(6).grants
    assert [grant.task_id for grant in again] == [grant.task_id for grant in first], "no prompt is lost"
    assert {grant.incarnation for grant in again} == {1}
    for grant, head in zip(again, (1, 1, 3, 3, 3, 3), strict=True):
        world.push(grant, head=head)
    batch = world.batch()
    assert batch.staleness_sum == 2 + 2 + 0 + 0
    assert miles_log(world) == [
        "Global worker queue size: 2",
        "Staleness stats: recycled=6, avg_staleness=1.00, max_staleness=2",
    ]


def test_miles_docs_generates_a_rollout_at_once_and_bounds_no_age_unless_it_is_told_to() -> None:
    world = Unchecked(**preset("miles_docs"))
    assert world.view.policy.max_staleness == -1
    feed(world, 1_002)
    assert len(world.lease(2_000).grants) == N
    world.queue(1_000)
    assert world.push("one-too-many") is ops.PushKind.BLOCKED


# ── queue algorithms ─────────────────────────────────────────────────────────


def test_queue_drop_keeps_the_newest_groups() -> None:
    world = World(**preset("queue_drop(2)"))
    pushed = world.queue(3 * N)
    world.publish(9)
    assert world.names() == pushed[N : 2 * N], "the newest 2 N are left, and staleness bounds nothing"
    assert world.names() == pushed[2 * N :]
    assert world.groups("dropped_overflow") == N
    assert world.groups("dropped_stale") == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_queue_drop_trains_on_responses_as_long_as_it_samples(seed: int) -> None:
    run = pipeline("queue_drop(1)", slots=8, train_ms=500, spread=1.0, seed=seed).run(150)
    assert run.world.groups("dropped_overflow") > 50
    assert run.length_bias == pytest.approx(1.0, abs=0.03)


def test_queue_max_drops_when_a_batch_is_taken() -> None:
    world = World(**preset("queue_max(1)"))
    old, fresh = world.queue(60, head=0), world.queue(N, head=2)
    world.publish(2)
    assert world.groups("queued") == len(old) + N
    assert world.names() == fresh
    assert world.groups("dropped_stale") == len(old)
    assert world.groups("dropped_overflow") == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("staleness", "bias"), [(1, 0.75), (2, 0.80), (4, 0.88)])
def test_queue_max_trains_on_shorter_responses_than_it_samples(staleness: int, bias: float, seed: int) -> None:
    run = pipeline(f"queue_max({staleness})", slots=8, train_ms=500, spread=1.0, seed=seed).run(100)
    assert max(max(batch) for batch in run.staleness) == staleness
    assert run.world.groups("dropped_stale") > 0
    assert run.world.groups("dropped_overflow") == 0
    assert run.length_bias < bias


# ── streaming ────────────────────────────────────────────────────────────────


def test_streaming_gives_a_step_in_micro_batches_as_soon_as_they_are_there() -> None:
    world = World(**preset("streaming(2, 2)", batch_groups=8))
    assert world.view.policy.max_queued_groups == 8, "two micro-batches of 2 ranks x 2 groups"
    world.queue(3)
    assert isinstance(world.pull(world_size=2), ops.Short)
    world.queue(1)
    ranks = [world.batch(0, rank=rank, world_size=2) for rank in range(2)]
    assert [len(batch.shard) for batch in ranks] == [2, 2]
    assert [(batch.micro_batch, batch.final, batch.total_groups) for batch in ranks] == [(0, False, 4)] * 2
    assert world.groups("forming") == 4
    world.queue(4)
    last = world.batch(0, world_size=2, micro_batch=1)
    assert (last.final, last.total_groups, last.total_tokens) == (True, 8, 80), "totals of the whole step"
    assert world.view.next_step == 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streaming_leaves_groups_hardly_any_time_in_the_queue(seed: int) -> None:
    def staleness(text: str) -> tuple[float, float, int]:
        policy = preset(text, batch_groups=16)
        run = Pipeline(policy, slots=16, train_ms=900, spread=0.5, seed=seed).run(60)
        return run.in_queue_staleness, run.length_bias, run.world.now

    whole, _, whole_ms = staleness("queue_drop(1)")
    streamed, bias, streamed_ms = staleness("streaming(1)")
    assert whole > 0.6
    assert streamed < 0.2
    assert bias == pytest.approx(1.0, abs=0.03)
    assert streamed_ms < 1.1 * whole_ms


# ── the table of the documentation ───────────────────────────────────────────


def test_the_documented_values_are_those_of_the_presets() -> None:
    with open("docs/presets.md") as page:  # noqa: PTH123
        rows = re.findall(r"^\| `([^`]+)` \|.*\| ([^|]+) \|$", page.read(), re.MULTILINE)
    assert {text.partition("(")[0] for text, _ in rows} == set(PRESETS)
    for text, values in rows:
        documented = dict(re.findall(r"`(\w+)` (\w+)", values.replace(",", "")))
        fields = {name: str(value).lower() for name, value in fields_of(text).items() if name != "preset"}
        assert documented == fields, text
