"""Result of a simulation, measured after its warm-up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Means are over the groups that were trained (staleness) or that ended (lengths) after the warm-up."""

    pqs: float
    iqs: float
    staleness: float
    """Staleness by the head, in versions."""
    token_staleness: float
    """Mean over all trained tokens of the versions since each was made, with updates in flight."""
    staleness_p95: int
    staleness_max: int
    tailness: float
    """M: mean longest response of a group over the mean response, as sampled."""
    train_period_ratio: float
    """Mean train period over B·L̄ / min(R, T)."""
    sampled_mean_length: float
    """Tokens; of the responses of all groups that were generated."""
    trained_mean_length: float
    """Tokens; of the responses of the groups that were trained."""
    sampled_max_length: int
    trained_max_length: int
    dropped_groups: int
    """Groups dropped by overflow or because they were too stale."""
    recycled_groups: int
    wasted_token_share: float
    """Tokens of dropped and recycled groups, and of surplus responses, over all that were generated."""
    surplus_token_share: float
    """Tokens of surplus responses that were cut off over all that were generated."""
    trainer_idle_share: float
    slot_idle_share: float
    mean_concurrency: float
    """Responses that decode at once, while any does."""
    mean_leased: float
    """Groups that are leased and not accepted."""
    steps: int
    """Measured train steps, after the warm-up."""
    warmup: int
    """Train steps that were simulated before and not counted."""
    seed: int
    staleness_counts: tuple[int, ...]
    """Trained groups by staleness, from 0."""

    @property
    def length_bias(self) -> float:
        """Trained over sampled mean length, minus 1; below 0 where short responses are preferred."""
        return self.trained_mean_length / self.sampled_mean_length - 1
