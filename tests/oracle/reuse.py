"""Reuse: groups that more steps than their own train on.

Invariants: what is in the pool was trained, by a step that is still committed, and has uses left; a group has its
payloads and its task while a step has it or the pool does; a step draws when its first micro-batch closes, the freshest
first, of these the least used.
"""

from collections.abc import Iterable, Sequence

from buffer_service.domain.ops import ReuseLedger
from tests.oracle.records import Group, Kept
from tests.oracle.state import RunState
from tests.oracle.steps import MicroBatch, Step, split


def pool(run: RunState) -> list[Kept]:
    """Return what may be drawn, in the order in which it is."""
    pooled = [kept for kept in run.kept.values() if kept.pooled]
    return sorted(pooled, key=lambda kept: (-kept.group.head, kept.uses, -kept.group.sequence))


def enter(run: RunState, kept: Kept) -> None:
    """It may be drawn, unless it has had its uses, or its step is not committed."""
    if not kept.spent and kept.origin < run.committed_steps and kept.uses < run.policy.max_uses:
        kept.pooled = True


def move(run: RunState, source: str, target: str, count: int = 1) -> None:
    """Move uses from one state to another; new ones are drawn."""
    if count:
        run.uses[source] += count if source == "drawn" else -count
        run.uses[target] += count
        run.changed = True


def evict(run: RunState, train_version: int) -> None:
    """Take out of the pool what is too old for a step, or all where nothing is used again."""
    oldest = train_version - run.policy.reuse_max_staleness
    for kept in pool(run):
        if run.policy.max_uses == 1 or kept.group.head < oldest:
            leave(run, kept)


def leave(run: RunState, kept: Kept) -> None:
    """It may not be drawn any more."""
    kept.pooled = False
    run.settle_kept(kept)


def draw(run: RunState, step: Step, world_size: int) -> None:
    """A step that closes its first micro-batch takes groups that others have trained on."""
    form, most = step.form, run.policy.reused_groups(step.form.target)
    drawn: list[Kept] = []
    for kept in pool(run):
        if len(drawn) == most:
            break
        if kept.uses < run.policy.max_uses:
            drawn.append(kept)
        else:
            leave(run, kept)
    if form.equal:
        drawn = drawn[: len(drawn) - len(drawn) % world_size]
    for kept in drawn:
        kept.uses += 1
        kept.holders.add(step.step)
        kept.pooled = False
        enter(run, kept)
    if drawn:
        groups = [kept.group for kept in drawn]
        step.reused = MicroBatch(
            shards=split(groups, world_size, equal=form.equal),
            staleness={group.group_id: max(0, form.train_version - group.head) for group in groups},
            stalest_milli=0,
            max_staleness=run.policy.reuse_max_staleness,
        )
        step.prior_uses = {kept.group.group_id: kept.uses - 1 for kept in drawn}
        move(run, "drawn", "delivered", len(drawn))


def keep(run: RunState, step: Step) -> None:
    """Groups of a step were trained."""
    for group in step.groups:
        kept = run.kept.get(group.sequence) or Kept(group, step.step, holders={step.step})
        enter(run, kept)
        if kept.pooled:
            run.settle_kept(kept)


def replay(run: RunState, again: Iterable[Step]) -> None:
    """A resume delivers steps again: what they trained is to be trained once more before it is used again."""
    for step in again:
        if step.step < run.committed_steps:
            move(run, "trained", "delivered", len(step.reused_again))
            for group in step.groups:
                if group.sequence in run.kept:
                    leave(run, run.kept[group.sequence])


def take_apart(run: RunState, again: Sequence[Step]) -> None:
    """A resume takes steps apart: they used nothing again, and nothing uses their groups."""
    for step in again:
        take_back(run, step)
    for step in again:
        for group in step.groups:
            run.kept.pop(group.sequence, None)


def take_back(run: RunState, step: Step) -> None:
    """A resume takes a step apart: what it used again may be drawn again."""
    for group in step.reused_again:
        kept = run.kept[group.sequence]
        kept.uses -= 1
        kept.holders.discard(step.step)
        enter(run, kept)
        run.settle_kept(kept)
        move(run, "trained" if step.step < run.committed_steps else "delivered", "given_back")


def give_up(run: RunState, step: Step, group: Group, target: str) -> None:
    """A use ends in its step, and the group is not drawn any more."""
    assert step.reused is not None
    step.reused.remove(group)
    kept = run.kept[group.sequence]
    kept.spent = True
    kept.holders.discard(step.step)
    leave(run, kept)
    move(run, "delivered", target)


def ledger(run: RunState) -> ReuseLedger:
    """Return the uses, and how many groups may be used again."""
    return ReuseLedger(reusable_groups=len(pool(run)), **run.uses)
