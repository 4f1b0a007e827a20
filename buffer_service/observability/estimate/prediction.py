"""The closed form that fits a run's policy, fed with what was measured, and the prediction by it or a simulation.

Its assumptions affect a live run. The forms take C slots that are always taken and a speed v = R/C that does not depend
on them. Where pushes wait or admission holds groups back, slots stand empty while their engine decodes others. C and R,
measured while engines decode, are then both below what the engines could do, by the same factor. v, M and the
generation time stay right; ρ and C/B are lower bounds. A trainer that hardly waits then tells that the run is
train-bound. Its staleness is predicted by up to 1 - 1/ρ wrong, ρ being what the engines could do. R also holds tokens
that no batch gets: of evaluations and of groups that are lost on the way.
"""

from dataclasses import dataclass, replace

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import UNSET, Order, OverflowAction, RunPolicy, StaleAction, StalenessMeasure
from buffer_service.observability.estimate import closed_forms
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_wire.estimate import Predicted, Quantities

NEVER_WAITS = 0.05
"""A trainer that waits a smaller share of its time is the bottleneck."""

HIDDEN_BELOW = 1.1
"""Largest measured utilization that may be too low because engines wait."""

TOLERANCE = 0.3
"""Versions that a live mean may differ from the closed form, and less than that share of it."""
RELATIVE_TOLERANCE = 0.2

SIMULATED_TOLERANCE = 0.2
"""Versions that it may differ from the simulation, and less than that share of it."""
RELATIVE_SIMULATED_TOLERANCE = 0.1

IN_FLIGHT_HOLDS = 1.25
"""Times the groups that C requests take, up to which max_inflight_groups may be what holds C."""

_BARELY_TRAIN_BOUND = 1.001

_DROPS, _WAITS, _RETRIES = range(3)
_WITHOUT_ROOM = {OverflowAction.DROP_OLDEST: _DROPS, OverflowAction.BLOCK: _WAITS, OverflowAction.REJECT: _RETRIES}
"""Fate of a group, its own or another one's, that there is no room for."""
_GATES = {StaleAction.DROP: "drops", StaleAction.RECYCLE: "starts anew", StaleAction.WAIT: "makes batches wait for"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of a run, as the closed forms take it.

    A batch of the closed forms is all that one version is trained on: b batches of N groups.
    """

    rho: float
    concurrency_ratio: float
    """Ratio C/B of concurrency to a version's samples, B = b·N·G."""
    tailness: float
    per_batch: float
    """Groups of a batch: N."""
    batches: int
    """Batches of a version: b."""
    take: float
    """Groups that the trainer takes at once: N, or a micro-batch of them."""
    queue: float
    """Groups that the queue has room for."""
    lookahead: float | None = None
    """Versions that admission lets generation run ahead."""
    gate: int | None = None
    """Versions of the head beyond which no group is trained."""
    blocks: bool = False
    """Pushes wait for room instead of dropping the oldest."""
    drops: bool = True
    """Groups are dropped where there is no room."""
    hides_rho: bool = False
    """The trainer hardly waits, and pushes do: ρ is 1 or more, and cannot be measured."""
    newest_first: bool = False
    prefetched_versions: float = 0.0
    """Versions that a batch waits at the trainer when that is the bottleneck: d/b for d batches ahead."""
    versions_per_publish: float = 1.0
    capped: str = ""
    """Field of the policy that may hold C, so that more engines would not make more; empty where none does."""

    @property
    def groups(self) -> float:
        """Groups of a version: b·N."""
        return self.batches * self.per_batch

    @property
    def streams(self) -> bool:
        """True when batches are taken in micro-batches."""
        return self.take < self.per_batch

    @property
    def share(self) -> float:
        """Share m of a take: its groups over those of a version."""
        return min(1.0, self.take / self.groups)

    @property
    def queue_factor(self) -> float:
        """Queue over the groups of a version; newest first the rest of the queue is never reached."""
        return self.share if self.newest_first else max(self.share, self.queue / self.groups)

    @property
    def form(self) -> str:
        """The closed form's name."""
        if self.lookahead is not None:
            return f"admission, {self.lookahead:g} version{'s' * (self.lookahead != 1)} ahead"
        taken = f"micro-batches of {self.take:.0f} groups" if self.streams else "whole batches"
        taken += f", {self.batches} batches a version" if self.batches > 1 else ""
        limit = "" if self.gate is None else f", at most max_staleness {self.gate}"
        return f"{'blocking' if self.blocks else 'queue-drop'}, {taken}{limit}"


def setting_of(
    policy: RunPolicy,
    world_size: int,
    known: Quantities,
    versions_per_publish: float,
    lookahead: float | None,
) -> Setting | None:
    """The setting of a live run; None while a quantity that it needs is not known. `lookahead`: the one in effect."""
    rho, ratio, tailness = known.rho, known.concurrency_ratio, known.tailness
    per_batch, batches = known.groups_per_batch, known.batches_per_publish
    if not (rho and ratio and tailness and per_batch and batches and known.queue_factor):
        return None
    without_room = _WITHOUT_ROOM[policy.overflow_action]
    blocks = without_room == _WAITS
    take = min(policy.micro_batch_groups * max(1, world_size), per_batch) or per_batch
    hides_rho = blocks and never_waits(known) and rho <= HIDDEN_BELOW
    gated = policy.max_staleness != UNSET and policy.staleness_measure == StalenessMeasure.HEAD
    # A publish at the window's edge makes it 1.03 batches; a form for 1 is meant.
    whole = max(1, round(batches))
    setting = Setting(
        rho=max(rho, _BARELY_TRAIN_BOUND) if hides_rho else rho,
        concurrency_ratio=ratio * batches / whole,
        tailness=tailness,
        per_batch=per_batch,
        batches=whole,
        take=take,
        queue=known.queue_factor * per_batch,
        lookahead=lookahead,
        gate=policy.max_staleness if gated else None,
        blocks=blocks,
        drops=without_room == _DROPS,
        hides_rho=hides_rho,
        newest_first=policy.order == Order.LIFO,
        prefetched_versions=policy.prefetch_batches / whole,
        # Versions that are published while one batch is trained age groups like any other.
        versions_per_publish=versions_per_publish / min(1.0, batches),
        capped=_capped(policy, known, tailness),
    )
    if setting.lookahead is None:
        return setting
    # Admission that lets generation run further ahead than the queue has room for holds nothing back.
    free = replace(setting, lookahead=None)
    return free if predict(free).staleness < predict(setting).staleness else setting


def never_waits(known: Quantities) -> bool:
    """Tell whether the trainer is the bottleneck."""
    return known.trainer_idle_share is not None and known.trainer_idle_share < NEVER_WAITS


def _capped(policy: RunPolicy, known: Quantities, tailness: float) -> str:
    """The field that may hold C. Of a group's requests 1/M decode, on average over its time."""
    if policy.reserve_queue_space:
        return "reserve_queue_space"
    in_flight = policy.max_inflight_groups * (known.group_size or 0)
    held = 0 < in_flight <= IN_FLIGHT_HOLDS * tailness * (known.concurrency or 0)
    return "max_inflight_groups" if held else ""


def barely_train_bound(setting: Setting) -> Setting:
    """Copy of the setting with ρ just above 1, where the queue is full."""
    return replace(setting, rho=_BARELY_TRAIN_BOUND)


def predict(setting: Setting) -> Prediction:
    """Mean staleness of a setting, in versions."""
    ratio, rho, tailness, share = setting.concurrency_ratio, setting.rho, setting.tailness, setting.share
    if setting.lookahead is not None:
        # Waiting for the slowest of a batch is left out of the period, which stays a lower bound.
        plain = closed_forms.admission_limited(ratio, setting.lookahead, rho, tailness, tailness)
    elif setting.blocks:
        plain = closed_forms.blocking(ratio, setting.queue_factor, rho, tailness, share)
    elif share < 1:
        plain = closed_forms.streaming(ratio, share, max(1.0, setting.queue_factor / share), rho, tailness)
    else:
        plain = closed_forms.queue_drop(ratio, max(1.0, setting.queue_factor), rho, tailness)
    if setting.lookahead is None and rho > 1:
        # What was pulled ahead is dropped no more: it waits its turn at the trainer.
        plain = replace(plain, iqs=plain.iqs + setting.prefetched_versions)
    scale = setting.versions_per_publish
    pqs, iqs = plain.pqs * scale, plain.iqs * scale
    if setting.gate is not None:
        # What the gate leaves is what was generated in time and did not wait too long.
        pqs = min(pqs, setting.gate)
        iqs = min(iqs, setting.gate - pqs)
    return replace(plain, pqs=pqs, iqs=iqs)


def tolerance(setting: Setting, prediction: Prediction, *, simulated: bool = False) -> float:
    """Tolerance for a live mean, in versions. Near balance that of the form is between its branches."""
    if simulated:
        return max(SIMULATED_TOLERANCE, RELATIVE_SIMULATED_TOLERANCE * prediction.staleness)
    usual = max(TOLERANCE, RELATIVE_TOLERANCE * prediction.staleness)
    if not closed_forms.is_rough(setting.rho):
        return usual
    below = replace(setting, rho=closed_forms.ROUGH_ABOVE)
    sides = [predict(side).iqs for side in (below, barely_train_bound(setting))]
    return max(2 * usual, max(sides) - min(sides))


def predicted(
    view: RunView, known: Quantities, setting: Setting | None, simulation: Prediction | None, *, pending: bool
) -> Predicted:
    """The prediction beside what it leaves out: by a simulation where there is one, else by the closed form."""
    policy = view.policy
    if setting is None:
        return Predicted()
    simulated = simulation is not None
    unbounded = policy.overflow_action == OverflowAction.REJECT and setting.lookahead is None and setting.rho > 1
    if unbounded and not simulated:
        return Predicted(notes=("overflow_action reject has no closed form above ρ = 1",), pending=pending)
    prediction = predict(setting) if simulation is None else _in_versions(setting, simulation)
    return Predicted(
        form=setting.form,
        pre_queue=prediction.pqs,
        in_queue=prediction.iqs,
        staleness=prediction.staleness,
        period_ratio=prediction.train_period_ratio,
        rough=not simulated and closed_forms.is_rough(setting.rho),
        tolerance=tolerance(setting, prediction, simulated=simulated),
        notes=tuple(_notes(policy, known, setting, prediction, simulated=simulated)),
        simulated=simulated,
        pending=pending,
    )


def _in_versions(setting: Setting, simulation: Prediction) -> Prediction:
    scale = setting.versions_per_publish
    return replace(simulation, pqs=simulation.pqs * scale, iqs=simulation.iqs * scale)


def _notes(
    policy: RunPolicy, known: Quantities, setting: Setting, prediction: Prediction, *, simulated: bool
) -> list[str]:
    notes = []
    if simulated:
        left_out = [name for name in ("cancel_stale_leases", "environments", "stages") if getattr(policy, name)]
        if left_out:
            notes.append(f"simulated without {' and '.join(left_out)}")
    elif closed_forms.is_rough(setting.rho):
        notes.append("between ρ 0.8 and 1.2 the closed form is rough")
    if setting.gate is not None and setting.lookahead is None and prediction.staleness >= setting.gate:
        action = _GATES[policy.stale_action]
        biased = "" if policy.stale_action is StaleAction.WAIT else ", and so prefers short responses"
        notes.append(f"the gate {action} what is staler than {setting.gate}{biased}")
    elif policy.max_staleness != UNSET and setting.gate is None and not simulated:
        notes.append(f"the gate is left out, as it goes by the {policy.staleness_measure} version")
    if setting.hides_rho:
        notes.append("the trainer hardly waits, so the run is taken for train-bound: engines wait for room")
    if policy.order in {Order.PRIORITY, Order.STALEST_FIRST} and setting.rho > 1 and not simulated:
        notes.append(f"order {policy.order} is taken for fifo")
    if known.pass_share < 1:
        notes.append(f"R and C are those of the {known.pass_share:.0%} of the recent groups that pass the filter")
    return notes
