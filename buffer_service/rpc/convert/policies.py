"""Policies of runs: unset fields take their preset's value or their default, and operators' bounds become quotas.

A policy's own bounds are the domain's; here only what the wire and the service's settings add is checked.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from buffer_service.domain.policy import ENUMS, MAY_BE_UNSET, UNSET, EnvironmentRule, RunPolicy
from buffer_service.domain.presets import fields_of
from buffer_service.rpc.convert import fields
from buffer_service.rules.filters import FILTERS, NO_REWARD_BOUND
from buffer_wire.enums import members
from buffer_wire.errors import InvalidField, InvalidPolicy
from rollout_buffer.v1 import runs_pb2 as pb

_ENUMS: Mapping[str, Mapping[int, StrEnum]] = {
    field: members(getattr(pb, kind.__name__), kind) for field, kind in ENUMS.items()
}
_TO_ENUMS = {field: {value: number for number, value in values.items()} for field, values in _ENUMS.items()}

_OPTIONAL = tuple(field.name for field in pb.RunPolicy.DESCRIPTOR.fields if field.has_presence)
_RULE = tuple(field.name for field in pb.EnvironmentRule.DESCRIPTOR.fields if field.has_presence)
_CHANGEABLE = frozenset(pb.RunPolicy.DESCRIPTOR.fields_by_name) - {"preset"}
"""Fields that can be changed one by one: all but `preset`, the name of a whole policy."""
_NO_BOUND = dict.fromkeys(MAY_BE_UNSET, UNSET)
_NO_BOUND |= {each.field: each.off for each in FILTERS if abs(each.off) == NO_REWARD_BOUND}
"""Values that the wire leaves unset."""


@dataclass(frozen=True, slots=True)
class QuotaBounds:
    """Largest quotas that the service's settings allow a run; 0 is no bound."""

    groups: int = 0
    tokens: int = 0
    bytes: int = 0


UNBOUNDED = QuotaBounds()


def policy(message: pb.RunPolicy, bounds: QuotaBounds = UNBOUNDED) -> RunPolicy:
    """The effective policy. Raises InvalidField, InvalidPolicy."""
    given: dict[str, Any] = {field: getattr(message, field) for field in _OPTIONAL if message.HasField(field)}  # type: ignore[arg-type]
    if given.get("max_queued_groups") == 0:
        raise InvalidField("policy.max_queued_groups", 0, "at least batch_groups; unset for the default")
    for field, names in _ENUMS.items():
        number = getattr(message, field)
        if number and number not in names:
            raise InvalidField(f"policy.{field}", number, f"one of {', '.join(names.values())}")
        if number:
            given[field] = names[number]
    if message.environments:
        given["environments"] = tuple(_rule(i, rule) for i, rule in enumerate(message.environments))
    if message.stages:
        given["stages"] = tuple(message.stages)
    start = fields_of(message.preset, given.get("batch_groups")) if message.preset else {}
    values = {**start, **given}
    imposed = _impose(values, bounds)
    try:
        return RunPolicy(**values)
    except InvalidPolicy as error:
        field = error.attributes["field"]
        if field in imposed:
            raise InvalidPolicy(field, f"{error.attributes['why']}; it is the service's {imposed[field]}") from None
        raise


def merged(effective: RunPolicy, message: pb.RunPolicy, names: Collection[str]) -> pb.RunPolicy:
    """`effective` with the named fields of `message`; what is unset there has its default.

    A preset that would set it otherwise is no longer the policy's. Raises InvalidField for a name that it cannot be.
    """
    for i, name in enumerate(names):
        if name not in _CHANGEABLE:
            raise InvalidField(f"fields[{i}]", name, "the name of a field of RunPolicy other than preset")
    if len(names) > len(_CHANGEABLE):
        raise InvalidField("fields", len(names), f"at most {len(_CHANGEABLE)} names")
    kept, taken = to_policy(effective), pb.RunPolicy()
    taken.CopyFrom(message)
    for name in pb.RunPolicy.DESCRIPTOR.fields_by_name:
        (kept if name in names else taken).ClearField(name)  # type: ignore[arg-type]
    kept.MergeFrom(taken)
    if kept.preset and fields_of(kept.preset, kept.batch_groups).keys() - {
        field.name for field, _ in kept.ListFields()
    }:
        kept.preset = ""
    return kept


def _rule(i: int, rule: pb.EnvironmentRule) -> EnvironmentRule:
    return EnvironmentRule(
        environment=fields.line(rule.environment, f"policy.environments[{i}].environment", 0, 64),
        **{name: getattr(rule, name) if rule.HasField(name) else UNSET for name in _RULE},  # type: ignore[arg-type]
    )


def _impose(values: dict[str, Any], bounds: QuotaBounds) -> dict[str, str]:
    """Take the bounds as quotas where none is set; returns the settings they come from, by field.

    Raises InvalidField for a quota above its bound.
    """
    imposed = {}
    for unit in ("groups", "tokens", "bytes"):
        bound, field, setting = getattr(bounds, unit), f"quota_{unit}", f"max_run_{unit}"
        quota = values.get(field, 0)
        if bound and quota > bound:
            raise InvalidField(f"policy.{field}", quota, f"at most {bound}, the service's {setting}")
        if bound and not quota:
            imposed[field] = setting
            values[field] = bound
            _fit_queue(values, unit, bound)
    return imposed


def _fit_queue(values: dict[str, Any], unit: str, quota: int) -> None:
    """A quota that its policy did not ask for must not refuse it: the queue's cap, if not set either, follows."""
    defaults = RunPolicy()
    cap = f"max_queued_{unit}"
    # As many full queues as the domain wants a quota to hold.
    batches = 1 + sum(
        values.get(field, getattr(defaults, field)) for field in ("prefetch_batches", "batches_per_publish")
    )
    micro = values.get("micro_batch_groups", 0)
    queues = batches * -(-values.get("batch_groups", defaults.batch_groups) // micro) if micro else batches
    queues = max(queues, 1)  # A policy without batches is refused later, by the name of its field.
    if unit == "tokens" and not values.get(cap):
        values[cap] = quota // queues
    if unit == "bytes" and cap not in values:
        values[cap] = min(defaults.max_queued_bytes, quota // queues)


def to_policy(effective: RunPolicy) -> pb.RunPolicy:
    """The message of an effective policy: every field filled in but those that are unset on purpose."""
    values: dict[str, Any] = {field: getattr(effective, field) for field in _OPTIONAL}
    for field, nothing in _NO_BOUND.items():
        if values[field] == nothing:
            del values[field]
    for field, numbers in _TO_ENUMS.items():
        values[field] = numbers[getattr(effective, field)]
    return pb.RunPolicy(
        preset=effective.preset,
        environments=[_to_rule(rule) for rule in effective.environments],
        stages=effective.stages,
        **values,
    )


def _to_rule(rule: EnvironmentRule) -> pb.EnvironmentRule:
    values = {name: value for name in _RULE if (value := getattr(rule, name)) != UNSET}
    return pb.EnvironmentRule(environment=rule.environment, **values)
