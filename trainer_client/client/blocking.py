"""Blocking client of a trainer: every operation on a run, and sessions over it."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trainer_client.client.operations import ServiceClient
from trainer_client.forks import CALLS
from trainer_client.policy import Policy
from trainer_client.state import Resumed
from trainer_client.tasks import Task

if TYPE_CHECKING:
    from trainer_client.publish.publication import WeightPublisher
    from trainer_client.session.plan import BatchGroups, SessionOptions
    from trainer_client.session.session import TrainerSession


class BufferClient(ServiceClient):
    """Connection to the service at `target` ("host:port" or "unix:path"). Close it, or use it in a `with`.

    A forked child may go on with the client that it inherits. The client connects anew at its first call there, or
    raises UsedAfterFork where gRPC did not survive the fork.
    """

    def session(  # noqa: PLR0913 - what a trainer says in one place
        self,
        run_id: str,
        *,
        policy: Policy | None = None,
        tasks: Iterable[Task] | None = None,
        publisher: "WeightPublisher | None" = None,
        next_step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 0,
        batch_groups: "BatchGroups" = None,
        start: Resumed | None = None,
        options: "SessionOptions | None" = None,
    ) -> AbstractContextManager["TrainerSession"]:
        """Open a training loop over the run, for a `with`; see `trainer_client.session.session`.

        `policy`: of the run, which is created if need be; None: the run exists. `tasks`: any iterable, fed in the
        background. `publisher`: receives the weights of `session.publish`. `next_step`: from the trainer's checkpoint;
        None: after the last commit. `prefetch`: batches pulled while training. `batch_groups`: N of each step, if it is
        not the policy's. `start`: rank 0's `session.start`, on every other rank.
        """
        with CALLS.under_way():
            from trainer_client.session.opening import open_session
            from trainer_client.session.plan import SessionOptions, SessionPlan

        plan = SessionPlan(
            run_id=run_id,
            policy=policy,
            tasks=tasks,
            publisher=publisher,
            next_step=next_step,
            rank=rank,
            world_size=world_size,
            prefetch=prefetch,
            batch_groups=batch_groups,
            start=start,
            options=options or SessionOptions(),
        )
        return open_session(self, plan)
