"""Defects of the queue, of turns and of pushes."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import Order, RunPolicy, StalenessMeasure
from buffer_service.rules.transitions import GroupState
from tests.oracle import pushing, queue
from tests.oracle.line import PushLine
from tests.oracle.queue import GroupQueue
from tests.oracle.records import Payloads
from tests.oracle.rules.filters import acceptance_ppm, why_filtered
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.stride import Stride
from tests.oracle.state import RunState


def newest_is_dropped(run: RunState) -> bool:
    group = max(run.queue, key=lambda group: group.sequence, default=None)
    if group is None:
        return False
    run.dequeue(group, GroupState.DROPPED_OVERFLOW)
    run.end_group(group)
    return True


_fits = GroupQueue.fits


def caps_hold_always(queue: GroupQueue, policy: RunPolicy, more: ops.Amount | None = None) -> bool:
    return more is None or _fits(queue, policy, more)


_comparator = queue._comparator


def order_of(instead: Order, actual: Order) -> Callable[..., Any]:
    """One order sorts as another does."""

    def comparator(mixture: Mixture, measure: StalenessMeasure) -> Any:
        return _comparator(replace(mixture, order=actual) if mixture.order is instead else mixture, measure)

    return comparator


def stalest_by_head(mixture: Mixture, measure: StalenessMeasure) -> Any:
    return _comparator(mixture, StalenessMeasure.HEAD)


def nobody_waits_for_turns(mixture: Mixture, environments: Iterable[str], stride: Stride) -> str | None:
    return None


_take = Stride.take


def turns_cost_the_same(stride: Stride, environment: str, share: int) -> None:
    _take(stride, environment, 1)


def absence_is_saved_up(stride: Stride, environment: str) -> int:
    return stride.passes.get(environment, 0)


def ties_by_dictionary(stride: Stride, environments: Iterable[str]) -> str | None:
    return min(environments, key=lambda name: (stride._pass(name), name.casefold()), default=None)


def equal_rewards_pass(policy: RunPolicy, facts: ops.GroupFacts) -> str | None:
    return why_filtered(replace(policy, filter_equal_rewards=False), facts)


def bounds_on_rewards_are_open(policy: RunPolicy, facts: ops.GroupFacts) -> str | None:
    return why_filtered(policy, replace(facts, mean_reward_milli=facts.mean_reward_milli - 1))


def average_is_slower(before: int, *, passed: bool) -> int:
    return (before + acceptance_ppm(before, passed=passed)) // 2


def nobody_stands_in_line(line: PushLine, payload_key: str, now: int) -> bool:
    return True


_wait = PushLine.wait


def back_to_the_end(line: PushLine, payload_key: str, now: int) -> bool:
    known = any(key == payload_key for key, _ in line)
    line.leave(payload_key)
    _wait(line, payload_key, now)
    return not known


_missing = pushing._missing


def what_is_gone_is_closed(run: RunState, facts: ops.GroupFacts, payload_key: str, *, retry: bool) -> Any:
    return ops.PushKind.CLOSED if _missing(run, facts, payload_key, retry=retry) else None


def any_length_will_do(payloads: Payloads, key: str, size: int) -> bool:
    return key in payloads.expiring


_write = Payloads.write


def written_over(payloads: Payloads, key: str, body: ops.Buffer) -> None:
    payloads.trash(key)
    _write(payloads, key, body)


def forgotten_at_once(run: RunState, task_id: str) -> None:
    del run.tasks[task_id]
    run.changed = True


_judge_unknown = pushing._judge_unknown


def first_tried_just_now(run: RunState, facts: ops.GroupFacts) -> ops.Pushed | None:
    return _judge_unknown(run, replace(facts, first_revision=0))
