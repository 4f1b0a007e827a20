"""The model and a subject side by side: every operation on both, reply by reply, dump by dump.

Invariant: after each operation that returned, both have given the same reply (payload keys aside, which each makes up
for itself; the bodies behind them are compared), the same error with the same data, and the same view of the run.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import RolloutBufferError, UnknownRun
from buffer_wire.revision import Revision
from tests.model import outcomes
from tests.model.comparison import canonical, differences
from tests.model.inside import Inside
from tests.model.notation import Entry, lines
from tests.model.subjects import Subject
from tests.oracle import ReferenceModel
from tests.oracle.rules.proofs import prove

SECRET = "of every run"
UNPROVEN = "0123456789abcdef"

START_MS = 1_700_000_000_000

SEEN_REVISION = frozenset(
    {
        "update_policy",
        "submit",
        "lease",
        "lease_groups",
        "extend",
        "give_back",
        "push",
        "pull",
        "reject",
        "commit",
        "publish",
        "plan_collective",
        "checkpoint",
        "report_engine",
    }
)
"""Operations whose caller says what it has seen."""


WEIGHTS = frozenset({"publish", "plan_collective", "resume", "report_engine", "update_policy"})
"""Operations after which the watched weights are compared."""


class Disagreement(AssertionError):
    """Model and subject differ. `history` leads to it."""

    def __init__(self, what: str, history: Sequence[Entry]) -> None:
        super().__init__(f"{what}\nafter this history:\n{lines(history)}")
        self.what = what
        self.history = tuple(history)


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A blocked group, its payload keys on both sides, and the replica whose caller waits."""

    name: str
    facts: ops.GroupFacts
    key: str
    their_key: str
    replica: int


class Pair:
    """One run on both sides, its clock, its history, and how often each kind of outcome was seen."""

    def __init__(self, subject: Subject, run_id: str, seen: Counter[str]) -> None:
        self.subject = subject
        self.run_id = run_id
        self.seen = seen
        self.history: list[Entry] = []
        self.now = START_MS
        self.model = ReferenceModel(lambda: self.now)
        self.inside = Inside(self.model, run_id)
        self.view: ops.RunView | None = None
        """The run as the model has it; None: there is none."""
        self.waiting: dict[str, Waiting] = {}
        self.read: dict[str, list[tuple[str, str]]] = {}
        """Payload keys on both sides of groups that batches had, by group id, the newest first; over deletions too."""
        self.disagreed = False
        subject.forget()
        subject.set_time(run_id, self.now)

    # ── operations ──

    def create(self, policy: RunPolicy) -> Any:
        return self.do(Entry("create_run", (policy,)))

    def both(self, operation: str, *args: Any, ahead: int = 0) -> Any:
        """An operation on both sides; the model's reply, None after an error."""
        return self.do(Entry(operation, args, ahead=ahead))

    def do(self, entry: Entry) -> Any:
        """The entry on both sides; the model's reply, None after an error or when it has none."""
        self.history.append(entry)
        if entry.operation == "time":
            return self._advance(entry.args[0])
        before = outcomes.look(self.inside, entry, self.view)
        mine, theirs = self._arguments(entry)
        kwargs: dict[str, Any] = {}
        if entry.operation in SEEN_REVISION:
            kwargs["seen_revision"] = prove(SECRET, (self.view.revision if self.view else 0) + abs(entry.ahead))
            if entry.ahead < 0:
                kwargs["seen_revision"] = Revision(kwargs["seen_revision"], UNPROVEN)
        elif entry.operation == "create_run":
            kwargs["secret"] = SECRET
        self.seen["operations"] += 1
        self.seen[f"op:{entry.operation}"] += 1
        if entry.operation == "sweep":
            self._sweep()
            return None
        reply = self._mine(entry.operation, mine, kwargs)
        answer, view = self._theirs(entry.operation, theirs, kwargs, entry.replica)
        self._compare("reply", reply, answer)
        if isinstance(reply, ops.Batch):
            self._compare_bodies(reply, answer)
        self._settle(view)
        self._remember_waiting(entry, reply, answer)
        if entry.operation in WEIGHTS and self.view:
            self._compare_now("weights")
        if entry.operation == "delete_run":
            self.subject.set_time(self.run_id, self.now)
        outcomes.observe(self.seen, self.inside, entry, mine, reply, before, self.view)
        return None if isinstance(reply, Exception) else reply

    # ── comparison ──

    def _mine(self, operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return getattr(self.model, operation)(self.run_id, *args, **kwargs)
        except RolloutBufferError as refusal:
            return refusal
        except Exception as defect:
            raise self._disagreement(f"the model's {operation} is defective: {defect!r}") from defect

    def _theirs(self, operation: str, args: Sequence[Any], kwargs: dict[str, Any], replica: int = 0) -> tuple[Any, Any]:
        try:
            return self.subject.call(operation, self.run_id, args, kwargs, replica)
        except Exception as defect:
            raise self._disagreement(f"the subject's {operation} is defective: {defect!r}") from defect

    def _advance(self, by_ms: int) -> None:
        """Time passes, or goes back."""
        self.now += by_ms
        self.subject.set_time(self.run_id, self.now)

    def _sweep(self) -> None:
        """Expire leases and delete trash; what is left is what something refers to."""
        if self.view is not None:
            self.model.expire(self.run_id)
        self.subject.sweep(self.run_id)
        if self.view is None:
            self._compare("keys of no run", [], self.subject.leftovers(self.run_id))
            return
        self._compare("bodies", self.model.stored_bodies(self.run_id), self.subject.stored_bodies(self.run_id))
        self._settle(self.subject.view(self.run_id))

    def _settle(self, their_view: Any) -> None:
        """After an operation: invariants hold and dumps agree."""
        my_view: Any
        try:
            my_view = self.model.view(self.run_id)
            self.model.check_invariants(self.run_id)
        except UnknownRun as refusal:
            my_view = refusal
        except Exception as defect:
            raise self._disagreement(f"the model is defective: {defect!r}") from defect
        self._compare("view", my_view, their_view)
        self.view = my_view if isinstance(my_view, ops.RunView) else None

    def _compare_now(self, operation: str, *args: Any) -> None:
        """An operation that changes nothing."""
        self.seen[f"op:{operation}"] += 1
        answer, _ = self._theirs(operation, args, {})
        self._compare(operation, self._mine(operation, args, {}), answer)

    def _compare_bodies(self, mine: ops.Batch, other: Any) -> None:
        keys = [piece.payload_key for piece in mine.pieces], [piece.payload_key for piece in other.pieces]
        for group, pair in zip(mine.pieces, zip(*keys, strict=True), strict=True):
            known = self.read.setdefault(group.group_id, [])
            if pair not in known:
                known.insert(0, pair)
        if keys[0]:
            self.seen["op:fetch"] += 1
            answer, _ = self._theirs("fetch", (keys[1],), {})
            self._compare("bodies of the batch", list(self.model.fetch(self.run_id, keys[0])), list(answer))

    def _compare(self, what: str, mine: Any, other: Any) -> None:
        if mine == other:
            return
        one, two = canonical(mine), canonical(other)
        if one != two:
            raise self._disagreement(f"{what} differs: {differences(one, two)}")

    def _disagreement(self, what: str) -> Disagreement:
        self.disagreed = True
        return Disagreement(what, self.history)

    # ── blocked groups ──

    def _arguments(self, entry: Entry) -> tuple[Sequence[Any], Sequence[Any]]:
        """The entry's arguments for the model and for the subject: each has payload keys of its own."""
        if entry.operation == "report_lost":
            *asked, lost = entry.args
            mine, theirs = ([self._key(name, which)[side] for name, which in lost] for side in (0, 1))
            return (*asked, mine), (*asked, theirs)
        if entry.operation not in {"retry_push", "abandon_push"}:
            return entry.args, entry.args
        meant = [self.waiting[name] for name in entry.names if name in self.waiting]
        if entry.operation == "abandon_push":
            for one in meant:
                del self.waiting[one.name]
            return ([one.key for one in meant],), ([one.their_key for one in meant],)
        return ([(one.facts, one.key) for one in meant],), ([(one.facts, one.their_key) for one in meant],)

    def _key(self, group_id: str, which: int) -> tuple[str, str]:
        known = self.read.get(group_id, [])
        return known[which] if which < len(known) else ("", "")

    def _remember_waiting(self, entry: Entry, mine: Any, other: Any) -> None:
        """Remember who is blocked now. A refusal ends the push, and nobody waits for a new run."""
        facts: dict[str, ops.GroupFacts] = {}
        if entry.operation == "push":
            facts = {name: group.facts for name, group in zip(entry.names, entry.args[0], strict=True)}
        elif entry.operation == "retry_push":
            facts = {name: self.waiting.pop(name).facts for name in entry.names if name in self.waiting}
        elif entry.operation == "create_run" and isinstance(mine, tuple) and mine[1]:
            self.waiting.clear()
        if not isinstance(mine, ops.PushResult):
            return
        for (name, fact), ours, theirs in zip(facts.items(), mine.outcomes, other.outcomes, strict=True):
            if ours.kind is ops.PushKind.BLOCKED:
                self.waiting[name] = Waiting(name, fact, ours.payload_key, theirs.payload_key, entry.replica)
