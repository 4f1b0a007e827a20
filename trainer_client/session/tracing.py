"""Traces of a trainer: how weight versions came to be, and the training in the trace of each group.

A version's trace has the pulls and the training of its steps, and its publish; workers add their loads. Spans are kept
until the publish, which says what the version is called. In each group's own trace stands its training, with a link to
the version's. So a group leads to the weights that it made, and these to their groups.

Where tracing is off, nothing is done here, and nothing is kept.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from buffer_wire.tracing.contexts import Context, Fact, RunTraces, Span
from buffer_wire.tracing.process import tracer
from trainer_client.batch import Batch, Group
from trainer_client.state import Resumed, RunState

if TYPE_CHECKING:
    from buffer_wire.tracing.sdk import Tracer

MAX_STEPS = 64
"""Largest number of steps that wait for a publish; the trace of an older one is that of the step."""


@dataclass(frozen=True, slots=True)
class _Pull:
    """Wait for a batch, or for a part of one."""

    context: Context
    began_ns: int
    ended_ns: int
    facts: dict[str, Fact] = field(default_factory=dict)


@dataclass(slots=True)
class _Step:
    """Step, from its first pull to the end of its training."""

    step: int
    pulls: list[_Pull] = field(default_factory=list)
    groups: dict[str, tuple[Context, dict[str, Fact]]] = field(default_factory=dict)
    """Roots of the groups' traces with their facts, by group id; of those that are recorded."""
    facts: dict[str, Fact] = field(default_factory=dict)
    began_ns: int = 0
    ended_ns: int = 0
    """Time at which the training ended; 0: it goes on."""


class Updates:
    """Traces of one rank of a session, where tracing is on."""

    def __init__(self, run: RunState, start: Resumed, rank: int, traced: "Tracer | None" = None) -> None:
        self._tracer = traced or tracer()
        self._run = RunTraces(run.run_id, run.created_ms)
        self._term, self._rank = start.term, rank
        self._pulled: list[_Pull] = []
        """Waits since the last batch that went to the training loop."""
        self._steps: dict[int, _Step] = {}

    @contextmanager
    def pulling(self, next_version: int) -> Iterator[None]:
        """Time the block, a wait for a batch that is to be trained for `next_version`; its calls carry its context."""
        if self._tracer is None:
            yield
            return
        began_ns = time.time_ns()
        self._end_training(began_ns)
        context = self._run.update(self._term, next_version).child(f"pull {self._rank} {began_ns}")
        with self._tracer.within(context):
            yield
        self._pulled.append(_Pull(context, began_ns, time.time_ns()))

    def got(self, batch: Batch) -> None:
        """Take a batch, a whole one or a part, into account, which goes to the training loop now."""
        if self._tracer is None:
            return
        step = self._steps.setdefault(batch.step, _Step(batch.step, began_ns=time.time_ns()))
        info = batch.info
        step.ended_ns = 0
        for pull in self._pulled:
            pull.facts.update(step=info.step, micro_batch=info.micro_batch, replayed=info.replayed)
        step.pulls += self._pulled
        self._pulled = []
        step.facts = {
            "step": info.step,
            "rank": self._rank,
            "train_version": info.train_version,
            "groups": info.total_groups,
            "tokens": info.total_tokens,
            "loss_tokens": info.total_loss_tokens,
            "staleness_mean": info.staleness_mean,
            "staleness_max": info.staleness_max,
        }
        for group in batch.groups:
            root = self._tracer.root(self._run, group.group_id)
            if root is not None:
                step.groups[group.group_id] = (root, _facts(group, info.step))
        if len(self._steps) > MAX_STEPS:
            oldest = min(self._steps)
            self._record(self._run.step(self._term, oldest), [self._steps.pop(oldest)])

    def rejected(self, group_ids: Collection[str]) -> None:
        """Forget groups that were given back: nothing is trained on them."""
        for step in self._steps.values():
            for group_id in group_ids:
                step.groups.pop(group_id, None)

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Time the block, which publishes `version`, and record what led to it; its calls carry its context."""
        if self._tracer is None:
            yield
            return
        began_ns = time.time_ns()
        self._end_training(began_ns)
        root = self._run.update(self._term, version)
        mine = root.child(f"publish {self._rank} {began_ns}")
        error = ""
        try:
            with self._tracer.within(mine):
                yield
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            facts: dict[str, Fact] = {"run": self._run.run_id, "version": version, "rank": self._rank}
            publish = Span(
                name="publish",
                context=mine,
                parent=root,
                began_ns=began_ns,
                ended_ns=time.time_ns(),
                facts=facts,
                error=error,
            )
            self._tracer.record(publish)
            if not error:
                self._record(root, list(self._steps.values()), publish, version)
                self._steps.clear()

    def close(self) -> None:
        """Record steps that no publish has followed."""
        self._end_training(time.time_ns())
        for number, step in self._steps.items():
            self._record(self._run.step(self._term, number), [step])
        self._steps.clear()

    # ── inside ───────────────────────────────────────────────────────────────

    def _end_training(self, now_ns: int) -> None:
        for step in self._steps.values():
            step.ended_ns = step.ended_ns or now_ns

    def _record(
        self, root: Context, steps: list[_Step], publish: Span | None = None, version: int | None = None
    ) -> None:
        """Record steps below `root`, and `root` itself from rank 0."""
        if self._tracer is None:
            return
        traced = self._tracer
        began_ns = [publish.began_ns] if publish is not None else []
        for step in steps:
            began_ns += [step.began_ns, *(pull.began_ns for pull in step.pulls)]
            for pull in step.pulls:
                context = pull.context if pull.context.trace_id == root.trace_id else None
                wait = Span(name="pull", context=context, parent=root, began_ns=pull.began_ns, ended_ns=pull.ended_ns)
                traced.record(replace(wait, facts=pull.facts))
            train = Span(
                name="train",
                context=root.child(f"train {self._rank} {step.step}"),
                parent=root,
                began_ns=step.began_ns,
                ended_ns=step.ended_ns,
            )
            links = [group for group, _ in step.groups.values()]
            traced.record(replace(train, facts=step.facts, links=links))
            for group, facts in step.groups.values():
                of_group = replace(train, context=group.child(f"train {self._term} {step.step}"), parent=group)
                to_update = [train.context] if train.context is not None else []
                traced.record(replace(of_group, facts={**facts, "version": version}, links=to_update))
        if self._rank == 0:
            ended_ns = publish.ended_ns if publish is not None else max(step.ended_ns for step in steps)
            named: dict[str, Fact] = {"run": self._run.run_id, "term": self._term, "version": version}
            update = Span(name="update", context=root, began_ns=min(began_ns), ended_ns=ended_ns)
            traced.record(replace(update, facts={**named, "steps": len(steps)}))


def _facts(group: Group, step: int) -> dict[str, Fact]:
    return {
        "group": group.group_id,
        "step": step,
        "head_version": group.head_version,
        "tail_version": group.tail_version,
        "train_version": group.train_version,
        "staleness": max(0, group.train_version - group.head_version),
    }
