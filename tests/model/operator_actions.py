"""Actions of operators and time: policies, pauses, deletions, clocks, and callers from the future."""

import dataclasses

from buffer_service.domain import ops
from buffer_service.domain.ops.groups import STAGING_AGE_MS
from buffer_service.domain.policy import OverflowAction
from tests.model.drawing import Draw
from tests.model.notation import Entry
from tests.model.policies import changed, policy
from tests.model.universe import INSTANCES, TIME_STEPS_MS, WORKERS
from tests.model.weight_actions import WeightActions


class OperatorActions(WeightActions):
    """Each method is one action. `features`: what the policies of this history are about."""

    features: tuple[str, ...] = ()

    # ── policies ──

    def update_policy(self, draw: Draw) -> None:
        """One rule of the present policy changes, or all do."""
        new = policy(draw, self.features) if draw.rarely(6) else changed(draw, self.view.policy, self.features)
        # Mostly by a caller who has seen what is replaced, or who does not ask.
        expected = (None, self.view.policy, changed(draw, self.view.policy, self.features))[draw.integer(0, 2)]
        self.pair.both("update_policy", new, expected)

    def change_shares(self, draw: Draw) -> None:
        """Other shares, sometimes after none."""
        if draw.rarely(3):
            self.pair.both("update_policy", dataclasses.replace(self.view.policy, environments=()))
        self.pair.both("update_policy", changed(draw, self.view.policy, ("shared",)))

    def filter_from_now_on(self, draw: Draw) -> None:
        """Groups that wait for room meet a filter that was not there when they came."""
        self.flood(draw)
        self.pair.both("update_policy", changed(draw, self.view.policy, ("filtering",)))
        if self.pair.waiting:
            self.retry_blocked(draw)

    def reject_from_now_on(self, draw: Draw) -> None:
        """Groups that their pushers wrote, and that wait for room, are rejected; what may expire does."""
        for action in (OverflowAction.BLOCK, OverflowAction.REJECT):
            self.pair.both("update_policy", dataclasses.replace(self.view.policy, overflow_action=action))
            if action is OverflowAction.BLOCK:
                self.write_and_push(draw)
            elif self.pair.waiting:
                self.retry_blocked(draw)
        self.pair.both("expire_written")
        self.pair.do(Entry("sweep"))

    def change_budget(self, draw: Draw) -> None:
        self.pair.both("update_policy", dataclasses.replace(self.view.policy, failure_budget=draw.pick((-1, 0, 100))))

    def create_again(self, draw: Draw) -> None:
        self.pair.create(self.view.policy if draw.rarely(2) else policy(draw, self.features))

    # ── the run as a whole ──

    def pause(self, draw: Draw) -> None:
        """Pause, look at what still works, and mostly go on."""
        self.pair.both("pause_run")
        if draw.rarely(2) or self.pair.inside.micro_batches_of(self.view.next_step):
            self.read_open_micro_batches(draw)
        if not draw.rarely(3):
            self.pair.both("continue_run")

    def drain(self, draw: Draw) -> None:
        """Drain, down to the last group if nobody holds anything, and mostly go on."""
        self.pair.both("drain_run")
        for _ in range(draw.integer(0, 3)):
            self.next_micro_batch(draw)
        if not draw.rarely(3):
            self.pair.both("continue_run")

    def go_on(self, draw: Draw) -> None:
        self.pair.both("continue_run")

    def read_open_micro_batches(self, draw: Draw) -> None:
        """Micro-batches of the open step are there for other ranks, and the one to come is asked for."""
        step = self.view.next_step
        self.read_again(draw, step)
        self.pair.both(
            "pull",
            ops.Pull(self.view.term, step, 0, self.world_size(draw), None, self.pair.inside.micro_batches_of(step)),
        )

    def delete_and_create(self, draw: Draw) -> None:
        """The run is gone for everyone until it is created anew."""
        facts = [self.facts(draw, "late", 0, "")]
        term = self.view.term
        self.pair.both("delete_run")
        for _ in range(draw.integer(0, 3)):
            call = draw.integer(0, 5)
            if call == 0:
                self.pair.both("pull", ops.Pull(term, 0, 0, 1, None))
            elif call == 1:
                self.send(draw, facts)
            elif call == 2 and self.pair.waiting:
                self.retry_blocked(draw)
            elif call == 3:
                self.pair.both("extend", WORKERS[0], INSTANCES[0], ["a/0/1"])
            elif call == 4:
                self.pair.both("delete_run")
            else:
                self.pair.both(
                    "resume", ops.Resume(None, ops.ResumeMode.REPLAY, self.request_id(), allow_regenerate=True)
                )
        self.pair.do(Entry("sweep"))
        self.forget()
        self.pair.create(policy(draw, self.features))

    def come_from_the_future(self, draw: Draw) -> None:
        """A caller has seen a revision that the store has lost, or says so; those who wait find out by trying again."""
        if draw.rarely(2):
            self.flood(draw)
        ahead = draw.integer(1, 3)
        if draw.rarely(3):
            self.pair.both("extend", WORKERS[0], INSTANCES[0], [], ahead=-ahead)
            if draw.rarely(2):
                return
        self.pair.both("extend", WORKERS[0], INSTANCES[0], [], ahead=ahead)
        if self.pair.waiting:
            self.retry_blocked(draw)
        if not draw.rarely(3):
            self.resume(draw)

    # ── time ──

    def time_passes(self, draw: Draw) -> None:
        """To a moment at which something is due or no longer, most often, and what meets it there."""
        moments = [moment - self.pair.now for moment in self.pair.inside.moments()]
        ahead = sorted({by_ms for by_ms in moments if by_ms >= 0})[:8]
        by_ms = draw.pick(ahead) if ahead and draw.integer(0, 2) else draw.pick(TIME_STEPS_MS)
        if self.pair.waiting and draw.rarely(4):
            # To where the sweep gives up what nobody has asked for, or just before.
            by_ms = STAGING_AGE_MS - draw.integer(0, 1)
        self.pair.do(Entry("time", (by_ms,)))
        if by_ms >= STAGING_AGE_MS - 1:
            self.pair.do(Entry("sweep"))
        then = draw.pick(("extend", "lease", "give_back", "retry_blocked", "retry_blocked"))
        if then == "retry_blocked":
            if self.pair.waiting:
                self.retry_blocked(draw)
        elif then == "lease" or self.grants:
            getattr(self, then)(draw)

    def sweep(self, draw: Draw) -> None:
        self.pair.do(Entry("sweep"))
