"""Update: one attempt at one collective update, prepare → all have joined and paused → broadcast → all have received.

Invariants: nothing here waits without a deadline, and every wait says on whom. However an attempt ends early, the group
is closed, so that no engine waits in it, and the workers are told that it is abandoned. A member is named as failed
only for errors before that end; errors after it befall all.
"""

import contextlib
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from buffer_wire.errors import NotReady, RolloutBufferError
from trainer_client.client.driver import Deadline
from trainer_client.publish.collective.buckets import packed
from trainer_client.publish.collective.group import GroupBroken, TrainerGroup
from trainer_client.publish.collective.members import Attendance, Stage, Watch, unheard
from trainer_client.publish.collective.plan import CollectivePlan, Phase
from trainer_client.publish.named_tensors import NamedTensors, announced
from trainer_client.publish.publication import Publication
from trainer_client.state import RunState

FIRST_POLL_S = 0.02
LONGEST_POLL_S = 0.2
REACTION_S = 10.0
"""Time, in seconds, for members to report their errors when the group breaks, and to react when the attempt is
abandoned."""
_LEAST_ANSWER_S = 5.0
_ABANDON_S = 10.0
_INTERRUPTED_S = 2.0
_IN_FLIGHT = 2
"""Number of tensors, or buckets, that are being sent or ready for it. While one is sent, the next is made."""

_DOING: dict[Stage, str] = {"prepared": "engines join and pause", "loaded": "engines receive"}


class AttemptFailed(Exception):
    """Error: the attempt failed; `members` are those to be left out of the next one, with the reasons."""

    def __init__(self, why: str, members: dict[str, str]) -> None:
        named = "; ".join(f"{engine_id}: {reason}" for engine_id, reason in members.items())
        super().__init__(f"{why} ({named})" if named else why)
        self.members = members


def pause_between_polls(deadline: Deadline, looks: int = 10) -> None:
    """Sleep a little before the next look at the run, less before the first ones, and not beyond the deadline."""
    longest = min(FIRST_POLL_S * 2**looks, LONGEST_POLL_S)
    time.sleep(min(longest * random.uniform(0.5, 1.0), deadline.left_s()))  # noqa: S311 - jitter


class Update:
    """Update: one attempt. `plan` is in its first phase."""

    def __init__(self, publication: Publication, plan: CollectivePlan, group: TrainerGroup, *, slack_s: float) -> None:
        self._publication = publication
        self._plan = plan
        self._group = group
        self._timeout_s = plan.timeout_ms / 1000
        self._slack_s = slack_s
        self._gathering = False
        """True while members may be on their way to the meeting point."""

    def run(self, tensors: NamedTensors, before: RunState, *, join: bool) -> None:
        """Carry the update out; returns when every member has received and waits for the publish.

        `before`: the run when the members were chosen. `join`: the group is a new one. Raises AttemptFailed, and errors
        of `tensors` and the service.
        """
        watch = Watch(self._plan, before)
        try:
            self._carry_out(tensors, watch, join=join)
        except AttemptFailed as error:
            self._let_come(watch, set(error.members), REACTION_S)
            self._end([m.engine_id for m in self._plan.members if m.engine_id not in error.members])
            raise
        except GroupBroken as error:
            # Nobody has said what broke it: see who does not even react to its end.
            silent = self._end([member.engine_id for member in self._plan.members])
            why = f"the group broke: {error}"
            raise AttemptFailed(why, dict.fromkeys(silent, "did not react when the group broke")) from None
        except Exception:
            self._let_come(watch, set(), REACTION_S)
            self._end([member.engine_id for member in self._plan.members])
            raise
        except BaseException:
            self._let_come(watch, set(), _INTERRUPTED_S)
            self._end(())
            raise

    def _carry_out(self, tensors: NamedTensors, watch: Watch, *, join: bool) -> None:
        self._gathering = join
        joining = self._group.join() if join else None
        self._announce("prepare")
        self._until("prepared", watch, joining)
        self._gathering = False
        self._announce("broadcast")
        self._send(tensors, watch)
        self._until("loaded", watch, None)

    def _announce(self, phase: Phase) -> None:
        self._publication.announce(replace(self._plan, phase=phase), timeout_s=self._timeout_s + self._slack_s)

    def _look(self, deadline: Deadline) -> RunState:
        return self._publication.state(timeout_s=max(_LEAST_ANSWER_S, deadline.left_s()))

    def _until(self, stage: Stage, watch: Watch, joining: Future[None] | None) -> None:
        """Wait until all members report `stage`, and this end has joined. Raises AttemptFailed, GroupBroken."""
        # Whoever waits in the group gives up soon after the plan's own time; then nobody could tell on whom it waited.
        deadline, longer = Deadline.after(self._timeout_s), Deadline.after(self._timeout_s + self._slack_s)
        notices, looks = self._publication.notices(_DOING[stage]), 0
        while True:
            attendance = self._judged(watch, stage, longer)
            if joining is None or joining.done():
                deadline = longer
                if joining is not None:
                    self._settled(joining, watch, stage)
                if not attendance.missing:
                    return
            waits_on = f"the engines {', '.join(attendance.missing)}" if attendance.missing else "the process group"
            if deadline.left_s() == 0.0:
                late = dict.fromkeys(self._culprits(attendance), f"not {stage} in time")
                raise AttemptFailed(f"waited {deadline.at - deadline.started:.0f} s for {waits_on}", late)
            notices.tell(NotReady(f"{_DOING[stage]}; waiting on {waits_on}", waits_on=waits_on))
            pause_between_polls(deadline, looks)
            looks += 1

    def _judged(self, watch: Watch, stage: Stage, deadline: Deadline) -> Attendance:
        attendance = watch.judge(self._look(deadline), stage)
        if attendance.failed:
            raise AttemptFailed(f"members failed before they were {stage}", attendance.failed)
        return attendance

    def _settled(self, call: Future[None], watch: Watch, stage: Stage) -> None:
        """Return the result of a finished call. If it failed, members first get time to report their errors."""
        try:
            call.result()
        except GroupBroken:
            deadline = Deadline.after(REACTION_S)
            while deadline.left_s():
                self._judged(watch, stage, deadline)
                pause_between_polls(deadline)
            raise

    def _culprits(self, attendance: Attendance) -> tuple[str, ...]:
        """Select the members to blame among the late ones: those that have not come to the meeting point, else all."""
        absent = set(self._absent())
        return tuple(engine_id for engine_id in attendance.missing if engine_id in absent) or attendance.missing

    def _absent(self) -> tuple[str, ...]:
        """Name the members that have not come to the meeting point, as far as can be seen."""
        arrived = self._group.arrived(range(self._plan.world_size))
        if arrived is None:
            return tuple(member.engine_id for member in self._plan.members)
        return tuple(member.engine_id for member in self._plan.members if member.rank not in arrived)

    def _send(self, tensors: NamedTensors, watch: Watch) -> None:
        deadline = Deadline.after(self._timeout_s)
        sending: deque[Future[None]] = deque()
        specs, counts = self._plan.tensors, self._plan.bucket_tensors
        each = map(self._group.on_device, announced(tensors, specs))
        for tensor in packed(each, counts) if counts else each:
            sending.append(self._group.send(tensor, max(0.1, deadline.left_s())))
            del tensor
            if len(sending) == _IN_FLIGHT:
                self._until_sent(sending.popleft(), watch)
        while sending:
            self._until_sent(sending.popleft(), watch)

    def _until_sent(self, call: Future[None], watch: Watch) -> None:
        """Wait until a send has ended, which has a limit of its own. Raises AttemptFailed once a member has failed."""
        deadline = Deadline.after(self._timeout_s + self._slack_s)
        while True:
            try:
                call.exception(LONGEST_POLL_S)
            except TimeoutError:
                self._judged(watch, "loaded", deadline)
                continue
            self._settled(call, watch, "loaded")
            return

    # ── the end of an attempt that failed ────────────────────────────────────

    def _let_come(self, watch: Watch, failed: set[str], limit_s: float) -> None:
        """Wait a little for members that are still on their way into the group, except those that have failed.

        An engine that finds no meeting point any more tries for half an hour, and does nothing else. One that is in the
        group when it ends knows at once.
        """
        deadline = Deadline.after(limit_s)
        with contextlib.suppress(RolloutBufferError):
            while self._gathering and deadline.left_s():
                attendance = watch.judge(self._look(deadline), "prepared")
                if not set(attendance.missing).intersection(self._absent()) - failed:
                    return
                pause_between_polls(deadline)

    def _end(self, survivors: Sequence[str]) -> tuple[str, ...]:
        """End the attempt, and wait until the survivors have reported their state after it.

        Returns those that report nothing. Errors that they report of this attempt must not be taken for a failure of
        the next one.
        """
        # First, for it frees the engines also when the service cannot be reached.
        self._group.close()
        began, deadline = time.monotonic(), Deadline.after(REACTION_S)
        with contextlib.suppress(RolloutBufferError):
            self._publication.announce(replace(self._plan, phase="abandoned"), timeout_s=_ABANDON_S)
            while silent := unheard(self._look(deadline), survivors, time.monotonic() - began):
                if deadline.left_s() == 0.0:
                    return silent
                pause_between_polls(deadline)
        return ()
