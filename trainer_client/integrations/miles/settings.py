"""Settings from Miles and slime under their own names, and a few of ours, each an attribute of args or a variable.

`--custom-config-path` of either framework sets attributes of args from a YAML file; an attribute wins over a variable
of the environment.

| attribute of args                  | variable                          | default                                  |
|------------------------------------|-----------------------------------|------------------------------------------|
| rollout_buffer_address             | ROLLOUT_BUFFER_ADDRESS            | 127.0.0.1:50051                          |
| rollout_buffer_run                 | ROLLOUT_BUFFER_RUN                | none: it must be set                     |
| rollout_buffer_publish             | ROLLOUT_BUFFER_PUBLISH            | trainer                                  |
| rollout_buffer_lookahead           | ROLLOUT_BUFFER_LOOKAHEAD          | 1, as train_async.py; 0 for train.py     |
| rollout_buffer_first_rollout       | ROLLOUT_BUFFER_FIRST_ROLLOUT      | 0: the rollout id that is the run's step 0 |
| rollout_buffer_timeout_s           | ROLLOUT_BUFFER_TIMEOUT_S          | 3600: longest wait for one rollout       |
| rollout_buffer_no_progress_s       | ROLLOUT_BUFFER_NO_PROGRESS_S      | 30: between warnings while one waits     |
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from buffer_wire.errors import InvalidField
from trainer_client.batch import Group
from trainer_client.integrations.miles.contract import Args
from trainer_client.policy import Policy

MILES_STALENESS = 4
MILES_DOCS_QUEUE = 1_000
PUBLISH_MODES = ("trainer", "rollout")
LEAST_RETAINED = 64
EQUAL_REWARDS_FILTER = "check_reward_nonzero_std"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings: the service's address, and the relation of rollouts, steps and versions in the trainer's loop."""

    address: str
    run_id: str
    publish: str
    """Mode of publishing. "trainer": the training program calls `publish_weights`; "rollout": the rollout function
    publishes versions without files, for engines whose weights somebody else writes."""
    lookahead: int
    """Number of rollouts that the program asks for before the ones ahead of them are trained: 1 in train_async.py."""
    first_rollout: int
    """Rollout id of step 0 of the run."""
    interval: int
    """Number of rollouts trained between two weight updates, --update-weights-interval."""
    timeout_s: float
    no_progress_s: float

    @classmethod
    def of(cls, args: Args, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read the settings from the framework's arguments and the environment. Raises InvalidField."""
        environ = os.environ if environ is None else environ
        settings = cls(
            address=_read(args, environ, "address", str, "127.0.0.1:50051"),
            run_id=_read(args, environ, "run", str, ""),
            publish=_read(args, environ, "publish", str, "trainer"),
            lookahead=_read(args, environ, "lookahead", int, 1),
            first_rollout=_read(args, environ, "first_rollout", int, 0),
            interval=getattr(args, "update_weights_interval", None) or 1,
            timeout_s=_read(args, environ, "timeout_s", float, 3600.0),
            no_progress_s=_read(args, environ, "no_progress_s", float, 30.0),
        )
        if not settings.run_id:
            raise InvalidField("ROLLOUT_BUFFER_RUN", "", "the name of the training run, one of its own for each")
        if settings.publish not in PUBLISH_MODES:
            raise InvalidField("ROLLOUT_BUFFER_PUBLISH", settings.publish, "one of " + ", ".join(PUBLISH_MODES))
        if settings.lookahead not in (0, 1):
            raise InvalidField("ROLLOUT_BUFFER_LOOKAHEAD", settings.lookahead, "1 (train_async.py) or 0 (train.py)")
        return settings

    def step_of(self, rollout_id: int) -> int:
        """Return the run's step of a rollout. Raises InvalidField for one before the run's first."""
        if rollout_id < self.first_rollout:
            raise InvalidField("rollout_id", rollout_id, f"at least ROLLOUT_BUFFER_FIRST_ROLLOUT, {self.first_rollout}")
        return rollout_id - self.first_rollout

    def updates(self, first: int, until: int) -> int:
        """Count the weight updates that follow the training of steps first … until − 1.

        There is one after each rollout id r for which (r + 1) mod interval = 0, as in train_async.py.
        """
        return (until + self.first_rollout) // self.interval - (first + self.first_rollout) // self.interval

    def updated_steps(self, trained: int) -> int:
        """Count the steps, of `trained` ones, that are in the newest update."""
        return (trained + self.first_rollout) // self.interval * self.interval - self.first_rollout


def _read(args: Args, environ: Mapping[str, str], name: str, kind: Callable[[str], T], default: T) -> T:
    value = getattr(args, f"rollout_buffer_{name}", None)
    variable = f"ROLLOUT_BUFFER_{name.upper()}"
    if value is None:
        value = environ.get(variable)
    if value is None:
        return default
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise InvalidField(variable, str(value), f"a value for {name} ({error})") from error


def _count(environ: Mapping[str, str], name: str, default: int, least: int) -> int:
    try:
        value = int(environ.get(name, default))
    except ValueError as error:
        raise InvalidField(name, environ[name], "a whole number") from error
    if value < least:
        raise InvalidField(name, value, f"at least {least}")
    return value


def rollout_policy(args: Args, settings: Settings, environ: Mapping[str, str] | None = None) -> Policy:
    """Make the run's policy for the rollout function: preset `miles_docs` with --max-weight-staleness, else `miles`.

    Raises InvalidField for a knob out of range, or a dynamic filter that the service cannot apply.
    """
    environ = os.environ if environ is None else environ
    groups = args.rollout_batch_size
    samples = getattr(args, "async_max_concurrent_samples", None)
    inflight = groups if samples is None else max(1, samples // args.n_samples_per_prompt)
    staleness = getattr(args, "max_weight_staleness", None)
    if staleness is None:
        staleness = _count(environ, "MAX_STALENESS_BATCHES", MILES_STALENESS, 0)
        preset, limit, room = "miles", staleness, (staleness + 1) * groups
    else:
        preset, limit, room = f"miles_docs({staleness})", None, max(MILES_DOCS_QUEUE, groups)
    return Policy(
        preset=preset,
        max_staleness=limit,
        batch_groups=groups,
        batches_per_publish=settings.interval,
        prefetch_batches=settings.lookahead,
        filter_equal_rewards=_filters_equal_rewards(args) or None,
        max_queued_groups=_count(environ, "QUEUE_CAP_GROUPS", room, 1),
        max_inflight_groups=_count(environ, "MAX_INFLIGHT_GROUPS", inflight, 1),
        retained_steps=max(LEAST_RETAINED, _saved_steps(args)),
    )


def _filters_equal_rewards(args: Args) -> bool:
    path = getattr(args, "dynamic_sampling_filter_path", None)
    if path is None:
        return False
    if path.rpartition(".")[2] != EQUAL_REWARDS_FILTER:
        raise InvalidField(
            "dynamic_sampling_filter_path",
            path,
            f"{EQUAL_REWARDS_FILTER}, which the service applies itself; others need the policy's filter_* fields",
        )
    return True


def refuse_reuse(group: Group) -> None:
    """Raise InvalidField for a group that an earlier step has trained on, as after a change of the run's policy."""
    if group.prior_uses:
        what = f"group {group.group_id}, which was trained on before"
        raise InvalidField("policy.max_uses", what, "1: the framework takes rollout_batch_size new groups a rollout")


def data_buffer_policy(args: Args) -> Policy:
    """Make the run's policy for the data buffer: every group is a batch, and nothing is dropped for lack of room.

    --async-data-buffer-capacity-factor times the rollout's groups may be queued; the staleness limit is
    --max-weight-staleness.
    """
    groups = args.rollout_batch_size
    capacity = int((getattr(args, "async_data_buffer_capacity_factor", None) or 2.0) * groups)
    if capacity < 1:
        raise InvalidField(
            "async_data_buffer_capacity_factor", args.async_data_buffer_capacity_factor, "at least one group"
        )
    kept = _saved_steps(args) * groups
    return Policy(
        batch_groups=1,
        max_queued_groups=capacity,
        overflow_action="block",
        max_staleness=getattr(args, "max_weight_staleness", None),
        stale_action="drop",
        retained_steps=max(LEAST_RETAINED, min(kept, 100_000)),
    )


def _saved_steps(args: Args) -> int:
    """Number of steps that a restart may go back over: those of two --save-interval, and two more."""
    return 2 * (getattr(args, "save_interval", None) or 0) + 2
