"""Groups: only their headers are parsed. The body that is stored is the serialized Group as it came."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from struct import Struct
from typing import TypeAlias

from google.protobuf.message import DecodeError

from buffer_service.domain import ops
from buffer_service.rpc.convert import fields
from buffer_service.rules.filters import NO_REWARD_BOUND
from buffer_service.rules.totals import MOST, MOST_BEHIND
from buffer_wire import limits
from buffer_wire.codec import MalformedMessage, PushBundle, group_head, split_pushed, usual_head
from buffer_wire.enums import numbers
from buffer_wire.errors import EvaluationsFull, InvalidField, RolloutBufferError, UnknownLease
from buffer_wire.layout import payload_bytes
from buffer_wire.payloads.keys import NONCE_BYTES, group_checksum, part_count, payload_checksum
from buffer_wire.revision import Revision
from buffer_wire.status import to_detail
from buffer_wire.validate import GroupSummary, check_group
from rollout_buffer.v1 import common_pb2
from rollout_buffer.v1 import groups_pb2 as pb

Entry: TypeAlias = ops.NewGroup | pb.PushAck
"""A group to push, or the refusal of one that breaks a rule."""

_FINAL = (
    *(ops.PushKind.QUEUED, ops.PushKind.DUPLICATE, ops.PushKind.CLOSED),
    *(ops.PushKind.REJECTED_FULL, ops.PushKind.FILTERED, ops.PushKind.RECORDED, ops.PushKind.ADDED),
    ops.PushKind.PAYLOAD_MISSING,
)
_OUTCOMES = numbers(pb.PushOutcome, _FINAL)


def check_bundle(bundle: PushBundle, expected_sequence: int) -> None:
    """Check what would make a bundle unusable as a whole. Raises InvalidField."""
    fields.run_id(bundle.run.run_id)
    fields.count(bundle.groups, "groups", 1, limits.MAX_GROUPS_PER_BUNDLE)
    if bundle.sequence != expected_sequence:
        raise InvalidField("sequence", bundle.sequence, f"{expected_sequence}: it rises by one from 1 within a stream")


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest payloads, in bytes: of a group in one message or under one key, and of a group in parts."""

    message_bytes: int
    group_bytes: int

    def check(self, size_bytes: int, parts: int, sink: ops.TaskSink) -> None:
        """Check a payload in so many parts (0: under one key). Raises InvalidField."""
        if sink is not ops.TaskSink.QUEUE and size_bytes > self.message_bytes:
            limit = f"at most {self.message_bytes} bytes for the result of an evaluation (max_message_bytes)"
        elif parts and size_bytes > self.group_bytes:
            limit = f"at most {self.group_bytes} bytes (max_group_bytes)"
        elif not parts and size_bytes > self.message_bytes:
            limit = f"at most {self.message_bytes} bytes (max_message_bytes); in parts, {self.group_bytes}"
        else:
            return
        raise InvalidField("payload", f"{size_bytes} bytes", limit)


def new_group(body: memoryview, most: Limits) -> ops.NewGroup:
    """A checked group. Raises InvalidField."""
    try:
        head, payload, stored = split_pushed(body)
        header = pb.GroupHeader.FromString(bytes(head))
    except (MalformedMessage, DecodeError) as error:
        raise InvalidField("group", f"{len(body)} bytes", f"a serialized Group ({error})") from None
    if len(head) > limits.MAX_HEADER_BYTES:
        raise InvalidField("header", f"{len(head)} bytes", f"at most {limits.MAX_HEADER_BYTES} bytes")
    most.check(len(payload), 0, ops.TaskSink.QUEUE)
    of_stage = ops.is_of_stage(header.lease_id)
    summary = check_group(header, None if stored else len(payload), of_stage=of_stage)
    fields.number(header.stage_version, "stage_version", 0, MOST)
    if header.stage_version and not of_stage:
        raise InvalidField("stage_version", header.stage_version, "0: lease_id is of no stage")
    fields.number(header.first_revision, "first_revision", 0, MOST)
    fields.lease_id(header.lease_id, low=0)
    if stored is None:
        checksum = group_checksum(head, payload_checksum(payload))
        # Parts are for a group as it is nearly always written, since whoever checks them sees its head alone.
        parts = part_count(len(body))
        if parts and not usual_head(body, len(body)):
            parts = 0
        return ops.NewGroup(_facts(header, summary, len(body)), body, checksum, parts=parts)
    if payload:
        raise InvalidField("payload", f"{len(payload)} bytes", "none where `stored` says where it lies")
    if len(stored.nonce) != NONCE_BYTES:
        raise InvalidField("stored.nonce", f"{len(stored.nonce)} bytes", f"{NONCE_BYTES} bytes")
    lies = payload_bytes(header)
    most.check(lies, stored.parts, ops.sink_of(header.lease_id))
    size = len(group_head(head, lies)) + lies
    if stored.parts not in (0, part_count(size)):
        raise InvalidField("stored.parts", stored.parts, f"{part_count(size)} for a group of {size} bytes, or 0")
    facts = _facts(header, summary, size, stored=True)
    return ops.NewGroup(facts, b"", group_checksum(head, stored.checksum), stored.nonce, stored.parts)


def entry(body: memoryview, most: Limits) -> Entry:
    """The group to push, or the acknowledgement that refuses it."""
    try:
        return new_group(body, most)
    except InvalidField as error:
        return refusal(error)


def direct_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of the groups that their pusher has written to the store."""
    return sum([entry.facts.size_bytes for entry in entries if isinstance(entry, ops.NewGroup) and entry.facts.stored])


def _facts(header: pb.GroupHeader, summary: GroupSummary, size_bytes: int, *, stored: bool = False) -> ops.GroupFacts:
    # A checked group that is no partial rollout has a token in every sample.
    head, tail = summary.head or (0, 0), summary.tail or (0, 0)
    lengths, rewards, samples = summary.response_lengths, summary.rewards, len(header.samples)
    trained_tokens = response_tokens = sum(lengths)
    shortest, longest = min(lengths), max(lengths)
    if len(lengths) < samples:
        # Rows that are not trainable are part of the group, and decide nothing.
        lengths = [sample.tokens - sample.prompt_len for sample in header.samples]
        rewards, response_tokens = [sample.reward for sample in header.samples], sum(lengths)
    mean_reward_milli = _mean_milli(summary.mean_reward)
    is_plain = samples == summary.trajectories
    return ops.GroupFacts(
        task_id=header.task_id,
        incarnation=header.incarnation,
        lease_id=header.lease_id,
        environment=header.environment,
        samples=samples,
        tokens=summary.tokens,
        loss_tokens=summary.loss_tokens,
        size_bytes=size_bytes,
        head=(made := ops.WeightVersion(*head)),
        tail=made if head == tail else ops.WeightVersion(*tail),
        # Versions do not fall within a sample, so head and tail bound every span.
        spans_versions=head != tail,
        mean_milli=1_000 * summary.version_tokens // trained_tokens,
        equal_rewards=summary.equal_rewards,
        mean_reward_milli=mean_reward_milli,
        response_lengths=_uint32s(samples).pack(*lengths),
        rewards=_float32s(samples).pack(*rewards),
        min_response_tokens=shortest,
        max_response_tokens=longest,
        response_tokens=response_tokens,
        reward_milli=_within_bound(
            sum([round(1_000 * reward) for reward in rewards]) if is_plain else samples * mean_reward_milli
        ),
        turns=summary.turns,
        truncated_samples=summary.truncated_samples,
        failed_samples=summary.failed_samples,
        version_tokens=_version_tokens(summary.tokens_by_version, tail) if head != tail else (),
        first_revision=header.first_revision,
        stored=stored,
        trajectories=summary.trajectories,
        trajectory_rewards=_float32s(len(summary.trajectory_rewards)).pack(*summary.trajectory_rewards),
    )


def _version_tokens(
    by_version: Mapping[tuple[int, int], int], tail: tuple[int, int]
) -> list[tuple[ops.WeightVersion, int]]:
    told: Counter[tuple[int, int]] = Counter()
    for (term, version), tokens in by_version.items():
        if (term, version) != tail:
            told[term, max(version, tail[1] - MOST_BEHIND)] += tokens
    return [(ops.WeightVersion(*made), tokens) for made, tokens in sorted(told.items())]


def _mean_milli(mean: float) -> int:
    """Mean reward in thousandths, rounded down, within +-NO_REWARD_BOUND."""
    # A reward of 0.7 arrives as a float32 a little below it, and must not count as less than 700.
    return _within_bound(floor(mean * 1_000 + 0.001))


def _within_bound(milli: int) -> int:
    return max(-NO_REWARD_BOUND, min(NO_REWARD_BOUND, milli))


@lru_cache(maxsize=limits.MAX_SAMPLES)
def _uint32s(count: int) -> Struct:
    return Struct(f"<{count}I")


@lru_cache(maxsize=limits.MAX_SAMPLES)
def _float32s(count: int) -> Struct:
    return Struct(f"<{count}f")


def partial_rollout_facts(at: str, group: pb.Group, lease_id: str) -> tuple[ops.WeightVersion | None, int]:
    """Head version, or None, and kept response tokens of a checked partial rollout. Raises InvalidField."""
    header = group.header
    try:
        summary = check_group(header, len(group.payload), partial_rollout=True)
    except InvalidField as error:
        shown = error.attributes
        raise InvalidField(f"{at}.{shown['field']}", shown["value"], shown["limit"]) from None
    if group.HasField("stored"):
        raise InvalidField(f"{at}.stored", "set", "unset: a partial rollout has its payload with it")
    if header.task_id != lease_id.partition("/")[0]:
        raise InvalidField(f"{at}.task_id", header.task_id, f"the task of lease {lease_id}")
    if summary.head is None:
        return None, 0
    prompts = sum(sample.prompt_len for sample in header.samples)
    return ops.WeightVersion(*summary.head), summary.tokens - prompts


# ── acknowledgements ─────────────────────────────────────────────────────────


def to_ack(entry: Entry) -> pb.PushAck:
    """The acknowledgement of a group that the store has judged, or was refused; BLOCKED ones never get here."""
    if isinstance(entry, pb.PushAck):
        return entry
    pushed = entry.outcome
    if pushed is None:
        raise RuntimeError("the group was not pushed")
    if pushed.kind is ops.PushKind.UNKNOWN_LEASE:
        return refusal(UnknownLease(entry.facts.lease_id), pushed.group_id)
    if pushed.kind in {ops.PushKind.INVALID, ops.PushKind.FORGOTTEN}:
        return refusal(InvalidField(pushed.field, pushed.value, pushed.limit), pushed.group_id)
    if pushed.kind is ops.PushKind.EVALUATIONS_FULL:
        return refusal(EvaluationsFull(pushed.field, int(pushed.value), int(pushed.limit)), pushed.group_id)
    return pb.PushAck(outcome=_OUTCOMES[pushed.kind], group_id=pushed.group_id)


def refusal(error: RolloutBufferError, group_id: str = "") -> pb.PushAck:
    """The acknowledgement of a group that breaks a rule."""
    return pb.PushAck(outcome=pb.PUSH_OUTCOME_INVALID, group_id=group_id, error=to_detail(error))


def to_push_response(
    revision: Revision, sequence: int, acks: list[pb.PushAck], published: ops.WeightVersion
) -> pb.PushGroupsResponse:
    """The acknowledgement of a bundle."""
    weights = common_pb2.WeightVersion(term=published.term, version=published.version)
    return pb.PushGroupsResponse(
        revision=revision, revision_proof=revision.proof, sequence=sequence, acks=acks, published=weights
    )
