"""A run's staleness as the service estimates it: predicted, measured, explained. docs/staleness.md has the definitions.

What is not known is None, and `Estimate.unknown` says why. Invariant: nothing here refers to a message.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """A quantity that cannot be told yet."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """Quantities that determine a run's staleness, over the window; symbols as in docs/staleness.md."""

    engines: int = 0
    """Engines that are ready or loading, and heard of."""
    concurrency: float | None = None
    """Concurrency C: requests that all engines decode at once, while they decode."""
    rollout_tokens_per_s: float | None = None
    """Rollout speed R: tokens/s of all engines, while they decode."""
    slot_tokens_per_s: float | None = None
    """Speed of one request in tokens/s: v = R/C."""
    engine_busy_share: float | None = None
    """Share of the window in which an engine decodes anything."""
    train_tokens_per_s: float | None = None
    """Train speed T: response tokens trained a second, while the trainer works."""
    trainer_idle_share: float | None = None
    """Share of its time that the trainer waits for a batch."""
    pass_share: float = 1.0
    """Share of the recent groups that pass the run's filter."""
    rho: float | None = None
    """Utilization ρ = R/T; R counts only what passes the filter."""
    mean_length: float | None = None
    """Mean length L̄: response tokens of an accepted sample."""
    tailness: float | None = None
    """Tailness M: mean longest response of an accepted group over L̄."""
    group_size: float | None = None
    """Group size G: samples of an accepted group."""
    groups_per_batch: float | None = None
    """Groups of an assembled batch: N."""
    batches_per_publish: float | None = None
    """Batches that were assembled for each publish."""
    concurrency_ratio: float | None = None
    """Ratio C/B, with B the samples of all batches of a publish; C counts only what passes the filter."""
    queue_factor: float | None = None
    """Queue factor q: groups that the queue has room for, over N."""
    queue_cap: str = "max_queued_groups"
    """The cap that allows the fewest groups, by the mean size of those that were accepted."""
    train_period_s: float | None = None
    """Mean time from batch to batch."""
    publish_period_s: float | None = None
    """Mean time from publish to publish."""
    group_generation_s: float | None = None
    """Mean time from lease to acceptance, waits for environments, rewards and room in the queue included."""
    expected_generation_s: float | None = None
    """Time M·L̄/v to decode the longest response of a group."""
    decoded_tokens_per_s: float | None = None
    """Tokens/s that the engines decode, over the whole window."""
    trained_tokens_per_s: float | None = None
    """Response tokens/s of assembled groups, over the whole window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Mean staleness, in versions: by a simulation of the run, or by the closed form."""

    form: str = ""
    """Name of the closed form, in words: how the policy is taken."""
    pre_queue: float | None = None
    in_queue: float | None = None
    staleness: float | None = None
    period_ratio: float | None = None
    """Train period over the ideal one; under admission a lower bound."""
    rough: bool = False
    """True near balance, where the closed forms are rough and only the simulator predicts, as long as it has not."""
    tolerance: float | None = None
    """Largest difference between predicted and measured mean that needs no explanation."""
    notes: tuple[str, ...] = ()
    """Parts of the policy that are left out."""
    simulated: bool = False
    """True where the simulator predicts, False where the closed form does."""
    pending: bool = False
    """True while a simulation of the run as it is now is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStaleness:
    """Mean staleness of one environment's groups, over the whole run, in versions."""

    environment: str
    groups: int
    pre_queue: float
    in_queue: float
    staleness: float
    tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Mean staleness of the groups that were assembled in the window, in versions."""

    groups: int = 0
    pre_queue: float | None = None
    in_queue: float | None = None
    staleness: float | None = None
    """Mean staleness, by the head version."""
    tokens: float | None = None
    """Mean token staleness, over response tokens."""
    worst: int | None = None
    """Largest staleness of the whole run, by the head version."""
    environments: tuple[EnvironmentStaleness, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A mean over the trained samples beside the mean over all sampled ones."""

    name: str
    sampled: float
    trained: float
    ratio: float | None = None
    """Ratio of the trained to the sampled mean; None where that says nothing: the sampled one is 0 or below."""
    chance: float | None = None
    """The largest difference that is left to chance; None where it is not tested."""
    biased: bool = False
    """True where the difference is beyond chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Trained (assembled) against sampled (accepted) groups."""

    sampled_groups: int = 0
    trained_groups: int = 0
    comparisons: tuple[Comparison, ...] = ()
    """mean_length, mean_longest, mean_reward, mean_turns, truncated_share; over the window."""
    environments: tuple[Comparison, ...] = ()
    """Share of the groups of each environment, by its name; over the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Conclusions from the numbers, in words."""

    bound: str = ""
    """`rollout`, `train`, `balanced`, or empty while it is not known."""
    source: str = ""
    """`pre_queue` or `in_queue`, where most of the staleness comes from; empty where there is hardly any."""
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A lever, and its effect by the closed form; the best comes first."""

    lever: str
    """Name of the lever: `split`, `queue`, `streaming`, `batch`, `concurrency`, `length_cap`, `gate`."""
    text: str
    staleness: float
    """Staleness that is predicted with the lever applied, in versions."""
    change: float
    """Predicted change of staleness, in versions; below 0 is fresher."""
    throughput: float | None = None
    """Predicted change of trained tokens/s, as a share; None where the closed form cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimate of a run's staleness: measured, predicted, and what to do about it."""

    publishes: int
    """Publishes in the window, after the first."""
    window_s: float
    quantities: Quantities
    unknown: tuple[Unknown, ...]
    predicted: Predicted
    measured: Measured
    bias: Bias
    verdict: Verdict
    advice: tuple[Advice, ...]
    response_lengths: tuple[int, ...]
    """Accepted samples so far: at place i those of more than 2**(i-1) and at most 2**i response tokens."""
