"""Named policies: the ways in which known systems pace generation and treat staleness, as fields of a RunPolicy.

A preset is written `name` or `name(number, …)`. Its fields depend on its numbers and on N, the groups of a batch, and
on nothing else. Every field that it does not name keeps its default, and its user may set any field otherwise.
docs/presets.md has them beside the knobs of the systems they come from.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_wire.errors import InvalidField

Fields = dict[str, object]

_NUMBER = re.compile(r"[0-9]{1,9}")
_WRITTEN = re.compile(r"(?P<name>[a-z_]+)(?P<numbers>\( *[0-9]{1,9}(?: *, *[0-9]{1,9})* *\))?")

MILES_STALENESS = 4
MILES_DOCS_QUEUE = 1_000
PRIME_RL_LEVEL = 1
PRIME_RL_OFF_POLICY_STEPS = 8
QUEUE_MAX_BACKLOG = 10
"""Rollout throughput over train throughput up to which queue_max drops at dequeue alone, never for want of room."""


def _paced(batch_groups: int, lookahead: int) -> Fields:
    """Generation runs at most `lookahead` batches ahead, and the queue has room for all that may exist."""
    return {
        "max_lookahead": lookahead,
        "max_staleness": lookahead,
        "max_queued_groups": (lookahead + 1) * batch_groups,
        "overflow_action": OverflowAction.BLOCK,
    }


def sync(batch_groups: int) -> Fields:
    """Generation and training take turns, as in synchronous RL: one batch is generated with each version, then trained
    (AReaL with max_head_offpolicyness 0).
    """
    return _paced(batch_groups, 0)


def one_step_off(batch_groups: int) -> Fields:
    """The next batch is generated while the trainer trains on this one: staleness 1 (verl's one_step_off_policy;
    num_steps_async 1 of verifiers).
    """
    return _paced(batch_groups, 1)


def miles(batch_groups: int) -> Fields:
    """The fully asynchronous example of Miles: MAX_STALENESS_BATCHES 4, staler groups dropped when a batch is taken;
    MAX_INFLIGHT_GROUPS N; QUEUE_CAP_GROUPS (4 + 1) N.
    """
    return {
        "max_staleness": MILES_STALENESS,
        "stale_action": StaleAction.DROP,
        "max_inflight_groups": batch_groups,
        "max_queued_groups": (MILES_STALENESS + 1) * batch_groups,
        "overflow_action": OverflowAction.BLOCK,
    }


def miles_docs(batch_groups: int, staleness: int | None = None) -> Fields:
    """The mode of Miles' documentation: --rollout-batch-size groups are generated at once, and a queue of 1,000 groups.
    With --max-weight-staleness, unset by default, tasks of staler groups are started anew.
    """
    gate: Fields = {} if staleness is None else {"max_staleness": staleness, "stale_action": StaleAction.RECYCLE}
    return {
        **gate,
        "max_inflight_groups": batch_groups,
        "max_queued_groups": max(MILES_DOCS_QUEUE, batch_groups),
        "overflow_action": OverflowAction.BLOCK,
    }


def areal(batch_groups: int, staleness: int) -> Fields:
    """AReaL with max_head_offpolicyness = staleness: (staleness + version + 1) N groups may exist in all, and N of them
    may be generated at once: max_concurrent_rollouts is consumer_batch_size where it is not set.
    """
    return {**_paced(batch_groups, staleness), "max_inflight_groups": batch_groups}


def prime_rl(
    batch_groups: int, level: int = PRIME_RL_LEVEL, off_policy_steps: int = PRIME_RL_OFF_POLICY_STEPS
) -> Fields:
    """PRIME-RL: generation runs at most `level` batches ahead (1; up to v0.5.0 max_async_level). A group whose oldest
    version would be more than max_off_policy_steps (off_policy_steps) behind the one that trains on it is dropped,
    queued or in flight.
    """
    return {**_paced(batch_groups, level), "max_staleness": off_policy_steps, "cancel_stale_leases": True}


def queue_drop(batch_groups: int, factor: int) -> Fields:
    """A queue of factor N groups, the oldest dropped when it is full; no gate, hence no bias to short responses."""
    return {"max_queued_groups": factor * batch_groups, "overflow_action": OverflowAction.DROP_OLDEST}


def queue_max(batch_groups: int, staleness: int) -> Fields:
    """Groups more than staleness versions behind are dropped when a batch is taken; the queue has room for ten times
    what can be trained in time, so that this alone decides. Trains on shorter responses than it samples.
    """
    return {
        "max_staleness": staleness,
        "stale_action": StaleAction.DROP,
        "max_queued_groups": QUEUE_MAX_BACKLOG * (staleness + 1) * batch_groups,
        "overflow_action": OverflowAction.DROP_OLDEST,
    }


def streaming(batch_groups: int, groups: int, world_size: int = 1) -> Fields:
    """Batches in micro-batches of `groups` a rank over a queue of two of world_size ranks, the oldest
    dropped when it is full: hardly any time in the queue.
    """
    return {
        "micro_batch_groups": groups,
        "max_queued_groups": 2 * min(groups * world_size, batch_groups),
        "overflow_action": OverflowAction.DROP_OLDEST,
    }


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a preset takes."""

    name: str
    least: int
    most: int
    default: int | None = None
    optional: bool = False

    @property
    def written(self) -> str:
        """Name and bounds of the number, as people read them."""
        default = f", default {self.default}" if self.default is not None else ""
        return f"{self.name} {self.least:,} to {self.most:,}{default}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset as people see it."""

    fields: Callable[..., Fields]
    numbers: tuple[Number, ...] = ()

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.fields.__name__

    @property
    def description(self) -> str:
        """Text on what the preset does, and whose knobs it stands for."""
        return " ".join((self.fields.__doc__ or "").split())

    @property
    def written(self) -> str:
        """Name with numbers, those in brackets may be left out: `streaming(groups 1 to 65,536[, world_size …])`."""
        parts = [f"[{', ' if i else ''}{n.written}]" if n.optional else n.written for i, n in enumerate(self.numbers)]
        return f"{self.name}({''.join(parts)})" if parts else self.name

    def takes(self, numbers: list[int]) -> bool:
        """Test whether the preset may be written with these numbers."""
        needed = sum(not number.optional for number in self.numbers)
        if not needed <= len(numbers) <= len(self.numbers):
            return False
        return all(known.least <= given <= known.most for known, given in zip(self.numbers, numbers, strict=False))


_MAX_STALENESS = 1_000

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(sync),
        Preset(one_step_off),
        Preset(miles),
        Preset(miles_docs, (Number("staleness", 0, _MAX_STALENESS, optional=True),)),
        Preset(areal, (Number("staleness", 0, _MAX_STALENESS),)),
        Preset(
            prime_rl,
            (
                Number("level", 0, _MAX_STALENESS, PRIME_RL_LEVEL, optional=True),
                Number("off_policy_steps", 0, _MAX_STALENESS, PRIME_RL_OFF_POLICY_STEPS, optional=True),
            ),
        ),
        Preset(queue_drop, (Number("factor", 1, 1_000),)),
        Preset(queue_max, (Number("staleness", 0, _MAX_STALENESS),)),
        Preset(streaming, (Number("groups", 1, 65_536), Number("world_size", 1, 4_096, 1, optional=True))),
    )
}


def fields_of(text: str, batch_groups: int | None = None) -> Fields:
    """RunPolicy fields of a preset, and `preset` as it is written in full. Raises InvalidField.

    `batch_groups` is N where the policy sets it, None for the default's.
    """
    written = _WRITTEN.fullmatch(text)
    preset = PRESETS.get(written["name"]) if written else None
    numbers = [int(number) for number in _NUMBER.findall(written["numbers"] or "")] if written else []
    if preset is None or not preset.takes(numbers):
        known = ", ".join(preset.written for preset in PRESETS.values())
        raise InvalidField("policy.preset", text, f"one of {known}")
    given = f"{preset.name}({', '.join(map(str, numbers))})" if numbers else preset.name
    return {"preset": given, **preset.fields(batch_groups or RunPolicy().batch_groups, *numbers)}
