"""The asyncio client: `BufferClient`'s operations as coroutines, on grpc.aio.

Requests, replies and the rules of repeating are the blocking client's; only the waiting differs. Make and use it in
one event loop of one process: an event loop does not survive a fork, and while such a client is open gRPC does not
either (`trainer_client.forks`).
"""

import asyncio
import random
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf.message import Message

from buffer_wire.connect import Connector
from buffer_wire.errors import UnknownRun
from buffer_wire.retry import retry_async
from buffer_wire.revisions import Revisions
from trainer_client.batch import Batch
from trainer_client.client import engines, requests
from trainer_client.client.assembly import PullAssembly
from trainer_client.client.driver import PULL_SLICE_S, ClientOptions, Deadline, worth_repeating
from trainer_client.client.evaluation.aio import AsyncEvaluationCalls
from trainer_client.client.pulling import PullLoop
from trainer_client.client.requests import Call, PullSpec, ResumeMode, Submission
from trainer_client.forks import CALLS, Holder
from trainer_client.manifest import Manifest
from trainer_client.policy import Policy, changed
from trainer_client.publish.collective.plan import CollectivePlan
from trainer_client.rounds import Rounds
from trainer_client.state import Ledger, Published, Resumed, RunState, Submitted, TrainerTime
from trainer_client.waiting import OnWait, Waiting, WaitNotices

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")


class AsyncBufferClient(AsyncEvaluationCalls):
    """A connection to the service at `target` ("host:port" or "unix:path"). Use it in an `async with`.

    Every method does what `BufferClient`'s does, with the same arguments and errors.
    """

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self.target = target
        self.options = options or ClientOptions()
        self.revisions = Revisions()
        """The highest revision that was seen of each run."""
        self._holder = Holder("an AsyncBufferClient")
        CALLS.note_asyncio(self)
        connector = Connector(target, self.options, self.options.channel_options())
        self.tokens = connector.tokens
        """The token that calls carry, as it is now."""
        self._control = connector.asyncio()
        self._bulk = connector.asyncio()
        self._pull = self._bulk.unary_stream(
            requests.PULL_METHOD, request_serializer=requests.serialize, response_deserializer=None
        )

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        self._holder.check()
        await self._control.close(None)
        await self._bulk.close(None)
        CALLS.forget_asyncio(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, call: Call[ReplyT, T], timeout_s: float | None = None, on_wait: OnWait | None = None) -> T:
        self._holder.check()
        rpc = self._control.unary_unary(
            call.method, request_serializer=requests.serialize, response_deserializer=call.reply.FromString
        )
        reply = await retry_async(
            lambda: rpc(call.build(self.revisions.ref(call.run_id)), timeout=self.options.attempt_timeout_s),
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

    async def create_run(self, run_id: str, policy: Policy | None = None) -> RunState:
        """Create a run, or find it with the same policy."""
        return await self._call(requests.create_run(run_id, policy))

    async def run(self, run_id: str, *, timeout_s: float | None = None) -> RunState:
        """The whole state of a run."""
        return await self._call(requests.get_run(run_id), timeout_s)

    async def runs(self) -> tuple[str, ...]:
        """Ids of all runs, in order."""
        return await self._call(requests.list_runs())

    async def ledger(self, run_id: str) -> Ledger:
        """Where every accepted group and every submitted task is."""
        return (await self.run(run_id)).ledger

    async def update_policy(self, run_id: str, policy: Policy | None = None, **changes: object) -> Policy:
        """Change the policy of a live run: to `policy`, or only the fields that `changes` names.

            client.update_policy("math", environments={"easy": 1, "hard": 3})

        A field of None takes its default. Others may change other fields meanwhile. Returns the effective policy.
        """
        if policy is not None:
            return await self._call(requests.update_policy(run_id, changed(policy, changes)))
        present = (await self.run(run_id)).policy
        if not changes:
            return present
        # The whole policy goes along for a service that does not know of single fields yet.
        return await self._call(requests.update_policy(run_id, changed(present, changes), changes))

    async def pause_run(self, run_id: str) -> None:
        """Hold a run: no leases, no submits, no new batches, until `continue_run`; what is in flight may land."""
        await self._call(requests.pause_run(run_id))

    async def drain_run(self, run_id: str) -> None:
        """Let a run end: no leases and no submits any more; what is queued or being generated is still trained."""
        await self._call(requests.drain_run(run_id))

    async def continue_run(self, run_id: str) -> None:
        """Undo `pause_run` and `drain_run`."""
        await self._call(requests.continue_run(run_id))

    async def delete_run(self, run_id: str) -> None:
        """Delete a run and everything stored for it; there is no way back."""
        tries: list[Waiting] = []
        try:
            await self._call(requests.delete_run(run_id), on_wait=tries.append)
        except UnknownRun:
            # Of a repeat, it says that the first try, whose answer was lost, has done it.
            if not tries:
                raise

    async def submit_tasks(
        self,
        run_id: str,
        submission: Submission,
        *,
        timeout_s: float | None = None,
        on_wait: OnWait | None = None,
    ) -> Submitted:
        """Add tasks and move the feeder's cursor, both or neither."""
        return await self._call(requests.submit_tasks(run_id, submission), timeout_s, on_wait)

    async def pull(  # noqa: PLR0913 - the parts of one request
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
    ) -> Batch:
        """A rank's shard of a step, or of one `round` of it, as soon as it is there."""
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
            batch = await loop.run_async(attempt, notices.tell, deadline.left_s())
            if round is not None:
                return batch
            rounds.add(batch)
            if (whole := rounds.whole()) is not None:
                return whole
            spec = spec.following()

    def pull_loop(self, run_id: str) -> PullLoop:
        """The loop in which pulls of the run wait; `pull` does it all."""
        return PullLoop(self.target, self.tokens, partial(self.revisions.met, run_id))

    async def try_pull(self, run_id: str, spec: PullSpec, within: Deadline) -> Batch:
        """One try of a pull, for that loop. Raises gRPC's own errors too."""
        self._holder.check()
        wait_s = min(within.left_s(), PULL_SLICE_S)
        assembly = PullAssembly(run_id, self.revisions, within.started)
        request = spec.to_wire(self.revisions.ref(run_id), wait_s)
        stream = self._pull(request, timeout=wait_s + self.options.transfer_timeout_s)
        try:
            async for message in stream:
                assembly.add(message)
        finally:
            stream.cancel()
        return assembly.finish()

    async def commit(self, run_id: str, *, epoch: int, through_step: int) -> int:
        """Mark every step up to and including `through_step` as trained; returns the steps committed so far."""
        return await self._call(requests.commit(run_id, epoch=epoch, through_step=through_step))

    async def checkpoint(self, run_id: str, *, epoch: int, through_step: int) -> int:
        """Free replay data up to and including `through_step`; returns the steps freed so far."""
        return await self._call(requests.checkpoint(run_id, epoch=epoch, through_step=through_step))

    async def resume(
        self,
        run_id: str,
        *,
        next_step: int | None = None,
        mode: ResumeMode = "replay",
        allow_regenerate: bool = False,
    ) -> Resumed:
        """Take the run over: a new epoch, the clock set back to `next_step` (None: after the last commit)."""
        return await self._call(
            requests.resume(run_id, next_step=next_step, mode=mode, allow_regenerate=allow_regenerate)
        )

    async def publish(
        self,
        run_id: str,
        *,
        epoch: int,
        version: int,
        manifest: Manifest | None = None,
        commit_through: int | None = None,
        time_spent: TrainerTime | None = None,
    ) -> Published:
        """Make (epoch, version) the published weights and commit through a step, in one decision.

        `time_spent`: what the trainer did since it resumed, for the run's statistics; None: unknown.
        """
        return await self._call(
            requests.publish(
                run_id,
                epoch=epoch,
                version=version,
                manifest=manifest,
                commit_through=commit_through,
                time_spent=time_spent,
            )
        )

    async def plan_collective(
        self, run_id: str, *, epoch: int, plan: CollectivePlan, timeout_s: float | None = None
    ) -> None:
        """Announce a collective update of the weights to the workers, or its next phase."""
        await self._call(requests.plan_collective(run_id, epoch=epoch, plan=plan), timeout_s)

    async def wait_for_engines(
        self,
        run_id: str,
        version: int,
        count: engines.Quorum = 1,
        *,
        epoch: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> RunState:
        """Wait until `count` engines (a float: that share of them) are ready with `version` of `epoch` or newer."""
        deadline = Deadline.after(timeout_s)
        notices = WaitNotices(f"waiting for version {version} on {engines.said(count)}", self.target, on_wait)
        poll_s = engines.FIRST_POLL_S
        while True:
            run = await self.run(run_id, timeout_s=max(engines.LEAST_ANSWER_S, deadline.left_s()))
            missing = engines.not_loaded(run, version, count, epoch)
            if missing is None:
                return run
            if deadline.left_s() == 0.0:
                raise missing
            notices.tell(missing)
            await asyncio.sleep(min(poll_s * random.uniform(0.5, 1.0), deadline.left_s()))  # noqa: S311 - jitter
            poll_s = min(poll_s * 2, engines.MOST_POLL_S)
