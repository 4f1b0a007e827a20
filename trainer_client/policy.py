"""Policy of a run as a trainer states it: batches, queue, staleness, filters, leases and durability.

    Policy(batch_groups=256, max_staleness=2, order="priority", environments={"easy": 1, "hard": Environment(share=3)})

Invariant: a field that is None is not sent, so that the service's default, or the preset's, applies. `run().policy` has
every field filled in with the value in force.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal, TypeAlias

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2 as pb
from trainer_client.field_names import NamedFields, check_names

OverflowAction: TypeAlias = Literal["drop_oldest", "block", "reject"]
StaleAction: TypeAlias = Literal["drop", "recycle", "wait"]
StalenessMeasure: TypeAlias = Literal["head", "mean", "tail"]
TargetMeasure: TypeAlias = Literal["head", "token"]
Order: TypeAlias = Literal["fifo", "lifo", "stalest_first", "priority", "submission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(NamedFields):
    """Share and priority of one environment, for tasks that wait for a lease and for queued groups alike; how fast its
    tasks may begin.
    """

    share: int | None = None
    """Weight among the environments that have work, 0 to 10,000; 0: only when no other has any. None: 1 if any
    environment has a share, else there is no division."""
    priority: int | None = None
    """Priority against other environments, 0 to 255, in place of the tasks' own. None: their own."""
    starts_per_minute: int | None = None
    """Tasks that may be leased a minute, over all workers, 1 to 1,000,000; others go past. None: any number."""
    start_burst: int | None = None
    """Number of these at once after a pause; None: 1, which spaces them evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(NamedFields):
    """Rules of a run for its groups and tasks. Bounds are the service's; an error names the field that breaks one."""

    preset: str | None = None
    """Name of a policy that the unset fields start from, for example "miles" or "areal(4)"."""

    # ── batches ──────────────────────────────────────────────────────────────
    batch_groups: int | None = None
    """Number of groups of a batch, N, 1 to 65,536; default 32."""
    batch_tokens: int | None = None
    """Token budget: a batch ends before the group that would exceed it. Default 0, none."""
    equal_shards: bool | None = None
    """True gives every rank the same number of groups; default False."""
    micro_batch_groups: int | None = None
    """Number of groups n per rank and micro-batch. Batches are assembled in micro-batches of world_size · n groups as
    soon as these are there. Default 0: in whole batches.
    """
    order: Order | None = None
    """Order in which queued groups enter batches; default fifo."""
    order_window_groups: int | None = None
    """Window W of the order submission: no batch takes a group that began W or more groups after one that is still
    generated. Default 0: batches wait for nobody.
    """
    longest_first: bool | None = None
    """Lease tasks that are submitted together by their expected_tokens, the longest first; default False."""
    environments: Mapping[str, Environment | int] = field(default_factory=dict)
    """Shares and priorities by the environment's name; a number is its share."""

    # ── the queue ────────────────────────────────────────────────────────────
    max_queued_groups: int | None = None
    """Cap on queued groups; default: batch_groups (queue factor 1)."""
    max_queued_tokens: int | None = None
    """Cap on tokens of all queued samples; default 0, no cap."""
    max_queued_bytes: int | None = None
    """Cap on bytes of all queued groups; default 8 GiB."""
    overflow_action: OverflowAction | None = None
    """Action on a push into a full queue; default drop_oldest."""
    quota_groups: int | None = None
    """Cap on groups that are queued, forming or delivered; default 0, none."""
    quota_tokens: int | None = None
    """Cap on tokens of groups that are queued, forming or delivered; default 0, none."""
    quota_bytes: int | None = None
    """Cap on bytes of groups that are queued, forming or delivered; default 0, none."""

    # ── staleness ────────────────────────────────────────────────────────────
    max_staleness: int | None = None
    """Largest staleness η, in versions: staler groups never reach a batch. Default: no gate."""
    staleness_measure: StalenessMeasure | None = None
    """Version of a group that max_staleness is compared with; default head."""
    stale_action: StaleAction | None = None
    """Action on a group that is too stale; default drop."""
    max_incarnations: int | None = None
    """Cap on incarnations of a task that recycling may start; default 0, no cap."""
    cancel_stale_leases: bool | None = None
    """Take back leases whose group could no longer be fresh; default False."""
    max_version_spread: int | None = None
    """Largest number of versions by which a partial rollout may be behind its engine; an older one is given up.
    Default: no bound.
    """

    # ── filters ──────────────────────────────────────────────────────────────
    filter_equal_rewards: bool | None = None
    """Filter groups whose rewards are all equal; default False."""
    filter_min_response_tokens: int | None = None
    """Filter groups with a shorter response; default 0."""
    filter_max_response_tokens: int | None = None
    """Filter groups with a longer response; default 0, no bound."""
    filter_min_mean_reward_milli: int | None = None
    """Filter groups whose mean reward is lower, in thousandths. Default: no bound."""
    filter_max_mean_reward_milli: int | None = None
    """Filter groups whose mean reward is higher, in thousandths. Default: no bound."""
    min_acceptance_milli: int | None = None
    """Share of recent groups, in thousandths, below which the filter is reported to starve the run; default 100."""

    # ── stages ───────────────────────────────────────────────────────────────
    stages: Sequence[str] = ()
    """Names of the stages that accepted groups pass in this order: in each a worker adds columns to them. The stage
    "rewards" writes rewards.
    """

    # ── reuse ────────────────────────────────────────────────────────────────
    max_uses: int | None = None
    """Number of steps that may train on a group, 1 to 8; default 1, each is trained on once."""
    reuse_share_milli: int | None = None
    """Groups that a step uses again, at most, beside its own, in thousandths of batch_groups. With max_uses alone."""
    reuse_max_staleness: int | None = None
    """Largest staleness, in versions by the head, at which a group is used again. With max_uses alone."""

    # ── tasks and leases ─────────────────────────────────────────────────────
    max_inflight_groups: int | None = None
    """Cap on groups being generated; default 0, no cap."""
    reserve_queue_space: bool | None = None
    """Lease only what would still fit into the queue; default False."""
    max_lookahead: int | None = None
    """AReaL's cap: at most (this + 1) · batches_per_publish batches may exist that no publish covers. Default: no cap.
    """
    lease_ttl_ms: int | None = None
    """Lifetime of a lease without a heartbeat, in ms; default 60,000."""
    max_attempts: int | None = None
    """Largest number of failed attempts of one incarnation; with the last of them the task fails. Default 5."""
    retry_backoff_ms: int | None = None
    """Back-off after a task's first failed attempt, in ms; default 500."""
    failure_budget: int | None = None
    """Largest number of failed tasks that the run survives. Default: no limit."""
    max_pending_tasks: int | None = None
    """Cap on pending tasks; default 10,000."""

    # ── the trainer ──────────────────────────────────────────────────────────
    prefetch_batches: int | None = None
    """Batches pulled ahead of the one being trained, 0 to 64; default 0. A session fills it in."""
    batches_per_publish: int | None = None
    """Batches trained between two publishes; default 1."""
    retained_steps: int | None = None
    """Committed steps kept for replay when the trainer does not checkpoint; default 64."""
    max_retained_bytes: int | None = None
    """Committed groups kept for replay, in bytes; default 0, no bound."""

    # ── record and durability ────────────────────────────────────────────────
    record_groups: bool | None = None
    """Keep an event of everything that happens to groups; default False."""
    wait_replicas: int | None = None
    """Number of the store's replicas that must hold a write before it is acknowledged, 0 (default) to 16."""
    wait_timeout_ms: int | None = None
    """Longest wait for those replicas, in ms; default 1,000."""

    # ── weights ──────────────────────────────────────────────────────────────
    max_unavailable_engines: int | None = None
    """Engines that may be out of service at once to load weights from files; 0 (default) is no limit."""
    fresh_start_ms: int | None = None
    """Longest time in ms that an engine gets no new group because it is about to load; default 30,000, 0: never."""
    stale_wait_ms: int | None = None
    """Longest time in ms that a batch waits for groups in flight, with stale_action "wait" or order_window_groups;
    default 60,000.
    """
    target_staleness_milli: int | None = None
    """Mean staleness that a controller holds, in thousandths of a version; 0 (default): none."""
    target_measure: TargetMeasure | None = None
    """Staleness whose mean is held: of groups by their "head" (default), or of response tokens ("token")."""

    def __post_init__(self) -> None:
        if not isinstance(self.environments, Mapping):
            raise InvalidField("policy.environments", repr(self.environments), "a share or an Environment by each name")
        rules = {
            name: rule if isinstance(rule, Environment) else Environment(share=rule)
            for name, rule in self.environments.items()
        }
        object.__setattr__(self, "environments", rules)
        if isinstance(self.stages, str):
            raise InvalidField("policy.stages", self.stages, "a list of names")
        object.__setattr__(self, "stages", tuple(self.stages))

    def to_wire(self) -> pb.RunPolicy:
        """Convert the set fields to the wire's RunPolicy.

        Raises InvalidField for a value that does not fit the message.
        """
        wire = pb.RunPolicy(environments=[_rule(name, rule) for name, rule in self.environments.items()])
        wire.stages.extend(_stages(self.stages))
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None or each.name in _UNSET:
                continue
            if each.name in _NUMBERS:
                value = _number(each.name, value)
            try:
                setattr(wire, each.name, value)
            except (TypeError, ValueError) as error:
                raise InvalidField(f"policy.{each.name}", value, f"one that fits the field ({error})") from error
        return wire

    @classmethod
    def from_wire(cls, wire: pb.RunPolicy) -> "Policy":
        """Convert from the wire's RunPolicy; the inverse of `to_wire`."""
        values: dict[str, object] = {"preset": wire.preset or None}
        for each in fields(cls):
            if each.name == "environments":
                values[each.name] = {rule.environment: _environment(rule) for rule in wire.environments}
            elif each.name == "stages":
                values[each.name] = tuple(wire.stages)
            elif each.name in _NUMBERS:
                number = getattr(wire, each.name)
                values[each.name] = _WORDS[each.name][number] if number else None
            elif each.name != "preset" and wire.HasField(each.name):  # type: ignore[arg-type]
                values[each.name] = getattr(wire, each.name)
        return cls(**values)  # type: ignore[arg-type]


_UNSET: Mapping[str, object] = {"environments": {}, "stages": ()}
"""Values that stand for "not set" in the fields where None does not."""


def changed(policy: Policy, changes: Mapping[str, object]) -> Policy:
    """Copy `policy` with some fields replaced; None: not set.

    Raises InvalidField for a name that is none of its fields.
    """
    check_names("policy", Policy.__dataclass_fields__, changes)
    return replace(policy, **{name: _UNSET.get(name) if value is None else value for name, value in changes.items()})  # type: ignore[arg-type]


_NUMBERS = {one.name: words(EnumTypeWrapper(one.enum_type)) for one in pb.RunPolicy.DESCRIPTOR.fields if one.enum_type}
"""Wire numbers by word, for each field that is an enum."""
_WORDS = {name: {number: word for word, number in numbers.items()} for name, numbers in _NUMBERS.items()}


def _number(field_name: str, word: str) -> int:
    numbers = _NUMBERS[field_name]
    if word not in numbers:
        raise InvalidField(f"policy.{field_name}", word, "one of " + ", ".join(numbers))
    return numbers[word]


def _stages(names: Sequence[str]) -> Sequence[str]:
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise InvalidField(f"policy.stages[{index}]", repr(name), "a name")
    return names


def _rule(name: str, rule: Environment | int) -> pb.EnvironmentRule:
    try:
        return pb.EnvironmentRule(environment=name, **asdict(rule))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidField(
            f"policy.environments[{name}]", repr(rule), f"an Environment, or a share ({error})"
        ) from error


def _environment(rule: pb.EnvironmentRule) -> Environment:
    return Environment(
        **{each.name: getattr(rule, each.name) if rule.HasField(each.name) else None for each in fields(Environment)},  # type: ignore[arg-type]
    )
