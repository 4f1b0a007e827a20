"""A run that streams, played by the fake service: rounds close in order, N and train_version of a step stay what its
first round said, what is closed can be pulled again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_wire.errors import BatchNotReady, InvalidField, RolloutBufferError, StepAhead
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, weights_pb2
from tests.support.push import GroupArrays, arrays_for
from tests.trainer_client.fake_service import FakeService, pull_messages


@dataclass
class Step:
    """Step as it was decided when its first round closed."""

    groups: int
    train_version: int
    rounds: list[list[GroupArrays]] = field(default_factory=list)

    @property
    def final(self) -> bool:
        return sum(len(closed) for closed in self.rounds) == self.groups


class StreamedRun:
    """Answers for run "r" with rounds of `world_size` · `micro` groups; as many groups as `arrived` have come."""

    def __init__(self, fake: FakeService, *, batch_groups: int = 4, micro: int = 1, arrived: int = 1 << 30) -> None:
        self.policy = runs_pb2.RunPolicy(
            batch_groups=batch_groups, micro_batch_groups=micro, prefetch_batches=4, batches_per_publish=1
        )
        self.arrived = arrived
        self.taken = 0
        self.steps: list[Step] = []
        self.published = 0
        self.committed = 0
        self.epoch = 1
        self.pulls: list[batches_pb2.PullBatchRequest] = []
        """Pulls: those that were answered with a round."""
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
            epoch=self.epoch,
            published=common_pb2.WeightVersion(epoch=self.epoch, version=self.published),
            next_step=self.next_step,
            committed_steps=self.committed,
        )

    def resume(self, request: batches_pb2.ResumeRequest, _: Any) -> batches_pb2.ResumeResponse:
        self.epoch += 1
        start = request.next_step if request.HasField("next_step") else self.committed
        return batches_pb2.ResumeResponse(
            revision=1,
            epoch=self.epoch,
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
            published=common_pb2.WeightVersion(epoch=self.epoch, version=self.published),
            committed_steps=self.committed,
        )

    def pull(self, request: batches_pb2.PullBatchRequest, _: Any) -> list[bytes] | RolloutBufferError:
        replayed = request.step < len(self.steps) and request.round < len(self.steps[request.step].rounds)
        if not replayed and (error := self._close(request)):
            return error
        step = self.steps[request.step]
        self.pulls.append(request)
        closed = step.rounds[: request.round + 1]
        mine, ranks = closed[-1][request.rank :: request.world_size], request.world_size
        others = [g for i, g in enumerate(closed[-1]) if i % ranks != request.rank]
        return pull_messages(
            mine,
            step=request.step,
            train_version=step.train_version,
            round_=request.round,
            final=step.final and request.round == len(step.rounds) - 1,
            # Totals are over all ranks.
            earlier=[*(g for each in closed[:-1] for g in each), *others],
            replayed=replayed,
        )

    def _close(self, request: batches_pb2.PullBatchRequest) -> RolloutBufferError | None:
        if request.step > self.next_step:
            return StepAhead(request.step, self.next_step)
        step = self.steps[request.step] if request.step < len(self.steps) else None
        if request.round > (len(step.rounds) if step else 0) or (step and step.final):
            return InvalidField("round", request.round, "the next")
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
            step.groups - sum(len(closed) for closed in step.rounds),
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
        step.rounds.append([arrays_for(f"g{self.taken + i:03d}") for i in range(size)])
        self.taken += size
        if request.step == len(self.steps):
            self.steps.append(step)
        return None


def names(groups: Sequence[GroupArrays]) -> list[str]:
    return [group.task_id for group in groups]
