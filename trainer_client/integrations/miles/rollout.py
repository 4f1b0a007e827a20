"""Rollout function of Miles and slime, served by the buffer: prompts in, one step of groups out.

    --rollout-function-path trainer_client.integrations.miles.generate_rollout_fully_async

The first call takes the run over at `args.start_rollout_id` and starts to feed prompts; each call then pulls the step
of its rollout id. Workers of the buffer generate; nothing is generated in this process.

Invariants: a rollout id gives equal samples in every process and at every call, until the trainer's checkpoint covers
it. Groups come sorted by the index of their first sample. No group is staler than the policy allows, for the version
that will train on it. Every wait has a deadline and says on whom it waits.
"""

import atexit
import logging
import threading
import time
from contextlib import ExitStack

from buffer_wire.errors import BatchNotReady
from trainer_client.batch import Batch
from trainer_client.client.blocking import BufferClient
from trainer_client.integrations.miles.contract import Args, DatasetOf, DataSource, Framework, Sample, load_function
from trainer_client.integrations.miles.conversion import Converter, first_index
from trainer_client.integrations.miles.evaluation import Evaluator
from trainer_client.integrations.miles.prompts import PromptTasks
from trainer_client.integrations.miles.settings import Settings, rollout_policy
from trainer_client.integrations.miles.terms import taken_over
from trainer_client.session.session import TrainerSession
from trainer_client.state import GroupLedger, RunState
from trainer_client.waiting import Waiting

logger = logging.getLogger("trainer_client.integrations.miles")

_PREFIX = "rollout/fully_async"


class WeightsNotPublished(RuntimeError):
    """Error: the training program trains on without publishing."""

    def __init__(self, run_id: str, rollout_id: int, committed_steps: int, expected: int) -> None:
        super().__init__(
            f"rollout {rollout_id} of run {run_id!r} is asked for, so {expected} steps are in updated weights, but "
            f"versions were published for {committed_steps} only: call publish_weights(args, rollout_id, …) after each "
            "update, or set ROLLOUT_BUFFER_PUBLISH=rollout if somebody else writes the engines' weights"
        )


class AsyncRolloutWorker:
    """Hold on the run by this process, from the first call to the process's end; one per process and run."""

    def __init__(self, framework: Framework, args: Args, source: DataSource, settings: Settings) -> None:
        self.framework = framework
        self.args = args
        self.settings = settings
        self.converter = Converter(framework, args, framework.tokenizer(args))
        self.client = BufferClient(settings.address)
        self._source = source
        self._stopped = threading.Event()
        self._stack = ExitStack()
        self._session: TrainerSession | None = None
        self._sample_filter = load_function(getattr(args, "rollout_sample_filter_path", None))
        self._datasets: dict[int, DatasetOf] = {}
        self._seen: GroupLedger | None = None
        """Ledger at the end of the previous rollout."""

    def start(self, start_rollout_id: int) -> None:
        """Create or find the run, take it over, and begin to feed prompts. Raises RunExists, ReplayGap, StepAhead."""
        session = self.client.session(
            self.settings.run_id,
            policy=rollout_policy(self.args, self.settings),
            tasks=PromptTasks(self.args, self._source, self.converter.task),
            next_step=self.settings.step_of(start_rollout_id),
        )
        self._session = self._stack.enter_context(session)
        logger.info("Continuous async rollout worker started")

    def stop(self) -> None:
        """End feeding and close the connection. The run goes on; a later start resumes it."""
        self._stopped.set()
        self._stack.close()
        self.client.close()

    @property
    def term(self) -> int:
        """Term of the trainer; set by `start`."""
        return self._held.term

    @property
    def running(self) -> bool:
        """False once `stop` was called."""
        return not self._stopped.is_set()

    # ── one rollout ──────────────────────────────────────────────────────────

    def rollout(self, rollout_id: int) -> object:
        """Pull the step of `rollout_id`, and return it as the framework's output.

        Raises BatchNotReady after the timeout, naming the shortage and on whom it waits; WeightsNotPublished;
        StaleTerm when another trainer has taken over; the error that ended the feeding.
        """
        step = self.settings.step_of(rollout_id)
        run = self._published(step, rollout_id)
        self._seen = self._seen or run.ledger.groups
        logger.info("Global worker queue size: %d", run.ledger.groups.queued.groups)
        # Before this step is trained, the updates that follow the steps ahead of it are published.
        version = run.published.version + max(0, self.settings.updates(run.committed_steps, step))
        batch = self._pull(step, version)
        data = sorted((self._samples(group) for group in batch.groups), key=first_index)
        if self._sample_filter is not None:
            self._sample_filter(self.args, data)
        return self.framework.train_output(data, self._metrics(batch))

    def evaluate(self, rollout_id: int) -> object:
        """Run the evaluation at `rollout_id`, and return it as the framework's output.

        Raises EvaluationNotReady after the timeout.
        """
        evaluator = Evaluator(self.client, self.converter, self.settings, term=self.term, datasets=self._datasets)
        return evaluator.evaluate(rollout_id)

    @property
    def _held(self) -> TrainerSession:
        if self._session is None:
            raise RuntimeError("the worker was not started")
        return self._session

    def _samples(self, group: object) -> list[Sample]:
        return self.converter.samples(group, reward_key=getattr(self.args, "reward_key", None))  # type: ignore[arg-type]

    def _published(self, step: int, rollout_id: int) -> RunState:
        """Read the run's state, after publishing the versions that the request for `step` implies."""
        run_id = self.settings.run_id
        run = self.client.run(run_id)
        expected = self.settings.updated_steps(max(self._held.start.next_step, step - self.settings.lookahead))
        if run.committed_steps >= expected:
            return run
        if self.settings.publish == "trainer":
            raise WeightsNotPublished(run_id, rollout_id, run.committed_steps, expected)
        version = run.published.version + self.settings.updates(run.committed_steps, expected)
        self.client.publish(run_id, term=self.term, version=version, commit_through=expected - 1)
        return self.client.run(run_id)

    def _pull(self, step: int, version: int) -> Batch:
        progress = _Progress(self.settings.no_progress_s, self.args.rollout_batch_size)

        def on_wait(waiting: Waiting) -> None:
            self._held.check()
            progress.look(waiting)

        return self.client.pull(
            self.settings.run_id,
            term=self.term,
            step=step,
            train_version=version,
            timeout_s=self.settings.timeout_s,
            on_wait=on_wait,
        )

    def _metrics(self, batch: Batch) -> dict[str, float]:
        """Compute the figures of one rollout; counters are those since the previous one."""
        run = self.client.run(self.settings.run_id)
        now, info, before = run.ledger.groups, batch.info, self._seen or run.ledger.groups
        self._seen = now
        stale = now.dropped_stale.groups - before.dropped_stale.groups
        recycled = now.recycled.groups - before.recycled.groups
        logger.info(
            "Staleness stats: recycled=%d, avg_staleness=%.1f, max_staleness=%d",
            recycled,
            info.staleness_mean,
            info.staleness_max,
        )
        return {
            f"{_PREFIX}/queue_size": now.queued.groups,
            f"{_PREFIX}/stale_groups_filtered": stale + recycled,
            f"{_PREFIX}/recycled_groups": recycled,
            f"{_PREFIX}/dropped_stale_groups": stale,
            f"{_PREFIX}/dropped_overflow_groups": now.dropped_overflow.groups - before.dropped_overflow.groups,
            f"{_PREFIX}/filtered_groups": now.filtered.groups - before.filtered.groups,
            f"{_PREFIX}/avg_staleness": info.staleness_mean,
            f"{_PREFIX}/max_staleness": info.staleness_max,
            f"{_PREFIX}/train_version": info.train_version,
            f"{_PREFIX}/wait_s": info.waited_s,
            f"{_PREFIX}/replayed": float(info.replayed),
            f"{_PREFIX}/pending_prompts": run.ledger.tasks.pending,
            f"{_PREFIX}/inflight_groups": run.ledger.tasks.leased,
            f"{_PREFIX}/failed_prompts": run.ledger.tasks.failed,
        }


class _Progress:
    """Warner about a queue that has not grown for a while. A batch comes as a whole, so nothing is collected before."""

    def __init__(self, every_s: float, target: int) -> None:
        self._every_s = every_s
        self._target = target
        self._queued = -1
        self._since = time.monotonic()

    def look(self, waiting: Waiting) -> None:
        """Note one pull attempt that failed."""
        now = time.monotonic()
        queued = self._queued
        if isinstance(waiting.error, BatchNotReady):
            queued = int(waiting.error.attributes.get("queued_groups", "0"))
        if queued > self._queued:
            self._queued, self._since = queued, now
        elif now - self._since >= self._every_s:
            logger.warning(
                "Warning: No progress for %ss. Queue size: %d, Collected: %d/%d",
                self._every_s,
                max(queued, 0),
                0,
                self._target,
            )
            logger.warning("%s", waiting)
            self._since = now


# ── one worker a process and run ─────────────────────────────────────────────

_workers: dict[tuple[str, str, str], AsyncRolloutWorker] = {}
_lock = threading.Lock()


def get_global_worker(framework: Framework, args: Args, source: DataSource, rollout_id: int) -> AsyncRolloutWorker:
    """Return the process's worker of the run that the settings name; starts it at its first use."""
    settings = Settings.of(args)
    key = (framework.name, settings.address, settings.run_id)
    with _lock:
        worker = _workers.get(key)
        if worker is None or not worker.running:
            logger.info("Creating new global async worker...")
            worker = AsyncRolloutWorker(framework, args, source, settings)
            start = getattr(args, "start_rollout_id", None)
            try:
                worker.start(rollout_id if start is None else start)
            except BaseException:
                worker.stop()
                raise
            _workers[key] = worker
            taken_over(settings, worker.term)
        return worker


def stop_global_worker() -> None:
    """Stop the workers of this process; called at its exit."""
    with _lock:
        for worker in _workers.values():
            worker.stop()
        _workers.clear()


atexit.register(stop_global_worker)


def generate(framework: Framework, args: Args, rollout_id: int, source: DataSource, *, evaluation: bool) -> object:
    """Serve the rollout function of either framework: one step of groups, or the evaluation at `rollout_id`."""
    worker = get_global_worker(framework, args, source, rollout_id)
    return worker.evaluate(rollout_id) if evaluation else worker.rollout(rollout_id)
