"""Advice: the levers of the theory, each alone, with its effect by the closed form. Best first.

Trained tokens/s are those of min(R, T) over the period's ratio. A lever is named when it is worth it: it takes away a
tenth of the staleness and a tenth of a version, or adds a twentieth to the throughput.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import RunPolicy
from buffer_service.observability.estimate import closed_forms
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.prediction import Setting, barely_train_bound, predict
from buffer_wire.estimate import Advice, Quantities

LEAST_VERSIONS = 0.1
LEAST_SHARE = 0.1
LEAST_THROUGHPUT = 0.05

SLIGHTLY_ROLLOUT_BOUND = 0.9
MICRO_BATCHES = 8
LONG_TAIL = 1.5
MUCH_CONCURRENCY = 1.0
WORTH_A_GATE = 2.0

_NO_LOSS = -0.02

Lever = Callable[[Setting, Quantities, RunView], Iterator[Advice]]


def advice(setting: Setting, known: Quantities, view: RunView) -> tuple[Advice, ...]:
    """Advice: levers that are worth it, the best first."""
    now = predict(setting).staleness
    least = max(LEAST_VERSIONS, LEAST_SHARE * now)
    found = [
        one
        for lever in _LEVERS
        for one in lever(setting, known, view)
        if one.lever == "split" or one.change <= -least or (one.throughput or 0.0) >= LEAST_THROUGHPUT
    ]
    return tuple(sorted(found, key=lambda one: (_costs(one), one.change)))


def _costs(one: Advice) -> bool:
    # A split costs nothing, also where what it gains is not known.
    return one.lever != "split" and (one.throughput is None or one.throughput < _NO_LOSS)


def _advised(
    lever: str, text: str, before: Prediction, after: Prediction, throughput: float | None
) -> Iterator[Advice]:
    yield Advice(
        lever=lever,
        text=text,
        staleness=after.staleness,
        change=after.staleness - before.staleness,
        throughput=throughput,
    )


def _split(setting: Setting, _known: Quantities, _: RunView) -> Iterator[Advice]:
    """Lever `split`: GPUs between engines and training. Fewer or more engines change C as they change R."""
    now, rho = predict(setting), setting.rho
    if setting.lookahead is not None:
        return
    if rho > closed_forms.ROUGH_BELOW:
        then = predict(replace(setting, rho=1.0, concurrency_ratio=setting.concurrency_ratio / rho))
        text = (
            f"split: engines make {rho - 1:.0%} more than is trained; {1 - 1 / rho:.0%} of them could train instead "
            f"(ρ {rho:.2f} -> 1): at least as much is trained, {_total(now, then)}"
        )
        # How much the freed GPUs train cannot be known here.
        yield from _advised("split", text, now, then, None)
    elif rho < closed_forms.ROUGH_ABOVE and not setting.capped:
        more = SLIGHTLY_ROLLOUT_BOUND / rho
        then = predict(replace(setting, rho=SLIGHTLY_ROLLOUT_BOUND, concurrency_ratio=setting.concurrency_ratio * more))
        text = (
            f"split: the trainer could take {1 / rho - 1:.0%} more; engines for {more - 1:.0%} more tokens/s "
            f"(ρ {rho:.2f} -> {SLIGHTLY_ROLLOUT_BOUND}): {more - 1:.0%} more is trained, {_total(now, then)}"
        )
        yield from _advised("split", text, now, then, more - 1)


def _queue(setting: Setting, known: Quantities, view: RunView) -> Iterator[Advice]:
    """A queue of one batch, of two takes where batches are streamed. Near balance both sides are taken at ρ = 1, where
    a long queue costs most.
    """
    policy, cap = view.policy, known.queue_cap
    room = max(2 * setting.take if setting.streams else setting.take, _least_queue(policy, cap, setting))
    if setting.lookahead is not None or setting.newest_first or setting.queue < 1.2 * room:
        return
    rough = closed_forms.is_rough(setting.rho)
    at = barely_train_bound(setting) if rough else setting
    now, then = predict(at), predict(replace(at, queue=room))
    loss = (
        0.0 if setting.streams else closed_forms.small_batch_period(max(1, round(setting.per_batch)), 1.0, at.rho) - 1
    )
    slower = f", {loss:.1%} less is trained" if loss >= 0.005 else ""
    limit = getattr(policy, cap)
    what = f"{cap} {limit} -> {math.ceil(round(limit * room / setting.queue, 3))}"
    if cap != "max_queued_groups":
        what += f", room for {setting.queue:.0f} groups -> for {room:.0f}"
    upto = "up to " if rough else ""
    text = f"queue: {what}: in-queue staleness {upto}{now.iqs:.1f} -> {then.iqs:.1f}{slower}"
    yield from _advised("queue", text, now, then, -loss)


def _least_queue(policy: RunPolicy, cap: str, setting: Setting) -> float:
    """Groups that the queue must have room for, or the policy is refused; a batch by tokens may hold fewer."""
    if policy.micro_batch_groups:
        return policy.micro_batch_groups
    if cap == "max_queued_tokens":
        return setting.queue * 2 * policy.batch_tokens / policy.max_queued_tokens
    return policy.batch_groups


def _streaming(setting: Setting, _known: Quantities, view: RunView) -> Iterator[Advice]:
    """Micro-batches of an eighth of a batch over a queue of two of them."""
    ranks = max(1, view.world_size)
    each = max(1, int(setting.per_batch / MICRO_BATCHES / ranks))
    take = each * ranks
    if setting.lookahead is not None or 2 * take > setting.take:
        return
    now, then = predict(setting), predict(replace(setting, take=take, queue=2 * take))
    rough = ", a few per cent less is trained near balance" if closed_forms.is_rough(setting.rho) else ""
    text = (
        f"streaming: micro_batch_groups {each}, max_queued_groups {2 * take:.0f}, for a trainer that accumulates "
        f"gradients: in-queue staleness {now.iqs:.1f} -> {then.iqs:.1f}{rough}"
    )
    yield from _advised("streaming", text, now, then, 0.0)


def _batch(setting: Setting, _known: Quantities, view: RunView) -> Iterator[Advice]:
    """Lever `batch`: twice the batch, and the queue with it."""
    groups, policy = setting.per_batch, view.policy
    doubled = replace(setting, concurrency_ratio=setting.concurrency_ratio / 2, per_batch=2 * groups)
    if not setting.streams:
        doubled = replace(doubled, take=2 * setting.take, queue=2 * setting.queue)
    now, then = predict(setting), predict(doubled)
    what = f"{groups:.0f} -> {2 * groups:.0f} groups"
    if policy.batch_tokens:
        tokens, most = policy.batch_tokens, policy.batch_groups
        what = f"batch_tokens {tokens} -> {2 * tokens}, batch_groups {most} -> {2 * most}"
    text = f"batch: {what} (and the queue with it): {_total(now, then)}; as many tokens/s, half as many steps"
    yield from _advised("batch", text, now, then, 0.0)


def _concurrency(setting: Setting, known: Quantities, _: RunView) -> Iterator[Advice]:
    """Lever `concurrency`: half of C, R as it is. The tokens/s of engines with fewer requests are not known here."""
    if setting.concurrency_ratio < MUCH_CONCURRENCY or not known.concurrency:
        return
    now, then = predict(setting), predict(replace(setting, concurrency_ratio=setting.concurrency_ratio / 2))
    most = max(0.0, 1 - setting.rho / 2) if setting.rho > 1 else 0.5
    loss = (
        f"engines decode fewer tokens/s then, and up to {most:.0%} less is trained"
        if most
        else "as long as engines make half of their tokens/s, as much is trained"
    )
    text = (
        f"concurrency: {known.concurrency:.0f} -> {known.concurrency / 2:.0f} requests at once: "
        f"{_total(now, then)} if R stays; {loss}"
    )
    yield from _advised("concurrency", text, now, then, None if most else 0.0)


def _length_cap(setting: Setting, _known: Quantities, _: RunView) -> Iterator[Advice]:
    """Lever `length_cap`: half of the tail, M - 1."""
    if setting.tailness < LONG_TAIL:
        return
    tailness = 1 + (setting.tailness - 1) / 2
    now, then = predict(setting), predict(replace(setting, tailness=tailness))
    text = (
        f"length cap: fewer tokens for the longest responses (M {setting.tailness:.2f} -> {tailness:.2f}): "
        f"{_total(now, then)}; what is cut off is trained truncated"
    )
    yield from _advised("length_cap", text, now, then, 0.0)


def _gate(setting: Setting, _known: Quantities, view: RunView) -> Iterator[Advice]:
    """Admission: tighter where there is none, looser where it costs throughput. Its period is a lower bound.

    Where a controller holds a target, admission is its own.
    """
    if view.policy.target_staleness_milli:
        return
    now = predict(setting)
    if setting.lookahead is not None:
        gate = None if setting.gate is None else setting.gate + 1
        then = predict(replace(setting, lookahead=setting.lookahead + 1, gate=gate))
        gain = now.train_period_ratio / then.train_period_ratio - 1
        raised = "" if gate is None else f", max_staleness {setting.gate} -> {gate}"
        text = (
            f"gate: max_lookahead {setting.lookahead:g} -> {setting.lookahead + 1:g}{raised}: "
            f"about {gain:.0%} more is trained, {_total(now, then)}"
        )
        yield from _advised("gate", text, now, then, gain)
        return
    lookahead = max(1, view.policy.least_staleness, round(now.staleness / 2))
    if now.staleness < WORTH_A_GATE:
        return
    then = predict(replace(setting, lookahead=lookahead, blocks=True))
    loss = 1 - now.train_period_ratio / then.train_period_ratio
    text = (
        f"gate: max_lookahead {lookahead}, overflow_action block: {_total(now, then)}; "
        f"at least {max(0.0, loss):.0%} less is trained"
    )
    yield from _advised("gate", text, now, then, -loss if loss > 0 else None)


def _total(now: Prediction, then: Prediction) -> str:
    return f"staleness {now.staleness:.1f} -> {then.staleness:.1f}"


_LEVERS: tuple[Lever, ...] = (_split, _queue, _streaming, _batch, _concurrency, _length_cap, _gate)
