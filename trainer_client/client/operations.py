"""Operations of the blocking client: each is repeated until it succeeds or its deadline passes.

Sessions and publishers use a client of this kind. `trainer_client.client.blocking` adds the opening of sessions.

Errors are those of `buffer_wire.errors`. An error that a later try can cure is raised only after `timeout_s` of trying.
A client may be shared by threads. It has two channels, so that small messages never wait behind a batch.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

import grpc
from google.protobuf.message import Message

from buffer_wire.connection.access import TokenSource
from buffer_wire.connection.retry import Retry, rpc_error
from buffer_wire.errors import BatchNotReady, RolloutBufferError
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import payloads_pb2, runs_pb2
from trainer_client.client import engines, requests
from trainer_client.client.call import Call, MadeBefore, documented, note, serialize
from trainer_client.client.connections import Connections
from trainer_client.client.driver import PULL_SLICE_S, ClientOptions, Deadline, worth_repeating
from trainer_client.client.evaluation import calls as evaluations
from trainer_client.client.evaluation.blocking import EvaluationCalls
from trainer_client.client.pulling import PULL_METHOD, PullLoop, PullSpec
from trainer_client.forks import CALLS
from trainer_client.micro_batches import MicroBatches
from trainer_client.policy import Policy, changed
from trainer_client.state import Ledger, RunState
from trainer_client.waiting import OnWait, WaitNotices

if TYPE_CHECKING:
    from buffer_wire.payloads.reader import PayloadReader
    from trainer_client.batch import Batch
    from trainer_client.client.assembly import PullAssembly

RECORDS_METHOD = "/rollout_buffer.v1.RunService/ExportRecords"

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")
P = ParamSpec("P")


def operation(make: Callable[P, Call[ReplyT, T]]) -> Callable[Concatenate["ServiceClient", P], T]:
    """Make a method of the client that builds a call with `make` and carries it out."""

    def method(self: "ServiceClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(make(*args, **kwargs))

    documented(method, make)
    return method


class ServiceClient(EvaluationCalls):
    """Connection to the service at `target` ("host:port" or "unix:path"). Close it, or use it in a `with`."""

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self.target = target
        self.options = options or ClientOptions()
        self._connections = Connections(target, self.options)
        self._made = MadeBefore()

    @property
    def revisions(self) -> Revisions:
        """Highest revision seen of each run."""
        return self._connections.mine.revisions

    @property
    def tokens(self) -> TokenSource:
        """Source of the token that calls carry."""
        return self._connections.tokens

    @property
    def _control(self) -> grpc.Channel:
        return self._connections.mine.control

    @property
    def _bulk(self) -> grpc.Channel:
        return self._connections.mine.bulk

    def close(self) -> None:
        """Close the connections; calls under way fail."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call[ReplyT, T]) -> T:
        if call.renews:
            self._made.forget(call.run_id)
        for name, first in self._made.lacking(call):
            self._call(first)
            self._made.note(call.run_id, name)
        rpc = self._control.unary_unary(
            call.method, request_serializer=serialize, response_deserializer=call.reply.FromString
        )

        def attempt() -> ReplyT:
            with CALLS.under_way():
                request = call.build(self.revisions.ref(call.run_id))
                answer: ReplyT = rpc(request, timeout=self.options.attempt_timeout_s)
                return answer

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
            reply = retry.blocking(attempt)
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

    # ── runs ─────────────────────────────────────────────────────────────────

    def ledger(self, run_id: str) -> Ledger:
        """Return the run's ledger: the entry of every accepted group and every submitted task."""
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

    def read_records(self, run_id: str, after: str, enough: int) -> list[runs_pb2.Record]:
        """Read events of the run's recording after the one with the id `after` ("": from the first), in order.

        Ends with the message in which `enough` are reached. Tries once. Raises UnknownRun, InvalidField.
        """
        records: list[runs_pb2.Record] = []

        def add(message: bytes) -> bool:
            records.extend(runs_pb2.ExportRecordsResponse.FromString(message).records)
            return len(records) >= enough

        request = runs_pb2.ExportRecordsRequest(run=self.revisions.ref(run_id), after=after)
        self._stream(RECORDS_METHOD, request, self.options.transfer_timeout_s, add)
        return records

    # ── batches ──────────────────────────────────────────────────────────────

    def pull(  # noqa: PLR0913 - the parts of one request
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
    ) -> "Batch":
        """Pull a rank's shard of a step, or of one `micro_batch` of it, as soon as it is there.

        `step`: the next unassembled one, or any earlier one that is still retained. `world_size` is fixed for a term
        by its first pull. `train_version`: the version whose weights will train on the batch, at least the published
        one; None: the published one. `micro_batch`: None gathers the whole step; a number pulls that micro-batch of a
        run that streams, any that has closed or the next. `batch_groups`: N of this step, equal for every rank; None:
        the policy's.

        `commit_through` and `checkpoint_through`: steps through which the same call first commits and then checkpoints,
        as `commit` and `checkpoint` do, with their errors. After an error they may be undone; say them again.

        Raises BatchNotReady after `timeout_s`, naming the shortage and on whom the step waits, ServiceUnreachable after
        as long; StaleTerm, StepAhead, ReplayGap, WorldSizeMismatch, RunPaused, FailureBudgetExceeded.
        """
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
            batch = loop.run(attempt, notices.tell, deadline.left_s())
            if micro_batch is not None:
                return batch
            micro_batches.add(batch)
            if (whole := micro_batches.whole()) is not None:
                return whole
            spec = spec.following()

    def pull_loop(self, run_id: str) -> PullLoop:
        """Make the loop in which pulls of the run wait; `pull` includes it."""
        return PullLoop(self.target, self.tokens, partial(self.revisions.met, run_id))

    def try_pull(self, run_id: str, spec: PullSpec, within: Deadline) -> "Batch":
        """Try a pull once, for that loop. What an older service left undone is asked of it by calls of their own."""
        try:
            batch = self._pulled(run_id, spec, within)
        except BatchNotReady:
            # The batch may depend on it: what is not committed takes room.
            for call in spec.left_undone(run_id):
                self._call(call)
            raise
        for call in spec.left_undone(run_id, batch.info):
            self._call(call)
        return batch

    def _pulled(self, run_id: str, spec: PullSpec, within: Deadline) -> "Batch":
        """Pull once. The service relays payloads that cannot be read, or settles them as lost."""
        with CALLS.under_way():
            from buffer_wire.payloads.reader import PayloadsUnreadable

        reader = self._reader(run_id, spec.rank) if self.options.direct_payloads else None
        if reader is not None and reader.open():
            assembly = self._streamed(run_id, spec, within, direct=True)
            with suppress(PayloadsUnreadable):
                if keys := assembly.keys:
                    assembly.fill(reader.read(keys))
                return assembly.finish()
        assembly = self._streamed(run_id, spec, within)
        assembly.fill([self._read_parts(run_id, key) for key in assembly.keys])
        return assembly.finish()

    def _read_parts(self, run_id: str, key: str) -> memoryview:
        """Read a group that no message carries, part by part. Raises NotReady where it is not what the key says."""
        with CALLS.under_way():
            from buffer_wire.payloads.relayed import READ_METHOD, ReadParts

        parts = ReadParts(run_id, key)
        request = payloads_pb2.ReadPayloadRequest(run=self.revisions.ref(run_id), payload_key=key)
        self._stream(READ_METHOD, request, self.options.transfer_timeout_s, parts.add)
        return parts.body()

    def _reader(self, run_id: str, rank: int) -> "PayloadReader":
        readers = self._connections.mine.readers
        if (known := readers.get((run_id, rank))) is not None:
            return known
        with CALLS.under_way():
            from buffer_wire.payloads.reader import PayloadReader

        who = f"trainer rank {rank}"
        made = PayloadReader(run_id, who, lambda trouble: self._call(requests.read_access(run_id, who, trouble)))
        return readers.setdefault((run_id, rank), made)

    def _streamed(self, run_id: str, spec: PullSpec, within: Deadline, *, direct: bool = False) -> "PullAssembly":
        with CALLS.under_way():
            from trainer_client.client.assembly import PullAssembly

        wait_s = min(within.left_s(), PULL_SLICE_S)
        assembly = PullAssembly(run_id, self.revisions, within.started)
        request = spec.to_wire(self.revisions.ref(run_id), wait_s, direct=direct)
        self._stream(PULL_METHOD, request, wait_s + self.options.transfer_timeout_s, assembly.add)
        return assembly

    def _stream(self, method: str, request: Message, timeout_s: float, take: Callable[[bytes], bool | None]) -> None:
        """Call a method whose reply is a stream, and hand its messages on, to the end or until `take` returns True."""
        begin = self._bulk.unary_stream(method, request_serializer=serialize, response_deserializer=None)
        with CALLS.under_way() as call:
            stream = begin(request, timeout=timeout_s)
            call.cancel = stream.cancel
            try:
                for message in stream:
                    if take(message):
                        break
            except grpc.RpcError as raised:
                raise rpc_error(raised) from raised
            finally:
                stream.cancel()  # type: ignore[no-untyped-call]

    # ── weights ──────────────────────────────────────────────────────────────

    def wait_for_engines(
        self,
        run_id: str,
        version: int,
        count: engines.Quorum = 1,
        *,
        term: int | None = None,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> RunState:
        """Wait until `count` engines (a float: that share of them) are ready with `version` of `term` or newer.

        `term` None: the run's. A share is of the engines in service: neither quarantined, stopped nor silent.
        Raises NotReady after `timeout_s`, naming the engines that lag and their last errors; InvalidField.
        """
        deadline = Deadline.after(timeout_s)
        notices = WaitNotices(f"waiting for version {version} on {engines.said(count)}", self.target, on_wait)
        poll_s = engines.FIRST_POLL_S
        while True:
            run = self.run(run_id, timeout_s=max(engines.LEAST_ANSWER_S, deadline.left_s()))
            missing = engines.not_loaded(run, version, count, term)
            if missing is None:
                return run
            if deadline.left_s() == 0.0:
                raise missing
            notices.tell(missing)
            time.sleep(min(poll_s * random.uniform(0.5, 1.0), deadline.left_s()))  # noqa: S311 - jitter
            poll_s = min(poll_s * 2, engines.MOST_POLL_S)
