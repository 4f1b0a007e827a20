"""The checker of histories finds what it is for: each change to a history that keeps every promise breaks one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.history import Facts, History, Op
from tests.faults.promises import PROMISES, broken
from tests.faults.tale import told

Change = Callable[[History], None]
CHANGES: dict[str, list[Change]] = {check.__name__: [] for check in PROMISES}


def breaks(promise: str) -> Callable[[Change], Change]:
    def enter(change: Change) -> Change:
        CHANGES[promise].append(change)
        return change

    return enter


def calls(history: History, kind: str, **given: object) -> list[Op]:
    return [op for op in history.of(kind) if given.items() <= op.given.items()]


def last_view(history: History) -> Facts:
    return calls(history, "view")[-1].got


def events(history: History) -> list[list[object]]:
    found: list[list[object]] = calls(history, "recording")[0].got["events"]
    return found


def shard(op: Op) -> list[Facts]:
    found: list[Facts] = op.got["groups"]
    return found


# ── 1: ledgers ───────────────────────────────────────────────────────────────


@breaks("ledgers_balance")
def a_group_vanishes_from_the_ledger(history: History) -> None:
    calls(history, "view")[0].got["groups"]["queued"][0] -= 1


@breaks("ledgers_balance")
def bytes_do_not_add_up(history: History) -> None:
    last_view(history)["groups"]["trained"][3] += 1


@breaks("ledgers_balance")
def an_environment_has_more_than_all(history: History) -> None:
    ledger = last_view(history)["environments"]["sums"] = {
        state: list(amounts) for state, amounts in last_view(history)["groups"].items()
    }
    ledger["trained"][0] += 1
    ledger["accepted"][0] += 1


@breaks("ledgers_balance")
def a_task_vanishes(history: History) -> None:
    last_view(history)["tasks"]["completed"] -= 1


# ── 2: what was acknowledged ─────────────────────────────────────────────────


@breaks("acknowledged_groups_are_kept")
def an_acknowledged_group_is_nowhere(history: History) -> None:
    events(history).remove(["accepted", "t3/0", "queued"])
    events(history)[-2] = ["round", 1, 0, ["t1/0"]]


@breaks("acknowledged_groups_are_kept")
def a_group_is_accepted_twice(history: History) -> None:
    events(history).insert(1, ["accepted", "t0/0", "queued"])


@breaks("acknowledged_groups_are_kept")
def the_ledger_calls_a_dropped_group_trained(history: History) -> None:
    events(history).append(["moved", "t3/0", "dropped_stale"])


@breaks("acknowledged_groups_are_kept")
def a_trained_group_enters_a_step_again(history: History) -> None:
    events(history).append(["round", 1, 1, ["t0/0"]])


@breaks("trained_is_what_ranks_got")
def what_came_was_never_pushed(history: History) -> None:
    shard(calls(history, "pull", epoch=2, step=0, rank=0)[0])[0]["digest"] = "of nobody"


@breaks("trained_is_what_ranks_got")
def a_rank_never_saw_its_shard(history: History) -> None:
    (op,) = calls(history, "pull", epoch=2, step=0, rank=1)
    op.reply = op.end = None


@breaks("trained_is_what_ranks_got")
def tokens_of_what_came_are_not_those_of_the_ledger(history: History) -> None:
    calls(history, "push", group_id="t2/0")[0].given["tokens"] += 1


# ── 3: batches ───────────────────────────────────────────────────────────────


@breaks("no_group_is_in_two_batches")
def a_group_comes_in_two_steps(history: History) -> None:
    for op in calls(history, "pull", step=1, rank=0):
        shard(op)[0].update(group_id="t0/0", digest="digest-0-1")


@breaks("no_group_is_in_two_batches")
def a_group_comes_to_two_ranks(history: History) -> None:
    shard(calls(history, "pull", step=0, rank=1)[0])[0].update(group_id="t0/0", digest="digest-0-1")


@breaks("no_group_is_in_two_batches")
def a_replay_has_other_groups(history: History) -> None:
    shard(calls(history, "pull", epoch=3, rank=0)[0])[0].update(group_id="t9/0", digest="digest-9")


@breaks("no_group_is_in_two_batches")
def a_discarded_group_comes_back(history: History) -> None:
    resume = calls(history, "resume")[-1]
    resume.given["mode"], resume.got["next_unassembled_step"] = "discard", 1


@breaks("no_group_is_in_two_batches")
def a_group_is_missing_from_every_shard(history: History) -> None:
    shard(calls(history, "pull", step=0, rank=1)[0]).clear()


def again(history: History, op: Op) -> Op:
    """The same call made once more, later."""
    copy = history.copy().ops[history.ops.index(op)]
    copy.begin, copy.end = history.tick(), history.tick()
    history.ops.append(copy)
    return copy


@breaks("a_repeated_pull_returns_the_same")
def ranks_swap_their_shards(history: History) -> None:
    op = again(history, calls(history, "pull", epoch=3, rank=0)[0])
    op.got["groups"] = calls(history, "pull", epoch=3, rank=1)[0].got["groups"]


@breaks("a_repeated_pull_returns_the_same")
def a_replay_has_other_bytes(history: History) -> None:
    shard(calls(history, "pull", epoch=3, rank=0)[0])[0]["digest"] = "digest-1-1"


@breaks("a_repeated_pull_returns_the_same")
def totals_change(history: History) -> None:
    again(history, calls(history, "pull", epoch=3, rank=0)[0]).got["totals"][3] += 1


# ── 4: caps ──────────────────────────────────────────────────────────────────


@breaks("caps_hold")
def the_queue_has_too_many_groups(history: History) -> None:
    calls(history, "view")[0].got["policy"]["max_queued_groups"] = 1


@breaks("caps_hold")
def the_queue_has_too_many_bytes(history: History) -> None:
    calls(history, "view")[0].got["policy"]["max_queued_bytes"] = 199


@breaks("caps_hold")
def a_quota_is_exceeded(history: History) -> None:
    calls(history, "view")[0].got["policy"]["quota_groups"] = 1


# ── 5: staleness ─────────────────────────────────────────────────────────────


@breaks("batches_are_fresh")
def a_batch_holds_a_stale_group(history: History) -> None:
    calls(history, "pull", step=1)[0].got["train_version"] = 2


@breaks("batches_are_fresh")
def a_head_is_not_what_the_worker_wrote(history: History) -> None:
    shard(calls(history, "pull", step=1)[0])[0]["head"] = 1


@breaks("batches_are_fresh")
def a_batch_says_that_it_is_stale(history: History) -> None:
    calls(history, "pull", step=0)[0].got["staleness_max"] = 2


# ── 6: leases and results ────────────────────────────────────────────────────


@breaks("leases_exclude_each_other")
def a_lost_lease_is_extended(history: History) -> None:
    calls(history, "extend", leases=["t1/0/1"])[0].got["states"] = ["LIVE"]


@breaks("leases_exclude_each_other")
def a_lease_is_given_twice(history: History) -> None:
    lease = calls(history, "lease", worker="w0")[0].got["leases"][1]
    calls(history, "lease", worker="w1")[1].got["leases"] = [lease]


@breaks("leases_exclude_each_other")
def a_task_is_given_away_under_a_live_lease(history: History) -> None:
    for op in calls(history, "return"):
        history.ops.remove(op)


@breaks("leases_exclude_each_other")
def a_lease_is_handed_back_after_its_result(history: History) -> None:
    op = again(history, calls(history, "return")[0])
    op.given.update(worker="w1", instance="w1-1", lease_id="t2/0/1")


@breaks("leases_exclude_each_other")
def another_instance_extends(history: History) -> None:
    calls(history, "extend", leases=["t0/0/1"])[0].given["instance"] = "w0-2"


@breaks("the_first_result_wins")
def two_attempts_are_accepted(history: History) -> None:
    calls(history, "push", lease_id="t1/0/1")[0].got["outcome"] = "queued"


@breaks("the_first_result_wins")
def a_result_is_not_needed_though_there_is_none(history: History) -> None:
    op = again(history, calls(history, "push", lease_id="t1/0/1")[0])
    op.given.update(group_id="t7/0", lease_id="t7/0/1", digest="digest-7")


@breaks("the_first_result_wins")
def a_valid_group_is_invalid(history: History) -> None:
    calls(history, "push", lease_id="t1/0/1")[0].got.update(outcome="invalid", error="invalid_field")


@breaks("the_first_result_wins")
def later_bytes_replace_the_first(history: History) -> None:
    op = again(history, calls(history, "push", lease_id="t0/0/1")[0])
    op.given["digest"], op.got["outcome"] = "digest-later", "duplicate"
    shard(calls(history, "pull", step=0, rank=0)[0])[0]["digest"] = "digest-later"


# ── 7: versions ──────────────────────────────────────────────────────────────


@breaks("versions_rise_by_publish_only")
def a_version_comes_from_nowhere(history: History) -> None:
    calls(history, "lease")[0].got["published"] = [2, 9]


@breaks("versions_rise_by_publish_only")
def the_version_goes_down(history: History) -> None:
    calls(history, "view")[1].got["published"] = [2, 0]


@breaks("versions_rise_by_publish_only")
def a_version_has_two_manifests(history: History) -> None:
    calls(history, "publish", version=1)[1].given["manifest"] = "/others/1"


@breaks("versions_rise_by_publish_only")
def a_former_trainer_publishes(history: History) -> None:
    op = calls(history, "publish", epoch=2, version=2)[0]
    op.reply, op.error = {"published": [2, 2], "committed_steps": 2}, None


@breaks("progress_never_falls")
def the_revision_goes_down(history: History) -> None:
    last_view(history)["revision"] = 1


@breaks("progress_never_falls")
def the_cursor_goes_down(history: History) -> None:
    last_view(history)["cursor"] = 3


@breaks("progress_never_falls")
def committed_steps_go_down(history: History) -> None:
    again(history, calls(history, "view")[-1]).got["committed_steps"] = 1


# ── the cursor ───────────────────────────────────────────────────────────────


@breaks("no_prompt_is_lost_or_repeated")
def two_feeders_feed_the_same(history: History) -> None:
    rival = history.of("submit")[1]
    rival.error, rival.reply = None, {"cursor": 4, "task_ids": ["t4", "t5", "t6", "t7"]}


@breaks("no_prompt_is_lost_or_repeated")
def a_prompt_becomes_two_tasks(history: History) -> None:
    calls(history, "lease")[1].got["leases"][0]["metadata"] = '{"item":0}'


@breaks("no_prompt_is_lost_or_repeated")
def a_resume_forgets_prompts(history: History) -> None:
    calls(history, "resume")[-1].got.update(cursor=3, feeder_state="3")


@breaks("no_prompt_is_lost_or_repeated")
def the_feeder_state_is_not_that_of_the_cursor(history: History) -> None:
    calls(history, "resume")[-1].got["feeder_state"] = "3"


@breaks("no_prompt_is_lost_or_repeated")
def a_prompt_never_becomes_a_task(history: History) -> None:
    last_view(history)["tasks"]["submitted"] = 3


@breaks("groups_are_of_their_prompts")
def a_group_is_of_another_prompt(history: History) -> None:
    shard(calls(history, "pull")[0])[0]["item"] = 3


@breaks("groups_are_of_their_prompts")
def an_id_is_given_again(history: History) -> None:
    op = again(history, calls(history, "submit")[0])
    op.given.update(expected_cursor=4, cursor=5)
    op.got.update(cursor=5, task_ids=["t3"])


@breaks("no_prompt_is_lost_or_repeated")
def a_prompt_is_never_leased(history: History) -> None:
    calls(history, "lease", worker="w1")[0].got["leases"].pop()


# ── the tests ────────────────────────────────────────────────────────────────


def test_the_tale_keeps_every_promise() -> None:
    assert broken(told()) == []


@pytest.mark.parametrize(
    ("promise", "change"),
    [(promise, change) for promise, changes in CHANGES.items() for change in changes],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_history_that_breaks_a_promise_is_found(promise: str, change: Change) -> None:
    history = told()
    change(history)
    assert [problem for problem in broken(history) if problem.startswith(f"{promise}: ")], broken(history)


def test_every_promise_can_be_broken() -> None:
    assert [promise for promise, changes in CHANGES.items() if not changes] == []


def test_a_kept_history_reads_as_it_was_written(tmp_path: Path) -> None:
    history = told()
    again = History.load(history.save(tmp_path / "history.jsonl"))
    assert again.ops == history.ops
    assert again.now == history.now
    a_lost_lease_is_extended(again)
    assert broken(again) != broken(history)


# ── losses ───────────────────────────────────────────────────────────────────


def lose_the_second_step(history: History, *, told_so: bool) -> None:
    """A failover before the last view: of the last two groups the store knows nothing any more."""
    events(history)[-4:] = []
    resume = calls(history, "resume")[-1]
    at = history.ops.index(resume)
    loss = Op("nemesis", "failover", {"loses": True}, resume.begin - 1, reply={}, end=resume.begin - 1)
    resume.got["next_unassembled_step"] = 1
    history.ops[at:] = [loss, resume, *(op for op in history.ops[at:] if op.kind in ("view", "recording"))]
    view, before = last_view(history), calls(history, "view")[1].got
    for name in ("groups", "environments", "tasks"):
        view[name] = before[name]
    view["groups"]["delivered"], view["groups"]["accepted"] = [0] * 4, view["groups"]["trained"]
    view.update(next_step=1, committed_steps=1, published=[3, 1])
    if told_so:
        history.note("w0", "met", reason="store_rolled_back")


def test_losses_must_be_told() -> None:
    history = told()
    lose_the_second_step(history, told_so=False)
    assert broken(history) == ["acknowledged_groups_are_kept: 2 acknowledged groups are lost, and nobody was told"]


def test_losses_that_were_told_are_no_breach_where_they_may_happen() -> None:
    history = told()
    lose_the_second_step(history, told_so=True)
    assert broken(history) == []
    (failover,) = calls(history, "failover")
    failover.given["loses"] = False
    assert any("is nowhere" in problem for problem in broken(history))
