"""The model and a subject side by side: every operation on both, reply by reply, dump by dump.

Invariant: after each operation that returned, both have given the same reply (payload keys aside, which each makes up
for itself; the bodies behind them are compared), the same error with the same data, and the same view of the run.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.model import ReferenceModel
from buffer_service.domain.model.records import Lease
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import RolloutBufferError
from tests.model.subjects import Subject

START_MS = 1_700_000_000_000


TAKE_SEEN_REVISION = frozenset(
    {
        "update_policy",
        "submit",
        "lease",
        "extend",
        "give_back",
        "push",
        "retry_push",
        "pull",
        "commit",
        "publish",
        "checkpoint",
        "report_engine",
    }
)


class Disagreement(AssertionError):
    """Model and subject differ; the message holds the whole history."""


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A group that waits for space, and its payload keys on both sides."""

    facts: ops.GroupFacts
    key: str
    their_key: str


class Pair:
    """One run on both sides, its clock, its history, and how often each kind of outcome was seen."""

    def __init__(self, subject: Subject, run_id: str, policy: RunPolicy, seen: Counter[str]) -> None:
        self.subject = subject
        self.run_id = run_id
        self.seen = seen
        self.history: list[str] = []
        self.now = START_MS
        self.model = ReferenceModel(lambda: self.now)
        self.last: Any = None
        """The model's last reply, or error."""
        self.disagreed = False
        subject.forget()
        subject.set_time(run_id, self.now)
        self.create(policy)

    # ── operations ──

    def create(self, policy: RunPolicy) -> None:
        self.both("create_run", policy)

    def both(self, operation: str, *args: Any, theirs: tuple[Any, ...] | None = None, **kwargs: Any) -> Any:
        """Run an operation on both sides; the model's reply, None after an error. `theirs`: other arguments."""
        if operation in TAKE_SEEN_REVISION:
            kwargs.setdefault("seen_revision", self.view.revision)
        self.history.append(f"{operation}{args}{kwargs or ''}")
        before = self.model.view(self.run_id) if operation != "create_run" else None
        reply = _attempt(lambda: getattr(self.model, operation)(self.run_id, *args, **kwargs))
        answer = _attempt(lambda: self.subject.call(operation, self.run_id, *(theirs or args), **kwargs))
        self.history.append(f"    -> {reply!r}" if before else "    -> created")
        self._compare("reply", _canonical(reply), _canonical(answer))
        if isinstance(reply, ops.Batch):
            self._compare_bodies(reply, answer)
        if isinstance(reply, ops.PushResult) and isinstance(answer, ops.PushResult):
            self._both_replies = (reply, answer)
            self._check_caps(reply)
        self.last = reply
        self.seen["operations"] += 1
        if isinstance(reply, RolloutBufferError):
            self.seen[f"error:{reply.reason}"] += 1
        self._settle(before)
        return None if isinstance(reply, Exception) else reply

    def push(self, groups: Sequence[ops.NewGroup]) -> list[Blocked]:
        """Push groups; those that are blocked now."""
        if self.both("push", groups) is None:
            return []
        return self._blocked([group.facts for group in groups])

    def retry(self, blocked: Sequence[Blocked]) -> list[Blocked]:
        """Try blocked groups again; those that still are."""
        ours = [(one.facts, one.key) for one in blocked]
        theirs = [(one.facts, one.their_key) for one in blocked]
        if self.both("retry_push", ours, theirs=(theirs,)) is None:
            return []
        return self._blocked([one.facts for one in blocked])

    def abandon(self, blocked: Sequence[Blocked]) -> None:
        """Give blocked groups up."""
        keys = [one.key for one in blocked], [one.their_key for one in blocked]
        self.both("abandon_push", keys[0], theirs=(keys[1],))

    def sweep(self) -> None:
        """Expire leases and delete trash; what is left is what something refers to."""
        self.history.append("sweep()")
        before = self.view
        self.model.expire(self.run_id)
        self.subject.sweep(self.run_id)
        self.seen["operations"] += 1
        self._compare("bodies", self.model.stored_bodies(self.run_id), self.subject.stored_bodies(self.run_id))
        self._settle(before)

    def advance(self, by_ms: int) -> None:
        """Time passes, or goes back."""
        self.now += by_ms
        self.history.append(f"time {by_ms:+} ms")
        self.subject.set_time(self.run_id, self.now)

    @property
    def view(self) -> ops.RunView:
        """The run as the model sees it."""
        return self.model.view(self.run_id)

    def leases(self) -> dict[str, Lease]:
        """Leases by id, with those that are past their expiry and not taken back yet."""
        leased = self.model._runs[self.run_id].leases.tasks.values()
        return {task.lease_id: task.lease for task in leased if task.lease}

    def groups_of(self, step: int) -> Sequence[str]:
        """Ids of a stored step's groups."""
        stored = self.model._runs[self.run_id].steps.get(step)
        return [group.group_id for group in stored.groups] if stored else []

    def moments(self) -> list[int]:
        """Times, in ms, on both sides of which rules on time differ."""
        run = self.model._runs[self.run_id]
        expiries = [lease.expiry for lease in self.leases().values()]
        backing_off = [task.not_before for task in run.tasks.values() if task in run.pending]
        return [*expiries, *(expiry + 1 for expiry in expiries), *backing_off, *(due - 1 for due in backing_off)]

    def world_size_of(self, step: int) -> int | None:
        """For how many ranks a stored step is sharded."""
        stored = self.model._runs[self.run_id].steps.get(step)
        return stored.world_size if stored else None

    # ── comparison ──

    def _settle(self, before: ops.RunView | None) -> None:
        """After an operation: invariants hold, dumps agree, and what changed is counted."""
        self.model.check_invariants(self.run_id)
        after = self.view
        self._compare("view", _canonical(after), _canonical(self.subject.call("view", self.run_id)))
        if before is None:
            return
        if before.published != after.published:
            mine, other = self.model.weights(self.run_id), self.subject.call("weights", self.run_id)
            self._compare("weights", _canonical(mine), _canonical(other))
        for state, amount in after.groups.items():
            self.seen[f"group:{state}"] += max(0, amount.groups - before.groups[state].groups)
        for state, number in after.tasks.items():
            self.seen[f"task:{state}"] += max(0, number - before.tasks[state])
        for name, value in after.statistics.items():
            self.seen[f"statistic:{name}"] += value - before.statistics[name]
        if after.checkpointed_steps > before.checkpointed_steps:
            self.seen["steps:freed"] += 1
        if after.paused != before.paused:
            self.seen[f"paused:{after.paused or 'released'}"] += 1

    def _check_caps(self, pushed: ops.PushResult) -> None:
        """No push leaves the queue above a cap."""
        if any(outcome.kind is ops.PushKind.QUEUED for outcome in pushed.outcomes):
            policy, queued = self.view.policy, self.view.groups["queued"]
            tokens_hold = not policy.max_queued_tokens or queued.tokens <= policy.max_queued_tokens
            groups_hold = queued.groups <= policy.max_queued_groups
            self._compare("caps", (groups_hold, tokens_hold), (True, True))
            self._compare("cap on bytes", queued.bytes <= policy.max_queued_bytes, other=True)

    def _compare(self, what: str, mine: Any, other: Any) -> None:
        if mine == other:
            return
        differing = _differences(mine, other)
        history = "\n".join(self.history)
        self.disagreed = True
        raise Disagreement(f"{what} differs: {differing}\nafter this history:\n{history}")

    def _compare_bodies(self, mine: ops.Batch, other: ops.Batch) -> None:
        keys = [group.payload_key for group in mine.shard], [group.payload_key for group in other.shard]
        bodies = list(self.model.fetch(self.run_id, keys[0])), self.subject.call("fetch", self.run_id, keys[1])
        self._compare("bodies of the batch", bodies[0], [None if b is None else bytes(b) for b in bodies[1]])

    def _blocked(self, facts: Sequence[ops.GroupFacts]) -> list[Blocked]:
        mine, other = self._both_replies
        return [
            Blocked(fact, ours.payload_key, theirs.payload_key)
            for fact, ours, theirs in zip(facts, mine.outcomes, other.outcomes, strict=True)
            if ours.kind is ops.PushKind.BLOCKED
        ]


def _attempt(operation: Any) -> Any:
    try:
        return operation()
    except RolloutBufferError as refusal:
        return refusal


def _canonical(value: Any) -> Any:
    """Plain values that compare equal when both sides mean the same."""
    if isinstance(value, RolloutBufferError):
        return {"reason": value.reason, **value.attributes}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            name: bool(field) if name == "payload_key" else _canonical(field)
            for name, field in fields.items()
            if name != "blocked_hint"
        }
    if isinstance(value, dict):
        return {str(key): _canonical(field) for key, field in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list | tuple):
        return [_canonical(one) for one in value]
    return value


def _differences(mine: Any, other: Any) -> str:
    if isinstance(mine, dict) and isinstance(other, dict):
        names = sorted({*mine, *other})
        found = [
            f"{name}: {_differences(mine.get(name), other.get(name))}"
            for name in names
            if mine.get(name) != other.get(name)
        ]
        return "{" + "; ".join(found) + "}"
    return f"the model has {mine!r}, the subject {other!r}"
