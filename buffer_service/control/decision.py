"""The decision after a publish: which knob moves, by how much, and why.

Admission holds the target: with a lookahead of k versions that binds, mean staleness by the head is k, whatever the
speeds and lengths (closed_forms.admission_limited). A jump of these needs no move. So k starts at the target.
The measurement corrects what the closed form leaves out: loads that lag, groups that are lost or filtered, tokens.

Order of the knobs, by what they cost: smaller micro-batches take in-queue staleness away and cost pulls alone. Room in
the queue costs generated groups; it moves where groups come without leases, which admission does not hold. Lookahead
costs trainer time, the limit in flight more of it for as much; it moves last.

Never two moves in a row: each waits until the one before shows. Within `BAND` of the target nothing moves. Where a
correction turns back, as around a jump of the mean between two settings, it is half as large as the last one.
"""

import math
from dataclasses import replace

from buffer_service.control.measurement import Measurement, measured
from buffer_service.control.reach import what_would_reach
from buffer_service.domain.gate import MILLI
from buffer_service.domain.policy import UNSET, RunPolicy, StalenessMeasure, TargetMeasure
from buffer_service.domain.steering.decisions import Decision, Outcome, Situation
from buffer_service.domain.steering.knobs import (
    NOTHING_LOWERED,
    Knobs,
    in_effect,
    inflight_groups,
    least_queue,
    lookahead_milli,
)
from buffer_service.observability.estimate.closed_forms import in_queue_streaming

LEAST_PUBLISHES = 6
"""Smallest number of intervals between publishes that is measured after a move shows."""

BAND, RELATIVE_BAND = 0.15, 0.1
"""Hysteresis: versions, or share of the target where it is more, by which the mean may be off before anything moves."""

GAIN = 0.7
"""Share of what the mean is off by which the lookahead moves: a mean over few publishes is a noisy one."""

LEAST_PACE = 100
"""Smallest share of a whole correction, in thousandths."""

STEP, RELATIVE_STEP = 0.5, 0.5
"""Largest move of the lookahead: versions, or that share of the target where it is more."""

FACTOR = 0.6
"""Largest move of a number of groups: to this share of it, or back."""

MOSTLY = 0.5
"""Share of groups that come by leases below which admission does not hold the run."""

MICRO_BATCHES = 8
"""Micro-batches of a batch beyond which smaller ones take hardly any staleness away."""


def decide(situation: Situation) -> Decision:
    """Decide after a publish, from a situation alone."""
    policy, decided = situation.policy, situation.decided
    if decided.version > situation.version:
        # A resume put the clock back.
        decided = replace(decided, moved_at=situation.version)
    target, by_token = policy.target_staleness_milli, policy.target_measure is TargetMeasure.TOKEN
    if (decided.target_milli, decided.by_token) != (target, by_token):
        return _begin(situation, by_token=by_token)
    mean = (decided.measured_milli if decided.measured_milli != UNSET else target) / MILLI
    shows = decided.moved_at + math.ceil(max(mean, target / MILLI)) + 1
    found = measured(situation.snapshots, shows, LEAST_PUBLISHES)
    if found is None:
        left = shows + LEAST_PUBLISHES - situation.version
        waits = f"the last move shows in {left} publishes" if left > 0 else "too few groups were trained to measure"
        return replace(decided, version=situation.version, outcome=Outcome.SETTLING, reason=waits)
    return _Judgement(situation, found).decision()


def _begin(situation: Situation, *, by_token: bool) -> Decision:
    """A new target: the lookahead is set to it. Knobs of a former target are forgotten."""
    policy = situation.policy
    ahead = _clamped(policy, policy.target_staleness_milli)
    return Decision(
        version=situation.version,
        moved_at=situation.version,
        moves=situation.decided.moves + 1,
        target_milli=policy.target_staleness_milli,
        by_token=by_token,
        knobs=Knobs(lookahead_milli=ahead),
        outcome=Outcome.MOVED,
        reason=f"lookahead {_versions(lookahead_milli(policy, NOTHING_LOWERED))} -> {_versions(ahead)} versions: where "
        "admission holds engines back, mean staleness is the lookahead",
    )


class _Judgement:
    """Judgement of what was measured against the target, and the move that follows."""

    def __init__(self, situation: Situation, found: Measurement) -> None:
        self._situation, self._found = situation, found
        self._policy, self._knobs = situation.policy, situation.decided.knobs
        self._target = self._policy.target_staleness_milli / MILLI
        self._mean = found.token if self._policy.target_measure is TargetMeasure.TOKEN else found.head
        self._off = self._mean - self._target
        self._wide = max(BAND, RELATIVE_BAND * self._target)
        # A mean over more publishes is less noisy.
        self._band = self._wide * math.sqrt(LEAST_PUBLISHES / found.publishes)
        self._pace = _pace(situation.decided.pace_milli, up=self._off < 0)
        self._held = situation.held_at >= situation.version - 1
        """True when admission held an engine back since the publish before this one."""

    def decision(self) -> Decision:
        """The decision."""
        says = f"mean staleness {self._mean:.2f} over {self._found.publishes} publishes, target {self._target:.2f}"
        above, below = self._off > self._band, self._off < -self._band
        if (above or (self._held and not below)) and (moved := self._smaller_micro_batches()):
            return self._moves(*moved, says if above else f"{says}, for which admission holds engines back")
        if not above and not below:
            return self._stays(Outcome.HOLDING, says)
        if moved := self._less() if above else self._more():
            return replace(self._moves(*moved, says), pace_milli=self._pace)
        if above and self._off <= self._wide:
            return self._stays(Outcome.HOLDING, says)
        if below:
            return self._stays(Outcome.OPEN, f"{says}: no knob holds it down")
        least = self._least_micro_batch()
        share = least * max(1, self._situation.world_size) / self._policy.batch_groups
        within = what_would_reach(self._policy, self._found, self._off, micro_batch_groups=least, share=share)
        return self._stays(Outcome.OUT_OF_REACH, f"{says}: every knob is at its least. {within}")

    def _stays(self, outcome: Outcome, reason: str) -> Decision:
        return replace(
            self._situation.decided,
            version=self._situation.version,
            outcome=outcome,
            measured_milli=round(self._mean * MILLI),
            reason=reason,
        )

    def _moves(self, knobs: Knobs, what: str, says: str) -> Decision:
        decided = self._stays(Outcome.MOVED, f"{what}: {says}")
        return replace(decided, knobs=knobs, moved_at=decided.version, moves=decided.moves + 1)

    # ── down, what costs least first ──

    def _least_micro_batch(self) -> int:
        """Groups a rank below which micro-batches are not made smaller."""
        return max(1, self._policy.batch_groups // (MICRO_BATCHES * max(1, self._situation.world_size)))

    def _smaller_micro_batches(self) -> tuple[Knobs, str] | None:
        policy = self._policy
        if not policy.micro_batch_groups or policy.quota_tokens or policy.quota_bytes:
            return None
        now = in_effect(policy, self._knobs, self._situation.world_size).micro_batch_groups
        least = self._least_micro_batch()
        if now <= least:
            return None
        then = max(least, now // 2)
        return replace(self._knobs, micro_batch_groups=then), f"micro_batch_groups {now} -> {then}"

    def _less(self) -> tuple[Knobs, str] | None:
        if self._found.leased_share < MOSTLY:
            return self._queue(self._ratio())
        policy, knobs = self._policy, self._knobs
        now = lookahead_milli(policy, knobs)
        then = _clamped(policy, now + self._step())
        if then < now:
            return self._ahead(now, then)
        if self._off <= self._wide:
            # What costs most is not moved for little.
            return None
        in_flight = inflight_groups(policy, knobs) or math.ceil(self._found.in_flight)
        fewer = max(policy.batch_groups, math.floor(in_flight * self._ratio()))
        return self._in_flight(in_flight, fewer) if fewer < in_flight else None

    # ── up, what costs most first ──

    def _more(self) -> tuple[Knobs, str] | None:
        policy, knobs = self._policy, self._knobs
        if knobs.max_inflight_groups:
            more = math.ceil(knobs.max_inflight_groups * self._ratio())
            # A limit that leaves room again holds nothing.
            free = more > 2 * self._found.in_flight or not self._held
            return self._in_flight(knobs.max_inflight_groups, 0 if free else more)
        now = lookahead_milli(policy, knobs)
        then = _clamped(policy, now + self._step())
        if self._held and then > now:
            return self._ahead(now, then)
        if knobs.max_queued_groups:
            return self._queue(self._ratio())
        return self._larger_micro_batches()

    def _larger_micro_batches(self) -> tuple[Knobs, str] | None:
        """Twice as large ones, where the closed form leaves the mean below the band all the same."""
        policy, knobs, ranks = self._policy, self._knobs, max(1, self._situation.world_size)
        now = knobs.micro_batch_groups
        if self._held or not now or now >= policy.micro_batch_groups:
            return None
        then = min(2 * now, policy.micro_batch_groups)
        batch, rho = policy.batch_groups, 1 - self._found.trainer_waits or 1.0
        older = in_queue_streaming(min(1.0, then * ranks / batch), 2.0, rho)
        older -= in_queue_streaming(min(1.0, now * ranks / batch), 2.0, rho)
        if self._mean + older >= self._target - self._band:
            return None
        return replace(knobs, micro_batch_groups=then), f"micro_batch_groups {now} -> {then}"

    # ── moves ──

    def _step(self) -> int:
        """Thousandths of a version by which the lookahead moves."""
        most = max(STEP, RELATIVE_STEP * self._target)
        return round(math.copysign(min(GAIN * abs(self._off), most), -self._off) * abs(self._pace))

    def _ratio(self) -> float:
        """Factor of a number of groups."""
        whole = min(1 / FACTOR, max(FACTOR, self._target / max(self._mean, BAND)))
        return math.pow(whole, abs(self._pace) / MILLI)

    def _ahead(self, now: int, then: int) -> tuple[Knobs, str]:
        return replace(self._knobs, lookahead_milli=then), f"lookahead {_versions(now)} -> {_versions(then)} versions"

    def _in_flight(self, now: int, then: int) -> tuple[Knobs, str]:
        shown = then or self._policy.max_inflight_groups or "no limit"
        return replace(self._knobs, max_inflight_groups=then), f"max_inflight_groups {now} -> {shown}"

    def _queue(self, factor: float) -> tuple[Knobs, str] | None:
        policy, ranks = self._policy, self._situation.world_size
        now = in_effect(policy, self._knobs, ranks).max_queued_groups
        then = min(policy.max_queued_groups, max(least_queue(policy, ranks), math.floor(now * factor)))
        if then == now:
            return None
        knobs = replace(self._knobs, max_queued_groups=0 if then == policy.max_queued_groups else then)
        return knobs, f"max_queued_groups {now} -> {then}"


def _pace(before: int, *, up: bool) -> int:
    """Share of a whole correction to make now: half of the last one's where the direction turns, else twice."""
    if not before:
        share = MILLI
    elif (before > 0) is up:
        share = min(MILLI, 2 * abs(before))
    else:
        share = max(LEAST_PACE, abs(before) // 2)
    return share if up else -share


def _clamped(policy: RunPolicy, ahead: int) -> int:
    """A lookahead, in thousandths, that the policy allows; far above a gate by the head it would only lose groups."""
    most = [ahead]
    if policy.max_lookahead != UNSET:
        most.append(policy.max_lookahead * MILLI)
    if policy.max_staleness != UNSET and policy.staleness_measure is StalenessMeasure.HEAD:
        most.append((policy.max_staleness + 1) * MILLI)
    return max(policy.least_staleness * MILLI, min(most))


def _versions(milli: int) -> str:
    return "unbounded" if milli == UNSET else f"{milli / MILLI:.2f}"
