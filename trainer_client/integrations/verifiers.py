"""Batches generated ahead of training, with the semantics of verifiers' AsyncBatchGenerator, over a session.

Contract followed: verifiers 0.1.6, the last release that has the class. Workers generate, so there is no thread here:
`get_batch` pulls in the caller's, and raises its errors there. A submitted batch is a list of tasks; its result has
their groups in the same order. Groups that come for another batch are kept for it. One thread uses a generator.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from buffer_wire.errors import InvalidField, RolloutBufferError
from trainer_client.batch import Group
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import worth_repeating
from trainer_client.client.requests import Submission
from trainer_client.policy import Policy
from trainer_client.publish.publication import WeightPublisher, WeightSource
from trainer_client.session.plan import SessionOptions
from trainer_client.session.session import TrainerSession
from trainer_client.tasks import Task

_ONCE = "1: a batch has the groups of its tasks, each once"
POLICY = Policy(batch_groups=1, max_queued_groups=1_024, overflow_action="block")
"""Policy of the run. A batch needs every group of its tasks: the run drops none, and its steps are single groups."""
Broadcast: TypeAlias = Callable[[list[Any]], object]  # as torch.distributed.broadcast_object_list
_OPTIONS = SessionOptions(mode="discard", pull_timeout_s=0.5)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of a batch. `generation_time`: seconds from the submit to the last group. Can be pickled."""

    batch_id: int
    groups: tuple[Group, ...]
    generation_time: float


class AsyncBatchGenerator:
    """Generator of batches ahead of training.

    `num_batches_ahead`: the target of `should_submit_more` and `batches`; 0 is synchronous. `max_queue_size`: largest
    number of batches that are submitted and not complete; None or 0: twice num_batches_ahead, at least 4.
    `generation_timeout`: seconds. `policy`: of the run, which belongs to one generator: POLICY with other fields, such
    as `failure_budget`. Raises InvalidField for one that uses groups again: a batch has the groups of its tasks.
    """

    def __init__(
        self,
        client: BufferClient,
        run_id: str,
        *,
        num_batches_ahead: int = 1,
        max_queue_size: int | None = None,
        generation_timeout: float = 300.0,
        publisher: WeightPublisher | None = None,
        policy: Policy = POLICY,
    ) -> None:
        if policy.max_uses not in (None, 1):
            raise InvalidField("policy.max_uses", policy.max_uses, _ONCE)
        self.num_batches_ahead, self.generation_timeout = num_batches_ahead, generation_timeout
        self.max_queue_size = max_queue_size or max(num_batches_ahead * 2, 4)
        self.generation_times: deque[float] = deque(maxlen=100)
        self._client, self._run_id, self._publisher, self._policy = client, run_id, publisher, policy
        self._session: TrainerSession | None = None
        self._stack, self._cursor = ExitStack(), 0
        self._pending: dict[int, tuple[float, dict[str, Group | None]]] = {}
        """Time of the submit, and the batch's groups by task id, None where one is awaited."""
        self._owner: dict[str, int] = {}
        self._complete: dict[int, BatchResult] = {}

    def start(self) -> None:
        """Take the run over and drop the groups of an earlier generator; more calls do nothing. Raises as a session."""
        if self._session is None:
            plan: dict[str, Any] = {"policy": self._policy, "publisher": self._publisher, "options": _OPTIONS}
            self._session = self._stack.enter_context(self._client.session(self._run_id, **plan))
            self._cursor = self._session.start.cursor

    def stop(self) -> None:
        """End the session; the run stays as it is. More calls do nothing."""
        self._session = None
        self._stack.close()

    def submit_batch(self, batch_id: int, tasks: Sequence[Task]) -> bool:
        """Submit a batch of tasks, under ids of the generator's; False when the queue is full, True when it is under
        way.

        Raises RuntimeError before `start`, InvalidField for tasks that are refused.
        """
        session = self._started()
        under_way = batch_id in self._pending or batch_id in self._complete
        if under_way or len(self._pending) >= self.max_queue_size:
            return under_way
        named = [replace(task, task_id=f"{session.term}.{self._cursor + i}") for i, task in enumerate(tasks)]
        cursor = self._cursor + len(named)
        submission = Submission(term=session.term, expected_cursor=self._cursor, cursor=cursor, tasks=named)
        self._client.submit_tasks(self._run_id, submission)
        self._cursor = cursor
        self._owner |= dict.fromkeys((task.task_id for task in named), batch_id)
        self._pending[batch_id] = (time.monotonic(), dict.fromkeys(task.task_id for task in named))
        return True

    def get_batch(self, batch_id: int, timeout: float | None = None) -> BatchResult:
        """Wait for a batch, in any order. `timeout`: seconds; None or 0: generation_timeout.

        Raises TimeoutError, after which the batch is late, not lost; RuntimeError when its generation, or all, failed.
        """
        session, timeout = self._started(), timeout or self.generation_timeout
        deadline = time.monotonic() + timeout
        while batch_id not in self._complete:
            try:
                for group in next(session).groups:
                    self._sort(group)
            except (StopIteration, RolloutBufferError) as error:
                if why := self._failure(session, batch_id, error):
                    self._pending.pop(batch_id, None)
                    raise RuntimeError(f"Batch {batch_id} generation failed: {why}") from error
            if batch_id not in self._complete and time.monotonic() >= deadline:
                raise TimeoutError(f"Batch {batch_id} generation timed out after {timeout}s")
        return self._complete.pop(batch_id)

    def batches(self, requests: Iterable[Sequence[Task]]) -> Iterator[BatchResult]:
        """Yield the batches of all requests, 0, 1, …; `num_batches_ahead` more are submitted before each is handed
        out.
        """
        handed_out = submitted = 0
        for submitted, tasks in enumerate(requests, 1):
            while submitted - handed_out > self.num_batches_ahead + 1 or not self.submit_batch(submitted - 1, tasks):
                yield self.get_batch(handed_out)
                handed_out += 1
        for batch_id in range(handed_out, submitted):
            yield self.get_batch(batch_id)

    def publish(self, source: WeightSource = None) -> int:
        """Offer weights trained on every batch handed out so far to the engines. See `TrainerSession.publish`."""
        return self._started().publish(source)

    def get_pending_count(self) -> int:
        """Count the batches that were submitted and that no `get_batch` has seen complete."""
        return len(self._pending)

    def get_average_generation_time(self) -> float:
        """Average the generation time of the latest 100 batches, in seconds; 0.0 before the first."""
        return sum(self.generation_times) / max(len(self.generation_times), 1)

    def should_submit_more(self) -> bool:
        """True while fewer than num_batches_ahead batches are pending or complete."""
        return len(self._pending) + len(self._complete) < self.num_batches_ahead

    def _started(self) -> TrainerSession:
        if self._session is None:
            raise RuntimeError("AsyncBatchGenerator not started")
        return self._session

    def _sort(self, group: Group) -> None:
        if group.prior_uses:
            raise InvalidField("policy.max_uses", f"group {group.group_id}, which was trained on before", _ONCE)
        batch_id = self._owner.pop(group.task_id, -1)
        if batch_id not in self._pending:
            return  # it has failed
        submitted_s, groups = self._pending[batch_id]
        groups[group.task_id] = group
        if None not in groups.values():
            del self._pending[batch_id]
            self.generation_times.append(time.monotonic() - submitted_s)
            found = tuple(each for each in groups.values() if each is not None)
            self._complete[batch_id] = BatchResult(batch_id, found, self.generation_times[-1])

    def _failure(self, session: TrainerSession, batch_id: int, error: Exception) -> str:
        """Return the reason why groups of the batch will never come; empty while they may."""
        if not isinstance(error, RolloutBufferError):
            return "the run was drained"
        if not worth_repeating(error):
            return str(error)
        try:
            run = session.state()
        except RolloutBufferError:
            return ""
        awaited = {task for task, group in self._pending.get(batch_id, (0, {}))[1].items() if group is None}
        failed = next((failure for failure in run.failures if failure.task_id in awaited), None)
        if failed is not None:
            return f"task {failed.task_id} failed after {failed.attempts} attempts: {failed.error}"
        queue, tasks = run.ledger.groups, run.ledger.tasks
        coming = tasks.pending or tasks.leased or queue.queued.groups or queue.forming.groups
        return f"{len(awaited)} of its tasks ended without a group" if awaited and not coming else ""


def get_batch_slice(
    generator: AsyncBatchGenerator | None, batch_id: int, rank: int, world_size: int, broadcast: Broadcast
) -> tuple[BatchResult, Sequence[Group]]:
    """Call `get_batch` on process 0, whose `generator` it is; return on every process the result and that process's
    groups.

    Raises on all processes what `get_batch` raised, and InvalidField when the groups do not divide by `world_size`.
    """
    box: list[Any] = [None]
    if generator is not None:
        try:
            box[0] = generator.get_batch(batch_id)
        except (RuntimeError, TimeoutError) as error:
            box[0] = type(error)(str(error))  # its cause need not survive pickling
    broadcast(box)
    result: BatchResult | Exception = box[0]
    if isinstance(result, Exception):
        raise result
    share, left = divmod(len(result.groups), world_size)
    if left:
        raise InvalidField("world_size", world_size, f"a divisor of the batch's {len(result.groups)} groups")
    return result, result.groups[rank * share : (rank + 1) * share]
