"""The trainer of a simulated run: pulls, prefetches, trains, publishes, checkpoints; at times it dies and resumes."""

from buffer_service.domain import ops
from buffer_service.domain.liveness import most_batch_groups
from buffer_service.domain.policy import UNSET, RunPolicy
from buffer_service.domain.steering.decisions import Decision
from buffer_service.domain.steering.knobs import Knobs
from tests.liveness.simulation import RUN, Simulation
from tests.liveness.workers import LARGEST_GROUP

TICK_MS = 30
TRAIN_MS = 120
TICKS_PER_CRASH = 40


class SimulatedTrainer:
    """Step n is trained after n // b publishes since the trainer began, b batches per publish."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._policy = simulation.policy
        self._habits = simulation.habits
        self.trained_in_all = 0
        self._crashes_left = simulation.habits.crashes
        self._lives = 0
        self._begin(step=0, version=0)

    def _begin(self, step: int, version: int) -> None:
        self._lives += 1
        self._first, self._first_version, self._version = step, version, version
        self._next = step
        self._micro_batch = 0
        self._trained = step
        """Steps below are trained."""
        self._training = False
        self._judged = step
        """Steps below have given back what they give."""
        self._size: int | None = None
        self._later(TICK_MS)

    def _later(self, delay_ms: int) -> None:
        life = self._lives
        self._simulation.at(delay_ms, lambda: self._tick() if life == self._lives else None)

    def _tick(self) -> None:
        if self._crashes_left and self._simulation.random.randrange(TICKS_PER_CRASH) == 0:
            self._crash()
            return
        self._later(TICK_MS)
        self._go_on()

    def _go_on(self) -> None:
        while self._next <= self._trained + self._policy.prefetch_batches and self._pull():
            pass
        if not self._training and self._trained < self._next and self._made_up():
            self._training = True
            life = self._lives
            self._simulation.at(TRAIN_MS, lambda: self._end_training() if life == self._lives else None)

    def _pull(self) -> bool:
        """Tell whether a micro-batch was there, for all ranks."""
        if self._micro_batch == 0 and self._habits.own_sizes and self._size is None:
            # A number that equal shards can be made of.
            ranks = self._habits.world_size if self._policy.equal_shards else 1
            self._size = ranks * self._simulation.random.randint(1, largest_step(self._policy) // ranks)
        final = False
        for rank in range(self._habits.world_size):
            request = ops.Pull(
                self._simulation.term,
                self._next,
                rank,
                self._habits.world_size,
                self._train_version() if self._micro_batch == 0 else None,
                self._micro_batch,
                self._size if self._micro_batch == 0 else None,
            )
            pulled = self._simulation.model.pull(RUN, request)
            if isinstance(pulled, ops.Short):
                assert rank == 0, "a micro-batch that one rank has is there for all"
                return False
            final = pulled.final
        if final:
            self._next, self._micro_batch, self._size = self._next + 1, 0, None
        else:
            self._micro_batch += 1
        return True

    def _made_up(self) -> bool:
        """Give groups of the step back that is to be trained; tell whether it has others."""
        model, term, step = self._simulation.model, self._simulation.term, self._trained
        if self._habits.gives_back and self._judged <= step:
            self._judged = step + 1
            groups = [group.group_id for group in self._simulation.state.steps[step].groups]
            gone = groups[: self._simulation.random.randint(0, len(groups))]
            model.reject(RUN, ops.Reject(term, step, gone, "as habits are"))
        while (stored := self._simulation.state.steps[step]).missing:
            number, ranks = len(stored.micro_batches), self._habits.world_size
            for rank in range(ranks):
                pulled = model.pull(RUN, ops.Pull(term, step, rank, ranks, None, number))
                if isinstance(pulled, ops.Short):
                    return False
        return True

    def _train_version(self) -> int | None:
        """A trainer that prefetches must say which version will train on the step; another need not."""
        if self._policy.prefetch_batches == 0:
            return None
        return self._first_version + (self._next - self._first) // self._policy.batches_per_publish

    def _end_training(self) -> None:
        self._training = False
        step = self._trained
        self._trained += 1
        self.trained_in_all += 1
        if self._habits.publishing == "commit first":
            self._simulation.model.commit(RUN, self._simulation.term, step)
        if (self._trained - self._first) % self._policy.batches_per_publish == 0:
            self._publish(step)
        if step % 2 and self._habits.publishing != "commit first":
            self._checkpoint()
        self._go_on()

    def _publish(self, step: int) -> None:
        model, term = self._simulation.model, self._simulation.term
        self._version += 1
        commit = step if self._habits.publishing == "with commit" else None
        model.publish(RUN, ops.Publish(term, self._version, b"", commit))
        if self._policy.target_staleness_milli:
            self._steer()
        if self._habits.publishing == "publish first":
            model.commit(RUN, term, step)

    def _steer(self) -> None:
        """A controller lowers what it can, mostly as far as it goes."""
        pick, version = self._simulation.random.choice, self._version
        knobs = Knobs(
            micro_batch_groups=pick((0, 1)),
            max_queued_groups=pick((0, 1, 1)),
            lookahead_milli=pick((UNSET, 0, 0, 333)),
            max_inflight_groups=pick((0, 1, 1)),
        )
        self._simulation.model.decide(RUN, Decision(version=version, moved_at=version, knobs=knobs))

    def _checkpoint(self) -> None:
        run = self._simulation.state
        if run.committed_steps > run.checkpointed_steps:
            self._simulation.model.checkpoint(RUN, self._simulation.term, run.committed_steps - 1)

    def _crash(self) -> None:
        """The next one resumes where the run stands, or a little before that."""
        self._crashes_left -= 1
        random, run = self._simulation.random, self._simulation.state
        step = random.choice([None, random.randint(run.checkpointed_steps, run.committed_steps)])
        mode = random.choice(list(ops.ResumeMode))
        request = ops.Resume(step, mode, self._simulation.request_id(), allow_regenerate=False)
        resumed = self._simulation.model.resume(RUN, request)
        self._simulation.term = resumed.term
        self._begin(resumed.next_step, resumed.version)


def largest_step(policy: RunPolicy) -> int:
    """The most groups that a pull may ask for, within reason, and so that the queue's tokens can hold them."""
    most = 2 * policy.batch_groups if policy.micro_batch_groups else policy.max_queued_groups
    if policy.max_queued_tokens and not policy.micro_batch_groups:
        most = min(most, policy.max_queued_tokens // LARGEST_GROUP)
    return min(most_batch_groups(policy, most), 2 * policy.batch_groups)
