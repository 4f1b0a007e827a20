"""One cell, live: a run of the service, a worker on the engine that all cells share, and a trainer that learns.

Training a batch takes at least `train_s`: the trainer sleeps what it does not compute, as if it had a device of its
own. The reward of the policy is computed, not sampled: the mean over tasks of the probability of the right answer. It
belongs to the weights just trained, where the reward of a batch belongs to those that generated it.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import Qwen3ForCausalLM

from bench.measure import tree_cpu_s
from bench.reward.cells import GROUP_SIZE, GROUPS, POLICIES, Cell
from bench.reward.learner import Learner, Samples
from examples.demo.loop import buffer_tasks
from examples.demo.model import build_model, save_model, write_weights
from examples.demo.processes import worker
from examples.demo.tasks import ChainSums
from examples.demo.warmup import expected_exact_match, teacher_batch, warm_up
from trainer_client import BufferClient, SessionOptions, TrainerSession
from trainer_client.batch import Batch
from trainer_client.collate import collate
from trainer_client.publish import FilesPublisher

_EVALUATED_TASKS = 256
_WARM_UP_SEEDS, _EVALUATION_SEEDS = 10_000, 20_000
"""Offsets of a seed: its warm-up and its evaluation have tasks of other streams than those that are rewarded."""
_COLUMNS = 8
"""Tokens of the longest sample: all batches have as many columns."""
_CHECKPOINT_STEPS = 10
_PULL_TIMEOUT_S, _READY_TIMEOUT_S = 120.0, 120.0
_POLL_S = 0.03
_SAME_LOGPROBS = 0.02
"""Nats. Engine and trainer compute the same weights' log-probabilities alike to 1e-4; other weights differ by more."""


class WrongWeights(RuntimeError):
    """The engine did not generate with the weights that the cell begins with."""


@dataclass(frozen=True)
class Start:
    """Start of every cell of a seed: the model after its warm-up, and the tasks by which policies are judged."""

    seed: int

    @cached_property
    def _state(self) -> Mapping[str, Tensor]:
        model = build_model(self.seed)
        warm_up(model, ChainSums(self.seed + _WARM_UP_SEEDS))
        return model.state_dict()

    @cached_property
    def _evaluation(self) -> tuple[Tensor, Tensor]:
        return teacher_batch(list(islice(ChainSums(self.seed + _EVALUATION_SEEDS).stream(), _EVALUATED_TASKS)))

    def model(self) -> Qwen3ForCausalLM:
        """A new model with these weights."""
        model = build_model(self.seed)
        model.load_state_dict(self._state)
        return model

    def save(self, directory: Path) -> None:
        """Write what an engine starts from."""
        save_model(self.model(), directory)

    def reward(self, model: Qwen3ForCausalLM) -> float:
        """Expected reward of a sample at temperature 1, between 0 and 1."""
        return expected_exact_match(model, *self._evaluation)


@dataclass(frozen=True, slots=True)
class Place:
    """Place where cells are run: the service, the engine, and their processes."""

    address: str
    service_pid: int
    engine_url: str
    engine_pid: int
    steps: int
    train_s: float
    """Least time of training on a batch, in seconds."""


def run(cell: Cell, start: Start, place: Place, directory: Path) -> dict[str, Any]:
    """Run a cell and return its row.

    Raises WrongWeights, BatchNotReady when the loop stands still, ProcessDied of a worker that ended.
    """
    directory.mkdir(parents=True)
    run_id = directory.name
    model = start.model()
    flags = [
        *("--reward", "examples.demo.worker_reward:reward", "--drain-grace-s", "5"),
        *("--engine", place.engine_url, "--groups-per-engine", str(GROUPS), "--progress-every-s", "0"),
    ]
    with (
        BufferClient(place.address) as client,
        FilesPublisher(directory / "weights") as publisher,
        worker(place.address, run_id, directory, *flags) as started,
        client.session(
            run_id,
            policy=POLICIES[cell.policy],
            tasks=buffer_tasks(ChainSums(cell.seed)),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=_PULL_TIMEOUT_S, on_wait=lambda _: started.check()),
        ) as session,
    ):
        # Whatever the cell before left in the engine is replaced as any weights are.
        session.publish(partial(write_weights, model))
        session.wait_for_engines(1, timeout_s=_READY_TIMEOUT_S, on_wait=lambda _: started.check())
        pids = {"engine": place.engine_pid, "worker": started.process.pid, "service": place.service_pid}
        with _costs(pids) as costs:
            trainer = _Trainer(session, start, Learner(model, cell.loss), place.train_s)
            trainer.train(place.steps)
        after = session.state()
        client.delete_run(run_id)
    groups = after.statistics["assembled_groups"]
    return {
        **cell._asdict(),
        "reward": [round(value, 4) for value in trainer.rewards],
        "at_s": [round(value, 2) for value in trainer.times],
        "sampled_reward": [round(value, 4) for value in trainer.sampled_rewards],
        "staleness": [round(value, 2) for value in trainer.staleness],
        "log_ratio": [round(value, 4) for value in trainer.log_ratios],
        "staleness_max": after.statistics["staleness_max"],
        "pre_queue_staleness": round(after.statistics["pre_queue_staleness_sum"] / groups, 3),
        "dropped_groups": after.ledger.groups.dropped_overflow.groups + after.ledger.groups.dropped_stale.groups,
        "computed_s": round(trainer.computed_s, 1),
        "reload_ms": after.engines[0].last_reload_ms,
        **costs,
    }


class _Trainer:
    """Takes micro-batches, each for its share of the time of a step, trains after the last, publishes."""

    def __init__(self, session: TrainerSession, start: Start, learner: Learner, train_s: float) -> None:
        self._session, self._start, self._learner, self._train_s = session, start, learner, train_s
        self._began = time.perf_counter()
        self.rewards = [start.reward(learner.model)]
        """Expected reward before the first step and after each."""
        self.times = [0.0]
        """Seconds since the engine was ready, for each of them."""
        self.sampled_rewards: list[float] = []
        """Mean reward of each step's samples."""
        self.staleness: list[float] = []
        """Mean over each step's groups, in versions."""
        self.log_ratios: list[float] = []
        """Mean over each step's tokens of |log π_old − log μ|."""
        self.computed_s = 0.0

    def _await_queue(self) -> None:
        """Wait until as many batches are queued as may be made ahead: what is trained is as old as it may be, also
        where the engine is slower than the trainer. A controller is left to itself.
        """
        policy = self._session.policy
        wanted = 0 if policy.target_staleness_milli else policy.max_lookahead or 0
        due = time.monotonic() + _PULL_TIMEOUT_S
        while wanted > 1 and self._session.state().ledger.groups.queued.groups < wanted * GROUPS:
            if time.monotonic() > due:
                raise TimeoutError(f"{wanted} batches were not made within {_PULL_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def train(self, steps: int) -> None:
        """Train so many steps."""
        parts: list[Samples] = []
        batches: list[Batch] = []
        self._await_queue()
        for batch in self._session.micro_batches():
            began = time.perf_counter()
            parts.append(self._learner.samples(collate(batch, multiple_of=_COLUMNS), GROUP_SIZE))
            batches.append(batch)
            if batch.final:
                self._step(parts, batches)
            computed_s = time.perf_counter() - began
            self.computed_s += computed_s
            time.sleep(max(0.0, self._train_s * len(batch.groups) / GROUPS - computed_s))
            if batch.final:
                self._session.publish(partial(write_weights, self._learner.model))
                self.times.append(time.perf_counter() - self._began)
                parts, batches = [], []
                if len(self.staleness) % _CHECKPOINT_STEPS == 0:
                    self._session.checkpoint()  # Lets weights and replay data go.
                if len(self.staleness) == steps:
                    return
                self._await_queue()
        raise RuntimeError("the run has ended")

    def _step(self, parts: list[Samples], batches: list[Batch]) -> None:
        groups = [group for batch in batches for group in batch.groups]
        ages = [group.staleness for group in groups]
        samples = Samples.joined(parts)
        if not self.staleness and (off := float(samples.log_ratios.max())) > _SAME_LOGPROBS:
            raise WrongWeights(f"the first batch is off by {off:.3f} nats from the weights that were published")
        self.log_ratios.append(float(samples.log_ratios.mean()))
        self.staleness.append(fmean(ages))
        self.sampled_rewards.append(fmean(float(group.rewards.mean()) for group in groups))
        self._learner.train(samples)
        self.rewards.append(self._start.reward(self._learner.model))


@contextmanager
def _costs(pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """CPU seconds of processes with their children, and of this one; the wall time, and the machine's load before."""
    costs: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 2)}
    before = {name: tree_cpu_s(pid) for name, pid in pids.items()}
    began, own = time.perf_counter(), time.process_time()
    yield costs
    costs["wall_s"] = round(time.perf_counter() - began, 1)
    costs["cpu_s"] = {name: round(tree_cpu_s(pid) - before[name], 1) for name, pid in pids.items()}
    costs["cpu_s"]["trainer"] = round(time.process_time() - own, 1)
