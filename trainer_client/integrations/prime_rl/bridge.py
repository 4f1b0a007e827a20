"""Loop between a run and PRIME-RL's trainer: rollouts to its output directory, its weights to the engines.

Invariants: the trainer's step N reads the run's step N − 1, with the same bytes after a restart of either side. v(N) is
published, and the step behind it committed, after the trainer has called it stable. Rollouts are written at most LEAD
steps ahead of the published weights, as PRIME-RL's orchestrator ships them. Progress is read off the output directory
and the run; the bridge keeps no state of its own. A run has one bridge: a later one takes over.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_wire.errors import BatchNotReady, InvalidField, RolloutBufferError, UnknownRun
from trainer_client.batch import Batch
from trainer_client.client.driver import worth_repeating
from trainer_client.integrations.prime_rl.micro_batches import Packing, pack
from trainer_client.integrations.prime_rl.output_dir import OutputDir
from trainer_client.integrations.prime_rl.wire import encode
from trainer_client.policy import Policy
from trainer_client.publish.publication import WeightPublisher
from trainer_client.session.pulls.puller import nothing_to_come
from trainer_client.session.session import TrainerSession
from trainer_client.state import RunState
from trainer_client.tasks import Task
from trainer_client.waiting import FIRST_LOG_S, LOG_EVERY_S, waits_on

if TYPE_CHECKING:
    from trainer_client.client.blocking import BufferClient

logger = logging.getLogger("trainer_client")

LEAD = 1
PULL_S = 1.0
"""Longest wait of one pull, in seconds; between two pulls the trainer's directory is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """Options of a bridge."""

    output_dir: Path
    """Directory that is the trainer's output_dir."""
    packing: Packing
    checkpoints: Path | None = None
    """Directory that is the trainer's ckpt.output_dir, if it has one."""
    batch_groups: int | None = None
    """Batch size N of a run that is created here, with the preset prime_rl; None: the run exists."""
    max_steps: int | None = None
    """Number of steps, the trainer's max_steps: the bridge ends with the weights of that step."""
    keep_rollouts: bool = False
    """True keeps the rollouts of steps that are trained."""
    poll_s: float = 0.2
    """Interval, in seconds, between two checks of the trainer's directory."""


class Bridge:
    """Bridge between a run and PRIME-RL's trainer.

    `tasks`: gives the run's tasks from the first one on, anew at each call. `publisher`: closed by the caller.
    """

    def __init__(
        self,
        client: "BufferClient",
        run_id: str,
        options: BridgeOptions,
        *,
        tasks: Callable[[], Iterable[Task]] | None = None,
        publisher: WeightPublisher,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._options = options
        self._tasks = tasks
        self._publisher = publisher
        self._output = OutputDir(options.output_dir, options.checkpoints)
        self._stop = threading.Event()
        self._waiting: _Waiting | None = None

    def stop(self) -> None:
        """End `run` soon, between two pieces of work; from any thread or signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Run until `stop`, the last step, the end of the tasks, or an error that no wait cures.

        Raises InvalidField for an output directory of another run and for weights that engines cannot take. Raises
        ReplayGap when the trainer went back behind the run's retained steps, StaleTerm when another bridge has taken
        over.
        """
        ended = False
        while not ended and not self._stop.is_set():
            try:
                ended = self._begin()
            except RolloutBufferError as error:
                # Beginning again is always right: where things stand is read off anew.
                if not (worth_repeating(error) or error.attributes.get("field") == "train_version"):
                    raise
                self._wait("service", waits_on(error, self._client.target))

    def _begin(self) -> bool:
        next_step = self._next_step()
        if next_step is None:
            return False
        with self._client.session(
            self._run_id, tasks=self._fed(), publisher=self._publisher, next_step=next_step
        ) as session:
            return self._carry(session)

    # ── where to begin ───────────────────────────────────────────────────────

    def _next_step(self) -> int | None:
        """Choose the run's step to go on from: the smaller of the trainer's position and the run's committed steps.

        None where the trainer has yet to write its position. Raises InvalidField for the directory of another run.
        """
        run, position = self._found(), self._output.position()
        if position is None:
            if run.committed_steps:
                self._wait("where the trainer stands", f"its first broadcast, {self._output.stable(0).parents[1]}")
                return None
            position = 0
        if position > run.next_step:
            limit = f"at most {run.next_step}, the steps of run {self._run_id}: the directory belongs to another run"
            raise InvalidField(f"{self._output.stable(position)}", position, limit)
        # Else a trainer would train on what another run left here.
        self._output.remove_rollouts(above=run.next_step)
        return min(position, run.committed_steps)

    def _found(self) -> RunState:
        try:
            return self._client.run(self._run_id)
        except UnknownRun:
            if self._options.batch_groups is None:
                raise
            policy = Policy(preset="prime_rl", batch_groups=self._options.batch_groups)
            return self._client.create_run(self._run_id, policy)

    def _fed(self) -> Iterator[Task] | None:
        return None if self._tasks is None else self._checked(self._tasks())

    def _checked(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks. Raises InvalidField for a temperature other than the bridge's.

        The trainer divides by the bridge's temperature; another one would make every ratio wrong, unnoticed.
        """
        stated = self._options.packing.temperature
        for task in tasks:
            if (task.sampling.temperature or 1.0) != stated:
                limit = f"the bridge's temperature, {stated}"
                raise InvalidField(f"tasks[{task.task_id}].sampling.temperature", task.sampling.temperature, limit)
            yield task

    # ── carrying ─────────────────────────────────────────────────────────────

    def _carry(self, session: TrainerSession) -> bool:
        """Carry rollouts and weights. True at the end; False when the trainer has begun again from an earlier step."""
        trained = written = session.start.next_step
        checkpointed = 0
        last = self._options.max_steps or sys.maxsize
        while not self._stop.is_set() and trained < last:
            position = self._output.position() or 0
            if position < trained:
                logger.warning("the trainer has gone back to step %d", position + 1)
                return False
            # v(trained) itself was skipped where an earlier bridge found later weights at its look.
            if trained < position <= written or session.version < position == trained:
                self._publish(session, position)
                trained = position
            checkpointed = self._checkpoint(session, trained, checkpointed)
            if written < min(max(trained + LEAD + 1, position), last):
                try:
                    batch = self._pull(session, written, trained)
                except EOFError:
                    if written <= trained:
                        logger.info("the tasks are used up after %d steps", trained)
                        break
                    self._wait_for_trainer(trained)
                    continue
                if batch is not None:
                    self._write(batch)
                    written += 1
            else:
                self._wait_for_trainer(trained)
        return True

    def _pull(self, session: TrainerSession, step: int, trained: int) -> Batch | None:
        """Pull the whole step; None when it is not there yet. Raises EOFError when no more comes."""
        session.check()
        ended = session.exhausted
        try:
            return self._client.pull(
                self._run_id,
                term=session.term,
                step=step,
                train_version=session.version + step - trained,
                timeout_s=PULL_S,
            )
        except RolloutBufferError as error:
            if nothing_to_come(error, ended=ended):
                raise EOFError from error
            if not isinstance(error, BatchNotReady):
                raise
            if step > trained:
                self._wait_for_trainer(trained)
            else:
                self._wait(f"rollouts of step {step + 1}", waits_on(error, self._client.target))
            return None

    def _write(self, batch: Batch) -> None:
        ranks = pack(batch.groups, self._options.packing)
        self._output.write_rollouts(batch.step + 1, [encode(micro_batches) for micro_batches in ranks])
        self._waiting = None
        logger.info(
            "step %d: %d samples in %d micro-batches for each of %d ranks, staleness %.2f%s",
            batch.step + 1,
            batch.info.total_samples,
            len(ranks[0]),
            len(ranks),
            batch.info.staleness_mean,
            ", as before" if batch.info.replayed else "",
        )

    def _publish(self, session: TrainerSession, step: int) -> None:
        """Publish v(step) to the engines, and commit the steps behind it."""
        began = time.monotonic()
        session.took(step - 1)
        version = max(step, session.version + 1)
        session.publish(partial(self._output.copy_weights, step), version=version)
        if not self._options.keep_rollouts:
            self._output.remove_rollouts(below=step)
        self._waiting = None
        logger.info("step %d: trained, published as version %d in %.1f s", step, version, time.monotonic() - began)

    def _checkpoint(self, session: TrainerSession, trained: int, told: int) -> int:
        """Report the trainer's newest checkpoint if it covers more steps than `told`; returns the steps covered."""
        steps = self._output.checkpointed(trained)
        if steps <= told:
            return told
        self._publisher.checkpointed(self._client.checkpoint(self._run_id, term=session.term, through_step=steps - 1))
        logger.info("step %d: the trainer's checkpoint is safe", steps)
        return steps

    # ── waiting ──────────────────────────────────────────────────────────────

    def _wait_for_trainer(self, trained: int) -> None:
        self._wait(f"step {trained + 1}", f"the trainer: {self._output.stable(trained + 1)}")

    def _wait(self, what: str, on: str) -> None:
        """Wait for one poll interval; log the wait after a while, and repeatedly."""
        now = time.monotonic()
        if self._waiting is None or self._waiting.what != what:
            self._waiting = _Waiting(what, now, now + FIRST_LOG_S)
        if now >= self._waiting.say_at:
            logger.info("%s: waiting for %.0f s on %s", what, now - self._waiting.since, on)
            self._waiting.say_at = now + LOG_EVERY_S
        self._stop.wait(self._options.poll_s)


@dataclass(slots=True)
class _Waiting:
    what: str
    since: float
    say_at: float
