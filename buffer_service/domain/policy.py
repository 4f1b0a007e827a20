"""RunPolicy: the rules of a run, their defaults and bounds, and which combinations are refused.

Invariants: a RunPolicy that exists is valid (`__post_init__` refuses anything else). Its values are integers, names and
the rules of environments. Only the fields of `MAY_BE_UNSET` may be unset (-1).
"""

import re
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, NamedTuple, get_type_hints

from buffer_service.domain.liveness import refuse_what_cannot_progress
from buffer_service.rules.filters import NO_REWARD_BOUND
from buffer_wire.errors import InvalidField, InvalidPolicy

UNSET = -1
"""Value for "no bound" in the integer fields that may be unset."""

GIB = 1 << 30

MAX_SHARE = 10_000
MAX_PRIORITY = 255
MAX_STARTS = 1_000_000
MAX_ENVIRONMENTS = 256
"""Environments of a run, named by its policy, its tasks and its groups."""
MAX_STAGES = 8
REWARDS = "rewards"
"""Stage that writes rewards."""
MAX_REUSING_GROUPS = 2_048
"""Largest number of groups of a step that may be used again, and of those that a step uses again: one call keeps, or
draws, them all."""
_STAGE = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)


class OverflowAction(StrEnum):
    """Action when a push meets a full queue."""

    DROP_OLDEST = "drop_oldest"
    BLOCK = "block"
    REJECT = "reject"


class StaleAction(StrEnum):
    """Action on a group that is too stale when its batch is assembled."""

    DROP = "drop"
    RECYCLE = "recycle"
    WAIT = "wait"


class StalenessMeasure(StrEnum):
    """Version of a group that the gate compares with the train_version, and by which `stalest_first` orders."""

    HEAD = "head"
    MEAN = "mean"
    TAIL = "tail"


class TargetMeasure(StrEnum):
    """Staleness whose mean a target is about: of groups by their head, or of tokens."""

    HEAD = "head"
    TOKEN = "token"  # noqa: S105 - no secret


class Order(StrEnum):
    """Order in which queued groups enter batches."""

    FIFO = "fifo"
    LIFO = "lifo"
    STALEST_FIRST = "stalest_first"
    PRIORITY = "priority"
    SUBMISSION = "submission"


@dataclass(frozen=True, slots=True)
class EnvironmentRule:
    """Share, priority and rate of one environment; UNSET leaves each as it would be without a rule."""

    environment: str
    share: int = UNSET
    """Weight among the environments that have work, 0 to 10,000; 0: only when no other has any."""
    priority: int = UNSET
    """Replaces the priority of the environment's tasks and groups against others', 0 to 255."""
    starts_per_minute: int = UNSET
    """Leases of its tasks that may be given a minute, over all workers, 1 to 1,000,000; evaluations go apart."""
    start_burst: int = UNSET
    """Number of these at once after a pause, 1 to 1,000,000; unset: 1. With starts_per_minute alone."""

    def to_store(self) -> list[object]:
        """The rule as the scripts read it; those without a limit as services of 0.1.0 know them."""
        stored: list[object] = [self.environment, self.share, self.priority]
        return stored if self.starts_per_minute == UNSET else [*stored, self.starts_per_minute, self.start_burst]


class Between(NamedTuple):
    """Bounds of an integer field; a field whose default is UNSET may be unset too."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """The effective policy of a run; the wire's RunPolicy documents each field with its unit and bounds."""

    batch_groups: Annotated[int, Between(1, 65_536)] = 32
    max_queued_groups: Annotated[int, Between(1, 10_000_000)] = 0
    """0 in the constructor: batch_groups (queue factor q = 1)."""
    max_queued_tokens: Annotated[int, Between(0, 1 << 50)] = 0
    max_queued_bytes: Annotated[int, Between(1 << 20, 1 << 50)] = 8 * GIB
    overflow_action: OverflowAction = OverflowAction.DROP_OLDEST
    max_staleness: Annotated[int, Between(0, 1_000_000)] = UNSET
    stale_action: StaleAction = StaleAction.DROP
    max_inflight_groups: Annotated[int, Between(0, 10_000_000)] = 0
    reserve_queue_space: bool = False
    max_lookahead: Annotated[int, Between(0, 1_000_000)] = UNSET
    lease_ttl_ms: Annotated[int, Between(1_000, 3_600_000)] = 60_000
    max_attempts: Annotated[int, Between(1, 1_000)] = 5
    retry_backoff_ms: Annotated[int, Between(0, 600_000)] = 500
    failure_budget: Annotated[int, Between(0, 10_000_000)] = UNSET
    max_pending_tasks: Annotated[int, Between(1, 10_000_000)] = 10_000
    prefetch_batches: Annotated[int, Between(0, 64)] = 0
    batches_per_publish: Annotated[int, Between(1, 1_000)] = 1
    retained_steps: Annotated[int, Between(1, 100_000)] = 64
    preset: str = ""
    """The preset that the policy was made from, for people; it decides nothing."""
    order: Order = Order.FIFO
    environments: tuple[EnvironmentRule, ...] = ()
    """Rules of environments, in order of name, each environment once."""
    staleness_measure: StalenessMeasure = StalenessMeasure.HEAD
    max_incarnations: Annotated[int, Between(0, 1_000)] = 0
    cancel_stale_leases: bool = False
    filter_equal_rewards: bool = False
    filter_min_response_tokens: Annotated[int, Between(0, 1 << 31)] = 0
    filter_max_response_tokens: Annotated[int, Between(0, 1 << 31)] = 0
    filter_min_mean_reward_milli: Annotated[int, Between(-NO_REWARD_BOUND, NO_REWARD_BOUND)] = -NO_REWARD_BOUND
    filter_max_mean_reward_milli: Annotated[int, Between(-NO_REWARD_BOUND, NO_REWARD_BOUND)] = NO_REWARD_BOUND
    min_acceptance_milli: Annotated[int, Between(0, 1_000)] = 100
    batch_tokens: Annotated[int, Between(0, 1 << 50)] = 0
    equal_shards: bool = False
    micro_batch_groups: Annotated[int, Between(0, 65_536)] = 0
    max_version_spread: Annotated[int, Between(0, 1_000_000)] = UNSET
    quota_groups: Annotated[int, Between(0, 100_000_000)] = 0
    quota_tokens: Annotated[int, Between(0, 1 << 50)] = 0
    quota_bytes: Annotated[int, Between(0, 1 << 50)] = 0
    max_retained_bytes: Annotated[int, Between(0, 1 << 50)] = 0
    record_groups: bool = False
    wait_replicas: Annotated[int, Between(0, 16)] = 0
    wait_timeout_ms: Annotated[int, Between(1, 60_000)] = 1_000
    max_unavailable_engines: Annotated[int, Between(0, 1_000_000)] = 0
    fresh_start_ms: Annotated[int, Between(0, 600_000)] = 30_000
    stale_wait_ms: Annotated[int, Between(0, 3_600_000)] = 60_000
    order_window_groups: Annotated[int, Between(0, 10_000_000)] = 0
    longest_first: bool = False
    target_staleness_milli: Annotated[int, Between(0, 1_000_000_000)] = 0
    target_measure: TargetMeasure = TargetMeasure.HEAD
    stages: tuple[str, ...] = ()
    """Stages that accepted groups pass, in order."""
    max_uses: Annotated[int, Between(1, 8)] = 1
    reuse_share_milli: Annotated[int, Between(0, 7_000)] = 0
    reuse_max_staleness: Annotated[int, Between(0, 1_000_000)] = UNSET

    def __post_init__(self) -> None:
        if self.max_queued_groups == 0:
            object.__setattr__(self, "max_queued_groups", self.batch_groups)
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value == UNSET and name in MAY_BE_UNSET:
                continue
            if not low <= value <= high:
                raise InvalidField(f"policy.{name}", value, f"between {low} and {high}")
        self._check_environments()
        self._check_stages()
        refuse_what_cannot_progress(self)
        self._check_reuse()

    def _check_environments(self) -> None:
        ordered = tuple(sorted(self.environments, key=lambda rule: rule.environment))
        object.__setattr__(self, "environments", ordered)
        if len(ordered) > MAX_ENVIRONMENTS:
            raise InvalidField("policy.environments", len(ordered), f"at most {MAX_ENVIRONMENTS} environments")
        for index, rule in enumerate(ordered):
            field = f"policy.environments[{rule.environment}]"
            if index and ordered[index - 1].environment == rule.environment:
                raise InvalidField(field, "named twice", "each environment once")
            if not UNSET <= rule.share <= MAX_SHARE:
                raise InvalidField(f"{field}.share", rule.share, f"between 0 and {MAX_SHARE}")
            if not UNSET <= rule.priority <= MAX_PRIORITY:
                raise InvalidField(f"{field}.priority", rule.priority, f"between 0 and {MAX_PRIORITY}")
            for name in ("starts_per_minute", "start_burst"):
                value = getattr(rule, name)
                if value != UNSET and not 1 <= value <= MAX_STARTS:
                    raise InvalidField(f"{field}.{name}", value, f"between 1 and {MAX_STARTS}")
            if rule.start_burst != UNSET and rule.starts_per_minute == UNSET:
                raise InvalidField(f"{field}.start_burst", rule.start_burst, "unset without starts_per_minute")

    def _check_stages(self) -> None:
        if len(self.stages) > MAX_STAGES:
            raise InvalidField("policy.stages", len(self.stages), f"at most {MAX_STAGES} stages")
        for index, name in enumerate(self.stages):
            if not _STAGE.fullmatch(name):
                raise InvalidField(f"policy.stages[{index}]", name, "1 to 32 characters of [a-z0-9_]")
            if name in self.stages[:index]:
                raise InvalidField(f"policy.stages[{index}]", name, "each stage once")

    def _check_reuse(self) -> None:
        """Refuse fields that need each other, and batches that have no number of groups."""
        share, bound = self.reuse_share_milli, self.reuse_max_staleness
        if self.max_uses == 1:
            if share:
                raise InvalidPolicy("reuse_share_milli", f"{share} needs max_uses above 1")
            if bound != UNSET:
                raise InvalidPolicy("reuse_max_staleness", f"{bound} needs max_uses above 1")
            return
        if bound == UNSET:
            raise InvalidPolicy("max_uses", f"{self.max_uses} needs reuse_max_staleness, the age up to which it holds")
        most = 1_000 * (self.max_uses - 1)
        if not 0 < share <= most:
            why = f"{share} is not between 1 and {most}, what max_uses {self.max_uses} can give beside 1,000 groups"
            raise InvalidPolicy("reuse_share_milli", why)
        if self.batch_tokens:
            raise InvalidPolicy("max_uses", "needs batches of batch_groups groups, without batch_tokens")
        if self.batch_groups > MAX_REUSING_GROUPS:
            why = f"needs batches of at most {MAX_REUSING_GROUPS} groups, not {self.batch_groups}"
            raise InvalidPolicy("max_uses", why)
        reused = self.reused_groups(self.batch_groups)
        if not 1 <= reused <= MAX_REUSING_GROUPS:
            why = f"{share} is {reused} groups beside {self.batch_groups}: at least 1, at most {MAX_REUSING_GROUPS}"
            raise InvalidPolicy("reuse_share_milli", why)

    def reused_groups(self, batch_groups: int) -> int:
        """Largest number of groups that a step of `batch_groups` uses again.

        Uses are at most 1 + reuse_share_milli / 1,000 for each group that enters a step: Reverb's samples per insert.
        """
        return batch_groups * self.reuse_share_milli // 1_000 if self.max_uses > 1 else 0

    @property
    def least_staleness(self) -> int:
        """Staleness, in versions, of a group generated with the newest published weights when its batch is pulled.

        At most d + b - 1 batches are assembled and not yet covered by a publish (d prefetched, b per publish). So the
        version that trains on the next batch is ahead of the published one by floor((d + b - 1) / b).
        """
        return (self.uncommitted_batches - 1) // self.batches_per_publish

    @property
    def uncommitted_batches(self) -> int:
        """Batches that a trainer holds at most before it commits: d prefetched and b that the next publish covers."""
        return self.prefetch_batches + self.batches_per_publish

    @property
    def micro_batches_of_batch(self) -> int:
        """Largest number of micro-batches of a batch of N groups: that for one rank; 1 where batches are whole."""
        return -(-self.batch_groups // self.micro_batch_groups) if self.micro_batch_groups else 1

    @property
    def queues_in_quota(self) -> int:
        """Full queues that a quota must hold: each micro-batch of uncommitted batches and of the next may be one."""
        return (self.uncommitted_batches + 1) * self.micro_batches_of_batch

    def to_store(self) -> dict[str, object]:
        """The policy as the store's scripts read it: integers, names, and rules of environments."""
        stored: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "environments":
                stored[field.name] = [rule.to_store() for rule in value]
            elif isinstance(value, tuple):
                stored[field.name] = list(value)
            elif isinstance(value, str):
                stored[field.name] = str(value)
            else:
                stored[field.name] = int(value)
        return stored

    @classmethod
    def from_store(cls, stored: dict[str, object]) -> "RunPolicy":
        """The inverse of `to_store`; ignores keys that this version does not know, and fills in those that the one
        that wrote it did not.
        """
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in stored.items() if k in known}
        for name, action in ENUMS.items():
            if name in values:
                values[name] = action(str(values[name]))
        for name in _FLAGS & values.keys():
            values[name] = bool(values[name])
        rules = values.pop("environments", None) or ()
        stages = values.pop("stages", None) or ()
        return cls(
            stages=tuple(map(str, stages)),  # type: ignore[call-overload]
            environments=tuple(EnvironmentRule(str(name), *values) for name, *values in rules),  # type: ignore[attr-defined]
            **values,  # type: ignore[arg-type]
        )


ENUMS: dict[str, type[StrEnum]] = {
    each.name: type(each.default) for each in fields(RunPolicy) if isinstance(each.default, StrEnum)
}
"""The enum of each field that has one."""
_FLAGS = frozenset(each.name for each in fields(RunPolicy) if isinstance(each.default, bool))
_BOUNDS: dict[str, Between] = {
    name: bounds
    for name, hint in get_type_hints(RunPolicy, include_extras=True).items()
    for bounds in getattr(hint, "__metadata__", ())
}
MAY_BE_UNSET = frozenset(each.name for each in fields(RunPolicy) if each.default == UNSET)
