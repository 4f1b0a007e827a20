"""One live run of a setting, and what the service's own statistics say of it after the warm-up."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.live_loop.setting import LENGTH_CAP, Setting
from bench.live_loop.sleeps import Sleeps
from bench.live_loop.worker import worker
from bench.ours import service
from trainer_client import BufferClient, SessionOptions, TrainerSession
from trainer_client.state import RunState
from trainer_client.tasks import SamplingParams, Task

_PROMPT = 4
_PULL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of the steps after the warm-up; nothing is subtracted from any time."""

    steps: int
    warmup: int
    pqs: float
    iqs: float
    staleness: float
    """Versions, of groups, by the service's statistics."""
    token_staleness: float
    """Versions, of response tokens."""
    staleness_of_pulled: float
    """Staleness by the groups that the trainer has pulled."""
    staleness_max: int
    period_s: float
    trainer_idle_share: float
    """Share of the wall time: all but training steps."""
    slot_idle_share: float
    """Share of C·v that is missing in the tokens that were generated; reloads, and whatever the parts take, included.
    """
    sampled_mean_length: float
    trained_mean_length: float
    dropped_groups: int
    """Groups dropped by overflow."""
    stale_groups: int
    """Dropped by the gate."""
    publish_lag_s: float
    """Mean time from the trainer's call of publish to the engine's having the weights, the load itself included."""
    trainer_sleeps: Sleeps
    engine_sleeps: Sleeps
    """Sleeps of the engine over the whole run."""

    @property
    def disturbed(self) -> bool:
        """True if sleeps were too long for the figures to mean anything: by 2 % of training, or 5 % of generating."""
        return any(
            sleeps.slept_s > (1 + share) * sleeps.asked_s
            for sleeps, share in ((self.trainer_sleeps, 0.02), (self.engine_sleeps, 0.05))
        )


def run(
    setting: Setting,
    directory: Path,
    *,
    steps: int,
    warmup: int,
    seed: int = 0,
    at_end: Callable[[BufferClient], None] | None = None,
) -> Measured:
    """Run a setting for so many steps; `at_end` is told while the worker still works.

    Raises BatchNotReady when the loop stands still for a minute.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (
        service(directory, "process") as served,
        BufferClient(served.address) as client,
        client.session(
            "live", policy=setting.policy, tasks=_tasks(setting), options=SessionOptions(pull_timeout_s=_PULL_TIMEOUT_S)
        ) as session,
        # Left first: it drains while the run is still there.
        worker(served.address, "live", setting, seed=seed, directory=directory) as account,
    ):
        trainer = _Trainer(session, setting)
        if setting.jump_step:
            trainer.train(setting.jump_step)
            trainer.take_longer(setting.jump_length)
        trainer.train(warmup - setting.jump_step)
        trainer.begin()
        before, began = session.state(), time.perf_counter()
        trainer.train(steps)
        wall_s, after = time.perf_counter() - began, session.state()
        if at_end is not None:
            at_end(client)
    groups = _counted(before, after, "assembled_groups")
    if groups != len(trainer.staleness):
        raise RuntimeError(f"the service assembled {groups} groups, the trainer has {len(trainer.staleness)}")
    sampled, trained = _responses(before, after, "accepted"), _responses(before, after, "trained")
    return Measured(
        steps=steps,
        warmup=warmup,
        pqs=_counted(before, after, "pre_queue_staleness_sum") / groups,
        iqs=_counted(before, after, "in_queue_staleness_sum") / groups,
        staleness=_counted(before, after, "staleness_sum") / groups,
        token_staleness=_counted(before, after, "token_staleness_milli_sum")
        / max(1, _counted(before, after, "assembled_response_tokens"))
        / 1_000,
        staleness_of_pulled=sum(trainer.staleness) / groups,
        staleness_max=max(trainer.staleness),
        period_s=wall_s / steps,
        trainer_idle_share=1 - trainer.sleeps.slept_s / wall_s,
        slot_idle_share=1 - sampled[1] / (setting.concurrency * setting.tokens_per_s * wall_s),
        sampled_mean_length=sampled[1] / sampled[0],
        trained_mean_length=trained[1] / trained[0],
        dropped_groups=after.ledger.groups.dropped_overflow.groups - before.ledger.groups.dropped_overflow.groups,
        stale_groups=after.ledger.groups.dropped_stale.groups - before.ledger.groups.dropped_stale.groups,
        publish_lag_s=_mean_lag_s(trainer.published_at, account.loaded_at),
        trainer_sleeps=trainer.sleeps,
        engine_sleeps=account.sleeps,
    )


class _Trainer:
    """Takes micro-batches, sleeps their share of a step, publishes after the last."""

    def __init__(self, session: TrainerSession, setting: Setting) -> None:
        self._session = session
        self._micro_batches = session.micro_batches()
        self._s_per_group = setting.train_s / setting.groups_per_batch
        self.begin()

    def begin(self) -> None:
        """Forget what was counted so far: it was warm-up."""
        self.sleeps = Sleeps()
        self.staleness: list[int] = []
        self.published_at: dict[int, float] = {}

    def take_longer(self, times: float) -> None:
        """Train so many times as long, as responses are longer."""
        self._s_per_group *= times

    def train(self, steps: int) -> None:
        """So many steps, to the publish of the last."""
        for micro in self._micro_batches:
            self.staleness += [group.train_version - group.head_version for group in micro.groups]
            self.sleeps.sleep(self._s_per_group * len(micro.groups))
            if micro.final:
                began = time.monotonic()
                self.published_at[self._session.publish()] = began
                steps -= 1
                if not steps:
                    return
        raise RuntimeError("the run has ended")


def _tasks(setting: Setting) -> Iterator[Task]:
    """Prompts without end, no two alike: the engine draws lengths by the prompt."""
    sampling = SamplingParams(max_new_tokens=LENGTH_CAP)
    for number in itertools.count():
        ids = [1 + number // 1_000**place % 1_000 for place in range(_PROMPT)]
        yield Task(group_size=setting.group_size, sampling=sampling, prompt_token_ids=ids)


def _counted(before: RunState, after: RunState, name: str) -> int:
    return after.statistics[name] - before.statistics[name]


def _mean_lag_s(published_at: Mapping[int, float], loaded_at: Mapping[int, float]) -> float:
    """Over the versions that were loaded: one that is superseded at once is skipped, and the last may come too late."""
    lags = [loaded_at[version] - at for version, at in published_at.items() if version in loaded_at]
    return sum(lags) / len(lags)


def _responses(before: RunState, after: RunState, entry: str) -> tuple[int, int]:
    """Responses that came into an entry of the ledger meanwhile, and their tokens without prompts."""
    early, late = getattr(before.ledger.groups, entry), getattr(after.ledger.groups, entry)
    samples = late.samples - early.samples
    return samples, late.tokens - early.tokens - _PROMPT * samples
