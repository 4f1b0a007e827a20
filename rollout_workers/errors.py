"""Errors inside a worker, besides those of the wire contract and of the engines.

    WorkerError
    ├── WeightsInvalid       the files are not those of the manifest; nothing was replaced
    ├── WeightsUnavailable   the files cannot be had now
    ├── RolloutFailed        the rollout function raised, took too long, or did not make a sample
    ├── EpisodeFull          nothing more fits into a rollout function's sample
    ├── RewardFailed         the reward function raised, took too long, or gave no finite number
    ├── PromptRefused        the task's prompt cannot become token ids here
    ├── GenerationFailed     the engine answered, and the answers do not make a group
    ├── SamplesFailed        some samples of the group failed in every attempt; the others are there
    └── EnginesLost          no engine could be started or reached

Invariants: `reason` is stable and unique; constructors take the error's data and build the message.
"""

from collections.abc import Mapping
from typing import ClassVar


class WorkerError(Exception):
    """Base of this tree."""

    reason: ClassVar[str] = "worker_error"
    retryable: ClassVar[bool] = False


class WeightsInvalid(WorkerError):
    """A file breaks its manifest entry."""

    reason = "weights_invalid"

    def __init__(self, label: str, file: str, why: str) -> None:
        super().__init__(f"weights {label}: {file}: {why}")
        self.file = file


class WeightsUnavailable(WorkerError):
    """The source does not give the files."""

    reason = "weights_unavailable"
    retryable = True

    def __init__(self, label: str, source: str, why: str) -> None:
        super().__init__(f"weights {label} cannot be had from {source}: {why}")


class RolloutFailed(WorkerError):
    """The rollout function made no sample."""

    reason = "rollout_failed"

    def __init__(self, function: str, sample_index: int, why: str) -> None:
        super().__init__(f"rollout function {function} failed for sample {sample_index}: {why}")


class EpisodeFull(WorkerError):
    """The sample has no room for another turn. A rollout function that lets it pass ends the sample as "length"."""

    reason = "episode_full"

    def __init__(self, sample_index: int, why: str) -> None:
        super().__init__(f"sample {sample_index} is full: {why}")
        self.sample_index = sample_index


class RewardFailed(WorkerError):
    """No reward for a sample."""

    reason = "reward_failed"

    def __init__(self, function: str, sample_index: int | None, why: str) -> None:
        where = "" if sample_index is None else f" for sample {sample_index}"
        super().__init__(f"reward function {function} failed{where}: {why}")


class PromptRefused(WorkerError):
    """The prompt cannot be used by this worker."""

    reason = "prompt_refused"

    def __init__(self, task_id: str, why: str) -> None:
        super().__init__(f"task {task_id}: {why}")


class GenerationFailed(WorkerError):
    """Generated samples do not make a group."""

    reason = "generation_failed"

    def __init__(self, lease_id: str, why: str) -> None:
        super().__init__(f"lease {lease_id}: {why}")


class SamplesFailed(WorkerError):
    """Samples of a group that were given up, with the last error of each; the group's others are kept."""

    reason = "samples_failed"

    def __init__(self, lease_id: str, errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        others = f" (and {len(errors) - 1} more samples of the group)" if len(errors) > 1 else ""
        super().__init__(f"lease {lease_id}: sample {first} was given up{others}: {errors[first]}")
        self.errors = errors


class EnginesLost(WorkerError):
    """No engine to work with."""

    reason = "engines_lost"

    def __init__(self, why: str) -> None:
        super().__init__(why)
