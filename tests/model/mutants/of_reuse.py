"""Defects of reuse."""

from tests.oracle import reuse
from tests.oracle.records import Kept
from tests.oracle.state import RunState
from tests.oracle.steps import Step


def used_once_too_often(run: RunState, kept: Kept) -> None:
    if not kept.spent and kept.origin < run.committed_steps and kept.uses <= run.policy.max_uses:
        kept.pooled = True


def never_too_old(run: RunState, train_version: int) -> None:
    pass


_give_up = reuse.give_up


def given_up_uses_come_back(run: RunState, step: Step, *args: object) -> None:
    kept = [run.kept[group.sequence] for group in step.reused_again]
    _give_up(run, step, *args)  # type: ignore[arg-type]
    for one in kept:
        one.spent = False
        reuse.enter(run, one)


_take_back = reuse.take_back


def uses_that_are_taken_back_count(run: RunState, step: Step) -> None:
    kept = [run.kept[group.sequence] for group in step.reused_again]
    _take_back(run, step)
    for one in kept:
        one.uses += 1
