"""Changes that break promises about groups: ledgers, acknowledgements, batches, caps and staleness."""

from tests.chaos.checker.events import Op
from tests.faults.changes import again, breaks, calls, events, last_view, shard
from tests.faults.history import History
from tests.faults.tale import amount

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
    events(history)[-2] = ["micro_batch", 1, 0, ["t1/0"]]


@breaks("acknowledged_groups_are_kept")
def a_group_is_lost_though_no_store_lost_it(history: History) -> None:
    events(history).append(["moved", "t3/0", "lost"])
    groups = last_view(history)["groups"]
    for unit, one in enumerate(amount(1)):
        groups["trained"][unit] -= one
        groups["lost"][unit] += one


@breaks("acknowledged_groups_are_kept")
def a_group_is_accepted_twice(history: History) -> None:
    events(history).insert(1, ["accepted", "t0/0", "queued"])


@breaks("acknowledged_groups_are_kept")
def the_ledger_calls_a_dropped_group_trained(history: History) -> None:
    events(history).append(["moved", "t3/0", "dropped_stale"])


@breaks("acknowledged_groups_are_kept")
def a_trained_group_enters_a_step_again(history: History) -> None:
    events(history).append(["micro_batch", 1, 1, ["t0/0"]])


@breaks("trained_is_what_ranks_got")
def what_came_was_never_pushed(history: History) -> None:
    shard(calls(history, "pull", term=2, step=0, rank=0)[0])[0]["digest"] = "of nobody"


@breaks("trained_is_what_ranks_got")
def a_rank_never_saw_its_shard(history: History) -> None:
    (op,) = calls(history, "pull", term=2, step=0, rank=1)
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
    shard(calls(history, "pull", term=3, rank=0)[0])[0].update(group_id="t9/0", digest="digest-9")


@breaks("no_group_is_in_two_batches")
def a_discarded_group_comes_back(history: History) -> None:
    resume = calls(history, "resume")[-1]
    resume.given["mode"], resume.got["next_unassembled_step"] = "discard", 1


@breaks("no_group_is_in_two_batches")
def a_group_is_missing_from_every_shard(history: History) -> None:
    shard(calls(history, "pull", step=0, rank=1)[0]).clear()


@breaks("a_repeated_pull_returns_the_same")
def ranks_swap_their_shards(history: History) -> None:
    op = again(history, calls(history, "pull", term=3, rank=0)[0])
    op.got["groups"] = calls(history, "pull", term=3, rank=1)[0].got["groups"]


@breaks("a_repeated_pull_returns_the_same")
def a_replay_has_other_bytes(history: History) -> None:
    shard(calls(history, "pull", term=3, rank=0)[0])[0]["digest"] = "digest-1-1"


@breaks("a_repeated_pull_returns_the_same")
def totals_change(history: History) -> None:
    again(history, calls(history, "pull", term=3, rank=0)[0]).got["totals"][3] += 1


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
