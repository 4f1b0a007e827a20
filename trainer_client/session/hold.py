"""Hold of a trainer on a run: its term, its position, its version, and what it asks of the run beside the loop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer_client.client.engines import Quorum
from trainer_client.client.evaluation.blocking import Evaluation
from trainer_client.client.operations import ServiceClient
from trainer_client.forks import Holder
from trainer_client.progress import ProgressBar
from trainer_client.session.clock import TrainClock
from trainer_client.session.feeding import feeder_of
from trainer_client.session.metrics import Doing, StepMeter
from trainer_client.session.plan import SessionPlan
from trainer_client.state import Resumed, RunState
from trainer_client.tasks import Task
from trainer_client.waiting import OnWait


class RunHold:
    """Hold of one rank: the clock of its steps, the feeder of its tasks, and the meter of its time."""

    def __init__(self, client: ServiceClient, plan: SessionPlan, run: RunState, start: Resumed) -> None:
        self._holder = Holder("a session")
        self._client = client
        self.run_id = plan.run_id
        self.policy = run.policy
        """Effective policy of the run."""
        self.start = start
        """Start of this term, which the other ranks need."""
        self._rank = plan.rank
        self._bar = ProgressBar(plan.options.on_wait) if plan.options.progress else None
        self._on_wait = self._bar or plan.options.on_wait
        self._clock = TrainClock(start.version, start.next_step, run.policy.batches_per_publish or 1)
        self._feeder = feeder_of(client, plan, run.policy, start) if plan.rank == 0 else None
        self._meter = StepMeter(
            plan.options.on_step,
            self._look if plan.rank == 0 else None,
            run,
            tally=lambda: None if self._feeder is None else self._feeder.tally,
        )

    @property
    def client(self) -> ServiceClient:
        """Client that the session was opened with."""
        self._holder.check()
        return self._client

    @property
    def term(self) -> int:
        """Term of the trainer."""
        return self.start.term

    @property
    def next_step(self) -> int:
        """Number of steps in the weights, a whole one in hand included; a checkpoint taken now would resume there."""
        return self._clock.handed_out

    @property
    def version(self) -> int:
        """Published version, as far as this process knows."""
        return self._clock.version

    @property
    def cursor(self) -> int:
        """Number of tasks submitted so far, over all terms."""
        return self._feeder.cursor if self._feeder is not None else self.start.cursor

    @property
    def exhausted(self) -> bool:
        """True when every task of the iterable is submitted; never on ranks other than 0, nor without tasks."""
        return self._feeder is not None and self._feeder.exhausted

    @property
    def failed(self) -> bool:
        """True when something failed in the background; `check` and the next batch raise it."""
        return self._feeder is not None and self._feeder.failed

    def check(self) -> None:
        """Raise an error of the background work: that of the iterable of tasks, every time; a refusal by the service,
        once.
        """
        self._holder.check()
        if self._feeder is not None:
            self._feeder.raise_if_failed()

    def state(self) -> RunState:
        """Read the whole state of the run."""
        return self.client.run(self.run_id)

    def evaluate(self, tasks: Sequence[Task], *, version: int | None = None, eval_id: str | None = None) -> Evaluation:
        """Have tasks generated wholly at the published version (None) or an earlier one, beside the training.

        Returns at once; the next version may be published meanwhile. See `BufferClient.evaluate`.
        """
        return self.client.evaluate(self.run_id, tasks, term=self.term, version=version, eval_id=eval_id)

    def wait_for_engines(
        self, count: Quorum = 1, *, timeout_s: float = 600.0, on_wait: OnWait | None = None
    ) -> RunState:
        """Wait until `count` engines, or that share of them, are ready with the published version.

        Raises NotReady after `timeout_s`, naming the engines that lag and their last errors.
        """
        return self.client.wait_for_engines(
            self.run_id, self.version, count, term=self.term, timeout_s=timeout_s, on_wait=on_wait
        )

    @contextmanager
    def _busy(self, doing: Doing) -> Iterator[None]:
        """Time the block, in the session's own process, and clear the progress line at its end."""
        self._holder.check()
        try:
            with self._meter.timing(doing):
                yield
        finally:
            if self._bar is not None:
                self._bar.clear()

    def _look(self, timeout_s: float) -> RunState:
        return self.client.run(self.run_id, timeout_s=timeout_s)
