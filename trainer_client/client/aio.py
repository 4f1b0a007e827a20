"""Asyncio client: `BufferClient`'s operations as coroutines, on grpc.aio.

Requests, replies and the rules of repeating are the blocking client's; only the waiting differs. Make and use it in one
event loop of one process. An event loop does not survive a fork, and gRPC does not either while such a client is open
(`trainer_client.forks`).
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Concatenate, ParamSpec, Self, TypeVar

import grpc
from google.protobuf.message import Message

from buffer_wire.connection.channels import Connector
from buffer_wire.connection.retry import Retry, rpc_error
from buffer_wire.errors import BatchNotReady, RolloutBufferError
from buffer_wire.payloads.reader import AsyncPayloadReader, PayloadsUnreadable
from buffer_wire.payloads.relayed import READ_METHOD, ReadParts
from buffer_wire.revisions import Revisions
from buffer_wire.tracing import process as tracing
from rollout_buffer.v1 import payloads_pb2
from trainer_client.batch import Batch
from trainer_client.client import engines, requests
from trainer_client.client.assembly import PullAssembly
from trainer_client.client.call import Call, MadeBefore, documented, note, serialize
from trainer_client.client.driver import PULL_SLICE_S, ClientOptions, Deadline, worth_repeating
from trainer_client.client.evaluation import calls as evaluations
from trainer_client.client.evaluation.aio import AsyncEvaluationCalls
from trainer_client.client.pulling import PULL_METHOD, PullLoop, PullSpec
from trainer_client.forks import CALLS, Holder
from trainer_client.micro_batches import MicroBatches
from trainer_client.policy import Policy, changed
from trainer_client.state import Ledger, RunState
from trainer_client.waiting import OnWait, WaitNotices

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")
P = ParamSpec("P")


def operation(
    make: Callable[P, Call[ReplyT, T]],
) -> Callable[Concatenate["AsyncBufferClient", P], Coroutine[None, None, T]]:
    """Make a method of the client that builds a call with `make` and carries it out."""

    async def method(self: "AsyncBufferClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(make(*args, **kwargs))

    documented(method, make)
    return method


class AsyncBufferClient(AsyncEvaluationCalls):
    """Connection to the service at `target` ("host:port" or "unix:path"). Use it in an `async with`.

    Every method does what `BufferClient`'s does, with the same arguments and errors.
    """

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self.target = target
        self.options = options or ClientOptions()
        self.revisions = Revisions()
        """Highest revision seen of each run."""
        self._holder = Holder("an AsyncBufferClient")
        CALLS.note_asyncio(self)
        tracing.start("rollout-trainer", around=CALLS.under_way, owns_process=False)
        connector = Connector(target, self.options, self.options.channel_options())
        self.tokens = connector.tokens
        """Source of the token that calls carry."""
        self._control = connector.asyncio()
        self._bulk = connector.asyncio()
        self._made = MadeBefore()
        self._readers: dict[tuple[str, int], AsyncPayloadReader] = {}

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        self._holder.check()
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))
        await self._control.close(None)
        await self._bulk.close(None)
        CALLS.forget_asyncio(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, call: Call[ReplyT, T]) -> T:
        self._holder.check()
        if call.renews:
            self._made.forget(call.run_id)
        for name, first in self._made.lacking(call):
            await self._call(first)
            self._made.note(call.run_id, name)
        rpc = self._control.unary_unary(
            call.method, request_serializer=serialize, response_deserializer=call.reply.FromString
        )
        notices = WaitNotices(call.doing, self.target, call.on_wait)
        retry = Retry(
            deadline_s=self.options.timeout_s if call.timeout_s is None else call.timeout_s,
            waiting_on=f"the service at {self.target}",
            retry_on=worth_repeating,
            on_retry=notices.on_retry,
            tokens=self.tokens,
            mend=partial(self.revisions.met, call.run_id),
        )
        try:
            reply = await retry.asyncio(
                lambda: rpc(call.build(self.revisions.ref(call.run_id)), timeout=self.options.attempt_timeout_s)
            )
        except RolloutBufferError as error:
            if not call.was_done(error, repeated=notices.told):
                raise
            return call.decode(call.reply())
        if call.run_id:
            note(self.revisions, call.run_id, reply)
        return call.decode(reply)

    # ── one call each; `requests` says what they do, and with which arguments ─────

    create_run = operation(requests.create_run)
    run = operation(requests.run)
    runs = operation(requests.runs)
    pause_run = operation(requests.pause_run)
    drain_run = operation(requests.drain_run)
    continue_run = operation(requests.continue_run)
    delete_run = operation(requests.delete_run)
    submit_tasks = operation(requests.submit_tasks)
    write_blob = operation(requests.write_blob)
    read_blob = operation(requests.read_blob)
    reject = operation(requests.reject)
    commit = operation(requests.commit)
    checkpoint = operation(requests.checkpoint)
    resume = operation(requests.resume)
    publish = operation(requests.publish)
    plan_collective = operation(requests.plan_collective)
    evaluation_state = operation(evaluations.evaluation_state)
    delete_evaluation = operation(evaluations.delete_evaluation)
    evaluations = operation(evaluations.evaluations)

    async def ledger(self, run_id: str) -> Ledger:
        """Return the run's ledger: the entry of every accepted group and every submitted task."""
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

    async def pull(  # noqa: PLR0913 - the parts of one request
        self,
        run_id: str,
        *,
        term: int,
        step: int,
        rank: int = 0,
        world_size: int = 1,
        train_version: int | None = None,
        micro_batch: int | None = None,
        batch_groups: int | None = None,
        commit_through: int | None = None,
        checkpoint_through: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> Batch:
        """Pull a rank's shard of a step, or of one `micro_batch` of it, as soon as it is there."""
        spec = PullSpec(
            term=term,
            step=step,
            rank=rank,
            world_size=world_size,
            train_version=train_version,
            micro_batch=micro_batch or 0,
            batch_groups=batch_groups,
            commit_through=commit_through,
            checkpoint_through=checkpoint_through,
        )
        loop = self.pull_loop(run_id)
        deadline = Deadline.after(timeout_s)
        micro_batches = MicroBatches()
        while True:
            notices = WaitNotices(f"pulling {spec}", self.target, on_wait)
            attempt = partial(self.try_pull, run_id, spec)
            batch = await loop.run_async(attempt, notices.tell, deadline.left_s())
            if micro_batch is not None:
                return batch
            micro_batches.add(batch)
            if (whole := micro_batches.whole()) is not None:
                return whole
            spec = spec.following()

    def pull_loop(self, run_id: str) -> PullLoop:
        """Make the loop in which pulls of the run wait; `pull` includes it."""
        return PullLoop(self.target, self.tokens, partial(self.revisions.met, run_id))

    async def try_pull(self, run_id: str, spec: PullSpec, within: Deadline) -> Batch:
        """Try a pull once, for that loop."""
        self._holder.check()
        try:
            batch = await self._pulled(run_id, spec, within)
        except BatchNotReady:
            for call in spec.left_undone(run_id):
                await self._call(call)
            raise
        for call in spec.left_undone(run_id, batch.info):
            await self._call(call)
        return batch

    async def _pulled(self, run_id: str, spec: PullSpec, within: Deadline) -> Batch:
        reader = self._reader(run_id, spec.rank) if self.options.direct_payloads else None
        if reader is not None and await reader.open():
            assembly = await self._streamed(run_id, spec, within, direct=True)
            with suppress(PayloadsUnreadable):
                if keys := assembly.keys:
                    assembly.fill(await reader.read(keys))
                return assembly.finish()
        assembly = await self._streamed(run_id, spec, within)
        assembly.fill([await self._read_parts(run_id, key) for key in assembly.keys])
        return assembly.finish()

    async def _read_parts(self, run_id: str, key: str) -> memoryview:
        parts = ReadParts(run_id, key)
        request = payloads_pb2.ReadPayloadRequest(run=self.revisions.ref(run_id), payload_key=key)
        await self._stream(READ_METHOD, request, self.options.transfer_timeout_s, parts.add)
        return parts.body()

    def _reader(self, run_id: str, rank: int) -> AsyncPayloadReader:
        if (run_id, rank) not in self._readers:
            who = f"trainer rank {rank}"
            self._readers[run_id, rank] = AsyncPayloadReader(
                run_id, who, lambda trouble: self._call(requests.read_access(run_id, who, trouble))
            )
        return self._readers[run_id, rank]

    async def _streamed(self, run_id: str, spec: PullSpec, within: Deadline, *, direct: bool = False) -> PullAssembly:
        wait_s = min(within.left_s(), PULL_SLICE_S)
        assembly = PullAssembly(run_id, self.revisions, within.started)
        request = spec.to_wire(self.revisions.ref(run_id), wait_s, direct=direct)
        await self._stream(PULL_METHOD, request, wait_s + self.options.transfer_timeout_s, assembly.add)
        return assembly

    async def _stream(self, method: str, request: Message, timeout_s: float, take: Callable[[bytes], None]) -> None:
        begin = self._bulk.unary_stream(method, request_serializer=serialize, response_deserializer=None)
        stream = begin(request, timeout=timeout_s)
        try:
            async for message in stream:
                take(message)
        except grpc.RpcError as raised:
            raise rpc_error(raised) from raised
        finally:
            stream.cancel()

    async def wait_for_engines(
        self,
        run_id: str,
        version: int,
        count: engines.Quorum = 1,
        *,
        term: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> RunState:
        """Wait until `count` engines (a float: that share of them) are ready with `version` of `term` or newer."""
        deadline = Deadline.after(timeout_s)
        notices = WaitNotices(f"waiting for version {version} on {engines.said(count)}", self.target, on_wait)
        poll_s = engines.FIRST_POLL_S
        while True:
            run = await self.run(run_id, timeout_s=max(engines.LEAST_ANSWER_S, deadline.left_s()))
            missing = engines.not_loaded(run, version, count, term)
            if missing is None:
                return run
            if deadline.left_s() == 0.0:
                raise missing
            notices.tell(missing)
            await asyncio.sleep(min(poll_s * random.uniform(0.5, 1.0), deadline.left_s()))  # noqa: S311 - jitter
            poll_s = min(poll_s * 2, engines.MOST_POLL_S)
