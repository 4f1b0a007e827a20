"""Commands on groups."""

from collections.abc import Sequence
from operator import attrgetter

from buffer_service.commands.replies import nothing, pack, text
from buffer_service.domain import ops
from buffer_service.domain.command import Command, Fields, Written
from buffer_service.domain.window import length_buckets
from buffer_service.rules.groups import FACTS
from buffer_wire.revision import NO_REVISION, Revision

_REFUSED_FOR = {"first_revision": ops.PushKind.FORGOTTEN, "stored_bytes": ops.PushKind.EVALUATIONS_FULL}
"""Kinds of refusals by the field that is to blame; of every other field INVALID."""
_KINDS = {kind.value.encode(): kind for kind in ops.PushKind}


def push_portion(
    run_id: str,
    groups: Sequence[tuple[ops.GroupFacts, str]],
    payloads: Sequence[tuple[str, ops.Buffer]] = (),
    *,
    retry: bool,
    goes_on: bool = False,
    there: bytes | None = None,
    seen_revision: Revision = NO_REVISION,
) -> Command[tuple[Revision, ops.WeightVersion, list[ops.Pushed | None]]]:
    """Push at most ops.PORTION groups by their facts and payload keys, or try again those that are blocked: revision,
    published weights and outcomes. None is that of a group for which room is still being made: it is pushed again, as a
    retry that `goes_on`. Raises RunPaused, StoreOutOfMemory.
    """
    arguments = pack(seen_revision, [_pack_group(*group) for group in groups], int(retry), int(goes_on))

    def unpacked(_tag: str, fields: Fields) -> tuple[Revision, ops.WeightVersion, list[ops.Pushed | None]]:
        revision, term, version, outcomes = fields
        pushed = [_pushed(*group, outcome) for group, outcome in zip(groups, outcomes, strict=True)]
        return revision, ops.WeightVersion(term, version), pushed

    # A retry's are staged: they have been taken over.
    written = [] if retry else _written(groups)
    return Command(run_id, "push", arguments, unpacked, payloads, written, there)


def empty_trash(run_id: str, at_most: int) -> Command[list[str]]:
    """Delete payloads that nothing refers to any more, where they lie with the index: their keys."""
    return Command(run_id, "empty_trash", pack(at_most), _keys, acknowledges=False)


def payloads_of_push(
    run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]], payloads: Sequence[tuple[str, ops.Buffer]]
) -> Command[None]:
    """Payloads of a push, to be stored before what it shares a call with is known. Not to be called."""
    return Command(run_id, "push", b"", nothing, payloads, _written(groups))


def _keys(_tag: str, fields: Fields) -> list[str]:
    return [text(key) for key in fields[1]]


def _written(groups: Sequence[tuple[ops.GroupFacts, str]]) -> list[Written]:
    return [
        Written(index, key, task_of(facts.task_id, facts.lease_id))
        for index, (facts, key) in enumerate(groups)
        if facts.stored
    ]


def abandon_push(run_id: str, payload_keys: Sequence[str]) -> Command[None]:
    """Give up blocked groups: their payloads are deleted. Of a run that is gone there are none left."""
    return Command(run_id, "abandon", pack(list(payload_keys)), nothing, acknowledges=False)


def task_of(task_id: str, lease_id: str) -> str:
    """Name of a group's task on the store, by its header: that of an evaluation's is in its lease alone."""
    return lease_id.rsplit("/", 2)[0] if ops.sink_of(lease_id) is ops.TaskSink.EVALUATIONS else task_id


def _pushed(facts: ops.GroupFacts, key: str, outcome: bytes | list[bytes]) -> ops.Pushed | None:
    if outcome == b"more":
        return None
    group_id, sink = f"{facts.task_id}/{facts.incarnation}", ops.sink_of(facts.lease_id)
    if isinstance(outcome, list):
        field, value, limit = (text(part) for part in outcome)
        kind = _REFUSED_FOR.get(field, ops.PushKind.INVALID)
        return ops.Pushed(kind, group_id, "", field, value, limit, sink)
    kind = _KINDS[outcome]
    return ops.Pushed(kind, group_id, key if kind is ops.PushKind.BLOCKED else "", sink=sink)


_facts = attrgetter(*FACTS)


def _pack_group(facts: ops.GroupFacts, payload_key: str) -> tuple[object, ...]:
    """A pushed group as the script takes it: rules.groups.PUSHED."""
    head, tail = facts.head, facts.tail
    return (
        *(payload_key, head.term, head.version, tail.term, tail.version),
        *(int(facts.spans_versions), int(facts.equal_rewards), int(facts.stored)),
        [number for entry in length_buckets(facts.response_lengths).items() for number in entry],
        [number for made, tokens in facts.version_tokens for number in (made.term, made.version, tokens)],
        *_facts(facts),
    )
