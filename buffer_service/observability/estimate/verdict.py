"""Verdict on a run, in sentences: the bottleneck, where the staleness comes from, what is lost, and what is odd.

A run whose trainer trains and publishes nothing gets sentences on that and on what is lost only. All the rest follows
from it, or was measured before.
"""

from collections.abc import Iterator, Sequence

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import UNSET
from buffer_service.observability.estimate.prediction import Setting, predict
from buffer_service.observability.estimate.questions import Effect
from buffer_service.observability.estimate.reasons import causes, differences, on_engines
from buffer_service.observability.filters import filtered
from buffer_wire.estimate import Bias, Comparison, Measured, Predicted, Quantities, Verdict

BALANCED = 0.1
"""|ρ - 1| up to which neither side is the bottleneck."""
HARDLY_STALE = 0.25
"""Versions below which no source is named."""
MUCH_LOST = 0.1
"""Share of the groups so far from which a loss is named."""
SLOW_GENERATION = 1.5
"""Ratio of the generation time to the decoding time from which something else takes the time."""
EXPLAINED = 0.5
"""Share of the in-queue staleness that a reason's closed form has to account for."""
UNPUBLISHED = 2
"""Publishes that a trainer owes by the steps that it has committed, beyond which it is taken to publish nothing."""
PULLED_AHEAD = 16
"""Steps that a trainer may have pulled ahead without having said so in its policy."""
HELD_BACK = 0.1
"""Share of their time that both sides stand idle from which the policy holds them back."""


def verdict(
    view: RunView,
    known: Quantities,
    setting: Setting | None,
    predicted: Predicted,
    measured: Measured,
    bias: Bias,
    effects: Sequence[Effect] = (),
) -> Verdict:
    """Verdict with all its sentences; the first is on the bottleneck, the second on the staleness."""
    if publishes_nothing(view):
        return Verdict(sentences=(_nothing_published(view), *_on_losses(view, "")))
    bound = _bound(setting)
    pre, queued = (
        (measured.pre_queue, measured.in_queue)
        if measured.staleness is not None
        else (predicted.pre_queue, predicted.in_queue)
    )
    source = "" if pre is None or queued is None or pre + queued < HARDLY_STALE else _larger(pre, queued)
    sentences = [
        *_on_bottleneck(known, setting, bound),
        *_on_source(known, setting, source, pre or 0.0, queued or 0.0),
        *causes(view, known, predicted, effects),
        *on_engines(view, known),
        *_on_losses(view, bound),
        *_on_prediction(view, known, predicted, measured),
        *_on_bias(bias),
    ]
    return Verdict(bound=bound, source=source, sentences=tuple(sentences))


def publishes_nothing(view: RunView) -> bool:
    """True when the trainer goes on from step to step and publishes no weights."""
    return bool(_unpublished(view))


def _unpublished(view: RunView) -> str:
    """Steps that went by without a publish, in words; empty while they are no more than allowed."""
    owed = UNPUBLISHED * view.policy.batches_per_publish
    committed, assembled = view.committed_steps - view.published_steps, view.next_step - view.published_steps
    if committed > owed:
        return f"{committed} steps are committed"
    if assembled > owed + view.policy.prefetch_batches + PULLED_AHEAD:
        return f"{assembled} steps are assembled"
    return ""


def _nothing_published(view: RunView) -> str:
    version = view.published.version
    since = f"since version {version}" if version else "so far"
    return (
        f"no weights are published: {_unpublished(view)} {since}, and engines go on with version {version}; call "
        "session.publish after each step (docs/trainer.md), or set batches_per_publish, now "
        f"{view.policy.batches_per_publish}, to the steps that one publish covers"
    )


def _bound(setting: Setting | None) -> str:
    if setting is None:
        return ""
    if setting.hides_rho:
        return "train"
    if abs(setting.rho - 1) <= BALANCED:
        return "balanced"
    return "rollout" if setting.rho < 1 else "train"


def _on_bottleneck(known: Quantities, setting: Setting | None, bound: str) -> Iterator[str]:
    rho, idle = known.rho, known.trainer_idle_share
    if setting is None or rho is None or idle is None:
        return
    waits = f"; the trainer waits {idle:.0%} of its time"
    if bound == "balanced":
        yield f"balanced: engines make {rho:.0%} of what the trainer can take{waits}"
    elif bound == "rollout":
        yield f"rollout-bound: engines make {rho:.0%} of what the trainer can take{waits}"
    elif setting.hides_rho:
        yield f"train-bound or balanced{waits}, and engines that wait for room hide by how much"
    else:
        yield f"train-bound: engines make {rho - 1:.0%} more than the trainer can take{waits}"
    busy = known.engine_busy_share
    if idle >= HELD_BACK and setting.lookahead is not None:
        yield (
            f"max_lookahead {setting.lookahead:g} may hold the engines back: with all slots taken they could make more "
            "than this ρ says"
        )
    elif idle >= HELD_BACK and setting.capped:
        yield (
            f"{setting.capped} may hold the engines back: with all slots taken they could make more than this ρ says"
        )
    elif idle >= HELD_BACK and busy is not None and 1 - busy >= HELD_BACK:
        yield (
            f"engines stand idle {1 - busy:.0%} of the time although the trainer waits: there are too few tasks, or "
            "rollouts wait for their environments"
        )


def _larger(pre_queue: float, in_queue: float) -> str:
    return "pre_queue" if pre_queue >= in_queue else "in_queue"


def _on_source(
    known: Quantities, setting: Setting | None, source: str, pre_queue: float, in_queue: float
) -> Iterator[str]:
    total = pre_queue + in_queue
    if source == "pre_queue":
        why = _why_pre_queue(known, setting, pre_queue)
        yield f"{pre_queue:.1f} of {total:.1f} versions pass while groups are generated{why}"
    elif source == "in_queue":
        yield f"{in_queue:.1f} of {total:.1f} versions pass in the queue{_why_in_queue(setting, in_queue)}"


def _why_pre_queue(known: Quantities, setting: Setting | None, pre_queue: float) -> str:
    expected = known.expected_generation_s
    # A group that takes so many periods spans as many publishes, on average.
    taken = pre_queue * (known.publish_period_s or 0.0)
    if expected and taken > SLOW_GENERATION * expected:
        return f": they take about {taken:.3g} s, {expected:.3g} s of it to decode the longest response"
    if setting is None:
        return ""
    tails, slots = f"M {setting.tailness:.2f}", f"C/B {setting.concurrency_ratio:.2f}"
    if setting.tailness >= setting.concurrency_ratio:
        return f": above all long tails ({tails}, {slots})"
    return f": above all many requests at once ({slots}, {tails})"


def _why_in_queue(setting: Setting | None, in_queue: float) -> str:
    if setting is None or predict(setting).iqs < EXPLAINED * in_queue:
        return ""
    if setting.lookahead is not None:
        return f": admission lets generation run {setting.lookahead:g} version{'s' * (setting.lookahead != 1)} ahead"
    if setting.rho > 1 + BALANCED and setting.queue > 1.2 * setting.per_batch:
        return f": training is the bottleneck and the queue holds {setting.queue / setting.per_batch:.1f} batches"
    if setting.rho > 1 + BALANCED:
        return ": training is the bottleneck, so the queue is full"
    return "" if setting.streams else ": groups wait until the trainer takes a whole batch"


def _on_losses(view: RunView, bound: str) -> Iterator[str]:
    accepted = view.groups["accepted"].groups
    gate = view.policy.max_staleness
    limit = f"max_staleness {gate}" if gate != UNSET else "a former max_staleness"
    too_stale = limit if publishes_nothing(view) else f"{limit}, which prefers short responses"
    overflow = (
        "training is the bottleneck" if bound == "train" else "they come in bursts, or training was slower before"
    )
    reasons = {
        "dropped_overflow": f"dropped from a full queue: {overflow}",
        "dropped_stale": f"dropped for {too_stale}",
        "recycled": f"started anew for {too_stale}",
        "filtered": "filtered, "
        + ", ".join(f"{count} for {reason}" for reason, count in filtered(view).items() if count),
        "rejected": "rejected by the trainer",
        "discarded": "discarded by resumes",
        "lost": "lost by the store",
    }
    for state, why in reasons.items():
        groups = view.groups[state].groups
        if accepted and groups / accepted >= MUCH_LOST:
            yield f"{groups / accepted:.0%} of all groups so far are {why}"


def _on_prediction(view: RunView, known: Quantities, predicted: Predicted, measured: Measured) -> Iterator[str]:
    """Sentence on a measured mean that is off the prediction, and on the reasons that numbers support."""
    if predicted.staleness is None or predicted.tolerance is None or measured.staleness is None:
        return
    if abs(measured.staleness - predicted.staleness) <= predicted.tolerance:
        return
    found = list(differences(view, known, predicted, measured))
    yield (
        f"measured staleness {measured.staleness:.1f} is off the predicted {predicted.staleness:.1f} by more than "
        f"{predicted.tolerance:.1f}; {'; '.join(found) or 'nothing that was checked explains it'}"
    )


def _on_bias(bias: Bias) -> Iterator[str]:
    found = [one for one in bias.comparisons if one.biased]
    if found:
        yield f"what is trained differs from what is sampled, beyond chance: {', '.join(map(_difference, found))}"
    shares = [one for one in bias.environments if one.biased]
    if shares:
        yield "shares of environments differ, trained from sampled: " + ", ".join(
            f"{one.name or '(none)'} {one.trained:.0%} from {one.sampled:.0%}" for one in shares
        )


def _difference(one: Comparison) -> str:
    name = one.name.replace("_", " ")
    if one.name == "truncated_share":
        return f"{name} {one.trained:.1%} from {one.sampled:.1%}"
    if one.ratio is None:
        return f"{name} {one.trained:.3g} from {one.sampled:.3g}"
    return f"{name} {one.ratio - 1:+.0%}"
