"""A run that streams, played by the fake service: micro-batches close in order, N and train_version of a step stay what
its first micro-batch said, what is closed can be pulled again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_wire.errors import BatchNotReady, InvalidField, RolloutBufferError, StepAhead
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, weights_pb2
from tests.support.push import GroupArrays, arrays_for
from tests.trainer_client.fake_service import FakeService, pull_messages


@dataclass
class Step:
    """Step as it was decided when its first micro-batch closed."""

    groups: int
    train_version: int
    micro_batches: list[list[GroupArrays]] = field(default_factory=list)

    @property
    def final(self) -> bool:
        return sum(len(closed) for closed in self.micro_batches) == self.groups


class StreamedRun:
    """Answers for run "r" in micro-batches of `world_size` · `micro` groups, with `arrived` groups there."""

    def __init__(self, fake: FakeService, *, batch_groups: int = 4, micro: int = 1, arrived: int = 1 << 30) -> None:
        self.policy = runs_pb2.RunPolicy(
            batch_groups=batch_groups, micro_batch_groups=micro, prefetch_batches=4, batches_per_publish=1
        )
        self.arrived = arrived
        self.taken = 0
        self.steps: list[Step] = []
        self.published = 0
        self.committed = 0
        self.term = 1
        self.pulls: list[batches_pb2.PullBatchRequest] = []
        """Pulls: those that were answered with a micro-batch."""
        fake.answer("RunService/GetRun", lambda *_: runs_pb2.GetRunResponse(revision=1, run=self.run()))
        fake.answer("RunService/CreateRun", lambda *_: runs_pb2.CreateRunResponse(revision=1, run=self.run()))
        fake.answer("BatchService/Resume", self.resume)
        fake.answer("BatchService/PullBatch", self.pull)
        fake.answer("BatchService/Commit", self.commit)
        fake.answer("WeightService/Publish", self.publish)

    @property
    def next_step(self) -> int:
        return len([step for step in self.steps if step.final])

    def run(self) -> runs_pb2.Run:
        return runs_pb2.Run(
            run_id="r",
            policy=self.policy,
            term=self.term,
            published=common_pb2.WeightVersion(term=self.term, version=self.published),
            next_step=self.next_step,
            committed_steps=self.committed,
        )

    def resume(self, request: batches_pb2.ResumeRequest, _: Any) -> batches_pb2.ResumeResponse:
        self.term += 1
        start = request.next_step if request.HasField("next_step") else self.committed
        return batches_pb2.ResumeResponse(
            revision=1,
            term=self.term,
            next_step=start,
            next_unassembled_step=self.next_step,
            version=self.published,
        )

    def commit(self, request: batches_pb2.CommitRequest, _: Any) -> batches_pb2.CommitResponse:
        self.committed = max(self.committed, request.through_step + 1)
        return batches_pb2.CommitResponse(revision=1, committed_steps=self.committed)

    def publish(self, request: weights_pb2.PublishRequest, _: Any) -> weights_pb2.PublishResponse:
        self.published = request.version
        if request.HasField("commit_through_step"):
            self.committed = max(self.committed, request.commit_through_step + 1)
        return weights_pb2.PublishResponse(
            revision=1,
            published=common_pb2.WeightVersion(term=self.term, version=self.published),
            committed_steps=self.committed,
        )

    def pull(self, request: batches_pb2.PullBatchRequest, _: Any) -> list[bytes] | RolloutBufferError:
        replayed = request.step < len(self.steps) and request.micro_batch < len(self.steps[request.step].micro_batches)
        if not replayed and (error := self._close(request)):
            return error
        step = self.steps[request.step]
        self.pulls.append(request)
        closed = step.micro_batches[: request.micro_batch + 1]
        mine, ranks = closed[-1][request.rank :: request.world_size], request.world_size
        others = [g for i, g in enumerate(closed[-1]) if i % ranks != request.rank]
        return pull_messages(
            mine,
            step=request.step,
            train_version=step.train_version,
            micro_batch=request.micro_batch,
            final=step.final and request.micro_batch == len(step.micro_batches) - 1,
            # Totals are over all ranks.
            earlier=[*(g for each in closed[:-1] for g in each), *others],
            replayed=replayed,
        )

    def _close(self, request: batches_pb2.PullBatchRequest) -> RolloutBufferError | None:
        if request.step > self.next_step:
            return StepAhead(request.step, self.next_step)
        step = self.steps[request.step] if request.step < len(self.steps) else None
        if request.micro_batch > (len(step.micro_batches) if step else 0) or (step and step.final):
            return InvalidField("micro_batch", request.micro_batch, "the next")
        wanted = request.train_version if request.HasField("train_version") else None
        if step is None:
            if wanted is not None and wanted < self.published:
                return InvalidField("train_version", wanted, f"at least {self.published}")
            n = request.batch_groups if request.HasField("batch_groups") else self.policy.batch_groups
            step = Step(n, self.published if wanted is None else wanted)
        elif wanted not in (None, step.train_version):
            return InvalidField("train_version", wanted, f"{step.train_version}")
        size = min(
            request.world_size * self.policy.micro_batch_groups or step.groups,
            step.groups - sum(len(closed) for closed in step.micro_batches),
        )
        if self.arrived - self.taken < size:
            return BatchNotReady(
                step=request.step,
                queued_groups=self.arrived - self.taken,
                needed_groups=size,
                leased=0,
                pending=0,
                waits_on="the workers",
            )
        step.micro_batches.append([arrays_for(f"g{self.taken + i:03d}") for i in range(size)])
        self.taken += size
        if request.step == len(self.steps):
            self.steps.append(step)
        return None


def names(groups: Sequence[GroupArrays]) -> list[str]:
    return [group.task_id for group in groups]
