"""The blocking client of a trainer: every operation on a run, repeated until it succeeds or its deadline passes.

Errors are those of `buffer_wire.errors`; the ones that a later try can cure are raised only after `timeout_s` of
trying. A client may be shared by threads. Two channels: small messages never wait behind a batch.
"""

import random
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from google.protobuf.message import Message

from buffer_wire.access import TokenSource
from buffer_wire.errors import UnknownRun
from buffer_wire.retry import retry_sync, rpc_error
from buffer_wire.revisions import Revisions
from trainer_client.client import engines, requests
from trainer_client.client.connections import Connections
from trainer_client.client.driver import PULL_SLICE_S, ClientOptions, Deadline, worth_repeating
from trainer_client.client.evaluation.blocking import EvaluationCalls
from trainer_client.client.pulling import PullLoop
from trainer_client.client.requests import Call, PullSpec, ResumeMode, Submission
from trainer_client.forks import CALLS
from trainer_client.policy import Policy, changed
from trainer_client.rounds import Rounds
from trainer_client.state import Ledger, Published, Resumed, RunState, Submitted, TrainerTime
from trainer_client.tasks import Task
from trainer_client.waiting import OnWait, Waiting, WaitNotices

if TYPE_CHECKING:
    from trainer_client.batch import Batch
    from trainer_client.manifest import Manifest
    from trainer_client.publish.collective.plan import CollectivePlan
    from trainer_client.publish.publication import WeightPublisher
    from trainer_client.session.plan import BatchGroups, SessionOptions
    from trainer_client.session.session import TrainerSession

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")


class BufferClient(EvaluationCalls):
    """A connection to the service at `target` ("host:port" or "unix:path"). Close it, or use it in a `with`.

    A child that a process forks may go on with the client that it inherits: it connects anew at its first call, or
    raises UsedAfterFork where gRPC did not survive the fork.
    """

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self.target = target
        self.options = options or ClientOptions()
        self._connections = Connections(target, self.options)

    @property
    def revisions(self) -> Revisions:
        """The highest revision that was seen of each run."""
        return self._connections.revisions

    @property
    def tokens(self) -> TokenSource:
        """The token that calls carry, as it is now."""
        return self._connections.tokens

    @property
    def _control(self) -> grpc.Channel:
        return self._connections.control

    @property
    def _bulk(self) -> grpc.Channel:
        return self._connections.bulk

    def close(self) -> None:
        """Close the connections; calls under way fail."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call[ReplyT, T], timeout_s: float | None = None, on_wait: OnWait | None = None) -> T:
        rpc = self._control.unary_unary(
            call.method, request_serializer=requests.serialize, response_deserializer=call.reply.FromString
        )

        def attempt() -> ReplyT:
            with CALLS.under_way():
                request = call.build(self.revisions.ref(call.run_id))
                answer: ReplyT = rpc(request, timeout=self.options.attempt_timeout_s)
                return answer

        reply = retry_sync(
            attempt,
            deadline_s=self.options.timeout_s if timeout_s is None else timeout_s,
            waiting_on=f"the service at {self.target}",
            retry_on=worth_repeating,
            on_retry=WaitNotices(call.doing, self.target, on_wait).on_retry,
            tokens=self.tokens,
            mend=partial(self.revisions.met, call.run_id),
        )
        if call.run_id:
            requests.note(self.revisions, call.run_id, reply)
        return call.decode(reply)

    # ── runs ─────────────────────────────────────────────────────────────────

    def create_run(self, run_id: str, policy: Policy | None = None) -> RunState:
        """Create a run, or find it with the same policy. Raises RunExists, InvalidPolicy, InvalidField."""
        return self._call(requests.create_run(run_id, policy))

    def run(self, run_id: str, *, timeout_s: float | None = None) -> RunState:
        """The whole state of a run. Raises UnknownRun."""
        return self._call(requests.get_run(run_id), timeout_s)

    def runs(self) -> tuple[str, ...]:
        """Ids of all runs, in order."""
        return self._call(requests.list_runs())

    def ledger(self, run_id: str) -> Ledger:
        """Where every accepted group and every submitted task is."""
        return self.run(run_id).ledger

    def update_policy(self, run_id: str, policy: Policy | None = None, **changes: object) -> Policy:
        """Change the policy of a live run: to `policy`, or only the fields that `changes` names.

            client.update_policy("math", environments={"easy": 1, "hard": 3})

        A field of None takes its default. Others may change other fields meanwhile. Returns the effective policy.
        Raises InvalidPolicy, InvalidField.
        """
        if policy is not None:
            return self._call(requests.update_policy(run_id, changed(policy, changes)))
        present = self.run(run_id).policy
        if not changes:
            return present
        # The whole policy goes along for a service that does not know of single fields yet.
        return self._call(requests.update_policy(run_id, changed(present, changes), changes))

    def pause_run(self, run_id: str) -> None:
        """Hold a run: no leases, no submits, no new batches, until `continue_run`; what is in flight may land."""
        self._call(requests.pause_run(run_id))

    def drain_run(self, run_id: str) -> None:
        """Let a run end: no leases and no submits any more; what is queued or being generated is still trained."""
        self._call(requests.drain_run(run_id))

    def continue_run(self, run_id: str) -> None:
        """Undo `pause_run` and `drain_run`."""
        self._call(requests.continue_run(run_id))

    def delete_run(self, run_id: str) -> None:
        """Delete a run and everything stored for it; there is no way back. Raises UnknownRun."""
        tries: list[Waiting] = []
        try:
            self._call(requests.delete_run(run_id), on_wait=tries.append)
        except UnknownRun:
            # Of a repeat, it says that the first try, whose answer was lost, has done it.
            if not tries:
                raise

    # ── tasks ────────────────────────────────────────────────────────────────

    def submit_tasks(
        self,
        run_id: str,
        submission: Submission,
        *,
        timeout_s: float | None = None,
        on_wait: OnWait | None = None,
    ) -> Submitted:
        """Add tasks and move the feeder's cursor, both or neither.

        Raises PendingFull after `timeout_s`, CursorConflict, StaleEpoch, RunPaused, InvalidField.
        """
        return self._call(requests.submit_tasks(run_id, submission), timeout_s, on_wait)

    # ── batches ──────────────────────────────────────────────────────────────

    def pull(  # noqa: PLR0913 - the parts of one request
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        rank: int = 0,
        world_size: int = 1,
        train_version: int | None = None,
        round: int | None = None,  # noqa: A002 - the wire's word
        batch_groups: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> "Batch":
        """A rank's shard of a step, or of one `round` of it, as soon as it is there.

        `step`: the next unassembled one, or any earlier one that is still retained. `world_size` is fixed for an
        epoch by its first pull. `train_version`: the version whose weights will train on the batch, at least the
        published one; None: the published one. `round`: None gathers the whole step; a number pulls that round of a
        run that streams, any that has closed or the next. `batch_groups`: N of this step, equal for every rank; None:
        the policy's.

        Raises BatchNotReady after `timeout_s` with what is short and on whom the step waits, ServiceUnreachable
        after as long; StaleEpoch, StepAhead, ReplayGap, WorldSizeMismatch, RunPaused, FailureBudgetExceeded.
        """
        spec = PullSpec(
            epoch=epoch,
            step=step,
            rank=rank,
            world_size=world_size,
            train_version=train_version,
            round=round or 0,
            batch_groups=batch_groups,
        )
        loop = self.pull_loop(run_id)
        deadline = Deadline.after(timeout_s)
        rounds = Rounds()
        while True:
            notices = WaitNotices(f"pulling {spec}", self.target, on_wait)
            attempt = partial(self.try_pull, run_id, spec)
            batch = loop.run(attempt, notices.tell, deadline.left_s())
            if round is not None:
                return batch
            rounds.add(batch)
            if (whole := rounds.whole()) is not None:
                return whole
            spec = spec.following()

    def pull_loop(self, run_id: str) -> PullLoop:
        """The loop in which pulls of the run wait; `pull` does it all."""
        return PullLoop(self.target, self.tokens, partial(self.revisions.met, run_id))

    def try_pull(self, run_id: str, spec: PullSpec, within: Deadline) -> "Batch":
        """One try of a pull, for that loop."""
        with CALLS.under_way():
            from trainer_client.client.assembly import PullAssembly

        wait_s = min(within.left_s(), PULL_SLICE_S)
        assembly = PullAssembly(run_id, self.revisions, within.started)
        request = spec.to_wire(self.revisions.ref(run_id), wait_s)
        pull = self._bulk.unary_stream(
            requests.PULL_METHOD, request_serializer=requests.serialize, response_deserializer=None
        )
        with CALLS.under_way() as call:
            stream = pull(request, timeout=wait_s + self.options.transfer_timeout_s)
            call.cancel = stream.cancel
            try:
                for message in stream:
                    assembly.add(message)
            except grpc.RpcError as raised:
                raise rpc_error(raised) from raised
            finally:
                stream.cancel()  # type: ignore[no-untyped-call]
        return assembly.finish()

    def commit(self, run_id: str, *, epoch: int, through_step: int) -> int:
        """Mark every step up to and including `through_step` as trained; returns the steps committed so far."""
        return self._call(requests.commit(run_id, epoch=epoch, through_step=through_step))

    def checkpoint(self, run_id: str, *, epoch: int, through_step: int) -> int:
        """Free replay data up to and including `through_step`; returns the steps freed so far.

        Raises NotCommitted, StaleEpoch.
        """
        return self._call(requests.checkpoint(run_id, epoch=epoch, through_step=through_step))

    def resume(
        self,
        run_id: str,
        *,
        next_step: int | None = None,
        mode: ResumeMode = "replay",
        allow_regenerate: bool = False,
    ) -> Resumed:
        """Take the run over: a new epoch, the clock set back to `next_step` (None: after the last commit).

        Raises StepAhead, and ReplayGap unless `allow_regenerate`.
        """
        return self._call(requests.resume(run_id, next_step=next_step, mode=mode, allow_regenerate=allow_regenerate))

    # ── weights ──────────────────────────────────────────────────────────────

    def publish(
        self,
        run_id: str,
        *,
        epoch: int,
        version: int,
        manifest: "Manifest | None" = None,
        commit_through: int | None = None,
        time_spent: TrainerTime | None = None,
    ) -> Published:
        """Make (epoch, version) the published weights and commit through a step, in one decision.

        `manifest` None: weights that need no loading. `time_spent`: what the trainer did since it resumed, for the
        run's statistics; None: unknown. Raises VersionConflict, StaleEpoch, StepAhead.
        """
        return self._call(
            requests.publish(
                run_id,
                epoch=epoch,
                version=version,
                manifest=manifest,
                commit_through=commit_through,
                time_spent=time_spent,
            )
        )

    def plan_collective(
        self, run_id: str, *, epoch: int, plan: "CollectivePlan", timeout_s: float | None = None
    ) -> None:
        """Announce a collective update of the weights to the workers, or its next phase; replaces the plan before.

        `trainer_client.publish.CollectivePublisher` carries it out. Raises VersionConflict, StaleEpoch, InvalidField.
        """
        self._call(requests.plan_collective(run_id, epoch=epoch, plan=plan), timeout_s)

    def wait_for_engines(
        self,
        run_id: str,
        version: int,
        count: engines.Quorum = 1,
        *,
        epoch: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> RunState:
        """Wait until `count` engines (a float: that share of them) are ready with `version` of `epoch` or newer.

        `epoch` None: the run's. A share is of the engines in service: neither quarantined, stopped nor silent.
        Raises NotReady after `timeout_s`, naming the engines that lag and their last errors; InvalidField.
        """
        deadline = Deadline.after(timeout_s)
        notices = WaitNotices(f"waiting for version {version} on {engines.said(count)}", self.target, on_wait)
        poll_s = engines.FIRST_POLL_S
        while True:
            run = self.run(run_id, timeout_s=max(engines.LEAST_ANSWER_S, deadline.left_s()))
            missing = engines.not_loaded(run, version, count, epoch)
            if missing is None:
                return run
            if deadline.left_s() == 0.0:
                raise missing
            notices.tell(missing)
            time.sleep(min(poll_s * random.uniform(0.5, 1.0), deadline.left_s()))  # noqa: S311 - jitter
            poll_s = min(poll_s * 2, engines.MOST_POLL_S)

    # ── sessions ─────────────────────────────────────────────────────────────

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
        """A training loop over the run, for a `with`; see `trainer_client.session.session`.

        `policy`: of the run, which is created if need be; None: the run exists. `tasks`: any iterable, fed in the
        background. `publisher`: where `session.publish` puts weights. `next_step`: from the trainer's checkpoint;
        None: after the last commit. `prefetch`: batches pulled while training. `batch_groups`: N of each step, if it
        is not the policy's. `start`: rank 0's `session.start`, on every other rank.
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
