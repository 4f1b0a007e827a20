"""Diagnosis of a run, in words: on whom it waits, for a pull that ran out of time and for `rollout-buffer status`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from buffer_service.domain.admission import NO_OPEN_STEP, OpenStep, required_version
from buffer_service.domain.ops import Amount, RunView, StageState, awaited_groups
from buffer_service.domain.policy import UNSET
from buffer_service.observability.filters import filtered, recent_acceptance, starved
from buffer_service.rules.pauses import Pause

SILENT_MS = 60_000
"""Workers report their engines twice as often at least."""

_NAMED = 5
"""Engines are named up to so many."""

_PAUSES: dict[str, str] = {
    Pause.OPERATOR: "an operator: the run is held until it is continued",
    Pause.FAILURE_BUDGET_EXCEEDED: "an operator: more tasks failed than the policy's failure_budget allows",
}


@dataclass(frozen=True, slots=True)
class Situation:
    """State of a run that has to be known to say on whom it waits. Counts are tasks and groups."""

    paused: str
    queued: int
    needed: int
    pending: int
    leased: int
    engines: Sequence[tuple[str, str, int]]
    """Engines that are heard of: id, state and loaded version of each."""
    required_version: int = 0
    """The oldest weights with which the next group may be started."""
    silent: int = 0
    """Engines that are not heard of any more."""
    draining: bool = False
    unit: str = "batch"
    """Unit that the needed groups make: a batch, or a micro-batch of one."""
    ready: bool = False
    """True when fewer groups than needed are enough, for their tokens."""
    filter: str = ""
    """Reason why the filter starves the run; empty where it does not."""
    room: str = ""
    """Reason why no further group finds room although too few are queued; empty where there is room."""
    unpublished: str = ""
    """Reason why nothing may be started before the trainer publishes; empty where work may be started."""
    limited: str = ""
    """Environments that may not begin a group yet, and for how long; empty where there are none."""
    stage: str = ""
    """Stage that holds back as many groups as the batch lacks; empty where none does."""
    awaited: str = ""
    """Groups in flight for which a pull waits though enough are queued; empty where there are none."""

    @classmethod
    def of(cls, view: RunView) -> Self:
        """The situation of a run."""
        view = replace(view, policy=view.in_effect)
        needed, policy = _needed(view), view.policy
        queued, staged = view.groups["queued"], sum(one.waiting + one.leased for one in view.stages)
        ready = queued.groups - staged
        short = ready < needed
        room = _room(view, needed) if short else ""
        return cls(
            paused=view.paused,
            queued=ready,
            needed=needed,
            pending=view.tasks["pending"],
            leased=view.tasks["leased"],
            engines=[
                (one.engine_id, one.state, one.loaded.version) for one in view.engines if one.silent_ms < SILENT_MS
            ],
            required_version=_required_version(view),
            silent=sum(one.silent_ms >= SILENT_MS and one.state != "stopped" for one in view.engines),
            draining=view.draining,
            unit="micro-batch" if policy.micro_batch_groups else "batch",
            ready=not policy.micro_batch_groups and not staged and 0 < policy.batch_tokens <= queued.tokens,
            filter=_filter(view) if starved(view) else "",
            room=room,
            unpublished=_unpublished(view),
            limited=_limited(view),
            stage=_stage(view.stages) if short and staged and (queued.groups >= needed or room) else "",
            awaited=awaited_groups(view.awaited, view.awaited_task) if view.awaited and view.tasks["leased"] else "",
        )


def waits_on(situation: Situation) -> str:
    """Tell on whom the run waits now."""
    queued = _counted(situation.queued, "group")
    if situation.awaited:
        return pull_waits_on(situation, situation.awaited)
    if not situation.paused and situation.queued >= situation.needed:
        return f"the trainer: {queued} queued, {situation.needed} make a {situation.unit}"
    if not situation.paused and situation.ready:
        return f"the trainer: {queued} queued, whose tokens make a batch"
    return pull_waits_on(situation)


def pull_waits_on(situation: Situation, hint: str = "") -> str:
    """Tell on whom a pull that found no batch waits. `hint`: the store's own word on why nothing moves, if any."""
    if situation.paused:
        return _PAUSES.get(situation.paused, f"a resume: the run is paused ({situation.paused})")
    stuck = situation.stage or situation.filter or situation.room
    if stuck:
        return stuck
    if situation.leased:
        draining = ", the last ones of a run that is being drained" if situation.draining else ""
        return f"generation: {hint or _counted(situation.leased, 'task') + ' being generated'}{draining}"
    return _without_leases(situation, hint)


def _without_leases(situation: Situation, hint: str) -> str:
    if situation.draining:
        return f"nobody: the run is drained, and what is left makes no {situation.unit}"
    if not situation.pending:
        return "the feeder: no task is pending"
    if held := _held(situation):
        return held
    if situation.silent and not situation.engines:
        return f"workers: {_counted(situation.silent, 'engine')} not heard of any more, and there is no other"
    return f"workers: {hint or 'no worker holds a lease'}"


def _needed(view: RunView) -> int:
    """Groups of the next batch, or of its next micro-batch."""
    policy = view.policy
    if not policy.micro_batch_groups:
        return policy.batch_groups
    left = policy.batch_groups - view.groups.get("forming", Amount()).groups
    return max(1, min(policy.micro_batch_groups * max(1, view.world_size), left))


def _required_version(view: RunView) -> int:
    forming = view.groups.get("forming", Amount()).groups
    return required_version(
        view.policy,
        published=view.published.version,
        unpublished_steps=view.next_step - view.published_steps,
        open_step=OpenStep(view.policy.batch_groups, forming) if forming else NO_OPEN_STEP,
        queued=view.groups["queued"].groups,
        leased=view.tasks["leased"],
        missing=view.missing_groups,
    )


def _filter(view: RunView) -> str:
    reasons = ", ".join(f"{count} for {reason}" for reason, count in filtered(view).items() if count)
    return f"the filter: {1 - recent_acceptance(view):.0%} of the recent groups are filtered (so far {reasons})"


def _room(view: RunView, needed: int) -> str:
    """Reason why the next group, if it is like those that are there, has no room; empty where it has."""
    policy, queued = view.policy, view.groups["queued"]
    for unit in ("groups", "tokens", "bytes"):
        quota = getattr(policy, f"quota_{unit}")
        held = [view.groups.get(state, Amount()) for state in ("queued", "forming", "delivered")]
        if quota and _is_full(held, unit, quota):
            return f"the trainer's commits: what is queued, forming and delivered fills quota_{unit} ({quota})"
    for unit in ("tokens", "bytes"):
        cap = getattr(policy, f"max_queued_{unit}")
        if cap and _is_full([queued], unit, cap):
            return (
                f"an operator: {queued.groups} queued groups fill max_queued_{unit} ({cap}), "
                f"and {needed} make a {'micro-batch' if policy.micro_batch_groups else 'batch'}"
            )
    return ""


def _stage(stages: Sequence[StageState]) -> str:
    """Tell which stage is behind: the one with the most groups, of equal ones the last."""
    behind = max(reversed(stages), key=lambda one: one.waiting + one.leased)
    waits = f"{_counted(behind.waiting, 'group')} waiting in it, {_counted(behind.leased, 'group')} held by its workers"
    if behind.asked_ms is None:
        return f"stage {behind.name}: {waits}, and no worker of it has ever asked for groups"
    since = f", and none has asked for {behind.asked_ms // 1000} s" if behind.asked_ms > SILENT_MS else ""
    return f"stage {behind.name}: {waits}{since}"


def _unpublished(view: RunView) -> str:
    """Reason why admission gives out nothing before a publish; empty where it does.

    Steps that are assembled count on versions that are not published yet.
    """
    policy = view.policy
    steps = view.next_step - view.published_steps
    ahead = steps // policy.batches_per_publish
    declared = f"prefetch_batches is {policy.prefetch_batches}, batches_per_publish {policy.batches_per_publish}"
    committed = view.committed_steps - view.published_steps
    what = f"published, {committed} of them committed" if committed > 0 else "committed"
    since = f"{_counted(steps, 'step')} assembled and not {what}; {declared}"
    if policy.max_staleness != UNSET and ahead > policy.max_staleness:
        required = view.published.version + ahead - policy.max_staleness
        return f"the trainer: work starts with version {required}, which is not published ({since})"
    if policy.max_lookahead != UNSET and steps >= (policy.max_lookahead + 1) * policy.batches_per_publish:
        return f"the trainer: max_lookahead {policy.max_lookahead} lets nothing start before a publish ({since})"
    return ""


def _limited(view: RunView) -> str:
    waits = sorted((one.limited_for_ms, one.environment) for one in view.environment_work if one.limited_for_ms)
    if not waits:
        return ""
    for_ms, first = waits[0]
    others = f", and of {len(waits) - 1} more later" if len(waits) > 1 else ""
    return f"starts_per_minute allow the next group of {first or '(none)'} in {for_ms / 1_000:.1f} s{others}"


def _is_full(amounts: Sequence[Amount], unit: str, cap: int) -> bool:
    groups = sum(amount.groups for amount in amounts)
    held = sum(getattr(amount, unit) for amount in amounts)
    return groups > 0 and held + held // groups > cap


def _weights_too_old(situation: Situation) -> str:
    """Reason why no engine may be given work, where its weights are that reason; else empty."""
    alive = [(name, state, version) for name, state, version in situation.engines if state != "stopped"]
    usable = sorted((-version, name) for name, state, version in alive if state != "quarantined")
    if alive and not usable:
        return f"{_counted(len(alive), 'engine')} quarantined, none is left: their last errors say why"
    if not usable or -usable[0][0] >= situation.required_version:
        return ""
    loaded = ", ".join(f"{name} has {-newest}" for newest, name in usable[:_NAMED])
    more = f", and {len(usable) - _NAMED} more" if len(usable) > _NAMED else ""
    return f"work starts with version {situation.required_version}, and no engine has loaded it: {loaded}{more}"


def _held(situation: Situation) -> str:
    """Whom admission waits on though tasks are pending; empty where it gives them out."""
    if situation.unpublished:
        return situation.unpublished
    if weights := _weights_too_old(situation):
        return f"weights: {weights}"
    return f"time: {situation.limited}" if situation.limited else ""


def _counted(number: int, noun: str) -> str:
    return f"1 {noun} is" if number == 1 else f"{number} {noun}s are"
