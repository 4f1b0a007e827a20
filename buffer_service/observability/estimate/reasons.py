"""Reasons for a run's staleness: hypotheses, each said with the number that supports it, or not at all.

Causes are checked by the simulation without them. Reasons why measured and predicted differ are checked by what the run
counts: such a number has to account for LEAST of the difference, or of what it is a share of.
"""

from collections.abc import Iterator, Sequence

from buffer_service.domain.ops import EngineReport, RunView
from buffer_service.domain.policy import UNSET
from buffer_service.observability.diagnosis import SILENT_MS
from buffer_service.observability.estimate.quantities import IN_SERVICE
from buffer_service.observability.estimate.questions import Cause, Effect, load_s
from buffer_wire.estimate import Measured, Predicted, Quantities

LEAST_VERSIONS, LEAST_SHARE = 0.08, 0.04
"""Versions, and share of the staleness, from which a cause is named."""
LEAST_PERIOD = 0.05
"""Share of the period from which a cause is named."""
LEAST = 0.5
"""Share of a difference that a number has to account for."""
DRIFT = 0.1
"""Change of a mean from before the window to within it, from which it is named."""
UNUSED = 0.1
"""Share of the decoded tokens that no accepted group has, from which it is named."""
BY_AGE = 0.01
"""Share of the groups that are lost to a gate, from which it is named."""
MISSED = 4
"""Publishes that an engine may be behind, beside those that pass while it loads."""
TURNS = 1.05
"""Turns of a sample from which waits between them count."""


def causes(view: RunView, known: Quantities, predicted: Predicted, effects: Sequence[Effect]) -> Iterator[str]:
    """Sentence on each cause that makes much of the staleness, or of the period."""
    least = max(LEAST_VERSIONS, LEAST_SHARE * (predicted.staleness or 0.0))
    for effect in sorted(effects, key=lambda one: -one.staleness):
        costs = []
        if effect.staleness >= least:
            costs.append(f"{effect.staleness:.1f} versions")
        if effect.period >= LEAST_PERIOD:
            costs.append(f"{effect.period:.0%} of the period")
        if costs:
            yield f"{_of(effect.cause, view, known)}: {' and '.join(costs)}, by a simulation without"


def _of(cause: Cause, view: RunView, known: Quantities) -> str:
    match cause:
        case Cause.LOADS:
            lag_s, pause_s = load_s(view)
            return (
                f"loads: engines have new weights {lag_s + pause_s:.3g} s after a publish, {pause_s:.3g} s of it paused"
            )
        case Cause.LEASES:
            return "leases ahead: workers hold leases for more samples than decode, from before a load"
        case Cause.WAITING_PUSHES:
            return (
                f"waiting pushes: overflow_action {view.policy.overflow_action} keeps what a full queue has no room for"
            )
        case Cause.FEW_GROUPS:
            return f"few groups: the {known.groups_per_batch or 0:.0f} of a batch do not come evenly"
        case Cause.FILTER:
            return f"filter: {known.pass_share:.0%} of the recent groups pass"


def left_behind(view: RunView, known: Quantities) -> Sequence[EngineReport]:
    """Engines that have missed more publishes than pass while they load."""
    period_s, loading_s = known.publish_period_s, sum(load_s(view))
    allowed = MISSED + (2 * loading_s / period_s if period_s else 0.0)
    heard = [one for one in view.engines if one.state in IN_SERVICE and one.silent_ms < SILENT_MS]
    return [one for one in heard if one.loaded.version and _behind(view, one) > allowed]


def _behind(view: RunView, engine: EngineReport) -> int:
    return view.published.version - engine.loaded.version


def on_engines(view: RunView, known: Quantities) -> Iterator[str]:
    """Sentence on engines that do not load what is published."""
    late = left_behind(view, known)
    if late:
        worst = max(late, key=lambda one: _behind(view, one))
        why = f" ({worst.last_error})" if worst.last_error else ""
        yield (
            f"{len(late)} of {known.engines} engines do not load: {worst.engine_id} has version "
            f"{worst.loaded.version}, {_behind(view, worst)} behind{why}"
        )


def differences(view: RunView, known: Quantities, predicted: Predicted, measured: Measured) -> Iterator[str]:
    """Reasons why what is measured is not what is predicted, with their numbers."""
    off = (measured.staleness or 0.0) - (predicted.staleness or 0.0)
    pre_queue = (measured.pre_queue or 0.0) - (predicted.pre_queue or 0.0)
    in_queue = (measured.in_queue or 0.0) - (predicted.in_queue or 0.0)
    if predicted.pending and not predicted.simulated:
        yield "the closed form stands in for a simulation that is under way"
    older = sum(_behind(view, one) for one in left_behind(view, known)) / max(1, known.engines)
    if off > 0 and older >= LEAST * off:
        yield from on_engines(view, known)
    ahead = view.next_step - view.published_steps - view.policy.batches_per_publish - view.policy.prefetch_batches
    if off > 0 and in_queue >= LEAST * off and ahead / view.policy.batches_per_publish >= LEAST * off:
        yield (
            f"{view.next_step - view.published_steps} steps are pulled that no publish covers, prefetch_batches says "
            f"{view.policy.prefetch_batches}"
        )
    turns = _mean(view, "accepted_turns", "accepted_samples")
    if off > 0 and pre_queue >= LEAST * off and turns is not None and turns >= TURNS:
        yield f"a sample has {turns:.1f} turns, and waits for its environment between them"
    lost = view.groups["dropped_stale"].groups + view.groups["recycled"].groups
    accepted = view.groups["accepted"].groups
    if off < 0 and not predicted.simulated and accepted and lost / accepted >= BY_AGE:
        limit = "a former limit" if view.policy.max_staleness == UNSET else f"max_staleness {view.policy.max_staleness}"
        yield f"{limit} keeps {lost / accepted:.0%} of the groups out"
    yield from _filling(view)
    yield from _unused(view)
    yield from _drifts(view)


def _filling(view: RunView) -> Iterator[str]:
    """Leases that become more, or fewer: the run has not come to rest."""
    window, now = view.window, view.tasks["leased"]
    held = window.grown("generation_ms") / 1000 / window.seconds if window and window.seconds else 0.0
    if held and now and abs(now / held - 1) >= DRIFT:
        yield f"workers hold {now} leases, {held:.0f} on average over these publishes"


def _unused(view: RunView) -> Iterator[str]:
    decoded = view.window.grown("decoded_tokens") if view.window else 0
    used = view.window.grown("accepted_response_tokens") if view.window else 0
    if decoded and 1 - used / decoded >= UNUSED:
        yield f"{1 - used / decoded:.0%} of the decoded tokens are of no accepted group (evaluations, lost work)"


_MEANS = {
    "responses": ("accepted_response_tokens", "accepted_samples"),
    "training a token": ("trainer_busy_ms", "assembled_response_tokens"),
    "decoding a token": ("decode_request_ms", "decoded_tokens"),
}
"""Means that should not change: what is summed, and over what."""


def _drifts(view: RunView) -> Iterator[str]:
    """Means that are not what they were before the window."""
    if view.window is None:
        return
    first = view.window.first.totals
    for name, (total, over) in _MEANS.items():
        now = _mean(view, total, over)
        if first[over] and first[total] and now:
            change = now / (first[total] / first[over]) - 1
            if abs(change) >= DRIFT:
                yield f"{name}: {change:+.0%} against before these publishes"


def _mean(view: RunView, total: str, over: str) -> float | None:
    if view.window is None or not view.window.grown(over):
        return None
    return view.window.grown(total) / view.window.grown(over)
