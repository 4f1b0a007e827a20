"""Metrics of each step: one flat dictionary of numbers, as wandb.log and tensorboard's add_scalar take them.

    options = SessionOptions(on_step=lambda step, metrics: wandb.log(metrics, step=step))

`on_step` is called once per step, in order and in the training loop's thread, when the step is over: the next batch is
asked for, or the session ends. So the metrics include the times of training and publishing, and the figures given to
`session.log`. `session.metrics()` gives them for the newest step so far. The keys are listed in docs/trainer.md.

Invariants: nothing here fails or holds up the training. Rank 0 asks for the run once per step, in a thread of its own,
from the moment the batch is there. If the answer is not there when the step is over, it is waited for at most
`GRACE_S`. After that its keys are missing, and the next answer covers both steps.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, SupportsFloat, TypeAlias

from buffer_wire.validate import is_trainable
from rollout_buffer.v1 import groups_pb2
from trainer_client.batch import Batch, BatchInfo, Group
from trainer_client.client.engines import in_service
from trainer_client.selection.selection import facts_of
from trainer_client.session.outcomes import Tally
from trainer_client.state import RunState, TrainerTime

logger = logging.getLogger("trainer_client")

PREFIX = "rollout_buffer/"
GRACE_S = 0.25
ASK_S = 10.0
"""Longest time, in seconds, over which one request for the run is repeated."""

OnStep: TypeAlias = Callable[[int, dict[str, float]], object]
"""Callback with each step and its metrics. What it raises is logged, and the training goes on."""

Doing: TypeAlias = Literal["pull_wait", "publish", "checkpoint"]
"""Activities that a step's time is counted for, beside the training itself."""

_DELTAS = (
    "accepted",
    "trained",
    "dropped_overflow",
    "dropped_stale",
    "recycled",
    "filtered",
    "rejected",
    "discarded",
    "lost",
)
_TASK_DELTAS = ("submitted", "completed", "failed", "cancelled")
_COUNTERS = ("leases_expired", "leases_cancelled", "pushes_rejected", "partial_rollout_tokens_discarded")


class RunRequest:
    """Background request for the run, one at a time."""

    def __init__(self, look: Callable[[float], RunState]) -> None:
        self._look = look
        self._done = threading.Event()
        self._done.set()
        self._answer: RunState | None = None

    def ask(self) -> bool:
        """Ask for the run; False if the request before is still open."""
        if not self._done.is_set():
            return False
        self._answer = None
        self._done.clear()
        threading.Thread(target=self._run, name="metrics-look", daemon=True).start()
        return True

    def answer(self, wait_s: float) -> RunState | None:
        """Return the answer, if it comes within `wait_s`; None when it does not, or the request failed."""
        return self._answer if self._done.wait(wait_s) else None

    def _run(self) -> None:
        try:
            self._answer = self._look(ASK_S)
        except Exception as error:  # noqa: BLE001 - figures may be missing, the training goes on
            logger.warning("no figures of the run for this step's metrics: %s", error)
        finally:
            self._done.set()


class StepMeter:
    """Meter of one step after the other. `look`: asks for the run; None on ranks that do not. `tally`: of outcomes.

    Used by the training loop's thread alone.
    """

    def __init__(
        self,
        on_step: OnStep | None,
        look: Callable[[float], RunState] | None,
        before: RunState,
        *,
        tally: Callable[[], Tally | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_step = on_step
        self._look = RunRequest(look) if look is not None else None
        self._before = before
        """State of the run at the end of the last step whose figures are known."""
        self._tally, self._tallied = tally, Tally()
        self._clock = clock
        self._started_at: float | None = None
        """Time at which the training loop asked for its first batch."""
        self._waited = 0.0
        """Seconds spent waiting for batches since then."""
        self._waits_since: float | None = None
        self._busy_ms = 0
        """Busy time, in ms, as last reported: rounding must not make it fall."""
        self._begin()

    def _begin(self) -> None:
        self._began = self._clock()
        self._spent: dict[Doing, float] = {"pull_wait": 0.0, "publish": 0.0, "checkpoint": 0.0}
        self._info: BatchInfo | None = None
        self._groups: list[Group] = []
        """Groups without their payloads, whose memory is freed as soon as the trainer has no more use for it."""
        self._received_bytes = 0
        self._rejected = 0
        self._logged: dict[str, SupportsFloat] = {}
        self._asked = False
        """True when the run was asked for in this step."""
        self.version: int | None = None
        """Version published last in this step; None before."""

    @contextmanager
    def timing(self, doing: Doing) -> Iterator[None]:
        """Count the time of the block for the activity `doing`."""
        began = self._clock()
        waits = doing == "pull_wait"
        if waits:
            self._waits_since = began
        try:
            yield
        finally:
            spent = self._clock() - began
            self._spent[doing] += spent
            if waits:
                self._waited, self._waits_since = self._waited + spent, None

    def time_spent(self) -> TrainerTime | None:
        """Return the time spent since the training loop asked for its first batch, a wait that goes on included.

        None before that, and where another process pulls.
        """
        if self._started_at is None:
            return None
        now = self._clock()
        waited = self._waited + (now - self._waits_since if self._waits_since is not None else 0.0)
        self._busy_ms = max(self._busy_ms, int(1_000 * (now - self._started_at - waited)))
        return TrainerTime(busy_ms=self._busy_ms, wait_ms=int(1_000 * waited))

    def next(self) -> None:
        """Begin the wait for the next batch or micro-batch; a complete step ends here."""
        if self._started_at is None:
            # What the trainer did before it asked for the first time is of no step.
            self._started_at = self._began = self._clock()
            self._spent = dict.fromkeys(self._spent, 0.0)
        else:
            self.end()

    def got(self, batch: Batch) -> None:
        """Count `batch`, a whole one or a micro-batch, which goes to the training loop."""
        self._info = batch.info
        # Their headers alone: views would keep the batch in memory.
        self._groups += (
            replace(group, header_bytes=bytes(group.header_bytes), payload=memoryview(b"")) for group in batch.groups
        )
        self._received_bytes += batch.received_bytes
        if batch.final and self._on_step is not None:
            self._ask()

    def rejected(self, kept: Batch, group_ids: Collection[str]) -> None:
        """Count groups that were given back of what `got` has counted; `kept`: the batch without them."""
        self._info = kept.info
        self._groups = [group for group in self._groups if group.group_id not in group_ids]
        self._rejected += len(group_ids)

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add figures of the trainer's own to this step, under their own names."""
        self._logged.update(values)

    def end(self) -> None:
        """End the step if it is complete, and report it."""
        if self._info is not None and self._info.final:
            self._report()
            self._begin()

    def metrics(self, wait_s: float) -> dict[str, float]:
        """Compute the metrics of the step that the training loop has; empty before the first."""
        if self._info is None:
            return {}
        self._ask()
        times = self._times()
        return self._figures(times, self._answer(wait_s))

    # ── inside ───────────────────────────────────────────────────────────────

    def _ask(self) -> None:
        if self._look is not None and not self._asked:
            self._asked = self._look.ask()

    def _answer(self, wait_s: float) -> RunState | None:
        return self._look.answer(wait_s) if self._look is not None and self._asked else None

    def _report(self) -> None:
        if self._info is None:
            return
        times = self._times()  # Waiting for the figures of the run is no part of the step.
        run = self._answer(GRACE_S if self._on_step is not None else 0.0)
        if self._on_step is not None:
            try:
                self._on_step(self._info.step, self._figures(times, run))
            except Exception:
                logger.exception("on_step failed for step %d; the training goes on", self._info.step)
        if run is not None:
            self._before = run
        self._tallied = replace(self._tally() or self._tallied)

    def _figures(self, times: dict[str, float], run: RunState | None) -> dict[str, float]:
        info = self._info
        if info is None:
            return {}
        figures = {**of_step(info), **of_groups(self._groups), **times}
        figures["received_bytes"] = self._received_bytes
        figures["rejected_groups"] = self._rejected
        if run is not None:
            figures |= of_run(run, self._before)
        if (tally := self._tally()) is not None:
            figures |= of_outcomes(tally, self._tallied)
        if self.version is not None:
            figures["published_version"] = self.version
        own = {name: float(value) for name, value in self._logged.items()}
        return {PREFIX + name: float(value) for name, value in figures.items()} | own

    def _times(self) -> dict[str, float]:
        whole_s = self._clock() - self._began
        train_s = max(0.0, whole_s - sum(self._spent.values()))
        return {
            **{f"{doing}_s": spent_s for doing, spent_s in self._spent.items()},
            "train_s": train_s,
            "step_s": whole_s,
            "busy_share": train_s / whole_s if whole_s > 0 else 0.0,
            "idle_share": self._spent["pull_wait"] / whole_s if whole_s > 0 else 0.0,
        }


def of_step(info: BatchInfo) -> dict[str, float]:
    """Compute the figures of a step over all ranks."""
    return {
        "step": info.step,
        "micro_batches": info.micro_batch + 1,
        "train_version": info.train_version,
        "replayed": info.replayed,
        "groups": info.total_groups,
        "samples": info.total_samples,
        "tokens": info.total_tokens,
        "loss_tokens": info.total_loss_tokens,
        "staleness_mean": info.staleness_mean,
        "staleness_max": info.staleness_max,
        "reused_groups": info.reused_groups,
        "queued_groups": info.queued_groups,
    }


def of_groups(groups: list[Group]) -> dict[str, float]:
    """Compute the figures of this rank's groups; without any, only their number.

    pre-queue = tail − head and in-queue = max(0, train_version − tail), means over groups, in versions, as the service
    counts them. token staleness = max(0, train_version − version of the token), mean over response tokens.
    """
    samples = [(group, sample) for group in groups for sample in group.header.samples if is_trainable(sample)]
    figures: dict[str, float] = {"shard_groups": len(groups), "shard_samples": len(samples)}
    if not samples:
        return figures
    rewards = [reward for group in groups for reward in facts_of(group).trajectory_rewards]
    lengths = [sample.tokens - sample.prompt_len for _, sample in samples]
    mean = sum(rewards) / len(rewards)
    figures |= {
        "shard_tokens": sum(sample.tokens for _, sample in samples),
        "pre_queue_staleness": sum(g.tail_version - g.head_version for g in groups) / len(groups),
        "in_queue_staleness": sum(max(0, g.train_version - g.tail_version) for g in groups) / len(groups),
        "token_staleness_mean": sum(_token_staleness(g, s) for g, s in samples) / max(1, sum(lengths)),
        "reward_mean": mean,
        "reward_std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_max": max(lengths),
        "truncated_share": sum(s.finish_reason == groups_pb2.FINISH_REASON_LENGTH for _, s in samples) / len(samples),
    }
    named = Counter(group.header.environment for group in groups)
    if set(named) != {""}:
        figures |= {f"environment_share/{name or 'unnamed'}": n / len(groups) for name, n in named.items()}
    return figures


def _token_staleness(group: Group, sample: groups_pb2.Sample) -> int:
    """Sum the staleness of the response's tokens; versions of an abandoned timeline are cut as in `Sample.versions`."""
    total, most = 0, group.tail_version
    for span in reversed(sample.spans):
        most = min(most, span.version.version)
        total += (span.end - span.start) * max(0, group.train_version - most)
    return total


def of_outcomes(tally: Tally, before: Tally) -> dict[str, float]:
    """Compute the figures of the groups that were reported since `before`; without any, only their number."""
    groups = tally.groups - before.groups
    figures: dict[str, float] = {"outcomes/groups": groups}
    if groups:
        figures["outcomes/all_right_share"] = (tally.all_right - before.all_right) / groups
        figures["outcomes/all_wrong_share"] = (tally.all_wrong - before.all_wrong) / groups
    return figures


def of_run(run: RunState, before: RunState) -> dict[str, float]:
    """Compute the figures of the run: its present state, and the changes of its ledgers and counters since `before`."""
    engines = in_service(run)
    ready = sum(engine.state == "ready" and engine.loaded >= run.published for engine in engines)
    figures: dict[str, float] = {
        "published_version": run.published.version,
        "engines_ready": ready,
        "engines_lagging": len(engines) - ready,
        "tasks/pending": run.ledger.tasks.pending,
        "tasks/leased": run.ledger.tasks.leased,
    }
    for name in _DELTAS:
        figures[f"ledger/{name}"] = getattr(run.ledger.groups, name).groups - getattr(before.ledger.groups, name).groups
    for name in _TASK_DELTAS:
        figures[f"tasks/{name}"] = getattr(run.ledger.tasks, name) - getattr(before.ledger.tasks, name)
    for name in _COUNTERS:
        figures[f"counts/{name}"] = run.statistics.get(name, 0) - before.statistics.get(name, 0)
    return figures
