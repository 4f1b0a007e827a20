"""Data buffer of Miles, kept by the service: groups from Miles' own engines go in, and come out under its policy.

    --custom-async-data-buffer-path trainer_client.integrations.miles.BufferServiceDataBuffer

Followed contract: `DataBuffer` of radixark/miles at 31f1ca9 (21 August 2026), and the additions of its pull request
2542 (`trainer_model_id`, `wait_failed`, `aclose`). Pull requests that give every group a receipt to be settled (2284,
2285, 2289; `discard_all`) are refused by name.

Each group that is handed out is one step of the run. So staleness is judged anew for every group, at the version that
`get` names.

Invariants: a group that `put` has accepted survives this process. A group is handed out once, or again in the same
order after a restart that goes back. A group beyond --max-weight-staleness is never handed out. Its prompts go to the
handler of unused samples once, unless another process put it. A run holds the groups of one policy.
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
from trainer_client.integrations.miles.settings import Settings, data_buffer_policy, refuse_reuse
from trainer_client.state import Resumed, RunState
from trainer_client.waiting import Waiting

logger = logging.getLogger("trainer_client.integrations.miles")

_PREFIX = "rollout/fully_async"


class ConstructorInput(Protocol):
    """Part of Miles' `DataBufferConstructorInput` that is used here."""

    args: Namespace
    unused_handler_fn: Callable[[list[Sample]], None]


class Input(Protocol):
    """Part of Miles' `DataBufferInput` that is used here."""

    prompt_group: list[Sample]
    group: Finished


class Stopped(RuntimeError):
    """Error: the wait was given up, because the task that asked was cancelled, or the buffer is closed."""


@dataclass(frozen=True, slots=True)
class _Put:
    """Group that this process has put, in the queue as far as the process knows."""

    prompts: list[Sample]
    head: int
    kept: Kept
    """Fields of the group that could not travel."""


_policies: dict[tuple[str, str], str] = {}
"""Policy of Miles whose groups a run holds, by address and run; shared by all buffers of this process."""


class BufferServiceDataBuffer:
    """Data buffer of one process, over the run's queue.

    `put`, `get` and the other methods belong to one event loop; only waits are in threads.
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
        """Callables that end each put and get that waits."""
        self._closed = False
        self._term: int | None = None
        """Term of this process's hold on the run, once it has one."""
        start = self._settings.step_of(getattr(args, "start_rollout_id", None) or 0)
        self._next_step = self._start_step = start * args.rollout_batch_size
        self._current = 0
        """Published version of the run."""
        self._offset: int | None = None
        """Offset of the run's version from Miles' version; None until a version of Miles is known."""
        self._queued: dict[str, _Put] = {}
        self._retries: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()
        """Names of fields already logged as not travelling."""
        self._staleness: list[int] = []
        self._dropped_stale = 0

    # ── the contract ─────────────────────────────────────────────────────────

    async def put(self, input: Input) -> None:  # noqa: A002 - Miles' name
        """Put a finished group into the queue; waits while the queue is full.

        Groups with an aborted sample go to the handler of unused samples; those that the dynamic filter refuses are
        dropped. A field that cannot travel is named in the log and counted. It is back in place when this process gets
        the group. Raises InvalidField for a sample of another policy, Stopped, and the service's errors about the
        group.
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
        term = await self._at(min(named, default=None), max(named, default=None))
        task_id = self._task_id(input.prompt_group)
        types = MILES.module("utils.types")
        header, payload, kept = to_wire(task_id, input.group, input.prompt_group, self._versions(term), types)
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
        """Get the next group; waits for it.

        `current_version` is Miles' version of the engines' weights; None as long as it has none. A version that has
        risen is published, and the groups that are trained by then are committed. A get that is cancelled takes
        nothing. Raises BatchNotReady after the settings' timeout, naming the shortage; Stopped. Raises InvalidField for
        another policy than the one whose groups the run holds, and for a group that is used again.
        """
        self._belongs(trainer_model_id)
        async with self._taking:
            term = await self._at(current_version, current_version)
            stop = threading.Event()
            with self._ended_by(stop.set):
                batch = await asyncio.to_thread(self._pull, term, self._next_step, stop)
            for each in batch.groups:
                refuse_reuse(each)
            self._next_step += 1
            (group,) = batch.groups
            put = self._queued.pop(group.task_id, None)
            self._staleness.append(group.staleness)
            self._forget_stale()
        versions = self._versions(term)
        prompts, finished = from_wire(group, MILES.module("utils.types"), versions, None if put is None else put.kept)
        for sample in flat(finished):
            self._belongs(getattr(sample, "trainer_model_id", None))
        types = MILES.module("rollout.fully_async_data_buffer")
        return cast("Input", types.DataBufferInput(prompt_group=prompts, group=finished))

    def get_metrics(self, trainer_model_id: str | None = None) -> dict[str, float]:
        """Return figures of the run; counters and staleness are those since the previous call."""
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
        """Wait for ever: this buffer does nothing in the background, so put or get raises every failure."""
        await asyncio.Future()

    async def aclose(self) -> None:
        """End waits with Stopped, and close the connections. Queued groups stay."""
        self._closed = True
        for end in tuple(self._waits):
            end()
        self._pusher.close()
        self._client.close()

    # ── inside ───────────────────────────────────────────────────────────────

    @contextmanager
    def _ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Register `end`, which stops the block's wait in another thread when its task is cancelled or the buffer
        closed.

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
        """Return the term of the run, taken over at the first use and with Miles' newest version published.

        The first version that Miles names is taken for the run's present version.
        """
        async with self._holding:
            if self._term is None:
                run, resumed = await asyncio.to_thread(self._open)
                self._term, self._current = resumed.term, resumed.version
                self._dropped_stale = run.ledger.groups.dropped_stale.groups
            if self._offset is None and oldest is not None:
                self._offset = self._current - oldest
            if newest is not None and newest + (self._offset or 0) > self._current:
                await asyncio.to_thread(self._publish, self._term, newest + (self._offset or 0))
            return self._term

    def _open(self) -> tuple[RunState, Resumed]:
        run = self._client.create_run(self._settings.run_id, self._policy)
        return run, self._client.resume(self._settings.run_id, next_step=self._next_step)

    def _say_what_stays(self, kept: Kept) -> None:
        for name in (name for fields in kept for name in fields):
            self._counts[f"{_PREFIX}/fields_not_carried"] += 1
            if name not in self._named:
                self._named.add(name)
                logger.warning("the field %s of samples cannot travel; after a restart their groups lack it", name)

    def _versions(self, term: int) -> Versions:
        return Versions(term, self._offset or 0, self._current)

    def _publish(self, term: int, version: int) -> None:
        """Publish `version`, to which Miles has updated its engines, and commit the groups trained for it."""
        ahead = self._settings.lookahead * self._args.rollout_batch_size
        trained = self._next_step - ahead
        through = trained - 1 if trained > self._start_step else None
        self._client.publish(self._settings.run_id, term=term, version=version, commit_through=through)
        self._current = version

    def _pull(self, term: int, step: int, stop: threading.Event) -> Batch:
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
            term=term,
            step=step,
            train_version=self._current,
            timeout_s=self._settings.timeout_s,
            on_wait=on_wait,
        )

    def _forget_stale(self) -> None:
        """Forget groups that no batch can hold any more, and give their prompts back; the service drops the groups."""
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
        """Name the task: equally after a restart, to recognise a prompt drawn again; differently for each retry."""
        name = _name(prompts)
        return f"{name}.{self._retries[name]}"

    def _is_refused(self, group: Finished) -> bool:
        """True for a group that the dynamic filter does not keep; counted by the filter's reason."""
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
