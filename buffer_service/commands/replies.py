"""Replies of the scripts: packing of arguments, unpacking of replies, refusals as errors of the contract.

A reply is one msgpack array whose first element is its tag; {'error', reason, data...} is a refusal. Where a reply
acknowledges something, {revision, proof} comes after the tag.
"""

from collections.abc import Callable
from typing import Any, cast

import msgpack

from buffer_service.domain.command import Fields
from buffer_service.domain.ops import Buffer
from buffer_service.domain.policy import MAX_ENVIRONMENTS
from buffer_wire import errors
from buffer_wire.revision import Revision


def pack(*values: object) -> bytes:
    """Arguments of a script, a revision as {revision, proof}. Bytes go as msgpack strings: cmsgpack does not know the
    bin types.
    """
    given = [(value, value.proof) if type(value) is Revision else value for value in values]
    packed: bytes = msgpack.packb(given, use_bin_type=False)
    return packed


def unpack(reply: Buffer) -> Any:  # noqa: ANN401 - whatever was packed
    """A msgpack value; strings as bytes, since payload keys, specs and names travel alike."""
    return msgpack.unpackb(reply, raw=True, strict_map_key=False)


_PAIR = b"\x92"
"""First byte of a packed array of two elements."""

_INTEGERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""Bytes of the unsigned integers of msgpack by their first byte."""


def head_of(reply: Buffer) -> tuple[bytes, int | bytes | None]:
    """Tag and first field of a reply, without unpacking the rest.

    The field is a revision's number, and None where it is neither count nor name.
    """
    at = 1 if reply[0] & 0xF0 == 0x90 else 3
    tag_end = at + 1 + (reply[at] & 0x1F)
    tag = bytes(reply[at + 1 : tag_end])
    if reply[tag_end : tag_end + 1] == _PAIR:
        tag_end += 1
    kind = reply[tag_end] if tag_end < len(reply) else 0xC0
    if kind < 0x80:
        return tag, kind
    if kind in _INTEGERS:
        return tag, int.from_bytes(reply[tag_end + 1 : tag_end + 1 + _INTEGERS[kind]])
    return tag, bytes(reply[tag_end + 1 : tag_end + 1 + (kind & 0x1F)]) if kind & 0xE0 == 0xA0 else None


def text(value: bytes) -> str:
    """A string of a reply. Error texts may have been cut inside a character."""
    return value.decode("utf-8", "replace")


_REFUSALS: dict[str, Callable[..., errors.RolloutBufferError]] = {
    "unknown_run": errors.UnknownRun,
    "unproven_revision": errors.UnprovenRevision,
    "store_rolled_back": errors.StoreRolledBack,
    "stale_term": lambda _run_id, term, current: errors.StaleTerm(term, current),
    "run_paused": errors.RunPaused,
    "failure_budget_exceeded": lambda _run_id, failed, budget, last_error: errors.FailureBudgetExceeded(
        failed, budget, last_error
    ),
    "cursor_conflict": lambda _run_id, expected, cursor: errors.CursorConflict(expected, cursor),
    "pending_full": lambda _run_id, pending, limit: errors.PendingFull(pending, limit),
    "task_exists": lambda _run_id, index, task_id: errors.InvalidField(
        f"tasks[{index}].task_id", task_id, "new to the run"
    ),
    "world_size_mismatch": lambda _run_id, world_size, expected: errors.WorldSizeMismatch(world_size, expected),
    "replay_gap": lambda _run_id, step, first_retained: errors.ReplayGap(step, first_retained),
    "step_ahead": lambda _run_id, step, next_step: errors.StepAhead(step, next_step),
    "train_version": lambda _run_id, value, published: errors.InvalidField(
        "train_version", value, f"at least the published version {published}"
    ),
    "step_train_version": lambda _run_id, value, version: errors.InvalidField(
        "train_version", value, f"{version}, that of the step's first micro-batch"
    ),
    "step_committed": lambda _run_id, step, committed: errors.InvalidField(
        "step", step, f"at least {committed}, the first that is not committed"
    ),
    "not_of_step": lambda _run_id, index, group_id, step: errors.InvalidField(
        f"group_ids[{index}]", group_id, f"a group of step {step}"
    ),
    "micro_batch_closed": lambda _run_id, value, micro_batches, step: errors.InvalidField(
        "micro_batch", value, f"below {micro_batches}, the micro-batches of step {step}"
    ),
    "micro_batch_ahead": lambda _run_id, value, micro_batches, step: errors.InvalidField(
        "micro_batch", value, f"at most {micro_batches}, the next micro-batch of step {step}"
    ),
    "batch_groups": lambda _run_id, value, most: errors.InvalidField("batch_groups", value, f"1 to {most}"),
    "equal_shards": lambda _run_id, world_size, groups: errors.InvalidField(
        "world_size", world_size, f"a divisor of batch_groups {groups} (equal_shards)"
    ),
    "equal_ranks": lambda _run_id, world_size, groups: errors.InvalidField(
        "world_size", world_size, f"at most batch_groups {groups} (equal_shards)"
    ),
    "micro_batch_size": lambda _run_id, world_size, most: errors.InvalidField(
        "world_size",
        world_size,
        f"at most {most} ranks: a micro-batch of world_size * micro_batch_groups groups must fit max_queued_groups",
    ),
    "invalid_policy": lambda _run_id, field, why: errors.InvalidPolicy(field, why),
    "policy_changed": errors.PolicyChanged,
    "environments": lambda _run_id, index, environment: errors.InvalidField(
        f"tasks[{index}].environment", environment, f"one of the run's {MAX_ENVIRONMENTS} environments"
    ),
    "deleting": lambda run_id: errors.NotReady(f"run {run_id!r} is being deleted", run_id=run_id),
    "version_conflict": lambda _run_id, version, published: errors.VersionConflict(version, published),
    "unknown_task": errors.UnknownTask,
    "unknown_evaluation": errors.UnknownEvaluation,
    "evaluation_exists": errors.EvaluationExists,
    "evaluations_full": lambda _run_id, what, value, limit: errors.EvaluationsFull(what, value, limit),
    "evaluation_version": lambda _run_id, version, published: errors.InvalidField(
        "version", version, f"{published}, the published version, or an earlier one whose manifest the run still has"
    ),
    "unknown_blob": errors.UnknownBlob,
    "blobs_full": lambda _run_id, value, limit: errors.BlobsFull(value, limit),
    "page_of_other_shards": lambda _run_id, step: errors.InvalidField(
        "page_token", f"a page of step {step}", "a token from after the last resume and split over ranks; list it anew"
    ),
    "not_committed": lambda _run_id, step, committed: errors.NotCommitted(step, committed),
}


def parse(run_id: str, reply: Buffer) -> tuple[str, Fields]:
    """Tag and fields of a reply. Raises the error that a refusal stands for."""
    tag, *fields = unpack(reply)
    if tag == b"error":
        reason, *data = fields
        raise _REFUSALS[text(reason)](run_id, *(text(d) if isinstance(d, bytes) else d for d in data))
    if fields and type(fields[0]) is list:
        number, proof = fields[0]
        fields[0] = Revision(number, text(proof))
    return text(tag), fields


def just_revision(_tag: str, fields: Fields) -> Revision:
    """The reply of an operation that returns nothing but the run's revision."""
    return cast("Revision", fields[0])


def nothing(_tag: str, _fields: Fields) -> None:
    """The reply of an operation that returns nothing."""
