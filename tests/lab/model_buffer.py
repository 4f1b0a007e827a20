"""The buffer's rules as the service has them: the reference model, driven by a worker, a feeder and a trainer.

The clock stands still, so that no lease expires and nobody in line lapses: in the simulation nobody fails.
"""

from collections.abc import Sequence

from buffer_service.domain import ops
from buffer_service.domain.policy import UNSET, RunPolicy
from buffer_service.domain.steering.decisions import Decision
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.rules.transitions import GroupState
from buffer_service.simulator.buffer import Losses
from buffer_service.simulator.groups import SimulatedGroup
from tests.oracle import ReferenceModel

_RUN = "simulation"
_TERM = 1
_TASKS_AHEAD = 256


class ModelBuffer:
    """A Buffer."""

    def __init__(self, policy: RunPolicy) -> None:
        self._model = ReferenceModel(lambda: 0)
        self._model.create_run(_RUN, policy)
        self._cursor = 0
        self.held_at = UNSET
        """Nobody asks the model for it."""
        self._published = 0
        self._groups: dict[str, SimulatedGroup] = {}
        """Groups by id: complete, and not taken by the trainer."""
        self._line: list[tuple[ops.GroupFacts, str]] = []

    def lease(self, group: SimulatedGroup) -> bool:
        """Tell whether the group may be started."""
        loaded = ops.WeightVersion(_TERM, group.head)
        ask = ops.LeaseAsk("worker", "process", "", "engine", loaded, max_tasks=1)
        leased = self._model.lease(_RUN, ask)
        if leased.wait is ops.LeaseWait.NO_TASKS:
            self._submit()
            leased = self._model.lease(_RUN, ask)
        if not leased.grants:
            return False
        group.lease = leased.grants[0]
        group.incarnation = leased.grants[0].incarnation
        return True

    def push(self, group: SimulatedGroup) -> bool:
        """Tell whether the complete group was queued."""
        facts = _facts(group)
        (outcome,) = self._model.push(_RUN, [ops.NewGroup(facts, b"")]).outcomes
        self._groups[outcome.group_id] = group
        if outcome.kind is ops.PushKind.QUEUED:
            return True
        if outcome.kind is not ops.PushKind.BLOCKED:
            raise RuntimeError(f"the model refused a group: {outcome}")
        self._line.append((facts, outcome.payload_key))
        return False

    def retry(self) -> int:
        """Queue what waits in line; how many wait still."""
        while self._line:
            (outcome,) = self._model.retry_push(_RUN, [self._line[0]]).outcomes
            if outcome.kind is ops.PushKind.BLOCKED:
                break
            del self._line[0]
        return len(self._line)

    def pull(self, step: int, number: int, train_version: int) -> tuple[Sequence[SimulatedGroup], bool] | None:
        """A micro-batch of a step, and whether it is the last."""
        pulled = self._model.pull(_RUN, ops.Pull(_TERM, step, 0, 1, train_version, number))
        if isinstance(pulled, ops.Short):
            return None
        return [self._groups.pop(one.group_id) for one in pulled.shard], pulled.final

    def finish(self, step: int, version: int | None) -> None:
        """A step is trained, and perhaps published; its replay data goes."""
        if version is None:
            self._model.commit(_RUN, _TERM, step)
        else:
            self._published = version
            self._model.publish(_RUN, ops.Publish(_TERM, version, b"", step))
        self._model.checkpoint(_RUN, _TERM, step)

    def steer(self, knobs: Knobs) -> None:
        """Have a controller's knobs in effect from now on."""
        self._model.decide(_RUN, Decision(version=self._published, knobs=knobs))

    def losses(self) -> Losses:
        """Return what was lost so far."""
        groups = self._model.view(_RUN).groups
        lost = [groups[state] for state in (GroupState.DROPPED_OVERFLOW, GroupState.DROPPED_STALE, GroupState.RECYCLED)]
        overflow, stale, recycled = (amount.groups for amount in lost)
        return Losses(overflow, stale, recycled, sum(amount.tokens for amount in lost))

    def _submit(self) -> None:
        tasks = [ops.NewTask("", 1, 0, "", b"")] * _TASKS_AHEAD
        after = self._cursor + len(tasks)
        self._model.submit(_RUN, ops.Submit(_TERM, f"submit-{after}", self._cursor, after, b"", tasks))
        self._cursor = after


def _facts(group: SimulatedGroup) -> ops.GroupFacts:
    grant = group.lease
    if not isinstance(grant, ops.LeaseGrant):
        raise TypeError("a group is pushed under its lease")
    return ops.GroupFacts(
        task_id=grant.task_id,
        incarnation=grant.incarnation,
        lease_id=grant.lease_id,
        environment="",
        samples=1,
        tokens=group.tokens,
        loss_tokens=group.tokens,
        size_bytes=1,
        head=ops.WeightVersion(_TERM, group.head),
        tail=ops.WeightVersion(_TERM, group.tail),
        spans_versions=group.head != group.tail,
        mean_milli=group.mean_milli,
        equal_rewards=False,
        mean_reward_milli=0,
        response_lengths=b"",
        rewards=b"",
        min_response_tokens=1,
        max_response_tokens=group.longest,
        response_tokens=group.tokens,
        reward_milli=0,
        turns=1,
        truncated_samples=0,
    )
