"""Rules for a trainer: taking over, feeding, pulling, committing, publishing, and giving way."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from buffer_conformance.record import Exchange, Record
from buffer_conformance.rules.rule import Finding, Rule, rule
from buffer_conformance.rules.shared import asked_again, goes_on, grouped, paced, seen_revision, well_formed
from buffer_conformance.rules.views import process_ends, without_run

EXIT_WITHIN_S = 30.0
GIVES_WAY_S = 5.0
"""Calls of other threads may be on their way when the trainer learns that it was replaced."""

_ENDING_S = 2.0
"""A candidate that ends so soon after a call that got no answer need not ask again."""

_OF_A_TERM = (
    *("SubmitTasks", "PullBatch", "Reject", "Commit", "Checkpoint"),
    *("Publish", "PlanCollective", "SubmitEvaluation"),
)
_PULL_MAY_DIFFER = ("train_version", "wait_ms", "direct", "commit_through_step", "checkpoint_through_step")


@dataclass(slots=True)
class Term:
    """A term: the resume that began it, and the calls that name it, in order of arrival."""

    number: int
    resumed: Exchange | None
    calls: list[Exchange] = field(default_factory=list)

    def of(self, *methods: str) -> Iterator[Exchange]:
        """Calls of these methods."""
        return (call for call in self.calls if call.method in methods)

    @property
    def start(self) -> Any:  # noqa: ANN401 - a ResumeResponse
        """Reply to the resume that began the term; None where none is known."""
        return self.resumed.reply if self.resumed is not None else None


def terms(record: Record) -> list[Term]:
    """Terms that the candidate was given, or named in a call."""
    found: dict[int, Term] = {}
    for call in record.of("Resume", *_OF_A_TERM):
        if call.method == "Resume":
            if call.reply is not None:
                found.setdefault(call.reply.term, Term(call.reply.term, call))
        else:
            number = call.request.term
            found.setdefault(number, Term(number, None)).calls.append(call)
    return list(found.values())


def _begun(record: Record) -> list[Term]:
    """Terms whose resume is known."""
    return [term for term in terms(record) if term.start is not None]


@rule("T1", "A trainer resumes before it names a term.", "Commit, checkpoint, resume")
def _resumes_first(record: Record, finding: Finding) -> None:
    for term in terms(record):
        for call in term.calls[:1]:
            resumed = term.resumed
            finding.expect(
                resumed is not None and resumed.replied_s <= call.began_s,
                f"{call} names term {term.number}, which no resume had been given",
            )


@rule(
    "T2",
    "Submits move the cursor from where it was; one that got no answer is repeated as it was.",
    "Commit, checkpoint, resume",
)
def _feeds_by_cursor(record: Record, finding: Finding) -> None:
    asked_again(
        record,
        finding,
        record.of("SubmitTasks"),
        lambda call: (call.request.term, call.request.request_id),
        without_run,
        of_one_kind=lambda call: call.request.term,
        said="the same submit",
    )
    for term in _begun(record):
        cursor, judged = term.start.cursor, set[str]()
        for call in term.of("SubmitTasks"):
            request = call.request
            if request.request_id not in judged:
                judged.add(request.request_id)
                finding.expect(
                    request.expected_cursor == cursor and request.cursor >= cursor,
                    f"{call} moves the cursor from {request.expected_cursor} to {request.cursor}; it was {cursor}",
                )
            if call.reply is not None:
                cursor = max(cursor, call.reply.cursor)


def _is_whole(call: Exchange) -> bool:
    """True when all of a shard reached the candidate."""
    delivered = [entry.message for entry in call.replies if entry.delivered and entry.message is not None]
    wanted = next((message.batch.shard_groups for message in delivered if message.HasField("batch")), None)
    return wanted is not None and sum(len(message.groups) for message in delivered) >= wanted


def _info(call: Exchange) -> Any:  # noqa: ANN401 - a BatchInfo
    return next(entry.message.batch for entry in call.replies if entry.message.HasField("batch"))


def _place(call: Exchange) -> tuple[int, int]:
    return call.request.step, call.request.micro_batch


@rule("T3", "Steps and micro-batches are pulled in order; what was not received is pulled again.", "Numbering")
def _pulls_in_order(record: Record, finding: Finding) -> None:
    for term in _begun(record):
        for calls in grouped(term.of("PullBatch"), lambda call: call.request.rank):
            due = (term.start.next_step, 0)
            for call in calls:
                finding.expect(
                    _place(call) <= due,
                    f"{call} asks for step {call.request.step}, micro-batch {call.request.micro_batch}, before step "
                    f"{due[0]}, "
                    f"micro-batch {due[1]} was received",
                )
                if _place(call) == due and _is_whole(call):
                    due = (due[0] + 1, 0) if _info(call).final else (due[0], due[1] + 1)
            for before, after in (pair for same in _apart(term, calls) for pair in pairwise(same)):
                if _is_whole(before) or before.began_s > after.began_s:
                    continue
                finding.expect(
                    without_run(after, *_PULL_MAY_DIFFER) == without_run(before, *_PULL_MAY_DIFFER),
                    f"{after} does not repeat {before}, which was not received whole ({before.fault or before.status})",
                )


def _apart(term: Term, calls: Iterable[Exchange]) -> Iterable[list[Exchange]]:
    """Pulls of a rank; those that make up for rejected groups, which may go on beside the next step's, each apart."""
    given_back = {call.request.step for call in term.of("Reject")}

    def place(call: Exchange) -> Hashable:
        request = call.request
        return _place(call) if request.step in given_back and request.micro_batch > 0 else None

    return grouped(calls, place)


def _received(term: Term, before_s: float) -> int:
    """Steps that are in the trainer's hands at a time: all below this one."""
    whole = [
        int(call.request.step) + 1
        for call in term.of("PullBatch")
        if _is_whole(call) and _info(call).final and call.replies[-1].at_s <= before_s
    ]
    return max([int(term.start.next_step), *whole])


def _commits(call: Exchange) -> int | None:
    """Step through which a call commits; None for a call that does not."""
    request = call.request
    if call.method == "Commit":
        return int(request.through_step)
    said = call.method != "Checkpoint" and request.HasField("commit_through_step")
    return int(request.commit_through_step) if said else None


def _checkpoints(call: Exchange) -> int | None:
    """Step through which a call checkpoints; None for a call that does not."""
    request = call.request
    if call.method == "Checkpoint":
        return int(request.through_step)
    said = call.method == "PullBatch" and request.HasField("checkpoint_through_step")
    return int(request.checkpoint_through_step) if said else None


@rule("T4", "Versions rise, and only what was received is committed.", "Numbering")
def _commits_what_it_has(record: Record, finding: Finding) -> None:
    for term in _begun(record):
        newest = (term.start.version, b"")
        for call in term.of("Commit", "Publish", "PullBatch"):
            if (through := _commits(call)) is not None:
                steps = _received(term, call.began_s)
                finding.expect(
                    through < steps, f"{call} commits through step {through}; received were the steps below {steps}"
                )
            if call.method == "Publish":
                version, content = call.request.version, without_run(call, "commit_through_step")
                finding.expect(
                    version > newest[0] or (version, content) == newest,
                    f"{call} publishes version {version} after version {newest[0]}",
                )
                if version >= newest[0]:
                    newest = (version, content)


@rule("T5", "Only what is committed is checkpointed.", "Commit, checkpoint, resume")
def _checkpoints_what_is_committed(record: Record, finding: Finding) -> None:
    for term in _begun(record):
        committed = term.start.next_step
        for call in term.of("Commit", "Publish", "Checkpoint", "PullBatch"):
            through, commits = _checkpoints(call), _commits(call)
            if through is not None:
                # A pull commits before it checkpoints.
                steps = committed if commits is None else max(committed, commits + 1)
                finding.expect(
                    through < steps,
                    f"{call} checkpoints through step {through}; committed were the steps below {steps}",
                )
            if call.method != "Checkpoint" and call.reply is not None:
                reply = call.reply.batch if call.method == "PullBatch" else call.reply
                committed = max(committed, reply.committed_steps)


@rule("T6", "A trainer that is told stale_term ends, and does not resume.", "Commit, checkpoint, resume")
def _gives_way(record: Record, finding: Finding) -> None:
    for taken in record.marked("taken_over"):
        ended = next((mark.at_s for mark in record.marked("exit") if mark.at_s >= taken.at_s), None)
        finding.expect(ended is not None, f"it still ran {EXIT_WITHIN_S:.0f} s after it was told stale_term")
        again = next((mark.at_s for mark in record.marked("start") if mark.at_s > taken.at_s), float("inf"))
        told = [
            call.ended_s
            for call in record.exchanges
            if call.error is not None and call.error.reason == "stale_term" and call.ended_s >= taken.at_s
        ]
        since = min(told, default=float("inf"))
        for call in record.of("Resume", *_OF_A_TERM):
            if not since < call.began_s < again:
                continue
            late = call.began_s > since + GIVES_WAY_S or call.method == "Resume"
            finding.expect(not late, f"{call} came after it was told stale_term at {since:.1f} s")


@rule("T8", "A publish that got no answer is repeated as it was.", "What is promised")
def _publishes_again(record: Record, finding: Finding) -> None:
    asked_again(
        record,
        finding,
        record.of("Publish"),
        lambda call: (call.request.term, call.request.version),
        without_run,
        of_one_kind=lambda call: call.request.term,
        said="the same publish, manifest and commit included",
    )


@rule("T9", "A resume that got no answer is repeated under its request id.", "Commit, checkpoint, resume")
def _resumes_again(record: Record, finding: Finding) -> None:
    """A new request would take the run from the trainer itself."""
    asked_again(
        record,
        finding,
        record.of("Resume"),
        lambda call: call.request.request_id,
        without_run,
        of_one_kind=lambda _: None,
        said="the same resume",
    )


@rule("T10", "A commit or checkpoint that got no answer is said again.", "Commit, checkpoint, resume")
def _commits_again(record: Record, finding: Finding) -> None:
    """A commit of a later step says what the unanswered one said."""
    calls = list(record.of("Commit", "Checkpoint", "Publish", "PullBatch"))
    for call in calls:
        if call.method == "Publish" or not call.unanswered or _is_last(record, call):
            continue
        later = [other for other in calls if other.began_s > call.began_s and other.request.term == call.request.term]
        for said_by in (_commits, _checkpoints):
            if (through := said_by(call)) is not None:
                said = [step for other in later if (step := said_by(other)) is not None]
                finding.expect(
                    any(step >= through for step in said),
                    f"{call} got no answer ({call.fault or call.status}) and was not asked again",
                )


@rule("T14", "What is rejected was received; a rejection that got no answer is repeated.", "A step given back in part")
def _rejects_what_it_has(record: Record, finding: Finding) -> None:
    asked_again(
        record,
        finding,
        (call for call in record.of("Reject") if call.request.group_ids),
        lambda call: (call.request.term, call.request.step, tuple(call.request.group_ids)),
        without_run,
        of_one_kind=lambda call: call.request.term,
        said="the same rejection",
    )
    for term in _begun(record):
        for call in term.of("Reject"):
            got = any(
                pull.request.step == call.request.step and _is_whole(pull) and pull.began_s < call.began_s
                for pull in term.of("PullBatch")
            )
            finding.expect(got, f"{call} rejects groups of step {call.request.step}, of which nothing was received")


def _is_last(record: Record, call: Exchange) -> bool:
    """True when the candidate ended, or was replaced, soon after."""
    ends = process_ends(record)
    last = record.exchanges[-1].began_s
    return any(0 <= end - call.ended_s < _ENDING_S for end in ends) or last - call.began_s < _ENDING_S


@rule("T13", "Calls that fail are not repeated in a hurry.", "Errors")
def _trainer_pace(record: Record, finding: Finding) -> None:

    def key(call: Exchange) -> Hashable:
        return call.method, call.request.rank if call.method == "PullBatch" else 0

    calls = grouped(record.of("Resume", *_OF_A_TERM), key)
    paced(finding, calls, lambda call: call.status not in ("OK", ""))


TRAINER_RULES = (
    _resumes_first,
    _feeds_by_cursor,
    _pulls_in_order,
    _commits_what_it_has,
    _checkpoints_what_is_committed,
    _gives_way,
    Rule("T7", "seen_revision is the highest revision received, with its proof.", "What is promised", seen_revision),
    _publishes_again,
    _resumes_again,
    _commits_again,
    Rule("T11", "No request is refused for its form.", "What is promised", well_formed),
    Rule("T12", "Training goes on after every fault.", "What is promised", goes_on),
    _trainer_pace,
    _rejects_what_it_has,
)
"""Rules for trainers; docs/conformance.md lists them."""
