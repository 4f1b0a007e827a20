"""Rules over the groups that a worker pushes, and over the partial rollouts that it hands back."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from buffer_conformance.record import Record
from buffer_conformance.rules.rule import Finding, rule
from buffer_conformance.rules.views import HeldLease, Push, ends_within, leases, pushes, reports, stamp
from buffer_wire.errors import InvalidField
from buffer_wire.layout import LOGPROBS, LOSS_MASK, TOKEN_IDS, read_payload
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2, tasks_pb2

PUSHED_AGAIN_S = 10.0
_SETTLING_S = 2.0


def _bodies(record: Record) -> Iterator[tuple[str, groups_pb2.Group, bool, HeldLease | None]]:
    """Distinct groups and partial rollouts, as (call that carried it, group, whether it is a partial rollout, its
    lease).
    """
    held = leases(record)
    seen: set[bytes] = set()
    for push in pushes(record):
        if push.body not in seen:
            seen.add(push.body)
            yield str(push), push.group, False, held.get(push.lease_id)
    for call in record.of("ReturnLeases"):
        for back in call.request.returns:
            if back.HasField("partial_rollout"):
                where = f"{call}, partial rollout of {back.lease_id}"
                yield where, back.partial_rollout, True, held.get(back.lease_id)


@rule("W5", "Pushed groups have the form that the contract states.", "Groups and payloads")
def has_form(record: Record, finding: Finding) -> None:
    """Check header, columns, spans and values of every pushed group and partial rollout."""
    for where, group, partial, _ in _bodies(record):
        wrong = _form_fault(group, partial_rollout=partial)
        finding.expect(not wrong, f"{where}: {wrong}")


def _form_fault(group: groups_pb2.Group, *, partial_rollout: bool) -> str:
    # What a worker has written to the store has passed this by.
    stored = group.HasField("stored") and not partial_rollout
    try:
        check_group(group.header, None if stored else len(group.payload), partial_rollout=partial_rollout)
    except InvalidField as error:
        return error.message
    if stored:
        return ""
    columns: dict[str, Any] = read_payload(group.header, group.payload)
    return next(_column_faults(group.header, columns[LOSS_MASK], columns[LOGPROBS]), "")


def _column_faults(header: groups_pb2.GroupHeader, mask: Any, logprobs: Any) -> Iterator[str]:  # noqa: ANN401 - arrays
    if mask.max(initial=0) > 1:
        yield f"loss_mask holds {mask.max()}, not only 0 and 1"
    if not np.isfinite(logprobs).all():
        yield "logprobs holds a number that is not finite"
    if (logprobs > 0).any():
        yield f"logprobs holds {logprobs.max():.3f}, a probability above 1"
    if logprobs[mask == 0].any():
        yield f"logprobs holds {logprobs[mask == 0].min():.3f} at a token that the mask leaves out, not 0"
    start = 0
    for i, sample in enumerate(header.samples):
        rows = mask[start : start + sample.tokens]
        if rows[: sample.prompt_len].any():
            yield f"loss_mask of sample {i} is set within the prompt"
        if int(rows.sum()) != sample.loss_tokens:
            yield f"sample {i} states {sample.loss_tokens} loss_tokens, its mask has {int(rows.sum())}"
        start += sample.tokens


@rule("W11", "A group is that of its task: prompt, metadata, environment, size.", "Groups and payloads")
def is_of_its_task(record: Record, finding: Finding) -> None:
    """Compare every pushed group and partial rollout with the task of its lease."""
    for where, group, partial, held in _bodies(record):
        if held is None:
            finding.expect(not group.header.lease_id, f"{where}: it was never leased to this worker")
            continue
        wrong = task_fault(group, held, partial=partial)
        finding.expect(not wrong, f"{where}: {wrong}")


def task_fault(group: groups_pb2.Group, held: HeldLease, *, partial: bool) -> str:
    """Fault of a group against its lease's task, or nothing. Of a trajectory's rows only the first has its prompt."""
    header, task = group.header, held.lease.task
    stated = {
        "task_id": (header.task_id, task.task_id),
        "environment": (header.environment, task.environment),
        "number of trajectories": (header.samples[-1].trajectory or len(header.samples), task.group_size),
    }
    if not partial:
        # What is only handed back is not for the trainer.
        stated["metadata_json"] = (header.metadata_json, task.metadata_json)
        stated["incarnation"] = (header.incarnation, held.lease.incarnation)
    for name, (is_, should) in stated.items():
        if is_ != should:
            return f"{name} is {is_!r}, the task's is {should!r}"
    if wrong := _images_fault(header, task):
        return wrong
    try:
        ids = read_payload(header, group.payload)[TOKEN_IDS]
    except (ValueError, KeyError, IndexError):
        return ""  # A matter of its form.
    prompt, start = list(task.prompt_token_ids), 0
    for i, sample in enumerate(header.samples):
        given = ids[start : start + sample.prompt_len].tolist()
        is_further = 0 < sample.trajectory == header.samples[i - 1].trajectory and i > 0
        if prompt and given != prompt and not is_further:
            return f"sample {i} begins with tokens {given[:8]}, the task's prompt is {prompt[:8]}"
        if sample.loss_tokens > task.sampling.max_new_tokens:
            most = task.sampling.max_new_tokens
            return f"sample {i} has {sample.loss_tokens} generated tokens, max_new_tokens is {most}"
        start += sample.tokens
    return ""


def _images_fault(header: groups_pb2.GroupHeader, task: tasks_pb2.Task) -> str:
    """Fault of a group's images against the task's; of images in messages nobody knows the places."""
    if task.messages:
        return ""
    given = [groups_pb2.ImageRef.FromString(image.SerializeToString()) for image in header.images]
    for image, asked in zip(given, task.images, strict=False):
        if not asked.sha256:
            image.ClearField("sha256")  # The worker has found it out.
    if given != list(task.images):
        return f"it has {len(given)} images, the task has {len(task.images)}, or they are others"
    return ""


@rule("W12", "Tokens state versions that the worker's engines had loaded.", "Numbering")
def states_loaded_versions(record: Record, finding: Finding) -> None:
    """Compare the versions of spans with those that the worker's engines were reported with."""
    said = [
        (exchange.began_s, stamp(report.loaded)) for found in reports(record).values() for exchange, report in found
    ]
    held, judged = leases(record), set[bytes]()
    for push in pushes(record):
        if push.body in judged:
            continue
        judged.add(push.body)
        known = {version for at, version in said if at <= push.at_s + _SETTLING_S}
        known |= _inherited(held.get(push.lease_id))
        stated = {stamp(span.version) for sample in push.group.header.samples for span in sample.spans}
        strange = sorted(stated - known)
        finding.expect(
            not strange,
            f"{push}: tokens of version {strange[:1]}, which none of its engines was reported with ({sorted(known)})",
        )


def _inherited(held: HeldLease | None) -> set[tuple[int, int]]:
    """Versions of the partial rollout that came with the lease."""
    samples = held.lease.partial_rollout.header.samples if held is not None else ()
    return {stamp(span.version) for sample in samples for span in sample.spans}


@rule("W6", "A group that got no answer is pushed again, byte for byte.", "What is promised")
def is_pushed_again(record: Record, finding: Finding) -> None:
    """Compare each push that got no answer with the next push of its group."""
    by_lease: dict[str, list[Push]] = {}
    for push in pushes(record):
        by_lease.setdefault(push.lease_id or push.group.header.task_id, []).append(push)
    held = leases(record)
    for lease_id, tries in by_lease.items():
        ended = min((push.acked_s for push in tries if push.is_final), default=float("inf"))
        for before, after in zip(tries, [*tries[1:], None], strict=True):
            if before.ack is not None:
                continue
            finding.exercised += 1
            lost = lease_id in held and held[lease_id].ended_s < float("inf") and ended == float("inf")
            if after is None:
                over = before.exchange.ended_s
                if not (lost or ends_within(record, over, PUSHED_AGAIN_S) or over == float("inf")):
                    finding.violations.append(f"{before} got no answer ({_why(before)}) and was not pushed again")
            elif after.body != before.body:
                finding.violations.append(f"{after} is not byte for byte what {before} was, which got no answer")


def _why(push: Push) -> str:
    return push.exchange.fault or push.exchange.status or "the stream is still open"
