"""Workload of a simulation: slots, groups, lengths, utilization, and what interrupts decoding.

The unit of time is a token time: what a slot needs to decode one token, 1/v = C/R. A train step's time follows from ρ.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buffer_service.simulator.lengths import Lengths
from buffer_wire.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Jump:
    """A change of the workload in the middle of a simulation, for groups that begin after it."""

    step: int
    """Trained steps after which it happens."""
    speed: float = 1.0
    """Factor of the engines' speed."""
    length: float = 1.0
    """Factor of the responses' lengths."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One setting of the loop."""

    concurrency: int
    """C: slots; each decodes one response at a time."""
    group_size: int
    """G: responses of a group."""
    rho: float
    """ρ = R/T: what the slots can make over what the trainer can train, both in responses a second."""
    lengths: Lengths
    turn_tokens: int = 0
    """A response of several turns waits for its environment after every so many tokens; 0: one turn."""
    turn_latency: float = 0.0
    """That wait, in token times; the slot stays taken."""
    reload_pause: float = 0.0
    """No slot decodes for so long after a publish, in token times."""
    publish_lag: float = 0.0
    """Time from a publish to that pause, in token times: engines go on with the weights they have. Of versions that
    are published meanwhile the newest alone is loaded next.
    """
    groups_in_flight: int = 0
    """Groups whose responses are generated at once, a worker's groups_per_engine over all engines; 0: as many as the
    slots need. A group begins when all of its responses have room: up to C/G, slots wait until as many are free. More
    are leased ahead, and begin as slots become free.
    """
    groups_outstanding: int = 0
    """Leases that workers hold at most, those whose pushes wait included; 0: any number, but none while a push waits
    in line.
    """
    submitted_together: int = 64
    """Tasks of one submit: with the policy's longest_first the one that is expected to be the longest begins first."""
    estimate_error: float = 0.0
    """Standard deviation of the logarithm of the expected length over the length of the longest response."""

    surplus: int = 0
    """Responses that a group begins beyond G; those that have not ended with the first G are cut off. One turn only."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("concurrency", self.concurrency, 1),
            ("group_size", self.group_size, 1),
            ("turn_tokens", self.turn_tokens, 0),
            ("turn_latency", self.turn_latency, 0),
            ("reload_pause", self.reload_pause, 0),
            ("publish_lag", self.publish_lag, 0),
            ("groups_in_flight", self.groups_in_flight, 0),
            ("surplus", self.surplus, 0),
            ("groups_outstanding", self.groups_outstanding, 0),
            ("submitted_together", self.submitted_together, 1),
            ("estimate_error", self.estimate_error, 0),
        ):
            if value < least:
                raise InvalidField(name, value, f"at least {least}")
        if self.surplus and self.turn_tokens:
            raise InvalidField("surplus", self.surplus, "0 with responses of several turns")
        if not 0 < self.rho < 1_000:
            raise InvalidField("rho", self.rho, "above 0, below 1,000")

    def durations(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Times that responses of these lengths take a slot, in token times; same shape."""
        if not self.turn_tokens or not self.turn_latency:
            return tokens.astype(np.float64)
        return tokens + (tokens - 1) // self.turn_tokens * self.turn_latency

    def mean_duration(self, seed: int) -> float:
        """L̄/v: mean time that a slot is taken by a response, in token times; estimated where turns wait."""
        if not self.turn_tokens or not self.turn_latency:
            return self.lengths.mean
        sample = self.lengths.draw(np.random.default_rng(seed), 20_000, 1)
        return float(self.durations(sample).mean())

    def rollout_time(self, batch_groups: int, seed: int) -> float:
        """B·L̄/R: token times in which the slots, all busy, make a batch of so many groups."""
        return batch_groups * self.group_size * self.mean_duration(seed) / self.concurrency

    def ideal_period(self, batch_groups: int, seed: int) -> float:
        """B·L̄ / min(R, T): shortest train period of such batches, in token times."""
        return self.rollout_time(batch_groups, seed) * max(1.0, self.rho)
