"""Miles' data buffer, kept by the service: what Miles' own engines generate goes in, and comes out under its policy.

    --custom-async-data-buffer-path trainer_client.integrations.miles.BufferServiceDataBuffer

Followed contract: `DataBuffer` of radixark/miles at 31f1ca9 (21 August 2026): `put(DataBufferInput)`, `get(**context)`
with `current_version`, `get_metrics()`. Two later shapes are served as well: `put` returns PutOutcomes, `get` takes
num_groups and then returns a list; `snapshot` and `restore`. Those were not found in any public source; their forms
here are ours.

Each group that is handed out is one step of the run, so staleness is judged anew for every group, at the version that
`get` names. Invariants: what `put` has accepted survives this process; a group is handed out once, or again in the same
order after a restart that goes back; a group beyond --max-weight-staleness is never handed out, and its prompts go to
the handler of unused samples once, unless another process put it.
"""

import asyncio
import logging
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypedDict, cast, overload

from trainer_client.batch import Batch, Group
from trainer_client.client import BufferClient
from trainer_client.integrations.miles.contract import MILES, Sample, load_function
from trainer_client.integrations.miles.finished import Finished, Versions, flat, from_wire, labels, to_wire
from trainer_client.integrations.miles.pushing import GroupPusher, Withdrawal
from trainer_client.integrations.miles.settings import Settings, data_buffer_policy
from trainer_client.state import Resumed, RunState
from trainer_client.waiting import Waiting

logger = logging.getLogger("trainer_client.integrations.miles")

_PREFIX = "rollout/fully_async"


class ConstructorInput(Protocol):
    """`DataBufferConstructorInput`."""

    args: Namespace
    unused_handler_fn: Callable[[list[Sample]], None]


class Input(Protocol):
    """`DataBufferInput`."""

    prompt_group: list[Sample]
    group: Finished


class Snapshot(TypedDict):
    """Where the buffer stands; plain numbers, fit for JSON."""

    epoch: int
    next_step: int
    """Groups handed out since the run began."""
    cursor: int
    """Prompts that a feeder has submitted to the run: 0 as long as only groups are put."""


@dataclass(frozen=True, slots=True)
class PutOutcomes:
    """What became of one put: exactly one of these is 1."""

    queued: int = 0
    duplicate: int = 0
    """The prompt's group is there already, from before a restart."""
    filtered: int = 0
    unused: int = 0
    """Aborted; the prompts went to the handler."""


class Stopped(RuntimeError):
    """The wait was given up because the task that asked was cancelled."""


@dataclass(frozen=True, slots=True)
class _Put:
    """A group that is in the queue, as far as this process knows."""

    prompts: list[Sample]
    head: int


@dataclass(frozen=True, slots=True)
class _Hold:
    """This process's hold on the run."""

    epoch: int
    cursor: int


class BufferServiceDataBuffer:
    """One process's view of the run's queue. `put`, `get` and the rest belong to one event loop; only waits are in
    threads.
    """

    def __init__(self, input: ConstructorInput) -> None:  # noqa: A002 - Miles' name
        args = input.args
        self._args = args
        self._unused = input.unused_handler_fn
        self._settings = Settings.of(args)
        self._policy = data_buffer_policy(args)
        self._dynamic_filter = load_function(getattr(args, "dynamic_sampling_filter_path", None))
        self._client = BufferClient(self._settings.address)
        self._pusher = GroupPusher(self._client, self._settings.run_id)
        self._taking = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._hold: _Hold | None = None
        start = self._settings.step_of(getattr(args, "start_rollout_id", None) or 0)
        self._next_step = self._start_step = start * args.rollout_batch_size
        self._current = 0
        """The run's version, as published."""
        self._offset: int | None = None
        """The run's version less Miles'; None until a version of Miles was heard of."""
        self._queued: dict[str, _Put] = {}
        self._retries: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._staleness: list[int] = []
        self._dropped_stale = 0

    # ── the contract ─────────────────────────────────────────────────────────

    async def put(self, input: Input) -> PutOutcomes:  # noqa: A002 - Miles' name
        """Keep a finished group; waits while the queue is full.

        Groups with an aborted sample go to the handler of unused samples, those that the dynamic filter refuses are
        dropped. Raises InvalidField for a sample that cannot travel, and what the service says of the group.
        """
        samples = flat(input.group)
        if any(sample.status.value == "aborted" for sample in samples):
            self._counts[f"{_PREFIX}/aborted_groups_filtered"] += 1
            self._give_back(input.prompt_group)
            return PutOutcomes(unused=1)
        if (reason := self._refused(input.group)) is not None:
            self._counts[f"rollout/dynamic_filter/drop_{reason}"] += 1
            return PutOutcomes(filtered=1)
        hold = await self._opened()
        self._heard_of(min((int(label) for sample in samples for label in labels(sample)), default=None))
        task_id = self._task_id(input.prompt_group)
        header, payload = to_wire(task_id, input.group, input.prompt_group, self._versions(hold))
        head = min(sample.spans[0].version.version for sample in header.samples)
        self._queued[task_id] = _Put(list(input.prompt_group), head)
        withdrawal = Withdrawal()
        try:
            outcome = await asyncio.to_thread(self._pusher.push, header, payload, withdrawal)
        except BaseException:
            withdrawal.ask()
            self._queued.pop(task_id, None)
            raise
        if outcome == "queued":
            return PutOutcomes(queued=1)
        self._queued.pop(task_id, None)
        return PutOutcomes(filtered=1) if outcome == "filtered" else PutOutcomes(duplicate=1)

    @overload
    async def get(self, num_groups: None = None, **context: object) -> Input: ...
    @overload
    async def get(self, num_groups: int, **context: object) -> list[Input]: ...
    async def get(self, num_groups: int | None = None, **context: object) -> Input | list[Input]:
        """The next group, or a list of the next `num_groups`, waiting for them.

        `context`: `current_version` is Miles' version of the engines' weights; None as long as it has none. A version
        that has risen is published, and the groups that are trained by then are committed. A get that is cancelled
        takes nothing. Raises BatchNotReady after the settings' timeout, with what is short.
        """
        current = cast("int | None", context.get("current_version"))
        async with self._taking:
            hold = await self._opened()
            self._heard_of(current)
            if current is not None and current + (self._offset or 0) > self._current:
                await asyncio.to_thread(self._publish, hold, current + (self._offset or 0))
            stop = threading.Event()
            taken: list[Group] = []
            try:
                for step in range(self._next_step, self._next_step + (num_groups or 1)):
                    batch = await asyncio.to_thread(self._pull, hold, step, stop)
                    taken += batch.groups
            except BaseException:
                stop.set()
                raise
            self._next_step += num_groups or 1
            for group in taken:
                self._queued.pop(group.task_id, None)
                self._staleness.append(group.staleness)
            self._forget_stale()
        entries = [self._entry(hold, group) for group in taken]
        return entries if num_groups is not None else entries[0]

    def get_metrics(self) -> dict[str, float]:
        """Figures of the run; counters and staleness are those since the previous call."""
        run = self._client.run(self._settings.run_id)
        stale = run.ledger.groups.dropped_stale.groups
        metrics: dict[str, float] = {
            f"{_PREFIX}/queue_size": run.ledger.groups.queued.groups,
            f"{_PREFIX}/aborted_groups_filtered": 0,
            f"{_PREFIX}/stale_groups_filtered": stale - self._dropped_stale,
            **self._counts,
        }
        self._dropped_stale = stale
        if self._staleness:
            metrics[f"{_PREFIX}/avg_staleness"] = sum(self._staleness) / len(self._staleness)
            metrics[f"{_PREFIX}/max_staleness"] = max(self._staleness)
        waiting = [self._current - put.head for put in self._queued.values()]
        if waiting:
            metrics[f"{_PREFIX}/buffer_avg_staleness"] = sum(waiting) / len(waiting)
            metrics[f"{_PREFIX}/buffer_max_staleness"] = max(waiting)
        self._counts.clear()
        self._staleness.clear()
        return metrics

    def snapshot(self) -> Snapshot:
        """Where a checkpoint that is taken now would go on. Raises UnknownRun before the first put or get."""
        hold = self._hold
        if hold is None:
            run = self._client.run(self._settings.run_id)
            hold = _Hold(run.epoch, run.cursor)
        return Snapshot(epoch=hold.epoch, next_step=self._next_step, cursor=hold.cursor)

    def restore(self, state: Snapshot) -> None:
        """Go back to a snapshot, with the next put or get: what was handed out after it comes again, in the same order.

        That raises ReplayGap when its groups are gone.
        """
        self._next_step = self._start_step = int(state["next_step"])
        self._hold = self._offset = None

    def close(self) -> None:
        """Close the connections. What is queued stays."""
        self._pusher.close()
        self._client.close()

    # ── inside ───────────────────────────────────────────────────────────────

    async def _opened(self) -> _Hold:
        """The hold on the run, which is taken over at the first use."""
        async with self._opening:
            if self._hold is None:
                run, resumed = await asyncio.to_thread(self._open)
                self._hold = _Hold(resumed.epoch, resumed.cursor)
                self._current = resumed.version
                self._dropped_stale = run.ledger.groups.dropped_stale.groups
            return self._hold

    def _open(self) -> tuple[RunState, Resumed]:
        run = self._client.create_run(self._settings.run_id, self._policy)
        return run, self._client.resume(self._settings.run_id, next_step=self._next_step)

    def _heard_of(self, version: int | None) -> None:
        """The first version that Miles names is that of the weights at which the run stands."""
        if self._offset is None and version is not None:
            self._offset = self._current - version

    def _versions(self, hold: _Hold) -> Versions:
        return Versions(hold.epoch, self._offset or 0, self._current)

    def _publish(self, hold: _Hold, version: int) -> None:
        """Miles has updated its engines: what was trained for it is committed."""
        ahead = self._settings.lookahead * self._args.rollout_batch_size
        trained = self._next_step - ahead
        through = trained - 1 if trained > self._start_step else None
        self._client.publish(self._settings.run_id, epoch=hold.epoch, version=version, commit_through=through)
        self._current = version

    def _pull(self, hold: _Hold, step: int, stop: threading.Event) -> Batch:
        warned = time.monotonic()

        def on_wait(waiting: Waiting) -> None:
            nonlocal warned
            if stop.is_set():
                raise Stopped(f"gave up {waiting.doing}")
            if time.monotonic() - warned >= self._settings.no_progress_s:
                warned = time.monotonic()
                logger.warning("%s", waiting)

        return self._client.pull(
            self._settings.run_id,
            epoch=hold.epoch,
            step=step,
            train_version=self._current,
            timeout_s=self._settings.timeout_s,
            on_wait=on_wait,
        )

    def _entry(self, hold: _Hold, group: Group) -> Input:
        make = MILES.module("utils.types").Sample.from_dict
        prompts, finished = from_wire(group, make, self._versions(hold))
        types = MILES.module("rollout.fully_async_data_buffer")
        return cast("Input", types.DataBufferInput(prompt_group=prompts, group=finished))

    def _forget_stale(self) -> None:
        """Groups that no batch can hold any more: the service drops them, their prompts are given back."""
        limit = self._policy.max_staleness
        if limit is None:
            return
        for task_id, put in list(self._queued.items()):
            if self._current - put.head > limit:
                del self._queued[task_id]
                self._give_back(put.prompts)

    def _give_back(self, prompts: list[Sample]) -> None:
        self._retries[_name(prompts)] += 1
        self._unused(prompts)

    def _task_id(self, prompts: list[Sample]) -> str:
        """The same after a restart, so that a prompt that is drawn again is known; another one for each retry."""
        name = _name(prompts)
        return f"{name}.{self._retries[name]}"

    def _refused(self, group: Finished) -> str | None:
        """Why the dynamic filter does not keep a group."""
        if self._dynamic_filter is None:
            return None
        verdict = self._dynamic_filter(self._args, group)
        if getattr(verdict, "keep", verdict):
            return None
        return str(getattr(verdict, "reason", None) or "filter")


def _name(prompts: list[Sample]) -> str:
    return f"miles-{prompts[0].group_index}"
