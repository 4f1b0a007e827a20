"""Controller of a run's target of staleness, as status, page and metrics show it: values stated and in effect."""

from collections.abc import Mapping

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import UNSET, TargetMeasure
from buffer_service.domain.steering.decisions import NO_DECISION
from buffer_service.domain.steering.knobs import NOTHING_LOWERED, lookahead_milli

Value = float | None
"""Value of a knob; None: no bound."""

KNOBS = ("max_lookahead", "micro_batch_groups", "max_queued_groups", "max_inflight_groups")
"""Fields of the policy that a controller may lower."""


def target(view: RunView) -> str:
    """Sentence on the target, and on the last decision; empty where there is no target."""
    policy, decided = view.policy, view.decision
    if not policy.target_staleness_milli:
        return ""
    of = "of tokens" if policy.target_measure is TargetMeasure.TOKEN else "by head"
    wanted = f"{policy.target_staleness_milli / MILLI:.2f} {of}"
    if decided == NO_DECISION:
        return f"{wanted}: decided with the next publish"
    return f"{wanted}, {decided.outcome.replace('_', ' ')}: {decided.reason}"


def knobs(view: RunView) -> Mapping[str, tuple[Value, Value]]:
    """Values that a controller may lower, by the field of the policy: as stated, and in effect."""
    stated, in_effect = view.policy, view.in_effect
    ahead = [lookahead_milli(stated, one) for one in (NOTHING_LOWERED, view.decision.knobs)]
    first, last = (None if one == UNSET else one / MILLI for one in ahead)
    values = [(getattr(stated, name) or None, getattr(in_effect, name) or None) for name in KNOBS[1:]]
    return dict(zip(KNOBS, [(first, last), *values], strict=True))


def lowered(view: RunView) -> str:
    """Values that are lowered, each beside the one stated; empty where none is."""
    parts = [
        f"{name} {last:g} of {'no bound' if first is None else f'{first:g}'}"
        for name, (first, last) in knobs(view).items()
        if last is not None and last != first
    ]
    return ", ".join(parts)
