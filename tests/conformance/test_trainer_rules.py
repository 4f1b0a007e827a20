"""Each rule for trainers is broken, alone, by a record that shows its defect; our trainer's own record breaks none."""

from collections.abc import Callable

import pytest

from buffer_conformance.record import Exchange, Record
from buffer_conformance.rules.rule import Outcome, judged
from buffer_conformance.rules.trainer import TRAINER_RULES
from rollout_buffer.v1 import common_pb2
from tests.conformance.falsify import after, calls, change, remember

LOST = "the reply was lost"


def broken(record: Record) -> dict[str, list[str]]:
    return {v.rule.id: list(v.violations) for v in judged(TRAINER_RULES, record) if v.outcome is Outcome.FAILED}


def test_our_trainer_breaks_no_rule_and_exercises_every_one(of_our_trainer: Record) -> None:
    verdicts = judged(TRAINER_RULES, of_our_trainer)
    assert {v.rule.id: (str(v.outcome), v.violations) for v in verdicts} == {
        rule.id: ("passed", ()) for rule in TRAINER_RULES
    }
    lost = {exchange.method for exchange in of_our_trainer.exchanges if exchange.fault == LOST}
    assert lost == {"Resume", "SubmitTasks", "PullBatch", "Publish", "Commit", "Checkpoint", "Reject"}


def without(record: Record, which: Callable[[Exchange], bool]) -> None:
    kept = [exchange for exchange in record.exchanges if not which(exchange)]
    assert len(kept) < len(record.exchanges)
    record.exchanges = kept
    remember(record)


def answered(call: Exchange) -> bool:
    return call.reply is not None


def repeat_of_lost(record: Record, method: str) -> Exchange:
    lost = calls(record, method, lambda call: call.fault == LOST)[0]
    return calls(record, method, lambda call: call.began_s > lost.began_s)[0]


def names_a_term_first(record: Record) -> None:
    resumed = calls(record, "Resume", answered)[0]
    first = calls(record, "SubmitTasks", answered)[0]
    early = after(record, resumed.replied_s - 0.001, first)
    early.requests[0].message.request_id = "early"
    early.requests[0].message.expected_cursor = 0
    early.status, early.replies = "FAILED_PRECONDITION", []
    early.error = common_pb2.ErrorDetail(reason="stale_term")
    change(early)
    change(first, expected_cursor=0)


def submits_from_another_cursor(record: Record) -> None:
    call = calls(record, "SubmitTasks", answered)[-1]
    change(call, expected_cursor=call.request.expected_cursor + 1)


def submits_other_tasks_again(record: Record) -> None:
    repeat = repeat_of_lost(record, "SubmitTasks")
    del repeat.requests[0].message.tasks[0]
    change(repeat)


def submits_anew(record: Record) -> None:
    change(repeat_of_lost(record, "SubmitTasks"), request_id="another")


def skips_a_step(record: Record) -> None:
    pulls = calls(record, "PullBatch", lambda call: call.status == "OK")
    change(pulls[3], step=pulls[3].request.step + 5)


def pulls_another_size_again(record: Record) -> None:
    change(repeat_of_lost(record, "PullBatch"), batch_groups=7)


def commits_ahead(record: Record) -> None:
    call = calls(record, "Publish", answered)[3]
    change(call, commit_through_step=call.request.commit_through_step + 5)


def publishes_an_older_version(record: Record) -> None:
    call = calls(record, "Publish", answered)[3]
    version = call.request.version
    older = after(record, call.replied_s + 0.001, call)
    change(older, version=version - 2)


def checkpoints_ahead(record: Record) -> None:
    call = calls(record, "Checkpoint", answered)[0]
    change(call, through_step=call.request.through_step + 5)


def commits_ahead_in_a_pull(record: Record) -> None:
    call = calls(record, "PullBatch", answered)[0]
    change(call, commit_through_step=call.request.step)


def checkpoints_ahead_in_a_pull(record: Record) -> None:
    call = calls(record, "PullBatch", answered)[0]
    change(call, checkpoint_through_step=call.request.step)


def does_not_end(record: Record) -> None:
    record.marks = [mark for mark in record.marks if mark.kind != "exit"]


def resumes_after_stale_term(record: Record) -> None:
    taken_over = record.marked("taken_over")[0].at_s
    told = [call for call in record.exchanges if call.error is not None and call.error.reason == "stale_term"]
    stale = min((call for call in told if call.ended_s >= taken_over), key=lambda call: call.ended_s)
    made = after(record, stale.ended_s + 0.01, calls(record, "Resume", answered)[0])
    made.requests[0].message.request_id = "fight"
    change(made)


def forgets_the_revision(record: Record) -> None:
    taken_over = record.marked("taken_over")[0].at_s
    call = calls(record, "Publish", lambda call: call.began_s < taken_over)[-1]
    call.requests[0].message.run.seen_revision = 1
    change(call)


def publishes_another_manifest_again(record: Record) -> None:
    lost = calls(record, "Publish", lambda call: call.fault == LOST)[0]
    repeat = repeat_of_lost(record, "Publish")
    repeat.requests[0].message.ClearField("commit_through_step")
    change(repeat)
    assert lost.request.version == repeat.request.version


def does_not_publish_again(record: Record) -> None:
    repeat = repeat_of_lost(record, "Publish")
    following = calls(record, "Publish", lambda call: call.request.version > repeat.request.version)[0]

    def is_gone(call: Exchange) -> bool:
        # A checkpoint in between would speak of what the publish was to commit.
        return call is repeat or (call.method == "Checkpoint" and repeat.began_s < call.began_s < following.began_s)

    without(record, is_gone)


def resumes_anew(record: Record) -> None:
    change(repeat_of_lost(record, "Resume"), request_id="another")


def does_not_checkpoint_again(record: Record) -> None:
    lost = calls(record, "Checkpoint", lambda call: call.fault == LOST)[0]
    without(record, lambda call: call.method == "Checkpoint" and call.began_s > lost.began_s)


def does_not_repeat_a_pulls_checkpoint(record: Record) -> None:
    # The last one may be unanswered because the session ended, with no checkpoint after it.
    last_s = calls(record, "Checkpoint", answered)[-1].began_s
    pull = calls(record, "PullBatch", lambda call: call.unanswered and call.began_s < last_s)[-1]
    newest = calls(record, "Checkpoint", lambda call: answered(call) and call.began_s < pull.began_s)[-1]
    change(pull, checkpoint_through_step=newest.request.through_step)
    without(record, lambda call: call.method == "Checkpoint" and call.began_s > pull.began_s)


def is_refused(record: Record) -> None:
    call = calls(record, "Checkpoint", answered)[0]
    again = after(record, call.replied_s + 0.001, call)
    again.status, again.replies = "INVALID_ARGUMENT", []
    again.error = common_pb2.ErrorDetail(reason="invalid_field", message="term is 0")


def gets_stuck(record: Record) -> None:
    record.mark("stuck", name="service away", why="waited in vain for 2 more versions")


def tries_in_a_hurry(record: Record) -> None:
    paused = next(mark.at_s for mark in record.marked("scenario") if mark.data["name"] == "paused run")
    call = calls(record, "PullBatch", lambda call: call.error is not None and call.began_s > paused)[0]
    for i in range(40):
        after(record, call.ended_s + 0.01 * i, call)


def rejects_others_again(record: Record) -> None:
    repeat = repeat_of_lost(record, "Reject")
    repeat.requests[0].message.group_ids[0] = "another/0"
    change(repeat)


def rejects_what_it_never_had(record: Record) -> None:
    call = calls(record, "Reject", answered)[0]
    change(call, step=call.request.step + 100)


DEFECTS = (
    ("T1", names_a_term_first),
    ("T2", submits_from_another_cursor),
    ("T2", submits_other_tasks_again),
    ("T2", submits_anew),
    ("T3", skips_a_step),
    ("T3", pulls_another_size_again),
    ("T4", commits_ahead),
    ("T4", publishes_an_older_version),
    ("T4", commits_ahead_in_a_pull),
    ("T5", checkpoints_ahead),
    ("T5", checkpoints_ahead_in_a_pull),
    ("T6", does_not_end),
    ("T6", resumes_after_stale_term),
    ("T7", forgets_the_revision),
    ("T8", publishes_another_manifest_again),
    ("T8", does_not_publish_again),
    ("T9", resumes_anew),
    ("T10", does_not_checkpoint_again),
    ("T10", does_not_repeat_a_pulls_checkpoint),
    ("T11", is_refused),
    ("T12", gets_stuck),
    ("T13", tries_in_a_hurry),
    ("T14", rejects_others_again),
    ("T14", rejects_what_it_never_had),
)


@pytest.mark.parametrize(("rule", "defect"), DEFECTS)
def test_a_defect_breaks_its_rule_alone(rule: str, defect: Callable[[Record], None], trainer_record: Record) -> None:
    defect(trainer_record)
    found = broken(trainer_record)
    assert set(found) == {rule}, found


def test_every_rule_has_a_defect() -> None:
    assert {rule for rule, _ in DEFECTS} == {rule.id for rule in TRAINER_RULES}
