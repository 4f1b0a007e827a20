"""Requests to tasks, groups back to requests, on an event loop of its own.

Steps of the run are pulled as groups come, whatever request they belong to, and sorted by task id, so a request is
complete when each of its tasks has its group, in any order. Invariants: a request ends exactly once, with its groups or
with the reason why they do not come; a step is committed when every request that has a group in it, or in a step
before, was trained or has failed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from buffer_wire.errors import CursorConflict, InvalidField, InvalidRequest, RolloutBufferError
from buffer_wire.limits import MAX_TASKS_PER_SUBMIT
from trainer_client.aio import AsyncBufferClient
from trainer_client.batch import Batch, Group
from trainer_client.driver import ClientOptions, worth_repeating
from trainer_client.integrations.verifiers_progress import Progress
from trainer_client.integrations.verifiers_requests import BatchRequest, TaskPlan, plan_tasks
from trainer_client.policy import Policy
from trainer_client.publication import WeightPublisher
from trainer_client.requests import PullSpec, Submission, new_request_id
from trainer_client.state import Resumed, RunState
from trainer_client.tasks import SamplingParams
from trainer_client.waiting import logger

PULL_S = 1.0
"""Longest wait of one pull; between two, failures are looked for."""
PAUSE_S = 0.5
"""Before a call is repeated that the client has given up after its `timeout_s`."""
MAX_STEP_GROUPS = 256
"""Most groups that are pulled at once."""
T = TypeVar("T")
DEFAULT_POLICY = Policy(batch_groups=1, max_queued_groups=1_024, overflow_action="block")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferConfig:
    """Which service and run generate: what verifiers' `client_config` is here."""

    base_url: str
    """host:port of the service, or unix:path."""
    run_id: str
    """The run, created if there is none. It belongs to one generator."""
    policy: Policy = DEFAULT_POLICY
    """Of the run. What loses groups, holds them back by the step, or makes only a part of a batch, is refused."""
    publisher: WeightPublisher | None = None
    """Where `AsyncBatchGenerator.publish` puts weights."""
    options: ClientOptions = field(default_factory=ClientOptions)

    @classmethod
    def of(cls, client_config: "BufferConfig | Mapping[str, Any]") -> "BufferConfig":
        """A config, or a mapping with its fields. Raises InvalidField for names that are none."""
        if isinstance(client_config, BufferConfig):
            return client_config
        for name in client_config:
            if name not in cls.__dataclass_fields__:
                raise InvalidField(f"client_config[{name}]", "…", "one of " + ", ".join(cls.__dataclass_fields__))
        for name in ("base_url", "run_id"):
            if name not in client_config:
                raise InvalidField(f"client_config[{name}]", None, "the service's address and the run's id")
        return cls(**client_config)


class TasksLost(Exception):
    """Tasks of a request have ended without a group; the message says which, and why."""


Outcome: TypeAlias = "dict[str, Group] | Exception"
"""Groups by task id, or why there are none."""


@dataclass(eq=False)
class OpenRequest:
    """A request on its way."""

    request: BatchRequest
    done: Callable[["OpenRequest", Outcome], None]
    submitted_s: float = field(default_factory=time.monotonic)
    plans: list[TaskPlan] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    acknowledged: bool = False
    """Every task is at the service."""


class Collector:
    """`run` it on a loop; `submit` and `trained` are called on the same loop, `progress` by any thread."""

    def __init__(self, config: BufferConfig, sampling: SamplingParams, taken_over: Callable[[Resumed], None]) -> None:
        self._config = config
        self._sampling = sampling
        self._taken_over = taken_over
        self._requests: asyncio.Queue[OpenRequest] = asyncio.Queue()
        self._owner: dict[str, OpenRequest] = {}
        """Tasks whose group is awaited."""
        self._woken = asyncio.Event()
        self._submitted = 0
        self._cursor = 0
        self._strangers = 0
        """Groups of requests that have ended, or that an earlier trainer submitted."""
        self.progress = Progress()

    async def run(self, client: AsyncBufferClient) -> None:
        """Take the run over, then submit and collect until cancelled. Raises what ends all generation."""
        run = await client.create_run(self._config.run_id, self._config.policy)
        check_policy(run.policy)
        start = await client.resume(self._config.run_id, mode="discard")
        if self._config.publisher is not None:
            self._config.publisher.resumed(start.next_step)
        self._cursor = start.cursor
        self.progress.begin(start.next_step)
        self._taken_over(start)
        submitting = asyncio.create_task(self._submit_all(client, start.epoch))
        collecting = asyncio.create_task(self._collect_all(client, start))
        try:
            done, _ = await asyncio.wait({submitting, collecting}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            submitting.cancel()
            collecting.cancel()
            await asyncio.gather(submitting, collecting, return_exceptions=True)

    def submit(self, submitted: OpenRequest) -> None:
        """Take a request; its `done` is called when it ends."""
        self._requests.put_nowait(submitted)

    def trained(self, requests: Iterable[OpenRequest]) -> None:
        """The trainer is through with these."""
        self.progress.trained(requests)
        self._woken.set()

    # ── out ──────────────────────────────────────────────────────────────────

    async def _submit_all(self, client: AsyncBufferClient, epoch: int) -> None:
        while True:
            submitted = await self._requests.get()
            name = f"{epoch}.{self._submitted}"
            self._submitted += 1
            try:
                submitted.plans = plan_tasks(submitted.request, self._sampling, name)
            except Exception as error:  # noqa: BLE001 - a tokenizer's; raised in get_batch
                self._end(submitted, error)
                continue
            self._owner |= dict.fromkeys((plan.task.task_id for plan in submitted.plans), submitted)
            self._woken.set()
            try:
                await self._send(client, epoch, submitted)
            except CursorConflict:
                raise
            except (InvalidRequest, TypeError, ValueError) as error:
                # The request's own fault; the next one may be better.
                self._end(submitted, error)

    async def _send(self, client: AsyncBufferClient, epoch: int, submitted: OpenRequest) -> None:
        tasks = [plan.task for plan in submitted.plans]
        for first in range(0, len(tasks), MAX_TASKS_PER_SUBMIT):
            chunk = tasks[first : first + MAX_TASKS_PER_SUBMIT]
            submission = Submission(
                epoch=epoch,
                expected_cursor=self._cursor,
                cursor=self._cursor + len(chunk),
                tasks=chunk,
                request_id=new_request_id(),
            )
            submitting = partial(client.submit_tasks, self._config.run_id, submission)
            self._cursor = (await _answered(submitting)).cursor
        submitted.acknowledged = True

    # ── in ───────────────────────────────────────────────────────────────────

    async def _collect_all(self, client: AsyncBufferClient, start: Resumed) -> None:
        step, groups, looked_s = start.next_step, 1, time.monotonic()
        while True:
            await self._commit(client, start.epoch)
            if not self._owner:
                self._woken.clear()
                await self._woken.wait()
                continue
            batch = await self._pull(client, PullSpec(epoch=start.epoch, step=step, batch_groups=groups))
            groups = 1
            if batch is not None:
                self._sort(batch)
                # As many as are there already: few pulls when groups come fast, no wait when they do not.
                groups = max(1, min(batch.info.queued_groups, MAX_STEP_GROUPS))
                step += 1
            # After the sorting, for what was pulled is on its way to nobody any more as the service sees it.
            if batch is None or time.monotonic() - looked_s > PULL_S:
                await self._look_for_failures(client)
                looked_s = time.monotonic()

    async def _pull(self, client: AsyncBufferClient, spec: PullSpec) -> Batch | None:
        try:
            return await client.pull(
                self._config.run_id,
                epoch=spec.epoch,
                step=spec.step,
                batch_groups=spec.batch_groups,
                timeout_s=PULL_S,
            )
        except RolloutBufferError as error:
            if not worth_repeating(error):
                raise
            return None

    def _sort(self, batch: Batch) -> None:
        owners: set[OpenRequest] = set()
        for group in batch.groups:
            submitted = self._owner.pop(group.task_id, None)
            if submitted is None:
                self._strangers += 1
                # At 1, 2, 4, 8, …: seldom enough for a log.
                if self._strangers & (self._strangers - 1) == 0:
                    logger.warning("%d groups of requests that nobody waits for were dropped", self._strangers)
                continue
            owners.add(submitted)
            submitted.groups[group.task_id] = group
        self.progress.pulled(batch.step, owners)
        for owner in owners:
            if len(owner.groups) == len(owner.plans):
                owner.done(owner, owner.groups)

    async def _look_for_failures(self, client: AsyncBufferClient) -> None:
        """End the requests whose tasks have failed for good, or cannot come any more."""
        acknowledged = {id(submitted) for submitted in self._owner.values() if submitted.acknowledged}
        run = await _answered(partial(client.run, self._config.run_id))
        for failure in run.failures:
            if (submitted := self._owner.get(failure.task_id)) is not None:
                error = f"task {failure.task_id} failed after {failure.attempts} attempts: {failure.error}"
                self._end(submitted, TasksLost(error))
        if settled(run):
            for submitted in set(self._owner.values()):
                if id(submitted) in acknowledged:
                    missing = sorted(name for name, owner in self._owner.items() if owner is submitted)
                    self._end(submitted, TasksLost(f"{len(missing)} tasks ended without a group, {missing[0]} first"))

    def _end(self, submitted: OpenRequest, error: Exception) -> None:
        self._owner = {name: owner for name, owner in self._owner.items() if owner is not submitted}
        self.progress.trained([submitted])
        submitted.done(submitted, error)

    async def _commit(self, client: AsyncBufferClient, epoch: int) -> None:
        if (through := self.progress.uncommitted()) is not None:
            await _answered(partial(client.commit, self._config.run_id, epoch=epoch, through_step=through))
            self.progress.committed(through)


async def _answered(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` gives, repeated for as long as the client's own tries come to nothing: who waits is a `get_batch`,
    which has its timeout. Raises what a later try does not cure.
    """
    while True:
        try:
            return await call()
        except RolloutBufferError as error:
            if not worth_repeating(error):
                raise
            await asyncio.sleep(PAUSE_S)


def settled(run: RunState) -> bool:
    """True when no task is pending or leased and no group waits: nothing comes any more."""
    tasks, groups = run.ledger.tasks, run.ledger.groups
    return not (tasks.pending or tasks.leased or groups.queued.groups or groups.forming.groups)


def check_policy(policy: Policy) -> None:
    """Raise InvalidField for a policy under which requests would not get their groups."""
    wanted = {
        "overflow_action": ("block", policy.overflow_action == "block"),
        "stale_action": ("recycle, with max_staleness", _keeps_stale(policy)),
        "max_generations": ("0, with max_staleness", policy.max_staleness is None or not policy.max_generations),
        "max_lookahead": ("unset: num_batches_ahead says it", policy.max_lookahead is None),
        "micro_batch_groups": ("0", not policy.micro_batch_groups),
        "batch_tokens": ("0", not policy.batch_tokens),
        "filter_equal_rewards": ("False", not policy.filter_equal_rewards),
        "filter_min_response_tokens": ("0", not policy.filter_min_response_tokens),
        "filter_max_response_tokens": ("0", not policy.filter_max_response_tokens),
        "filter_min_mean_reward_milli": ("unset", policy.filter_min_mean_reward_milli is None),
        "filter_max_mean_reward_milli": ("unset", policy.filter_max_mean_reward_milli is None),
    }
    for name, (limit, holds) in wanted.items():
        if not holds:
            raise InvalidField(f"policy.{name}", getattr(policy, name), limit)


def _keeps_stale(policy: Policy) -> bool:
    return policy.max_staleness is None or policy.stale_action == "recycle"
