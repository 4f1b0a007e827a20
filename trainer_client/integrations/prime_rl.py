"""The buffer in the terms of PRIME-RL's trainer: rollouts of a step as packed micro-batches, weights tagged by step.

Contract followed: PRIME-RL v0.5.0 (commit 63331ad, 2026-03-30), the last release with `max_async_level`; from May 2026
on, its level is fixed at 1. There, trainer step n trains on rollouts n, which policy max(0, n − k) or a newer one
generated, and makes policy n + 1 of them; policy n is broadcast at the top of step n. Here n is the step, and the
version:

    with open_prime_rl(client, "math", config, tasks=tasks) as (data, weights):
        for n in range(max_steps):
            if n > 0:
                weights.broadcast_weights(model.save_pretrained, step=n)
            data.wait_for_batch()
            for micro_batch in data.get_batch():
                ...

`data` and `weights` have the methods that its `train` calls on its data loader and its weight broadcast.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, Group
from trainer_client.integrations.prime_rl_packing import AdvantageFn, Packing, TensorMicroBatch, pack, to_tensors
from trainer_client.integrations.prime_rl_weights import StepPublisher
from trainer_client.policy import Policy
from trainer_client.session import TrainerSession
from trainer_client.session_plan import SessionOptions
from trainer_client.state import Resumed
from trainer_client.tasks import Task

if TYPE_CHECKING:
    from trainer_client.client import BufferClient
    from trainer_client.publication import WeightSource

__all__ = [
    "PrimeRLConfig",
    "PrimeRLData",
    "PrimeRLWeights",
    "StepPublisher",
    "TensorMicroBatch",
    "open_prime_rl",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRLConfig:
    """The settings of PRIME-RL that concern rollouts, by their names. Raises InvalidField."""

    batch_size: int
    """Rollouts of a step, over all ranks."""
    rollouts_per_example: int
    """Rollouts of one prompt: the group size of every task."""
    seq_len: int
    """Most tokens of a micro-batch; longer rollouts are cut."""
    max_async_level: int = 2
    """k: step n trains on rollouts of policy max(0, n − k) or newer."""
    max_off_policy_steps: int | None = None
    """Versions that a rollout may be behind when it is trained; older ones in flight are cancelled. None: k."""
    pad_to_multiple_of: int = 1
    """Micro-batches are padded to a multiple of so many tokens."""
    temperature: float | Callable[[Group], float] = 1.0
    """Of the sampling, as the tasks state it."""
    advantage: AdvantageFn | None = None
    """None: rewards less their group's mean."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "rollouts_per_example", "seq_len", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "at least 1")
        if self.batch_size % self.rollouts_per_example:
            limit = f"a multiple of rollouts_per_example, {self.rollouts_per_example}"
            raise InvalidField("batch_size", self.batch_size, limit)
        if self.seq_len % self.pad_to_multiple_of:
            limit = f"a multiple of pad_to_multiple_of, {self.pad_to_multiple_of}"
            raise InvalidField("seq_len", self.seq_len, limit)
        if self.max_async_level < 0:
            raise InvalidField("max_async_level", self.max_async_level, "at least 0")

    @property
    def packing(self) -> Packing:
        """How rollouts become micro-batches."""
        return Packing(
            seq_len=self.seq_len,
            pad_to_multiple_of=self.pad_to_multiple_of,
            temperature=self.temperature,
            advantage=self.advantage,
        )

    def policy(self, **changes: object) -> Policy:
        """The run's policy: preset prime_rl with these numbers, and whatever `changes` name."""
        k, off = self.max_async_level, self.max_off_policy_steps
        preset = f"prime_rl({k})" if off is None else f"prime_rl({k},{off})"
        policy = Policy(preset=preset, batch_groups=self.batch_size // self.rollouts_per_example)
        return replace(policy, **changes)  # type: ignore[arg-type]


class PrimeRLData:
    """One data-parallel rank's micro-batches: `wait_for_batch`, then `get_batch`, once a step."""

    def __init__(self, session: TrainerSession, packing: Packing, most_of_ranks: Callable[[int], int]) -> None:
        self.session = session
        """Rank 0's `session.start` is what the other ranks need."""
        self._packing = packing
        self._most_of_ranks = most_of_ranks
        self._batch: Batch | None = None

    @property
    def step(self) -> int:
        """The n of the rollouts that `get_batch` gives, or gave last."""
        return self.session.next_step - 1

    @property
    def batch(self) -> Batch:
        """The groups behind the micro-batches, with the step's totals. Raises InvalidField before `wait_for_batch`."""
        if self._batch is None:
            raise InvalidField("batch", None, "one that wait_for_batch has waited for")
        return self._batch

    def wait_for_batch(self) -> None:
        """Wait for this rank's rollouts of the next step.

        Raises BatchNotReady after the session's `pull_timeout_s`, EOFError when the tasks are used up or the run was
        drained, and what `TrainerSession` raises.
        """
        try:
            self._batch = next(self.session)
        except StopIteration:
            raise EOFError(f"no rollouts for step {self.session.next_step}: the tasks are used up") from None

    def get_batch(self) -> list[TensorMicroBatch]:
        """The step's micro-batches as torch tensors, as many on every rank; those that only fill up have no loss.

        Raises ImportError without torch.
        """
        micro_batches = pack(self.batch, self._packing)
        wanted = self._most_of_ranks(len(micro_batches))
        micro_batches += [self._packing.dummy()] * (wanted - len(micro_batches))
        return [to_tensors(micro_batch) for micro_batch in micro_batches]


class PrimeRLWeights:
    """Publishes policy n, made by the steps below n, as version n."""

    def __init__(self, session: TrainerSession) -> None:
        self._session = session

    def broadcast_weights(self, source: "WeightSource", step: int) -> None:
        """Offer policy `step` to the engines, and commit the steps below it.

        `source`: what the session's publisher takes, such as `model.save_pretrained`; every rank calls it. Raises
        InvalidField when `step` is not the number of trained steps, and what `TrainerSession.publish` raises.
        """
        self._check(step)
        if step > self._session.version:
            self._session.publish(source, version=step)

    def checkpointed(self, step: int) -> None:
        """The trainer's own checkpoint with `progress.step` = `step` is safe: rollouts of steps below it are freed.

        Raises InvalidField when `step` is not the number of trained steps, and StaleEpoch.
        """
        self._check(step)
        self._session.checkpoint()

    def maybe_clean(self, max_async_level: int = 0, interval_to_keep: int | None = None) -> None:
        """Does nothing: the publisher keeps what a resume needs, and its `interval_to_keep`."""

    def _check(self, step: int) -> None:
        if step != self._session.next_step:
            raise InvalidField("step", step, f"the steps that are trained, {self._session.next_step}")


@contextmanager
def open_prime_rl(  # noqa: PLR0913 - what a trainer says in one place
    client: "BufferClient",
    run_id: str,
    config: PrimeRLConfig,
    *,
    tasks: Iterable[Task] | None = None,
    publisher: StepPublisher | None = None,
    next_step: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    start: Resumed | None = None,
    most_of_ranks: Callable[[int], int] | None = None,
    policy: Policy | None = None,
    options: SessionOptions | None = None,
) -> Iterator[tuple[PrimeRLData, PrimeRLWeights]]:
    """A session over the run in PRIME-RL's terms.

    `tasks`: of `rollouts_per_example` samples each. `next_step`: the trainer's `progress.step` after a resume. `rank`,
    `world_size`: of the data-parallel ranks. `start`: rank 0's `session.start` on the others. `most_of_ranks`: the
    largest number over all ranks, such as an all-reduce with MAX; needed for more than one. `policy`: None:
    `config.policy()`. Raises what `BufferClient.session` does, and InvalidField.
    """
    if world_size > 1 and most_of_ranks is None:
        raise InvalidField("most_of_ranks", None, f"an all-reduce with MAX over the {world_size} ranks")
    with client.session(
        run_id,
        policy=(policy or config.policy()) if rank == 0 else None,
        tasks=tasks,
        publisher=publisher,
        next_step=next_step,
        rank=rank,
        world_size=world_size,
        start=start,
        options=options,
    ) as session:
        yield PrimeRLData(session, config.packing, most_of_ranks or int), PrimeRLWeights(session)
