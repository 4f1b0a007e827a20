"""Named policies: the ways in which known systems pace generation and treat staleness, as fields of a RunPolicy.

A preset is written `name` or `name(number, …)`. Its fields depend on N, the groups of a batch, and on nothing else;
every field that it does not name keeps its default, and its user may set any field otherwise.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature

from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_wire.errors import InvalidField

Fields = dict[str, object]

_NUMBER = re.compile(r"[0-9]{1,9}")
_WRITTEN = re.compile(r"(?P<name>[a-z_]+)(?P<numbers>\( *[0-9]{1,9}(?: *, *[0-9]{1,9})* *\))?")

DEFAULT_BATCH_GROUPS = 32


def _paced(batch_groups: int, lookahead: int) -> Fields:
    """At most `lookahead` batches beyond the next one exist, and room in the queue for all of them."""
    return {
        "max_lookahead": lookahead,
        "max_staleness": lookahead,
        "max_queued_groups": (lookahead + 1) * batch_groups,
        "overflow_action": OverflowAction.BLOCK,
    }


def sync(batch_groups: int) -> Fields:
    """Generation and training take turns, as in synchronous RL: one batch is generated with each version, then trained.

    The same as `areal(0)`: max_head_offpolicyness 0.
    """
    return _paced(batch_groups, 0)


def one_step_off(batch_groups: int) -> Fields:
    """The next batch is generated while the trainer trains on this one: staleness 0 or 1 (verl's one_step_off_policy,
    num_steps_async 1 of verifiers' AsyncBatchGenerator).
    """
    return _paced(batch_groups, 1)


def miles(batch_groups: int) -> Fields:
    """The fully asynchronous example of Miles: MAX_STALENESS_BATCHES 4, dropped when a batch is taken;
    MAX_INFLIGHT_GROUPS N; QUEUE_CAP_GROUPS (4 + 1) N.
    """
    staleness = 4
    return {
        "max_staleness": staleness,
        "stale_action": StaleAction.DROP,
        "max_inflight_groups": batch_groups,
        "max_queued_groups": (staleness + 1) * batch_groups,
        "overflow_action": OverflowAction.BLOCK,
    }


def miles_docs(batch_groups: int, staleness: int = 4) -> Fields:
    """The mode of Miles' documentation: --max-weight-staleness, above which a group's task is started anew; a queue of
    1,000 groups.
    """
    return {
        "max_staleness": staleness,
        "stale_action": StaleAction.RECYCLE,
        "max_queued_groups": max(1_000, batch_groups),
        "overflow_action": OverflowAction.BLOCK,
    }


def areal(batch_groups: int, staleness: int) -> Fields:
    """AReaL with max_head_offpolicyness = staleness: (staleness + version + 1) N groups may exist in all. Its
    max_concurrent_rollouts is max_inflight_groups.
    """
    return _paced(batch_groups, staleness)


def prime_rl(batch_groups: int, level: int = 2) -> Fields:
    """PRIME-RL with max_async_level = level: step n trains on rollouts of policy n - level or newer; rollouts that
    would be older are cancelled in flight (max_off_policy_steps).
    """
    return {**_paced(batch_groups, level), "cancel_stale_leases": True}


def queue_drop(batch_groups: int, factor: int) -> Fields:
    """A queue of factor N groups, the oldest dropped when it is full; no gate, hence no bias to short responses."""
    return {"max_queued_groups": factor * batch_groups, "overflow_action": OverflowAction.DROP_OLDEST}


def queue_max(batch_groups: int, staleness: int) -> Fields:
    """What is more than `staleness` versions behind is dropped when a batch is taken; the queue holds ten times what
    can be fresh, so that this alone decides.
    """
    return {
        "max_staleness": staleness,
        "stale_action": StaleAction.DROP,
        "max_queued_groups": 10 * (staleness + 1) * batch_groups,
        "overflow_action": OverflowAction.DROP_OLDEST,
    }


def streaming(batch_groups: int, groups: int, world_size: int = 1) -> Fields:
    """Batches in rounds of micro-batches of `groups` a rank, over a queue of two rounds: hardly any time in the queue.
    A round of more ranks than world_size may not fit.
    """
    return {
        "micro_batch_groups": groups,
        "max_queued_groups": 2 * min(groups * world_size, batch_groups),
        "overflow_action": OverflowAction.DROP_OLDEST,
    }


_ALL: tuple[Callable[..., Fields], ...] = (
    sync,
    one_step_off,
    miles,
    miles_docs,
    areal,
    prime_rl,
    queue_drop,
    queue_max,
    streaming,
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset as people see it."""

    written: str
    """With its numbers' names, those in brackets may be left out: `streaming(groups[, world_size])`."""
    description: str
    fields: Callable[..., Fields]
    least: int
    most: int
    """How many numbers it takes."""


def _preset(fields: Callable[..., Fields]) -> Preset:
    numbers = list(signature(fields).parameters.values())[1:]
    needed = [number.name for number in numbers if number.default is number.empty]
    optional = [number.name for number in numbers if number.default is not number.empty]
    written = ", ".join(needed) + "".join(f"[, {name}]" if needed else f"[{name}]" for name in optional)
    description = " ".join((fields.__doc__ or "").split())
    return Preset(
        f"{fields.__name__}({written})" if written else fields.__name__,
        description,
        fields,
        len(needed),
        len(numbers),
    )


PRESETS: Mapping[str, Preset] = {fields.__name__: _preset(fields) for fields in _ALL}


def fields_of(text: str, batch_groups: int | None = None) -> Fields:
    """RunPolicy fields of a preset, with `preset` as it is written in full. Raises InvalidField.

    `batch_groups` is N where the policy sets it, None for the default's.
    """
    written = _WRITTEN.fullmatch(text)
    preset = PRESETS.get(written["name"]) if written else None
    numbers = [int(number) for number in _NUMBER.findall(written["numbers"] or "")] if written else []
    if preset is None or not preset.least <= len(numbers) <= preset.most:
        known = ", ".join(preset.written for preset in PRESETS.values())
        raise InvalidField("policy.preset", text, f"one of {known}")
    name = preset.fields.__name__
    given = f"{name}({', '.join(map(str, numbers))})" if numbers else name
    return {"preset": given, **preset.fields(batch_groups or DEFAULT_BATCH_GROUPS, *numbers)}


def from_preset(text: str, **overrides: object) -> RunPolicy:
    """The policy of a preset with some fields set otherwise. Raises InvalidField, InvalidPolicy."""
    batch_groups = overrides.get("batch_groups")
    values = fields_of(text, batch_groups if isinstance(batch_groups, int) else None)
    return RunPolicy(**{**values, **overrides})  # type: ignore[arg-type]
