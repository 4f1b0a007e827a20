"""A Hypothesis state machine over every operation of a run, on the model and a subject side by side.

One history is one run. `seen` counts operations and outcomes over all histories.
"""

import itertools
from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.model.drawing import Draw
from tests.model.moods import INSTEAD, Mood
from tests.model.operator_actions import OperatorActions
from tests.model.pair import Pair
from tests.model.policies import policy
from tests.model.subjects import Subject
from tests.model.uncover import uncover

_run_numbers = itertools.count(1)

ACTIONS_AT_ONCE = 8
"""Actions of one step of the machine: Hypothesis takes its time between steps."""


class RunMachine(OperatorActions, RuleBasedStateMachine):
    """One run. Subclasses set the class variables."""

    subject: ClassVar[Subject]
    mood: ClassVar[Mood]
    seen: ClassVar[Counter[str]]
    kind: ClassVar[type[Pair]]

    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.features = self.mood.features
        self.seen["histories"] += 1
        self.taken = 0
        self.begin(self.kind(self.subject, f"run-{next(_run_numbers)}", self.seen))
        self.pair.create(policy(Draw(data), self.features))
        self.actions = [name for name, weight in self.mood.weights.items() for _ in range(weight)]

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        draw = Draw(data)
        for _ in range(ACTIONS_AT_ONCE):
            # The simplest history takes all actions in turn.
            self.taken += 1
            name = self.actions[(draw.integer(0, len(self.actions) - 1) + self.taken) % len(self.actions)]
            getattr(self, name if self.can(name) else INSTEAD[name])(draw)

    def can(self, name: str) -> bool:
        """Tell whether there is anything to do it with."""
        if name not in INSTEAD:
            return True
        if name in {"push_results", "extend", "give_back"}:
            return bool(self.grants)
        things = {"push_again": self.pushes, "push_written_again": self.written, "retry_blocked": self.pair.waiting}
        if name in things:
            return bool(things[name])
        if name in {"report_lost", "reject", "replace"}:
            return (
                self.view.next_step > self.view.committed_steps
                or self.pair.inside.micro_batches_of(self.view.next_step) > 0
            )
        return self.view.next_step > 0

    def teardown(self) -> None:
        if hasattr(self, "pair") and not self.pair.disagreed and self.pair.view is not None:
            uncover(self.pair)
