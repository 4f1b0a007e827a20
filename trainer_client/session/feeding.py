"""Feeding of a session: how far ahead of the training the feeder runs, and its calls to the service."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buffer_wire.errors import PendingFull
from rollout_buffer.v1 import runs_pb2
from trainer_client.client.operations import ServiceClient
from trainer_client.client.requests import Submission
from trainer_client.policy import Policy
from trainer_client.session.feeder import TaskFeeder
from trainer_client.session.plan import SessionPlan
from trainer_client.state import Resumed, Submitted
from trainer_client.waiting import Waiting

_MOST_PENDING = 10_000
_LEAST_AHEAD = 256
_BATCHES_AHEAD = 4


def most_pending(policy: Policy, wanted: int | None = None) -> int:
    """Choose the number of pending tasks at which a feeder waits.

    It is `wanted` or a few batches, at most the cap of `policy`, which is an effective one.
    """
    ahead = max(_LEAST_AHEAD, _BATCHES_AHEAD * (policy.batch_groups or 32))
    return min(policy.max_pending_tasks or _MOST_PENDING, wanted or ahead)


def feeder_of(client: ServiceClient, plan: SessionPlan, policy: Policy, start: Resumed) -> TaskFeeder | None:
    """Start a feeder; None without tasks. `policy`: the effective one."""
    if plan.tasks is None:
        return None
    feeder = TaskFeeder(
        plan.tasks,
        _ServiceTarget(client, plan.run_id, lambda: feeder.stopped),
        start,
        max_pending_tasks=most_pending(policy, plan.options.max_pending_tasks),
        chunk_tasks=plan.options.chunk_tasks,
    )
    feeder.start()
    return feeder


@dataclass(frozen=True, slots=True)
class _ServiceTarget:
    """Target of the feeder at the service.

    Its calls end at once when the feeder is stopped or the run's cap is reached.
    """

    client: ServiceClient
    run_id: str
    stopped: Callable[[], bool]

    def submit(self, submission: Submission) -> Submitted:
        return self.client.submit_tasks(self.run_id, submission, on_wait=self._on_wait)

    def pending(self) -> int:
        return self.client.run(self.run_id).ledger.tasks.pending

    def records(self, after: str, enough: int) -> Sequence[runs_pb2.Record]:
        return self.client.read_records(self.run_id, after, enough)

    def _on_wait(self, waiting: Waiting) -> None:
        if self.stopped() or isinstance(waiting.error, PendingFull):
            raise waiting.error
