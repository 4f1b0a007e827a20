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
    ├── EnginesLost          no engine could be started or reached
    ├── InfrastructureError  raised by a reward or rollout function: what it needs does not work
    └── PolicyError          raised by a reward or rollout function: the answer is wrong, and is trained so

Invariants: `reason` is stable and unique; constructors take the error's data and build the message.
"""

from collections.abc import Mapping
from typing import ClassVar

from buffer_wire.errors import InvalidField
from buffer_wire.limits import FAILURE


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

    def __init__(self, function: str, sample_index: int, why: str, *, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
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

    def __init__(self, function: str, sample_index: int | None, why: str, *, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
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


class InfrastructureError(WorkerError):
    """A sandbox, a judge or an API that a reward or rollout function needs does not work. The sample is tried again,
    then its task; it is never trained. Any other exception but PolicyError counts as this one. `retry_after_s`: seconds
    until another attempt makes sense, at most 600; 0: the worker's own back-off.
    """

    reason = "infrastructure_error"
    retryable = True

    def __init__(self, why: str, *, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
        self.retry_after_s = retry_after_s_of(self)
        super().__init__(why)


LONGEST_RETRY_S = 600.0


def retry_after_s_of(error: BaseException) -> float:
    """Seconds that an error, of whatever library, asks to wait before another attempt; at most 600, 0 for no wish."""
    wish = getattr(error, "retry_after_s", 0.0)
    return min(wish, LONGEST_RETRY_S) if isinstance(wish, int | float) and wish > 0 else 0.0


class PolicyError(WorkerError):
    """The answer is wrong: it cannot be read, or breaks a rule. The sample ends here and is trained with its reward.

    `name`: 1 to 64 characters of [a-z0-9_], by which it is counted; `result`: what the function would return, so a
    reward, a mapping with one, or in a rollout function None, which leaves it to the reward function.
    """

    reason = "policy_error"

    def __init__(self, name: str, result: float | Mapping[str, object] | None = 0.0) -> None:
        if not FAILURE.fullmatch(name):
            raise InvalidField("PolicyError.name", name, "1 to 64 characters of [a-z0-9_]")
        super().__init__(name)
        self.name = name
        self.result = result
