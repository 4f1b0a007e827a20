"""Limits of the work on one task: its own where it has them, else its environment's, else the worker's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.options import is_positive

MS = 1_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts in seconds, and attempts."""

    generate_timeout_s: float
    """Longest time for the samples of one group on an engine."""
    reward_timeout_s: float
    """Longest time for the rewards of one group; of one sample where the function is a coroutine, or in a process."""
    max_sample_attempts: int
    """Attempts of one sample under one lease."""


NAMES = tuple(field.name for field in fields(Limits))


def parsed(settings: Iterable[str]) -> dict[str, dict[str, float]]:
    """Limits by environment, of settings `NAME.reward_timeout_s=600`. Raises InvalidField."""
    by_environment: dict[str, dict[str, float]] = {}
    for setting in settings:
        at, equals, text = setting.partition("=")
        # Names of environments may hold dots.
        environment, dot, name = at.rpartition(".")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        whole = name != "max_sample_attempts" or (value.is_integer() and 1 <= value <= 100)
        if not (equals and dot and name in NAMES and is_positive(value) and whole):
            raise InvalidField("environment_limits", setting, f"NAME.X=VALUE, X one of {', '.join(NAMES)}")
        by_environment.setdefault(environment, {})[name] = value
    return by_environment


class LimitsOfTasks:
    """Limits of each task. `default`: the worker's; `by_environment`: what environments have in their place."""

    def __init__(self, default: Limits, by_environment: Mapping[str, Mapping[str, float]]) -> None:
        self._default = default
        self._by_environment = {name: _with(default, given) for name, given in by_environment.items()}

    def of(self, task: tasks_pb2.Task) -> Limits:
        """The limits of a task."""
        own = {
            "generate_timeout_s": task.generate_timeout_ms / MS,
            "reward_timeout_s": task.reward_timeout_ms / MS,
            "max_sample_attempts": task.sample_attempts,
        }
        return _with(
            self._by_environment.get(task.environment, self._default),
            {name: each for name, each in own.items() if each},
        )


def _with(limits: Limits, given: Mapping[str, float]) -> Limits:
    if not given:
        return limits
    changed = replace(limits, **given)  # type: ignore[arg-type]
    return replace(changed, max_sample_attempts=int(changed.max_sample_attempts))
