"""Changes that break promises about leases, results, versions and prompts."""

from tests.faults.changes import again, breaks, calls, last_view, shard
from tests.faults.history import History

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


@breaks("the_clock_goes_with_time")
def the_clock_jumps_although_that_of_the_store_does_not(history: History) -> None:
    calls(history, "recording")[0].got["times_ms"][-1] += 60_000


@breaks("the_clock_goes_with_time")
def the_clock_goes_back(history: History) -> None:
    calls(history, "recording")[0].got["times_ms"][-1] = 1_010


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
    op = calls(history, "publish", term=2, version=2)[0]
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
