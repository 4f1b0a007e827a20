"""A Hypothesis state machine over every operation of a run, on the model and a subject side by side.

One history is one run. `seen` counts operations and outcomes over all histories.
"""

import dataclasses
import itertools
from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from buffer_service.domain.policy import RunPolicy
from tests.model.choices import rarely
from tests.model.moods import MOODS
from tests.model.pair import Pair
from tests.model.subjects import Subject
from tests.model.trainer_actions import TrainerActions
from tests.model.uncover import uncover
from tests.model.universe import INSTANCES, TIME_STEPS_MS, WORKERS, policies

_run_numbers = itertools.count(1)


class RunMachine(TrainerActions, RuleBasedStateMachine):
    """One run. Subclasses set the class variables."""

    subject: ClassVar[Subject]
    mood: ClassVar[str]
    seen: ClassVar[Counter[str]]

    @initialize(policy=policies())
    def create(self, policy: RunPolicy) -> None:
        self.begin(Pair(self.subject, f"run-{next(_run_numbers)}", policy, self.seen))
        self.weights = MOODS[self.mood]

    @rule(draw=st.data())
    def act(self, draw: st.DataObject) -> None:
        possible = [name for name, weight in self.weights.items() for _ in range(weight) if self.can(name)]
        getattr(self, draw.draw(st.sampled_from(possible), label="act"))(draw)

    def can(self, name: str) -> bool:
        """Whether there is anything to do it with."""
        needed: dict[str, bool] = {
            "push_results": bool(self.grants),
            "push_again": bool(self.pushes),
            "retry_blocked": bool(self.blocked),
            "extend": bool(self.grants),
            "give_back": bool(self.grants),
            "commit": self.view.next_step > 0,
            "checkpoint": self.view.next_step > 0,
            "report_lost": self.view.next_step > self.view.committed_steps,
        }
        return needed.get(name, True)

    def teardown(self) -> None:
        if hasattr(self, "pair") and not self.pair.disagreed:
            if self.blocked:
                self.pair.abandon(self.blocked)
            uncover(self.pair)
            self.pair.sweep()

    # ── operators and time ──

    def update_policy(self, draw: st.DataObject) -> None:
        self.pair.both("update_policy", draw.draw(policies()))

    def change_budget(self, draw: st.DataObject) -> None:
        budget = draw.draw(st.sampled_from([-1, 0, 100]))
        self.pair.both("update_policy", dataclasses.replace(self.view.policy, failure_budget=budget))

    def create_again(self, draw: st.DataObject) -> None:
        self.pair.create(self.view.policy if rarely(draw, 2) else draw.draw(policies()))

    def time_passes(self, draw: st.DataObject) -> None:
        """To a moment at which something is due or no longer, most often, and what meets it there."""
        moments = [moment - self.pair.now for moment in self.pair.moments()]
        ahead = sorted({by_ms for by_ms in moments if by_ms >= 0})[:6]
        self.pair.advance(draw.draw(st.sampled_from([*ahead, *ahead, *ahead, *TIME_STEPS_MS])))
        then = draw.draw(st.sampled_from(["extend", "lease", "give_back", "retry_blocked"]))
        if self.can(then):
            getattr(self, then)(draw)

    def sweep(self, draw: st.DataObject) -> None:
        del draw
        self.pair.sweep()

    def come_from_the_future(self, draw: st.DataObject) -> None:
        """A caller has seen a revision that the store has lost."""
        seen_revision = self.view.revision + draw.draw(st.integers(1, 3))
        self.pair.both("extend", WORKERS[0], INSTANCES[0], [], seen_revision=seen_revision)
