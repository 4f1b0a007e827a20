"""Miles' data buffer, kept by the service: what Miles' own engines generate goes in, and comes out under its policy.

    --custom-async-data-buffer-path trainer_client.integrations.miles.BufferServiceDataBuffer

Followed contract: `DataBuffer` of radixark/miles at 31f1ca9 (21 August 2026), and what its pull request 2542 adds
(`trainer_model_id`, `wait_failed`, `aclose`). Pull requests that give every group a receipt to be settled (2284, 2285,
2289; `discard_all`) are refused by name.

Each group that is handed out is one step of the run, so staleness is judged anew for every group, at the version that
`get` names. Invariants: what `put` has accepted survives this process; a group is handed out once, or again in the same
order after a restart that goes back; a group beyond --max-weight-staleness is never handed out, and its prompts go to
the handler of unused samples once, unless another process put it; a run holds the groups of one policy.
"""

import asyncio
import logging
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch
from trainer_client.client.blocking import BufferClient
from trainer_client.integrations.miles.contract import MILES, Sample, load_function
from trainer_client.integrations.miles.finished import (
    Finished,
    Kept,
    Versions,
    flat,
    from_wire,
    to_wire,
    versions_of,
)
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


class Stopped(RuntimeError):
    """The wait was given up: the task that asked was cancelled, or the buffer is closed."""


@dataclass(frozen=True, slots=True)
class _Put:
    """A group that is in the queue, as far as this process knows."""

    prompts: list[Sample]
    head: int
    kept: Kept
    """Fields that could not travel."""


_policies: dict[tuple[str, str], str] = {}
"""Which policy's groups a run holds, by address and run: for all buffers of this process."""


class BufferServiceDataBuffer:
    """One process's view of the run's queue. `put`, `get` and the rest belong to one event loop; only waits are in
    threads.
    """

    def __init__(self, input: ConstructorInput) -> None:  # noqa: A002 - Miles' name
        if hasattr(input, "discard_handler_fn"):
            raise InvalidField(
                "--custom-async-data-buffer-path",
                type(self).__name__,
                "another one: this Miles gives every group a receipt to be settled (discard_handler_fn, discard_all), "
                "which cannot leave its process",
            )
        args = input.args
        self._args = args
        self._unused = input.unused_handler_fn
        self._settings = Settings.of(args)
        self._policy = data_buffer_policy(args)
        self._dynamic_filter = load_function(getattr(args, "dynamic_sampling_filter_path", None))
        self._client = BufferClient(self._settings.address)
        self._pusher = GroupPusher(self._client, self._settings.run_id)
        self._taking = asyncio.Lock()
        self._holding = asyncio.Lock()
        self._waits: set[Callable[[], None]] = set()
        """What ends each put and get that waits."""
        self._closed = False
        self._epoch: int | None = None
        """This process's hold on the run, once it has one."""
        start = self._settings.step_of(getattr(args, "start_rollout_id", None) or 0)
        self._next_step = self._start_step = start * args.rollout_batch_size
        self._current = 0
        """The run's version, as published."""
        self._offset: int | None = None
        """The run's version less Miles'; None until a version of Miles was heard of."""
        self._queued: dict[str, _Put] = {}
        self._retries: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()
        """Fields of which it was logged that they do not travel."""
        self._staleness: list[int] = []
        self._dropped_stale = 0

    # ── the contract ─────────────────────────────────────────────────────────

    async def put(self, input: Input) -> None:  # noqa: A002 - Miles' name
        """Keep a finished group; waits while the queue is full.

        Groups with an aborted sample go to the handler of unused samples, those that the dynamic filter refuses are
        dropped. A field that cannot travel is named in the log, counted, and back in place when this process gets the
        group. Raises InvalidField for a sample of another policy, Stopped, and what the service says of the group.
        """
        samples = flat(input.group)
        for sample in samples:
            self._belongs(getattr(sample, "trainer_model_id", None))
        if any(sample.status.value == "aborted" for sample in samples):
            self._counts[f"{_PREFIX}/aborted_groups_filtered"] += 1
            self._give_back(input.prompt_group)
            return
        if self._is_refused(input.group):
            return
        named = [version for sample in samples for version in versions_of(sample)]
        epoch = await self._at(min(named, default=None), max(named, default=None))
        task_id = self._task_id(input.prompt_group)
        types = MILES.module("utils.types")
        header, payload, kept = to_wire(task_id, input.group, input.prompt_group, self._versions(epoch), types)
        self._say_what_stays(kept)
        head = min(sample.spans[0].version.version for sample in header.samples)
        self._queued[task_id] = _Put(list(input.prompt_group), head, kept)
        withdrawal = Withdrawal()
        outcome = ""
        try:
            with self._ended_by(withdrawal.ask):
                outcome = await asyncio.to_thread(self._pusher.push, header, payload, withdrawal)
        finally:
            if outcome != "queued":
                self._queued.pop(task_id, None)

    async def get(
        self, current_version: int | None = None, trainer_model_id: str | None = None, **_context: object
    ) -> Input:
        """The next group, waiting for it.

        `current_version` is Miles' version of the engines' weights; None as long as it has none. A version that has
        risen is published, and the groups that are trained by then are committed. A get that is cancelled takes
        nothing. Raises BatchNotReady after the settings' timeout, with what is short; InvalidField for another policy
        than the one whose groups are here; Stopped.
        """
        self._belongs(trainer_model_id)
        async with self._taking:
            epoch = await self._at(current_version, current_version)
            stop = threading.Event()
            with self._ended_by(stop.set):
                batch = await asyncio.to_thread(self._pull, epoch, self._next_step, stop)
            self._next_step += 1
            (group,) = batch.groups
            put = self._queued.pop(group.task_id, None)
            self._staleness.append(group.staleness)
            self._forget_stale()
        versions = self._versions(epoch)
        prompts, finished = from_wire(group, MILES.module("utils.types"), versions, None if put is None else put.kept)
        for sample in flat(finished):
            self._belongs(getattr(sample, "trainer_model_id", None))
        types = MILES.module("rollout.fully_async_data_buffer")
        return cast("Input", types.DataBufferInput(prompt_group=prompts, group=finished))

    def get_metrics(self, trainer_model_id: str | None = None) -> dict[str, float]:
        """Figures of the run; counters and staleness are those since the previous call."""
        self._belongs(trainer_model_id)
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

    async def wait_failed(self) -> None:
        """Never returns: nothing of this buffer works in the background, so every failure is raised by put or get."""
        await asyncio.Future()

    async def aclose(self) -> None:
        """End what waits with Stopped, and close the connections. What is queued stays."""
        self._closed = True
        for end in tuple(self._waits):
            end()
        self._pusher.close()
        self._client.close()

    # ── inside ───────────────────────────────────────────────────────────────

    @contextmanager
    def _ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """`end` gives up what the block waits for in another thread, when its task is cancelled or the buffer closed.

        Raises Stopped when it is closed.
        """
        if self._closed:
            raise Stopped("the data buffer is closed")
        self._waits.add(end)
        try:
            yield
        except BaseException as error:
            end()
            if isinstance(error, Exception) and self._closed:
                raise Stopped("the data buffer is closed") from error
            raise
        finally:
            self._waits.discard(end)

    def _belongs(self, trainer_model_id: str | None) -> None:
        """Refuse a second policy of Miles: its groups, in the same run, would be handed out to the first."""
        if trainer_model_id is None:
            return
        run_id = self._settings.run_id
        known = _policies.setdefault((self._settings.address, run_id), trainer_model_id)
        if known != trainer_model_id:
            wanted = f"{known!r}, the one policy whose groups run {run_id!r} holds"
            raise InvalidField("trainer_model_id", trainer_model_id, wanted)

    async def _at(self, oldest: int | None, newest: int | None) -> int:
        """The epoch of the run, taken over at the first use and with Miles' newest version published.

        The first version that Miles names is that of the weights at which the run stands.
        """
        async with self._holding:
            if self._epoch is None:
                run, resumed = await asyncio.to_thread(self._open)
                self._epoch, self._current = resumed.epoch, resumed.version
                self._dropped_stale = run.ledger.groups.dropped_stale.groups
            if self._offset is None and oldest is not None:
                self._offset = self._current - oldest
            if newest is not None and newest + (self._offset or 0) > self._current:
                await asyncio.to_thread(self._publish, self._epoch, newest + (self._offset or 0))
            return self._epoch

    def _open(self) -> tuple[RunState, Resumed]:
        run = self._client.create_run(self._settings.run_id, self._policy)
        return run, self._client.resume(self._settings.run_id, next_step=self._next_step)

    def _say_what_stays(self, kept: Kept) -> None:
        for name in (name for fields in kept for name in fields):
            self._counts[f"{_PREFIX}/fields_not_carried"] += 1
            if name not in self._named:
                self._named.add(name)
                logger.warning("the field %s of samples cannot travel; after a restart their groups lack it", name)

    def _versions(self, epoch: int) -> Versions:
        return Versions(epoch, self._offset or 0, self._current)

    def _publish(self, epoch: int, version: int) -> None:
        """Miles has updated its engines: what was trained for it is committed."""
        ahead = self._settings.lookahead * self._args.rollout_batch_size
        trained = self._next_step - ahead
        through = trained - 1 if trained > self._start_step else None
        self._client.publish(self._settings.run_id, epoch=epoch, version=version, commit_through=through)
        self._current = version

    def _pull(self, epoch: int, step: int, stop: threading.Event) -> Batch:
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
            epoch=epoch,
            step=step,
            train_version=self._current,
            timeout_s=self._settings.timeout_s,
            on_wait=on_wait,
        )

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

    def _is_refused(self, group: Finished) -> bool:
        """True for what the dynamic filter does not keep; counted by its reason."""
        if self._dynamic_filter is None:
            return False
        verdict = self._dynamic_filter(self._args, group)
        if getattr(verdict, "keep", verdict):
            return False
        if reason := getattr(verdict, "reason", None):
            self._counts[f"rollout/dynamic_filter/drop_{reason}"] += 1
        return True


def _name(prompts: list[Sample]) -> str:
    return f"miles-{prompts[0].group_index}"
