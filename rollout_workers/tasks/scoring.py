"""Rewards of one group: the rollout function's where it gave some, else the reward function's.

Rewards that are missing are asked for together; samples that got none are then asked for again, each alone.

Invariants: a reward that is there is never asked for again; a sample is generated anew only after its reward has failed
twice for the same response while a sibling's came. So neither a judge that is down nor a hiccup throws responses away.
"""

import asyncio

import structlog

from rollout_workers.errors import RewardFailed, SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.rewards import Scorer

_log = structlog.get_logger()


class GroupRewards:
    """Rewards of the samples of `progress`, by index."""

    def __init__(
        self, progress: GroupProgress, scorer: Scorer, attempts: Attempts, *, timeout_s: float | None = None
    ) -> None:
        self._progress = progress
        self._scorer = scorer
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._rewards: dict[int, float] = {}
        self._asked_again: set[int] = set()
        """Samples whose present response had no reward at the first try."""

    @property
    def in_order(self) -> list[float]:
        """Rewards, one for each sample, when `ask` has returned nothing to generate."""
        return [self._rewards[i] for i in range(len(self._progress.samples))]

    async def ask(self) -> list[int]:
        """Score what has no reward yet; returns the samples that were cleared and have to be generated anew.

        Raises RewardFailed when no sample can be scored at all, SamplesFailed when some are given up; those are cleared
        if their siblings have rewards, so that whoever goes on generates them alone.
        """
        anew: list[int] = []
        samples = self._progress.samples
        self._rewards.update({i: sample.reward for i, sample in enumerate(samples) if sample.reward is not None})
        failures = await self._score([i for i in range(len(samples)) if i not in self._rewards])
        while failures:
            given_up = {i: error for i, error in failures.items() if not self._attempts.failed(i, error)}
            if given_up:
                self._clear(list(given_up))
                raise SamplesFailed(self._progress.lease.lease_id, given_up)
            self._attempts.again += len(failures)
            cleared = self._clear([i for i in failures if i in self._asked_again])
            anew += cleared
            failures = await self._ask_again([i for i in failures if i not in cleared])
        return anew

    async def _ask_again(self, indices: list[int]) -> dict[int, RewardFailed]:
        """Ask for each sample alone, so that one that takes too long does not fail the next again."""
        self._asked_again.update(indices)
        await asyncio.sleep(max((self._attempts.wait_s(i) for i in indices), default=0.0))
        failed = await asyncio.gather(*(self._score([i]) for i in indices))
        return {i: error for each in failed for i, error in each.items()}

    async def _score(self, indices: list[int]) -> dict[int, RewardFailed]:
        if not indices:
            return {}
        scores = await self._scorer.score(self._progress, indices, timeout_s=self._timeout_s)
        self._rewards.update(scores.rewards)
        for i, columns in scores.columns.items():
            self._progress.samples[i].scored = columns
        for i, failure in scores.named.items():
            self._progress.samples[i].failure = failure
        if scores.failures:
            first = min(scores.failures)
            _log.warning(
                "rewards failed",
                lease=self._progress.lease.lease_id,
                samples=sorted(scores.failures),
                error=str(scores.failures[first]),
            )
        return dict(scores.failures)

    def _clear(self, indices: list[int]) -> list[int]:
        """Forget these responses, unless there is not one reward: then the fault is not theirs."""
        if not self._rewards:
            return []
        for i in indices:
            self._progress.start_anew(i, "no_reward")
            self._asked_again.discard(i)
        return indices
