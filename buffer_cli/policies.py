"""Policies as command lines write and show them: `field=value`, `environments.NAME.share=3`,
`stages=reference,values`, `none` for unset.
"""

from collections.abc import Iterator, Sequence

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from buffer_service.domain.policy import RunPolicy
from buffer_service.rpc.convert.policies import merged, to_policy
from buffer_service.rpc.convert.policies import policy as effective_policy
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2

_FIELDS = {field.name: field for field in runs_pb2.RunPolicy.DESCRIPTOR.fields}
_RULE_FIELDS = {field.name: field for field in runs_pb2.EnvironmentRule.DESCRIPTOR.fields if field.has_presence}
_ENVIRONMENTS = "environments"
_LISTS = ("stages",)
"""Fields that are lists of names, separated by commas."""
_PLAIN = [name for name in _FIELDS if name not in (_ENVIRONMENTS, "preset")]
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def assign(policy: runs_pb2.RunPolicy, assignments: Sequence[str]) -> frozenset[str]:
    """Set fields of a policy as `--set` says; returns their names. Raises InvalidField naming the option."""
    names = set()
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        at = f"--set {name}"
        if not equals:
            raise InvalidField("--set", assignment, "field=value")
        names.add(name.partition(".")[0])
        if name.startswith(f"{_ENVIRONMENTS}."):
            _assign_environment(policy, name, text)
        elif name not in _PLAIN:
            hint = "given as --preset" if name == "preset" else f"one of {', '.join(_PLAIN)}, environments.NAME.share"
            raise InvalidField(at, text if name == "preset" else name, hint)
        elif text == "none":
            policy.ClearField(name)  # type: ignore[arg-type]
        elif name in _LISTS:
            policy.ClearField(name)  # type: ignore[arg-type]
            getattr(policy, name).extend(part.strip() for part in text.split(","))
        else:
            setattr(policy, name, _value(at, _FIELDS[name], text))
    return frozenset(names)


def _assign_environment(policy: runs_pb2.RunPolicy, name: str, text: str) -> None:
    # Names of environments may hold dots.
    environment, _, field = name.removeprefix(f"{_ENVIRONMENTS}.").rpartition(".")
    at = f"--set {name}"
    if field not in _RULE_FIELDS:
        raise InvalidField(at, text, " or ".join(f"{_ENVIRONMENTS}.NAME.{each}" for each in _RULE_FIELDS))
    rules = {rule.environment: rule for rule in policy.environments}
    rule = rules.get(environment) or policy.environments.add(environment=environment)
    if text == "none":
        rule.ClearField(field)  # type: ignore[arg-type]
    else:
        setattr(rule, field, _value(at, _RULE_FIELDS[field], text))
    if not any(rule.HasField(name) for name in _RULE_FIELDS):  # type: ignore[arg-type]
        policy.environments.remove(rule)


def _value(at: str, field: FieldDescriptor, text: str) -> int | bool:
    if field.type == FieldDescriptor.TYPE_BOOL:
        if text.lower() not in _FLAGS:
            raise InvalidField(at, text, "true, false or none")
        return _FLAGS[text.lower()]
    if field.enum_type is not None:
        numbers = _words(field.enum_type)
        if text.lower() not in numbers:
            raise InvalidField(at, text, f"one of {', '.join(numbers)}, none")
        return numbers[text.lower()]
    try:
        value = int(text)
    except ValueError:
        raise InvalidField(at, text, "a whole number, or none") from None
    low, high = _RANGES[field.type]
    if not low <= value < high:
        raise InvalidField(at, value, f"{low} to {high - 1}")
    return value


_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 1 << 32),
    FieldDescriptor.TYPE_UINT64: (0, 1 << 64),
    FieldDescriptor.TYPE_SINT64: (-(1 << 63), 1 << 63),
}


def _words(enum: EnumDescriptor) -> dict[str, int]:
    return words(getattr(runs_pb2, enum.name))


# ── showing ──────────────────────────────────────────────────────────────────


def shown(policy: runs_pb2.RunPolicy) -> Iterator[tuple[str, str]]:
    """Fields of a policy as `--set` would write them."""
    if policy.preset:
        yield "preset", policy.preset
    for name in _PLAIN:
        yield name, _text(policy, name)
    for rule in policy.environments:
        for name in _RULE_FIELDS:
            if rule.HasField(name):  # type: ignore[arg-type]
                yield f"{_ENVIRONMENTS}.{rule.environment}.{name}", str(getattr(rule, name))


def _text(policy: runs_pb2.RunPolicy, name: str) -> str:
    field = _FIELDS[name]
    value = getattr(policy, name)
    if name in _LISTS:
        return ",".join(value) or "none"
    if field.enum_type is not None:
        return next((word for word, number in _words(field.enum_type).items() if number == value), "none")
    if not policy.HasField(name):  # type: ignore[arg-type]
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes(before: runs_pb2.RunPolicy, after: runs_pb2.RunPolicy) -> Iterator[tuple[str, str, str]]:
    """(field, before, after) of what differs."""
    old, new = dict(shown(before)), dict(shown(after))
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield name, old.get(name, "none"), new.get(name, "none")


def default_policy(preset: str = "", assignments: Sequence[str] = ()) -> runs_pb2.RunPolicy:
    """The effective policy of a run that is created so. Raises InvalidField, InvalidPolicy."""
    message = runs_pb2.RunPolicy(preset=preset)
    assign(message, assignments)
    return to_policy(effective_policy(message))


def changed(
    present: runs_pb2.RunPolicy, preset: str, assignments: Sequence[str]
) -> tuple[runs_pb2.RunPolicy, frozenset[str]]:
    """The policy to send so that `present` changes as said and in nothing else, and the fields to name; none: all.

    A new preset starts anew but for N and the environments. Raises InvalidField.
    """
    message = runs_pb2.RunPolicy()
    if preset:
        message.preset = preset
        message.batch_groups = present.batch_groups
        message.environments.extend(present.environments)
        assign(message, assignments)
        return message, frozenset()
    message.CopyFrom(present)
    return message, assign(message, assignments)


def applied(present: RunPolicy, preset: str, assignments: Sequence[str]) -> RunPolicy:
    """Policy after a change, as the service makes it. Raises InvalidField, InvalidPolicy."""
    message, names = changed(to_policy(present), preset, assignments)
    return effective_policy(merged(present, message, names) if names else message)
