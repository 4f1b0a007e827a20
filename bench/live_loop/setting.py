"""A setting of the loop, as the live run and the simulator both take it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from buffer_service.simulator import Simulation, Workload
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.queue_policies import queue_policy
from trainer_client.policy import Policy

LENGTH_MEDIAN, LENGTH_CAP = 100, 1_000
"""Tokens. The cap is ten medians: beyond 4.6 σ at σ = 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One loop. The trainer's step takes B·L̄/T seconds, T = R/ρ, whatever its batch holds."""

    name: str
    preset: str
    """The policy, with N on top."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the policy in place of the preset's."""
    rho: float
    groups_per_batch: int = 8
    group_size: int = 4
    concurrency: int = 32
    """C: slots of the one engine."""
    length_sigma: float = 0.5
    tokens_per_s: float = 150.0
    """v, of a slot, by the wall clock."""
    load_s: float = 0.02
    """Time for which the engine pauses to load weights."""
    jump_step: int = 0
    """Steps after which the engine is so much faster, and later responses longer; 0: never."""
    jump_speed: float = 1.0
    jump_length: float = 1.0
    whole_groups: bool = False
    """True if the worker has only as many groups in flight as have a slot for each response. Otherwise it has enough of
    them that every slot that becomes free takes the next response, as in the simulator.
    """

    @property
    def lengths(self) -> Lognormal:
        """Lengths of responses, as the simulated engine draws them."""
        return Lognormal(math.log(LENGTH_MEDIAN), self.length_sigma, LENGTH_CAP)

    @property
    def rollout_s(self) -> float:
        """B·L̄/R: what all slots need for a batch's tokens."""
        tokens = self.groups_per_batch * self.group_size * self.lengths.mean
        return tokens / (self.concurrency * self.tokens_per_s)

    @property
    def train_s(self) -> float:
        """B·L̄/T: a training step."""
        return self.rollout_s * self.rho

    @property
    def ideal_period_s(self) -> float:
        """B·L̄ / min(R, T)."""
        return max(self.rollout_s, self.train_s)

    @property
    def groups_per_engine(self) -> int:
        """Groups that the worker has in flight."""
        together = self.concurrency // self.group_size
        # A group takes M ≈ 1.5 to 3 times as long as a response, so up to M·C/G are begun.
        return together if self.whole_groups else max(4 * together, self.groups_per_batch)

    @property
    def policy(self) -> Policy:
        """Policy of the run."""
        return Policy(preset=self.preset, batch_groups=self.groups_per_batch, **self.fields)

    def slower(self, times: float) -> "Setting":
        """Make the same loop with all times so many times as long, but those that service and worker take."""
        return replace(self, tokens_per_s=self.tokens_per_s / times, load_s=self.load_s * times)

    def simulation(self, *, steps: int, warmup: int, seed: int, publish_lag_s: float = 0.0) -> Simulation:
        """Simulate the same loop; `publish_lag_s`: until engines begin to load what is published."""
        workload = Workload(
            concurrency=self.concurrency,
            group_size=self.group_size,
            rho=self.rho,
            lengths=self.lengths,
            reload_pause=self.load_s * self.tokens_per_s,
            publish_lag=publish_lag_s * self.tokens_per_s,
            groups_in_flight=self.groups_per_engine if self.whole_groups else 0,
        )
        policy = queue_policy(self.preset, self.groups_per_batch, **self.fields)
        return Simulation(policy=policy, workload=workload, steps=steps, warmup=warmup, seed=seed)
