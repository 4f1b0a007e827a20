"""Contents of a history, sorted for those who check it: forks, pushes, grants, and where every group went.

A failover that may lose writes (`failover` with `loses`) divides a history into eras: what was promised before it may
be gone after it, so that facts of different eras are not held against each other.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tests.chaos.checker.events import Events, Facts, Op

ACCEPTED = ("queued", "duplicate", "filtered")
UNITS = ("groups", "samples", "tokens", "bytes")


@dataclass
class Reading:
    """Reading of one history."""

    history: Events

    @cached_property
    def failovers(self) -> list[Op]:
        """Failovers of any kind, and stores killed on full disks."""
        return self.history.of("failover")

    @cached_property
    def losses(self) -> list[Op]:
        """Failovers that may have lost writes."""
        return [op for op in self.failovers if op.given["loses"]]

    def era(self, op: Op) -> int:
        """Failovers with losses before the call began."""
        return sum(loss.begin < op.begin for loss in self.losses)

    def life(self, op: Op) -> int:
        """Failovers before the call began: what a view shows may be gone after each of them."""
        return sum(it.begin < op.begin for it in self.failovers)

    def straddles(self, op: Op) -> bool:
        """True when the store lost writes while the call was under way, or nobody knows that it was not."""
        return any(op.begin < loss.begin < op.ended() for loss in self.losses)

    @cached_property
    def views(self) -> list[Op]:
        """Views that were answered, but for those during a failover, which may take a while."""
        views = self.history.of("view", ok=True)
        return [op for op in views if not any(op.begin < it.ended() and it.begin < op.ended() for it in self.failovers)]

    @cached_property
    def resumes(self) -> dict[int, Op]:
        """Resumes by term."""
        return {op.got["term"]: op for op in self.history.of("resume", ok=True)}

    def effective(self, version: tuple[int, int], term: int) -> int:
        """A version as it counts in the timeline of `term`: no more than what each fork after its own went on from."""
        forks = [op.got["version"] for e, op in self.resumes.items() if version[0] < e <= term]
        return int(min([version[1], *forks]))

    @cached_property
    def pushed(self) -> dict[str, Facts]:
        """Return what was pushed, by digest."""
        return {op.given["digest"]: op.given for op in self.history.of("push")}

    @cached_property
    def pushes(self) -> dict[str, list[Op]]:
        """Pushes by group id."""
        found = defaultdict(list)
        for op in self.history.of("push"):
            found[op.given["group_id"]].append(op)
        return found

    def accepted_pushes(self) -> Iterator[Op]:
        """Pushes whose group the run said to have."""
        for op in self.history.of("push", ok=True):
            if op.got["outcome"] in ACCEPTED:
                yield op

    @cached_property
    def last_view(self) -> Facts:
        """The run at the end."""
        return self.history.of("view", ok=True)[-1].got


@dataclass
class Step:
    """One step as ranks have seen it in one term."""

    era: int
    groups: dict[str, str] = field(default_factory=dict)
    """Digest by group id."""
    totals: list[int] = field(default_factory=list)
    complete: bool = False
    """Every rank has told of every micro-batch."""


@dataclass
class Timeline:
    """The steps of a history as they stand at its end, and what went wrong on the way."""

    steps: dict[int, Step] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _place: dict[str, int] = field(default_factory=dict)
    _discarded: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, reading: Reading) -> "Timeline":
        """Term after term: what its resume did to earlier steps, then what its ranks got."""
        self = cls()
        pulls = defaultdict(list)
        for op in reading.history.acknowledged("pull"):
            pulls[op.given["term"], reading.era(op)].append(op)
        terms = sorted({term for term, _ in pulls} | reading.resumes.keys())
        for term in terms:
            if term in reading.resumes:
                self._resume(reading.resumes[term], reading.era(reading.resumes[term]))
            for era in range(len(reading.losses) + 1):
                self._take(term, era, pulls[term, era])
        return self

    def _resume(self, op: Op, era: int) -> None:
        k, mode, unassembled = op.got["next_step"], op.given["mode"], op.got["next_unassembled_step"]
        for number in [number for number in self.steps if number >= k]:
            # Of a step that is not assembled a replay keeps the micro-batches that have closed, unless they are lost.
            is_gone = number > unassembled or (number == unassembled and self.steps[number].era < era)
            if mode != "replay" or is_gone:
                step = self._drop(number)
                # A step that a failover has taken back was not there to be discarded.
                if mode == "discard" and step.era == era:
                    self._discarded |= step.groups.keys()

    def _drop(self, number: int) -> Step:
        step = self.steps.pop(number)
        for group_id in step.groups:
            self._place.pop(group_id, None)
        return step

    def _take(self, term: int, era: int, pulls: list[Op]) -> None:
        steps: dict[int, dict[int, dict[int, Op]]] = defaultdict(lambda: defaultdict(dict))
        for op in pulls:
            steps[op.given["step"]][op.given["micro_batch"]].setdefault(op.given["rank"], op)
        for number, micro_batches in sorted(steps.items()):
            self._enter(f"step {number} in term {term}", number, self._step(f"step {number}", era, micro_batches))

    def _step(self, name: str, era: int, micro_batches: dict[int, dict[int, Op]]) -> Step:
        step = Step(era, complete=True)
        final = False
        for number in range(max(micro_batches) + 1):
            ranks = micro_batches.get(number, {})
            shards = [op.got for op in ranks.values()]
            for group in (group for shard in shards for group in shard["groups"]):
                if group["group_id"] in step.groups:
                    self.problems.append(f"{name} has group {group['group_id']} twice")
                step.groups[group["group_id"]] = group["digest"]
            some = next(iter(ranks.values()), None)
            step.complete = step.complete and some is not None and len(ranks) == some.given["world_size"]
            if some is not None:
                step.totals, final = some.got["totals"], some.got["final"]
        step.complete = step.complete and final
        if step.complete and len(step.groups) != step.totals[0]:
            self.problems.append(f"{name} has {len(step.groups)} groups in all shards, but says {step.totals[0]}")
        return step

    def _enter(self, name: str, number: int, new: Step) -> None:
        old = self.steps.get(number)
        if old is not None and _contradict(old, new):
            if old.era == new.era:
                self.problems.append(f"{name} is not what it was: {_difference(old, new)}")
            # Else it was lost, and assembled again.
            self._drop(number)
            old = None
        for group_id in new.groups:
            elsewhere = self._place.get(group_id, number)
            if elsewhere != number and self.steps[elsewhere].era < new.era:
                self._drop(elsewhere)
            elif elsewhere != number:
                self.problems.append(f"group {group_id} is in step {elsewhere} and in {name}")
            if group_id in self._discarded:
                self.problems.append(f"group {group_id} is in {name} although a resume has discarded it")
            self._place[group_id] = number
        if old is None or not old.complete:
            self.steps[number] = Step(
                new.era, {**(old.groups if old else {}), **new.groups}, new.totals, complete=new.complete
            )

    def amount(self, reading: Reading) -> list[int]:
        """Groups, samples, tokens and bytes of all steps."""
        groups = [reading.pushed[digest] for step in self.steps.values() for digest in step.groups.values()]
        return [len(groups), *(sum(group[unit] for group in groups) for unit in UNITS[1:])]


def _contradict(old: Step, new: Step) -> bool:
    """True when the two cannot be the same step, of which either may be known in part."""
    is_less = new.complete and not old.groups.items() <= new.groups.items()
    return is_less or (old.complete and not new.groups.items() <= old.groups.items())


def _difference(old: Step, new: Step) -> str:
    return str(sorted(set(old.groups.items()) ^ set(new.groups.items())))


@dataclass
class Fates:
    """Places of every group at the end, by the run's own recording."""

    state: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, reading: Reading) -> "Fates":
        """Fates by what happened to each group last."""
        self = cls()
        (recording,) = reading.history.of("recording", ok=True)
        steps: dict[str, int] = {}
        for kind, *facts in recording.got["events"]:
            if kind == "micro_batch":
                for group_id in facts[2]:
                    if self.state.get(group_id) != "queued":
                        self.problems.append(f"group {group_id} entered step {facts[0]} as {self.state.get(group_id)}")
                    self.state[group_id], steps[group_id] = "in a step", facts[0]
            elif kind in ("accepted", "moved"):
                group_id, state = facts
                if (kind == "accepted") == (group_id in self.state):
                    self.problems.append(f"group {group_id} was {kind} when it was {self.state.get(group_id)}")
                self.state[group_id] = state
        committed = reading.last_view["committed_steps"]
        for group_id, state in self.state.items():
            if state == "in a step":
                self.state[group_id] = "trained" if steps[group_id] < committed else "delivered"
        return self
