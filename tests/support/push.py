"""Groups made of given arrays, and a minimal worker that leases tasks and pushes such groups.

Needs grpcio, protobuf and numpy only. What a group holds follows from its task's id, so that a test can say what a
trainer must get back.
"""

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import grpc
import numpy as np
import numpy.typing as npt

from buffer_wire.codec import join_group, join_push
from buffer_wire.connection.channel import client_options
from buffer_wire.connection.retry import OnRetry, Retry
from buffer_wire.errors import RolloutBufferError, UnknownRun
from buffer_wire.layout import LOGPROBS, LOSS_MASK, TOKEN_IDS, Array, column_of, write_payload
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2, tasks_pb2, tasks_pb2_grpc
from rollout_buffer.v1.common_pb2 import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleArrays:
    """One response. `spans` are (term, version, start, end)."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]
    prompt_len: int
    reward: float = 0.0
    spans: Sequence[tuple[int, int, int, int]] = ()
    finish_reason: int = groups_pb2.FINISH_REASON_STOP
    turns: Sequence[tuple[str, int, int]] = ()
    trajectory: int = 0
    trainable: bool = True
    policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """A further column: one array for each sample, [T, …] per token, […] per sample, [rows, …] ragged."""

    axis: int
    arrays: Sequence[Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """A group as arrays."""

    task_id: str
    samples: Sequence[SampleArrays]
    incarnation: int = 0
    lease_id: str = ""
    environment: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)
    extras: Mapping[str, Extra] = field(default_factory=dict)

    def to_wire(self, worker_id: str = "tester") -> tuple[groups_pb2.GroupHeader, bytes]:
        """Header and payload, checked."""
        columns: list[tuple[str, Array, int, list[int]]] = [
            (name, np.concatenate([getattr(sample, name) for sample in self.samples]), groups_pb2.AXIS_TOKEN, [])
            for name in (TOKEN_IDS, LOGPROBS, LOSS_MASK)
        ]
        for name, extra in self.extras.items():
            stacked = np.stack if extra.axis == groups_pb2.AXIS_SAMPLE else np.concatenate
            rows = [len(array) for array in extra.arrays] if extra.axis == groups_pb2.AXIS_RAGGED else []
            columns.append((name, stacked(extra.arrays), extra.axis, rows))
        header = groups_pb2.GroupHeader(
            task_id=self.task_id,
            incarnation=self.incarnation,
            lease_id=self.lease_id,
            environment=self.environment,
            samples=[_sample(sample) for sample in self.samples],
            columns=[column_of(name, array, axis, rows) for name, array, axis, rows in columns],
            metadata_json=json.dumps(self.metadata) if self.metadata else "",
            worker_id=worker_id,
        )
        payload = write_payload([array for _, array, _, _ in columns])
        check_group(header, len(payload))
        return header, payload


def _sample(sample: SampleArrays) -> groups_pb2.Sample:
    return groups_pb2.Sample(
        trajectory=sample.trajectory,
        trainable=None if sample.trainable else False,
        policy=sample.policy,
        tokens=len(sample.token_ids),
        prompt_len=sample.prompt_len,
        loss_tokens=int(sample.loss_mask.sum()),
        reward=sample.reward,
        finish_reason=sample.finish_reason,  # type: ignore[arg-type]
        spans=[
            groups_pb2.VersionSpan(version=WeightVersion(term=term, version=version), start=start, end=end)
            for term, version, start, end in sample.spans
        ],
        turns=[groups_pb2.Turn(role=role, start=start, end=end) for role, start, end in sample.turns],
    )


def arrays_for(
    task_id: str, *, incarnation: int = 0, group_size: int = 2, term: int = 1, version: int = 0, response_len: int = 6
) -> GroupArrays:
    """The group of a task whose tokens all come from one version; the same arguments give the same arrays."""
    rng = np.random.default_rng(zlib.crc32(f"{task_id}/{incarnation}".encode()))
    samples = []
    for _ in range(group_size):
        prompt_len, tokens = 3, 3 + response_len + int(rng.integers(0, 4))
        mask = np.zeros(tokens, np.uint8)
        mask[prompt_len:] = 1
        samples.append(
            SampleArrays(
                token_ids=rng.integers(0, 1000, tokens, np.int32),
                logprobs=-rng.random(tokens, np.float32) * mask,
                loss_mask=mask,
                prompt_len=prompt_len,
                reward=float(rng.integers(0, 2)),
                spans=[(term, version, prompt_len, tokens)],
            )
        )
    return GroupArrays(task_id=task_id, incarnation=incarnation, samples=samples)


class Pusher:
    """Pushes groups to a run, one bundle a call, as a worker without leases or with them."""

    def __init__(self, target: str, run_id: str, worker_id: str = "tester") -> None:
        self.run_id = run_id
        self.worker_id = worker_id
        self._channel = grpc.insecure_channel(target, client_options())
        self._revisions = Revisions()
        self._loaded = WeightVersion(term=1, version=0)
        self._tasks = tasks_pb2_grpc.TaskServiceStub(self._channel)
        self._push = self._channel.stream_stream(
            "/rollout_buffer.v1.GroupService/PushGroups",
            request_serializer=None,
            response_deserializer=groups_pb2.PushGroupsResponse.FromString,
        )

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def push(
        self, *groups: GroupArrays, timeout_s: float = 30, attempt_s: float = 30, on_retry: OnRetry | None = None
    ) -> list[int]:
        """Push, and repeat until the service answers; outcomes in order. A group that is refused raises its error."""
        bodies = [join_group(*group.to_wire(self.worker_id)) for group in groups]

        def attempt() -> groups_pb2.PushGroupsResponse:
            bundle = join_push(self._revisions.ref(self.run_id), 1, bodies)
            reply: groups_pb2.PushGroupsResponse = next(iter(self._push(iter([bundle]), timeout=attempt_s)))
            return reply

        mend = partial(self._revisions.met, self.run_id)
        retry = Retry(deadline_s=timeout_s, waiting_on="the service", on_retry=on_retry, mend=mend)
        reply = retry.blocking(attempt)
        self._revisions.note(self.run_id, Revision.of(reply))
        for ack in reply.acks:
            if ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID:
                raise RolloutBufferError(ack.error.message, reason=ack.error.reason)
        return [ack.outcome for ack in reply.acks]

    def lease(self, max_tasks: int = 8, wait_ms: int = 500, timeout_s: float = 30) -> tasks_pb2.LeaseTasksResponse:
        """Lease tasks as the engine "e0" that has loaded what was published last."""
        request_id = f"{time.monotonic_ns()}"
        retry = Retry(
            deadline_s=timeout_s,
            waiting_on="the service",
            # A worker may be there before its run.
            retry_on=lambda error: error.retryable or isinstance(error, UnknownRun),
            mend=partial(self._revisions.met, self.run_id),
        )
        reply = retry.blocking(
            lambda: self._tasks.LeaseTasks(
                tasks_pb2.LeaseTasksRequest(
                    run=self._revisions.ref(self.run_id),
                    worker_id=self.worker_id,
                    instance_id="i0",
                    request_id=request_id,
                    engine_id="e0",
                    loaded=self._loaded,
                    max_tasks=max_tasks,
                    wait_ms=wait_ms,
                ),
                timeout=timeout_s,
            )
        )
        self._revisions.note(self.run_id, Revision.of(reply))
        self._loaded = reply.published
        return reply


class PushingWorker:
    """A thread that leases tasks and pushes `arrays_for` each of them until the block ends; outlives restarts."""

    def __init__(
        self,
        target: str,
        run_id: str,
        *,
        make: Callable[[tasks_pb2.Lease, WeightVersion], GroupArrays] | None = None,
        patience_s: float = 60,
    ) -> None:
        self._pusher = Pusher(target, run_id)
        self._make = make or group_of_lease
        self._patience_s = patience_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pushing-worker", daemon=True)
        self.acknowledged: list[str] = []
        """Task ids of groups that the service said are queued, or were before."""
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(self._patience_s + 5)
        self._pusher.close()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                reply = self._pusher.lease(timeout_s=self._patience_s)
                for lease in reply.leases:
                    self._push(self._make(lease, reply.published), lease.task.task_id)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again when the block ends
            self.failure = error

    def _push(self, group: GroupArrays, task_id: str) -> None:
        # Short attempts: a push that is blocked by a full queue must not hold up the end of the test.
        outcomes = self._pusher.push(group, timeout_s=self._patience_s, attempt_s=2, on_retry=self._stop_here)
        if outcomes[0] in (groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_DUPLICATE):
            self.acknowledged.append(task_id)

    def _stop_here(self, *_: object) -> None:
        if self._stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The block has ended."""


def group_of_lease(lease: tasks_pb2.Lease, loaded: WeightVersion) -> GroupArrays:
    """Return what `arrays_for` gives for the lease's task under the loaded weights."""
    made = arrays_for(
        lease.task.task_id,
        incarnation=lease.incarnation,
        group_size=lease.task.group_size,
        term=max(1, loaded.term),
        version=loaded.version,
    )
    return GroupArrays(
        task_id=made.task_id,
        incarnation=made.incarnation,
        samples=made.samples,
        lease_id=lease.lease_id,
        environment=lease.task.environment,
        metadata=json.loads(lease.task.metadata_json) if lease.task.metadata_json else {},
    )
