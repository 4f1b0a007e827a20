"""A run on the reference model with short words for what happens to it; invariants are checked after every word."""

import dataclasses
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from buffer_service.domain import ops
from buffer_service.domain.policy import ENUMS, EnvironmentRule, RunPolicy
from tests.oracle import ReferenceModel

RUN = "run"
START_MS = 1_000_000

_T = TypeVar("_T")


def actions(policy: dict[str, Any]) -> dict[str, Any]:
    """The actions of a policy by their names."""
    return {name: kind(policy[name]) for name, kind in ENUMS.items() if name in policy}


def shares(**by_environment: int) -> tuple[EnvironmentRule, ...]:
    """Rules that give environments these shares."""
    return tuple(EnvironmentRule(environment=name, share=share) for name, share in by_environment.items())


def priorities(**by_environment: int) -> tuple[EnvironmentRule, ...]:
    """Rules that give environments these priorities."""
    return tuple(EnvironmentRule(environment=name, priority=priority) for name, priority in by_environment.items())


class World:
    """One run, its clock, a trainer of term `term`, workers by name."""

    def __init__(self, **policy: Any) -> None:
        self.now = START_MS
        self.term = 1
        self.requests = 0
        self.model = ReferenceModel(lambda: self.now)
        self.model.create_run(RUN, RunPolicy(**{**policy, **actions(policy)}))

    def do(self, operation: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        try:
            return operation(RUN, *args, **kwargs)
        finally:
            self.model.check_invariants(RUN)

    # ── what is there ──

    @property
    def view(self) -> ops.RunView:
        return self.model.view(RUN)

    def groups(self, state: str) -> int:
        return self.view.groups[state].groups

    def tasks(self, state: str) -> int:
        return self.view.tasks[state]

    def statistic(self, name: str) -> int:
        return self.view.statistics[name]

    def change(self, **policy: Any) -> None:
        """Replace fields of the policy."""
        changed = dataclasses.replace(self.view.policy, **{**policy, **actions(policy)})
        self.do(self.model.update_policy, changed)

    # ── feeder ──

    def submit(
        self, *task_ids: str, priority: int = 0, environment: str = "math", request_id: str | None = None
    ) -> ops.Submitted:
        tasks = [ops.NewTask(name, 2, priority, environment, f"spec of {name}".encode()) for name in task_ids]
        cursor = self.view.cursor
        request = ops.Submit(self.term, request_id or self.new_request(), cursor, cursor + len(tasks), b"state", tasks)
        return self.do(self.model.submit, request)

    def new_request(self) -> str:
        self.requests += 1
        return f"request-{self.requests}"

    # ── workers ──

    def lease(
        self,
        max_tasks: int = 1,
        *,
        worker: str = "worker",
        instance: str = "process-1",
        request_id: str | None = None,
        engine: str = "engine",
        loaded: ops.WeightVersion | None = None,
    ) -> ops.Leased:
        weights = self.view.published if loaded is None else loaded
        request = request_id or self.new_request()
        return self.do(self.model.lease, ops.LeaseAsk(worker, instance, request, engine, weights, max_tasks))

    def lease_one(self, *, worker: str = "worker", instance: str = "process-1") -> ops.LeaseGrant:
        (grant,) = self.lease(worker=worker, instance=instance).grants
        return grant

    def extend(self, *lease_ids: str, worker: str = "worker", instance: str = "process-1") -> list[ops.LeaseState]:
        return list(self.do(self.model.extend, worker, instance, lease_ids).states)

    def interrupt(
        self,
        lease_id: str,
        *,
        partial_rollout: bytes = b"",
        head: int = 0,
        tokens: int = 0,
        instance: str = "process-1",
    ) -> ops.ReturnOutcome:
        weights = ops.WeightVersion(self.term, head) if partial_rollout else None
        given = ops.LeaseReturn(lease_id, ops.ReturnKind.INTERRUPTED, "", partial_rollout, weights, tokens)
        return self.do(self.model.give_back, "worker", instance, [given]).outcomes[0]

    def fail(self, lease_id: str, error: str = "reward crashed") -> ops.ReturnOutcome:
        given = ops.LeaseReturn(lease_id, ops.ReturnKind.FAILED, error, b"", None, 0)
        return self.do(self.model.give_back, "worker", "process-1", [given]).outcomes[0]

    def fail_for_good(self, *, worker: str = "worker") -> None:
        """Lease one task under max_attempts 1 and fail it."""
        assert self.fail(self.lease_one(worker=worker).lease_id) is ops.ReturnOutcome.FAILED

    def expire(self) -> int:
        return self.do(self.model.expire)

    # ── pushes ──

    def facts(
        self,
        source: ops.LeaseGrant | str,
        *,
        head: int | ops.WeightVersion = 0,
        tail: int | ops.WeightVersion | None = None,
        tokens: int = 10,
        size_bytes: int = 100,
        spans: bool = False,
        incarnation: int = 0,
        environment: str = "math",
        mean_milli: int | None = None,
        equal_rewards: bool = False,
        mean_reward_milli: int = 500,
        response_tokens: tuple[int, int] = (5, 5),
        turns: int = 2,
        truncated: int = 0,
    ) -> ops.GroupFacts:
        """Facts of a group made under a lease, or without one for a task of that name."""
        tail = head if tail is None else tail
        lease_id, task_id = ("", source) if isinstance(source, str) else (source.lease_id, source.task_id)
        return ops.GroupFacts(
            task_id=task_id,
            incarnation=incarnation if isinstance(source, str) else source.incarnation,
            lease_id=lease_id,
            environment=environment,
            samples=2,
            tokens=tokens,
            loss_tokens=tokens // 2,
            size_bytes=size_bytes,
            head=self.weights(head),
            tail=self.weights(tail),
            spans_versions=spans,
            mean_milli=1_000 * self.weights(head).version if mean_milli is None else mean_milli,
            equal_rewards=equal_rewards,
            mean_reward_milli=mean_reward_milli,
            response_lengths=struct.pack("<2I", *response_tokens),
            rewards=struct.pack("<2f", *(2 * [mean_reward_milli / 1_000])),
            min_response_tokens=min(response_tokens),
            max_response_tokens=max(response_tokens),
            response_tokens=sum(response_tokens),
            reward_milli=2 * mean_reward_milli,
            turns=turns,
            truncated_samples=truncated,
        )

    def weights(self, version: int | ops.WeightVersion) -> ops.WeightVersion:
        return version if isinstance(version, ops.WeightVersion) else ops.WeightVersion(self.term, version)

    def announce(self, *made_by: ops.WeightVersion) -> None:
        """Have a plan for what groups are said to be made by and nobody has published."""
        run = self.model._runs[RUN]
        newest = max((made.version for made in made_by if made.term == run.term), default=0)
        if newest > max(run.published.version, run.plan.version if run.plan else 0):
            self.model.plan_collective(RUN, ops.PlanCollective(run.term, newest, b"plan-%d" % newest))

    def push_facts(self, *facts: ops.GroupFacts) -> list[ops.Pushed]:
        self.announce(*(fact.tail for fact in facts))
        groups = [ops.NewGroup(fact, f"{fact.task_id}/{fact.lease_id}".encode()) for fact in facts]
        return list(self.do(self.model.push, groups).outcomes)

    def push(self, source: ops.LeaseGrant | str, **facts: Any) -> ops.PushKind:
        return self.push_facts(self.facts(source, **facts))[0].kind

    def retry(self, facts: ops.GroupFacts, blocked: ops.Pushed) -> ops.Pushed:
        """Try a blocked group again."""
        return self.do(self.model.retry_push, [(facts, blocked.payload_key)]).outcomes[0]

    def lose(self, step: int, *names: str) -> None:
        """The present trainer finds the payloads of these groups of a step gone."""
        stored = self.model._runs[RUN].steps.get(step)
        keys = {group.group_id: group.payload_key for group in stored.groups} if stored else {}
        self.do(self.model.report_lost, self.term, step, [keys.get(name, "") for name in names])

    def queue(self, count: int, **facts: Any) -> list[str]:
        """Push `count` groups of new tasks, without leases; their group ids."""
        names = [f"own-{self.new_request()}" for _ in range(count)]
        for name in names:
            assert self.push(name, **facts) is ops.PushKind.QUEUED
        return [f"{name}/0" for name in names]

    # ── trainer ──

    def pull(
        self,
        step: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        train_version: int | None = None,
        micro_batch: int = 0,
        batch_groups: int | None = None,
    ) -> ops.Batch | ops.Short:
        step = self.view.next_step if step is None else step
        request = ops.Pull(self.term, step, rank, world_size, train_version, micro_batch, batch_groups)
        return self.do(self.model.pull, request)

    def batch(self, step: int | None = None, **kwargs: Any) -> ops.Batch:
        pulled = self.pull(step, **kwargs)
        assert isinstance(pulled, ops.Batch), pulled
        return pulled

    def names(self, step: int | None = None, **kwargs: Any) -> list[str]:
        return [group.group_id for group in self.batch(step, **kwargs).shard]

    def commit(self, through_step: int) -> int:
        return self.do(self.model.commit, self.term, through_step)[1]

    def publish(
        self,
        version: int,
        *,
        manifest: bytes | None = None,
        commit: int | None = None,
        clock: tuple[int, int] | None = None,
    ) -> ops.Published:
        """`clock`: the trainer's busy and waiting ms."""
        content = f"manifest {version}".encode() if manifest is None else manifest
        said = ops.TrainerClock(*clock) if clock else None
        return self.do(self.model.publish, ops.Publish(self.term, version, content, commit, said))

    def train(self, steps: int = 1, **facts: Any) -> None:
        """Fill, pull, and publish with a commit, `steps` times."""
        for _ in range(steps):
            self.queue(self.view.policy.batch_groups, **facts)
            step = self.batch().step
            self.publish(self.view.published.version + 1, commit=step)

    def checkpoint(self, through_step: int) -> int:
        return self.do(self.model.checkpoint, self.term, through_step)[1]

    def resume(
        self,
        next_step: int | None = None,
        mode: ops.ResumeMode = ops.ResumeMode.REPLAY,
        *,
        request_id: str | None = None,
        allow_regenerate: bool = False,
    ) -> ops.Resumed:
        request = ops.Resume(next_step, mode, request_id or self.new_request(), allow_regenerate)
        resumed = self.do(self.model.resume, request)
        self.term = resumed.term
        return resumed
