"""Promises about leases and results, held against a history; see promises.py."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.checker.events import Op
from tests.chaos.checker.reading import ACCEPTED, Fates, Reading

CLOCKS_S = 0.05
"""The store's clock against this process's, over the time of a lease."""

JUMP_S = 2.0
"""Most that a jump of the store's clock may take from a lease."""

GroupId = str


@dataclass(frozen=True)
class Grant:
    """A lease, as it was given."""

    op: Op
    lease_id: str
    group_id: GroupId
    attempt: int

    @property
    def instance(self) -> str:
        return str(self.op.given["instance"])


def grants_of(reading: Reading) -> dict[tuple[int, GroupId], list[Grant]]:
    """Grants by era and the group that would be its result, in order of attempts."""
    found = defaultdict(list)
    for op in reading.history.of("lease", ok=True):
        for lease in op.got["leases"] if not reading.straddles(op) else ():
            group_id = f"{lease['task_id']}/{lease['incarnation']}"
            found[reading.era(op), group_id].append(Grant(op, lease["lease_id"], group_id, lease["attempt"]))
    return {key: sorted(grants, key=lambda grant: grant.attempt) for key, grants in found.items()}


def leases_exclude_each_other(reading: Reading) -> Iterator[str]:
    """A task has at most one live lease: no lease is given to two, and none while another one lasts. Whoever lost one
    can neither extend it nor hand it back. It is lost to a later one, to a result, to another instance, or by handing
    it back.
    """
    grants = grants_of(reading)
    ends = _Ends(reading)
    ttl_s = reading.last_view["policy"]["lease_ttl_ms"] / 1000
    clocks = reading.history.of("clock")
    uses = [op for op in reading.history.of("extend", "return", ok=True) if not reading.straddles(op)]
    lived: dict[tuple[int, str], list[Op]] = defaultdict(list)
    for op in uses:
        if _was_live(op):
            lived[reading.era(op), _lease_id(op)].append(op)
    for (era, _), of_group in grants.items():
        for i, grant in enumerate(of_group):
            later = of_group[i + 1 :]
            if any(it.attempt == grant.attempt for it in later):
                yield f"lease {grant.lease_id} was given twice"
            signs = lived[era, grant.lease_id]
            for op in signs:
                yield from _used_after_its_end(grant, op, later, [*ends.certain(era, grant)])
            for sign in [grant.op, *(op for op in signs if op.kind == "extend")]:
                lasts_s = sign.begin_s + ttl_s - CLOCKS_S
                for it in later:
                    jumps = sum(sign.begin < jump.ended() and jump.begin < it.op.ended() for jump in clocks)
                    lasted = it.op.end_s < lasts_s - JUMP_S * jumps
                    if sign.before(it.op) and lasted and not ends.possible(grant, it.op):
                        yield f"{it.lease_id} was given at {it.op.begin} while {grant.lease_id} lasted"


def _used_after_its_end(grant: Grant, op: Op, later: list[Grant], ends: list[Op]) -> Iterator[str]:
    what = f"{op.given['instance']} could {op.kind} lease {grant.lease_id} at {op.begin}"
    if op.given["instance"] != grant.instance:
        yield f"{what}, which is {grant.instance}'s"
    if any(it.op.before(op) for it in later):
        yield f"{what}, after the task was given to another"
    if any(end.before(op) for end in ends):
        yield f"{what}, after it had ended"


def _was_live(op: Op) -> bool:
    if op.kind == "extend":
        return bool(op.got["states"] == ["LIVE"])
    return op.got["outcome"] in ("PENDING", "FAILED")


def _lease_id(op: Op) -> str:
    return str(op.given["leases"][0] if op.kind == "extend" else op.given["lease_id"])


class _Ends:
    """Events that end leases, other than time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._returns = defaultdict(list)
        for op in reading.history.of("return"):
            self._returns[op.given["lease_id"]].append(op)
        self._instances = defaultdict(list)
        for op in reading.history.of("lease"):
            self._instances[op.given["worker"]].append(op)
        self._cancelled = defaultdict(list)
        for op in reading.history.of("extend"):
            if not op.ok or op.got["states"] == ["CANCELLED"]:
                self._cancelled[op.given["leases"][0]].append(op)

    def certain(self, era: int, grant: Grant) -> Iterator[Op]:
        """Acknowledged calls that ended the lease, if it had not ended before."""
        pushes = self._reading.pushes.get(grant.group_id, [])
        for op in (*self._returns[grant.lease_id], *pushes, *self._cancelled[grant.lease_id]):
            if op.ok and self._reading.era(op) == era and not self._reading.straddles(op):
                if op.kind == "push" and op.got["outcome"] not in (*ACCEPTED, "closed"):
                    continue
                if op.kind == "return" and not _was_live(op):
                    continue
                yield op
        for op in self._instances[grant.op.given["worker"]]:
            if op.ok and op.given["instance"] != grant.instance and op.begin > grant.op.begin:
                yield op

    def possible(self, grant: Grant, later: Op) -> bool:
        """True when something that ended the lease may have happened before `later` was answered."""
        others = [
            op
            for op in self._instances[grant.op.given["worker"]]
            if op.given["instance"] != grant.instance and (op.begin > grant.op.begin or not op.ok)
        ]
        mine = (*self._returns[grant.lease_id], *self._cancelled[grant.lease_id], *others)
        return any(op.begin < later.ended() for op in mine)


def the_clock_goes_with_time(reading: Reading) -> Iterator[str]:
    """The clock of a run, by which leases last, goes neither back nor faster than time. A jump of the store's clock
    moves it by JUMP_S at most. Its times are those of the recording.
    """
    (recording,) = reading.history.of("recording", ok=True)
    times = recording.got["times_ms"]
    for earlier, later in pairwise(times):
        if later < earlier:
            yield f"the run's clock went back from {earlier} to {later} ms"
    submits = reading.history.of("submit")
    if times and submits:
        # Before the first task is submitted nothing is recorded.
        passed_s = recording.end_s - min(op.begin_s for op in submits)
        most_s = passed_s + JUMP_S * len(reading.history.of("clock")) + CLOCKS_S
        if (times[-1] - times[0]) / 1000 > most_s:
            yield f"the run's clock went on by {(times[-1] - times[0]) / 1000:.1f} s in {passed_s:.1f} s"


def the_first_result_wins(reading: Reading) -> Iterator[str]:
    """The first result wins: one attempt at a group is accepted, and its first bytes are the ones that are delivered.
    Whoever is told that his was not needed is told so because there is a result.
    """
    granted = {group_id for _, group_id in grants_of(reading)}
    have_been = Fates.of(reading).state
    for group_id, pushes in reading.pushes.items():
        accepted = defaultdict(set)
        for op in pushes:
            if not op.ok or reading.straddles(op):
                continue
            outcome, era = op.got["outcome"], reading.era(op)
            if outcome in ACCEPTED:
                accepted[era].add(op.given["lease_id"])
            elif outcome == "closed" or op.got["error"] == "unknown_lease":
                # A recycled group's task is at a later incarnation, which somebody was given.
                task_id, _, incarnation = group_id.rpartition("/")
                later = f"{task_id}/{int(incarnation) + 1}"
                if group_id not in have_been and later not in granted and not reading.losses:
                    yield f"{op.actor} was told {outcome} for {op.given['lease_id']}, and there is no result"
            else:
                yield f"{op.actor} was told {outcome} ({op.got['error']}) for {op.given['lease_id']}"
        for winners in accepted.values():
            if len(winners) > 1:
                yield f"group {group_id} was accepted of {sorted(winners)}"
    yield from _first_bytes(reading)


def _first_bytes(reading: Reading) -> Iterator[str]:
    """Whoever pushed first and was answered before others of the same lease began is the one whose bytes are kept."""
    delivered = {
        (reading.era(op), group["group_id"]): group["digest"]
        for op in reading.history.of("pull", ok=True)
        for group in op.got["groups"]
    }
    for (era, group_id), digest in delivered.items():
        pushes = [op for op in reading.pushes.get(group_id, []) if reading.era(op) == era]
        winner = next((op for op in pushes if op.given["digest"] == digest), None)
        if winner is None:
            continue
        for op in pushes:
            if op.ok and op.got["outcome"] in ACCEPTED and op.before(winner) and op.given["digest"] != digest:
                yield f"group {group_id} was delivered with later bytes than those that were accepted"
