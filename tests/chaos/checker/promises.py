"""Promises of the service, held against a history: one function a promise, each yields what breaks it.

They take nothing for granted that the service could have computed wrongly: sums are made anew, and what came back is
compared with what was sent. Order is that of begins and ends as the callers saw them.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from tests.chaos.checker.events import Events, Op
from tests.chaos.checker.lease_promises import (
    leases_exclude_each_other,
    the_clock_goes_with_time,
    the_first_result_wins,
)
from tests.chaos.checker.prompt_promises import groups_are_of_their_prompts, no_prompt_is_lost_or_repeated
from tests.chaos.checker.reading import Fates, Reading, Timeline

Check = Callable[[Reading], Iterator[str]]


def ledgers_balance(reading: Reading) -> Iterator[str]:
    """Accepted groups are the sum of what became of them, in groups, samples, tokens and bytes, in every view, over
    all and in each environment; so are submitted tasks.
    """
    for op in reading.history.of("view", ok=True):
        view = op.got
        total: Counter[tuple[str, int]] = Counter()
        for name, ledger in {"all": view["groups"], **view["environments"]}.items():
            entries = [amounts for state, amounts in ledger.items() if state != "accepted"]
            summed = [sum(units) for units in zip(*entries, strict=True)]
            if summed != ledger["accepted"]:
                yield f"view {op.begin}: of {name} {ledger['accepted']} were accepted, {summed} are somewhere: {ledger}"
            if name != "all":
                total.update({(state, i): n for state, amounts in ledger.items() for i, n in enumerate(amounts)})
        for state, amounts in view["groups"].items():
            if [total[state, i] for i in range(len(amounts))] != amounts:
                yield f"view {op.begin}: {state} of all environments is not {amounts}"
        tasks = {state: n for state, n in view["tasks"].items() if state not in ("submitted", "balanced")}
        if view["tasks"]["submitted"] != sum(tasks.values()):
            yield f"view {op.begin}: tasks {view['tasks']}"


def acknowledged_groups_are_kept(reading: Reading) -> Iterator[str]:
    """Every group that was acknowledged is in exactly one place at the end, and none is accepted twice. The ledger's
    numbers are those of the groups. After a failover that lost writes, acknowledged groups may be missing, if somebody
    was told of it.
    """
    fates = Fates.of(reading)
    yield from fates.problems
    missing = [op for op in reading.accepted_pushes() if op.given["group_id"] not in fates.state]
    for op in missing:
        if not any(op.begin < loss.begin for loss in reading.losses):
            yield f"group {op.given['group_id']} was answered {op.got['outcome']} to {op.actor}, and is nowhere"
    if missing and reading.losses and not was_told(reading):
        yield f"{len({op.given['group_id'] for op in missing})} acknowledged groups are lost, and nobody was told"
    view = reading.last_view
    counts = Counter(fates.state.values())
    for state, (groups, *_) in view["groups"].items():
        if state != "accepted" and counts.pop(state, 0) != groups:
            yield f"{state} is {groups} groups in the ledger, but not in the recording"
    if counts:
        yield f"the ledger does not know the states {dict(counts)}"
    if view["groups"]["lost"][0] and not reading.losses:
        yield f"{view['groups']['lost'][0]} groups count as lost, and no store has lost anything"


def trained_is_what_ranks_got(reading: Reading) -> Iterator[str]:
    """Every step was seen whole by its ranks, and what they got was pushed so by a worker. In groups, samples, tokens
    and bytes it is what the ledger calls trained or delivered.
    """
    for op in reading.history.of("pull", ok=True):
        for group in op.got["groups"]:
            pushed = reading.pushed.get(group["digest"])
            if pushed is None or pushed["group_id"] != group["group_id"]:
                yield f"nobody pushed group {group['group_id']} with the bytes that came in step {op.given['step']}"
                return
    timeline, view = Timeline.of(reading), reading.last_view
    wanted = range(view["next_step"])
    if sorted(timeline.steps) != list(wanted):
        yield f"steps up to {view['next_step']} are assembled, but ranks know {sorted(timeline.steps)}"
    for number, step in timeline.steps.items():
        if not step.complete:
            yield f"step {number} was not seen whole"
    kept = [sum(units) for units in zip(view["groups"]["trained"], view["groups"]["delivered"], strict=True)]
    if timeline.amount(reading) != kept:
        yield f"ranks got {timeline.amount(reading)} in steps that stand, the ledger says {kept}"


def no_group_is_in_two_batches(reading: Reading) -> Iterator[str]:
    """Within a timeline a group is in one step alone, whatever was replayed; after a requeue it may enter another one,
    after a discard none; ranks share a step without remainder.
    """
    yield from Timeline.of(reading).problems


def a_repeated_pull_returns_the_same(reading: Reading) -> Iterator[str]:
    """Pulls of the same (term, step, micro-batch, rank) have the same groups, byte for byte, with the same totals,
    whoever asks; and a group's bytes never change.
    """
    first: dict[tuple[int, ...], Op] = {}
    bytes_of: dict[tuple[int, str], str] = {}
    for op in reading.history.acknowledged("pull"):
        given, era = op.given, reading.era(op)
        same = first.setdefault((era, *(given[name] for name in ("term", "step", "micro_batch", "rank"))), op)
        for name in ("groups", "totals", "train_version", "final", "shard", "staleness_max"):
            if op.got[name] != same.got[name] and not reading.straddles(op):
                yield f"{op.actor} got other {name} than {same.actor} for {given}"
        for group in op.got["groups"]:
            if bytes_of.setdefault((era, group["group_id"]), group["digest"]) != group["digest"]:
                yield f"group {group['group_id']} came with other bytes in {given}"


def caps_hold(reading: Reading) -> Iterator[str]:
    """Queued groups stay within the queue's caps; queued, forming and delivered ones stay within the quotas."""
    for op in reading.history.of("view", ok=True):
        groups, policy = op.got["groups"], op.got["policy"]
        live = [sum(units) for units in zip(*(groups[it] for it in ("queued", "forming", "delivered")), strict=True)]
        for unit, i in (("groups", 0), ("tokens", 2), ("bytes", 3)):
            cap, quota = policy[f"max_queued_{unit}"], policy[f"quota_{unit}"]
            if cap and groups["queued"][i] > cap:
                yield f"view {op.begin}: {groups['queued'][i]} {unit} are queued, the cap is {cap}"
            if quota and live[i] > quota and not _resumed(reading, op):
                yield f"view {op.begin}: {live[i]} {unit} are live, the quota is {quota}"


def _resumed(reading: Reading, view: Op) -> bool:
    """A resume may bring trained groups back to life, whatever the quota says."""
    return any(op.begin < view.ended() for op in reading.history.of("resume")[1:])


def batches_are_fresh(reading: Reading) -> Iterator[str]:
    """No batch holds a group staler than max_staleness for its train_version, by the versions that the worker wrote
    into the group. The service says of each group's head what the worker wrote.
    """
    bound = reading.last_view["policy"]["max_staleness"]
    for op in reading.history.of("pull", ok=True):
        term, step = op.given["term"], op.given["step"]
        start = reading.resumes.get(term)
        for group in op.got["groups"]:
            pushed = reading.pushed.get(group["digest"])
            if pushed is None:
                continue
            head = min(reading.effective((e, v), term) for e, v in pushed["heads"])
            if head != group["head"] and not reading.losses:
                yield f"group {group['group_id']} has head {head}, but the pull of {op.given} says {group['head']}"
            assembled_here = start is None or step > start.got["next_unassembled_step"] or not op.got["replayed"]
            if bound is not None and assembled_here and op.got["train_version"] - head > bound:
                yield f"group {group['group_id']} of head {head} is in {op.given} for {op.got['train_version']}"
        if bound is not None and op.got["staleness_max"] > bound:
            yield f"{op.given} says that it holds a group of staleness {op.got['staleness_max']}"


def versions_rise_by_publish_only(reading: Reading) -> Iterator[str]:
    """Whoever sees the published version sees one that a publish or a resume made, and never a lower one than somebody
    saw before; a version has one manifest; a former trainer's calls are refused.
    """
    published = reading.history.of("publish")
    seen = [op for op in reading.history.of("view", "lease", "publish", ok=True) if not reading.straddles(op)]
    first: dict[tuple[int, int], int] = {}
    for op in published:
        first.setdefault((op.given["term"], op.given["version"]), op.begin)
    for op in seen:
        term, version = op.got["published"]
        resume = reading.resumes.get(term)
        by_resume = (term == 1 and version == 0) or (resume is not None and resume.got["version"] == version)
        by_publish = first.get((term, version), op.ended()) < op.ended()
        if not by_resume and not by_publish:
            yield f"{op.actor} saw version {(term, version)} at {op.begin}, which nobody published"
    promised = [op for op in seen if op.kind != "view"]
    yield from _never_falls(promised, "published", lambda op: tuple(op.got["published"]), reading.era)
    views = {id(op) for op in reading.views}
    shown = [op for op in seen if op.kind != "view" or id(op) in views]
    yield from _never_falls(shown, "published", lambda op: tuple(op.got["published"]), reading.life)
    manifests = defaultdict(set)
    for op in published:
        if op.ok:
            manifests[reading.era(op), op.given["term"], op.given["version"]].add(op.given["manifest"])
            if op.got["published"] != [op.given["term"], op.given["version"]]:
                yield f"publish of {op.given} was answered {op.got['published']}"
    for version, ways in manifests.items():
        if len(ways) > 1:
            yield f"version {version} was published with {len(ways)} manifests"
    for op in reading.history.of("pull", "publish", "submit", "commit", "checkpoint", ok=True):
        for term, resume in reading.resumes.items():
            if term > op.given["term"] and resume.before(op) and reading.era(op) == reading.era(resume):
                yield f"{op.kind} of term {op.given['term']} succeeded at {op.begin}, after the resume to {term}"


def progress_never_falls(reading: Reading) -> Iterator[str]:
    """Revision, cursor and term never fall, and within a term neither do steps."""
    views = reading.views
    for name in ("revision", "cursor", "term"):
        yield from _never_falls(views, name, lambda op, name=name: (op.got[name],), reading.life)  # type: ignore[misc]
    for name in ("next_step", "committed_steps", "checkpointed_steps"):
        for term in {op.got["term"] for op in views}:
            of_term = [op for op in views if op.got["term"] == term]
            yield from _never_falls(of_term, name, lambda op, name=name: (op.got[name],), reading.life)  # type: ignore[misc]


def _never_falls(
    ops: list[Op], what: str, value: Callable[[Op], tuple[int, ...]], era: Callable[[Op], int]
) -> Iterator[str]:
    """Values of later calls are no lower, for two calls of an era one of which had ended before the other began."""
    for number in {era(op) for op in ops}:
        of_era = [op for op in ops if era(op) == number]
        by_end = sorted(of_era, key=Op.ended)
        ends = [op.ended() for op in by_end]
        highest: list[Op] = []
        for op in by_end:
            highest.append(op if not highest or value(op) >= value(highest[-1]) else highest[-1])
        for op in of_era:
            before = bisect_left(ends, op.begin)
            if before and value(highest[before - 1]) > value(op):
                top = highest[before - 1]
                yield f"{what} was {value(top)} at {top.end}, and {value(op)} at {op.begin}"


def was_told(reading: Reading) -> bool:
    """True when a call was refused because the store has lost something."""
    refused = any(op.error == "store_rolled_back" for op in reading.history)
    return refused or any(op.given["reason"] == "store_rolled_back" for op in reading.history.of("met"))


PROMISES: tuple[Check, ...] = (
    ledgers_balance,
    acknowledged_groups_are_kept,
    trained_is_what_ranks_got,
    no_group_is_in_two_batches,
    a_repeated_pull_returns_the_same,
    caps_hold,
    batches_are_fresh,
    leases_exclude_each_other,
    the_clock_goes_with_time,
    the_first_result_wins,
    versions_rise_by_publish_only,
    progress_never_falls,
    no_prompt_is_lost_or_repeated,
    groups_are_of_their_prompts,
)


def broken(history: Events) -> list[str]:
    """Every promise that the history breaks, and how: at most three times each."""
    reading = Reading(history)
    found = []
    for check in PROMISES:
        for number, problem in enumerate(check(reading)):
            if number == 3:
                break
            found.append(f"{check.__name__}: {problem}")
    return found
