"""Closed forms of mean staleness and of the train period; derivations in docs/staleness.md.

Symbols as there:

- L, L̄: tokens of a response, and their mean;
- C, R, v: slots, tokens/s that they decode in all, and v = R/C of each;
- T, B: tokens/s that the trainer trains, and rollouts of a batch;
- ρ = R/T;
- M = E[max of G lengths] / L̄;
- Q, q: rollouts that the queue holds, and q = Q/B.

Staleness is in weight versions, one per train step. Times cancel out: everything follows from C/B, q, ρ and M.
"""

import math
from dataclasses import dataclass

from buffer_wire.errors import InvalidField

ROUGH_ABOVE = 0.8
ROUGH_BELOW = 1.2
"""Largest utilization at which the closed forms are rough, as they are from ROUGH_ABOVE on.

Between the two, IQS jumps from 1 to q while the queue really wanders.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean staleness, in versions, and the train period over the ideal one, B·L̄ / min(R, T)."""

    pqs: float
    iqs: float
    train_period_ratio: float = 1.0

    @property
    def staleness(self) -> float:
        """Staleness in all: PQS + IQS."""
        return self.pqs + self.iqs


def is_rough(rho: float) -> bool:
    """True if only the simulator predicts at this utilization."""
    return ROUGH_ABOVE < rho < ROUGH_BELOW


def updates_over(age_periods: float) -> float:
    """Mean number of updates over an age that ends right after an update, in train periods.

    An age a counts the updates at 0, 1, 2, … periods back: floor(a) + 1. That is a + 1/2 on average when the fraction
    of a is spread evenly.
    """
    return age_periods + 0.5


def pre_queue(concurrency_ratio: float, rho: float, tailness: float) -> float:
    """PQS, versions published while a group is generated: M·L̄/v over the period, M·(C/B) / max(1, ρ)."""
    _positive(concurrency_ratio=concurrency_ratio, rho=rho)
    _at_least_one(tailness=tailness)
    return tailness * concurrency_ratio / max(1.0, rho)


# ── queue-drop, whole batches ────────────────────────────────────────────────


def in_queue(queue_factor: float, rho: float) -> float:
    """IQS of queue-drop with whole batches.

    ρ <= 1: the trainer is busy for the share ρ of a period, and what comes in meanwhile waits through one update: ρ.
    ρ > 1: at a pull the queue holds the last q·B rollouts, of ages 0 to q/ρ periods. The oldest B have the mean age
    (q - 1/2)/ρ, over which there are 1/2 + (q - 1/2)/ρ updates.
    """
    _positive(rho=rho)
    _at_least_one(queue_factor=queue_factor)
    return rho if rho <= 1 else updates_over((queue_factor - 0.5) / rho)


def queue_drop(concurrency_ratio: float, queue_factor: float, rho: float, tailness: float) -> Prediction:
    """Staleness of whole batches from a queue that drops its oldest groups.

    For ρ > 1 the sum holds as long as the ages of groups spread over a period. Groups that survive the queue were
    completed late in a period. So up to (1 - 1/ρ)/2 of it is seen as IQS, not PQS.
    """
    return Prediction(pre_queue(concurrency_ratio, rho, tailness), in_queue(queue_factor, rho))


def small_batch_period(groups_per_batch: int, queue_factor: float, rho: float) -> float:
    """Train period over the ideal one because groups come by ones: X in a training time, with mean and variance ρ·N.

    ρ <= 1: what comes beyond q·N while the trainer is busy is dropped and has to be made again, 1 + E[(X - qN)⁺]/N.
    ρ > 1: what is missing of N when the trainer is free is waited for at the rate ρ·N, 1 + E[(N - X)⁺]/(ρN).
    X is taken as normal. Its variance is that of arrivals independent of each other, which many slots come near to
    (C/B of 2 and more); fewer are more regular. For ρ > 1 that is for q = 1 only: a longer queue has them in stock.
    """
    _positive(groups_per_batch=groups_per_batch, rho=rho)
    _at_least_one(queue_factor=queue_factor)
    spread = math.sqrt(rho * groups_per_batch)
    if rho > 1 and queue_factor > 1:
        return 1.0
    gap = (queue_factor - rho if rho <= 1 else rho - 1) * groups_per_batch / spread
    density = math.exp(-gap * gap / 2) / math.sqrt(2 * math.pi)
    beyond = spread * (density - gap * math.erfc(gap / math.sqrt(2)) / 2)
    return 1 + beyond / (groups_per_batch * max(1.0, rho))


def queue_drop_of_small_batches(
    concurrency_ratio: float, queue_factor: float, rho: float, tailness: float, groups_per_batch: int
) -> Prediction:
    """Staleness of `queue_drop` with the period of `small_batch_period`.

    The same generation time spans fewer updates, and for ρ <= 1 the trainer is busy for a smaller share.
    """
    whole = queue_drop(concurrency_ratio, queue_factor, rho, tailness)
    period = small_batch_period(groups_per_batch, queue_factor, rho)
    return Prediction(whole.pqs / period, whole.iqs / period if rho <= 1 else whole.iqs, period)


# ── streaming ────────────────────────────────────────────────────────────────


def in_queue_streaming(micro_share: float, queue_micro_batches: float, rho: float) -> float:
    """IQS of queue-drop with streamed micro-batches: micro_share = n/N, a queue of k micro-batches.

    Only groups that are queued at the moment of an update (when the last micro-batch of a step is trained) see it.
    ρ <= 1: that takes ρ·n/N of a period, in which ρ·n groups come in, at most k·n: min(ρ, k)·n/N.
    ρ > 1: the queue is full then, k·n groups. Of these the trainer takes n at once. While it trains n groups, ρ·n come
    in and (ρ - 1)·n of the oldest are dropped. Let k - 1 = a·ρ + b, a whole, 0 <= b < ρ. The number of micro-batches
    of them that are trained is then 1 + a + max(0, b - (ρ - 1)). For k = 2 that is (3 - ρ)·n/N up to ρ = 2.
    """
    _positive(micro_share=micro_share, rho=rho)
    _at_least_one(queue_micro_batches=queue_micro_batches)
    if rho <= 1:
        return min(rho, queue_micro_batches) * micro_share
    whole = math.floor((queue_micro_batches - 1) / rho)
    rest = queue_micro_batches - 1 - whole * rho
    return (1 + whole + max(0.0, rest - (rho - 1))) * micro_share


def streaming(
    concurrency_ratio: float, micro_share: float, queue_micro_batches: float, rho: float, tailness: float
) -> Prediction:
    """Micro-batches are taken all over the period, so PQS is its closed form also for ρ > 1."""
    pqs = pre_queue(concurrency_ratio, rho, tailness)
    return Prediction(pqs, in_queue_streaming(micro_share, queue_micro_batches, rho))


# ── blocking pushes ──────────────────────────────────────────────────────────


def blocking(
    concurrency_ratio: float, queue_factor: float, rho: float, tailness: float, micro_share: float = 1.0
) -> Prediction:
    """Staleness under a queue that lets pushes wait instead of dropping; micro_share m = n/N, 1 for whole batches.

    ρ <= 1: the queue is seldom full, so as `queue_drop` and `streaming`.
    ρ > 1: nothing is dropped, and workers ask for no more while a push waits. So engines run for the share 1/ρ of the
    time. x = M·C/B batches are in flight when a queue of q batches is full. Of these, m are in line or queued when room
    comes, and the others were started at full rate: staleness = q + min(m, x) + max(0, x - m)/ρ. Groups start right
    after a take, so m/2 of what generation takes, x/ρ, is not seen as PQS but as IQS.
    C and ρ are those of engines that are never held back.
    """
    _positive(concurrency_ratio=concurrency_ratio, rho=rho, micro_share=micro_share)
    if rho <= 1:
        if micro_share < 1:
            return streaming(concurrency_ratio, micro_share, max(1.0, queue_factor / micro_share), rho, tailness)
        return queue_drop(concurrency_ratio, queue_factor, rho, tailness)
    _at_least_one(tailness=tailness)
    in_flight = tailness * concurrency_ratio
    whole = queue_factor + min(micro_share, in_flight) + max(0.0, in_flight - micro_share) / rho
    pqs = max(0.0, in_flight / rho - micro_share / 2)
    return Prediction(pqs, whole - pqs)


# ── admission-limited ────────────────────────────────────────────────────────


def admission_limited(
    concurrency_ratio: float, lookahead: float, rho: float, tailness: float, batch_tailness: float
) -> Prediction:
    """Staleness of blocking pushes under AReaL's admission, (η + p + 1)·N groups started in all at version p; no gate.

    PRIME-RL's async level k is the same with η = k. Nothing is dropped, so groups are trained in the order of their
    admission, but for reordering, which keeps the mean. The i-th group is trained by version ⌊i/N⌋ and may start from
    version ⌊i/N⌋ - η on. So groups that wait for admission are η stale, and the others are less:
    staleness = min(η, M·(C/B) + ρ) for ρ <= 1, η for ρ > 1.

    Period, in units of B·L̄/R. η = 0: the slowest of a batch, then training: max(0, 1 - C/B) + M′·C/B + ρ, with M′
    (`batch_tailness`) the tailness of min(B, C) responses. η >= 1: groups in flight wait at most η + 1 trainings. By
    Little's law the period is at least max(1, ρ, (M·C/B + ρ)/(η + 1)); waiting for the slow ones of a batch comes on
    top.
    PQS: generation over the period, and 1/2 less while admission binds, since groups then start right after a publish;
    as rough as the period.
    """
    _positive(concurrency_ratio=concurrency_ratio, rho=rho)
    _at_least_one(tailness=tailness, batch_tailness=batch_tailness)
    if lookahead < 0:
        raise InvalidField("max_staleness", lookahead, "0 or more")
    ideal = max(1.0, rho)
    generation = tailness * concurrency_ratio
    if lookahead == 0:
        slowest = max(0.0, 1 - concurrency_ratio) + batch_tailness * concurrency_ratio
        return Prediction(0.0, 0.0, (slowest + rho) / ideal)
    period = max(ideal, (generation + rho) / (lookahead + 1))
    unlimited = math.inf if rho > 1 else generation + rho
    if unlimited <= lookahead:
        return Prediction(generation, unlimited - generation, period / ideal)
    pqs = min(max(0.0, generation / period - 0.5), float(lookahead))
    return Prediction(pqs, lookahead - pqs, period / ideal)


# ── tokens ───────────────────────────────────────────────────────────────────


def token_staleness(
    prediction: Prediction, concurrency_ratio: float, rho: float, token_tailness: float, length_cv: float
) -> float:
    """Mean staleness over tokens when weights are updated in flight.

    From a token to its group's end it is the rest of M_t·L̄/v, with M_t the tailness as tokens see it: long groups have
    more of them. Of this, E[L²]/(2·L̄) = (1 + cv²)/2 · L̄ lie before the token on average.
    """
    _positive(concurrency_ratio=concurrency_ratio, rho=rho)
    period = max(1.0, rho) * prediction.train_period_ratio
    return prediction.iqs + (token_tailness - (1 + length_cv**2) / 2) * concurrency_ratio / period


# ── a fixed budget of GPUs ───────────────────────────────────────────────────


def period_of_budget(batch_tokens: float, gpus: float, rollout_tps: float, train_tps: float, rho: float) -> float:
    """Train period in seconds when `gpus` GPUs are split so that the utilization is ρ; tokens/s per GPU of each kind.

    With κ = t/r a share κρ/(1 + κρ) of them generates, so T = n·t/(1 + κρ). The period is:

        B·L̄·(1 + κρ) / (n·t·min(1, ρ))

    It falls below ρ = 1, rises above, and is least at 1.
    """
    _positive(batch_tokens=batch_tokens, gpus=gpus, rollout_tps=rollout_tps, train_tps=train_tps, rho=rho)
    kappa = train_tps / rollout_tps
    return batch_tokens * (1 + kappa * rho) / (gpus * train_tps * min(1.0, rho))


def train_bound_twin(rho: float, kappa: float) -> float:
    """The utilization above 1 with the period of `rho` below 1: 1 + (1/ρ - 1)/κ."""
    _positive(rho=rho, kappa=kappa)
    if rho > 1:
        raise InvalidField("rho", rho, "at most 1")
    return 1 + (1 / rho - 1) / kappa


def train_bound_gain(rho: float, kappa: float, queue_factor: float) -> float:
    """Difference of staleness between `rho` and its train-bound twin: PQS is the same, so IQS(ρ) - IQS(ρ₊)."""
    return in_queue(queue_factor, rho) - updates_over((queue_factor - 0.5) / train_bound_twin(rho, kappa))


def kappa_threshold(queue_factor: float) -> float:
    """Value of κ from which on the train-bound side is the staler one at every period.

    It is [(3q - 2) - 2·√((q - 1)(2q - 1))] / (2q²), 1/2 at q = 1.
    With x = ρ₋ the gain has the sign of a quadratic:

        x - 1/2 - (q - 1/2)·κx/(1 - (1 - κ)x)
        (x - 1/2)(1 - (1 - κ)x) - (q - 1/2)κx

    The threshold is the κ at which the two roots of the latter meet.
    """
    _at_least_one(queue_factor=queue_factor)
    q = queue_factor
    return ((3 * q - 2) - 2 * math.sqrt((q - 1) * (2 * q - 1))) / (2 * q * q)


def noise_adjusted(period: float, batch_rollouts: float) -> float:
    """Update time over √B: a batch of B has 1/√B of the gradient's noise."""
    _positive(period=period, batch_rollouts=batch_rollouts)
    return period / math.sqrt(batch_rollouts)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InvalidField(name, value, "above 0")


def _at_least_one(**values: float) -> None:
    for name, value in values.items():
        if not (value >= 1 and math.isfinite(value)):
            raise InvalidField(name, value, "at least 1")
