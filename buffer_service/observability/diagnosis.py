"""On whom a run waits, in words: what a pull that ran out of time says, and what `rollout-buffer status` prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import UNSET


@dataclass(frozen=True, slots=True)
class Standing:
    """What has to be known of a run to say on whom it waits. Counts are tasks and groups."""

    paused: str
    queued: int
    needed: int
    pending: int
    leased: int
    published_version: int
    max_staleness: int
    """UNSET for no gate."""
    engines: Sequence[tuple[str, int]]
    """State and loaded version of each."""

    @classmethod
    def of(cls, view: RunView) -> Self:
        """The standing of a run."""
        return cls(
            paused=view.paused,
            queued=view.groups["queued"].groups,
            needed=view.policy.batch_groups,
            pending=view.tasks["pending"],
            leased=view.tasks["leased"],
            published_version=view.published.version,
            max_staleness=view.policy.max_staleness,
            engines=[(engine.state, engine.loaded.version) for engine in view.engines],
        )


def waits_on(standing: Standing) -> str:
    """On whom the run waits now."""
    if not standing.paused and standing.queued >= standing.needed:
        return f"the trainer: {_counted(standing.queued, 'group')} queued, {standing.needed} make a batch"
    return pull_waits_on(standing)


def pull_waits_on(standing: Standing, hint: str = "") -> str:
    """On whom a pull waits that found no batch. `hint`: the store's own word on why nothing moves, if it has one."""
    if standing.paused:
        return f"a resume: the run is paused ({standing.paused})"
    if standing.leased:
        return f"generation: {_counted(standing.leased, 'task')} being generated"
    if not standing.pending:
        return "the feeder: no task is pending"
    weights = _weights_too_old(standing)
    if weights:
        return f"weights: {weights}"
    return f"workers: {hint or 'no worker has leased a task'}"


def _weights_too_old(standing: Standing) -> str:
    """Why no engine may be given work, where its weights are the reason."""
    alive = [(state, version) for state, version in standing.engines if state != "stopped"]
    usable = [version for state, version in alive if state != "quarantined"]
    if alive and not usable:
        return f"{_counted(len(alive), 'engine')} quarantined, none is left"
    if not usable or standing.max_staleness == UNSET:
        return ""
    required = max(0, standing.published_version - standing.max_staleness)
    if max(usable) >= required:
        return ""
    return f"the newest engine has loaded version {max(usable)} and the next batch needs {required}"


def _counted(number: int, noun: str) -> str:
    return f"1 {noun} is" if number == 1 else f"{number} {noun}s are"
