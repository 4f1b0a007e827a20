"""Torch dataset over a run: one rank's steps, pulled in the process that iterates, such as a DataLoader's worker.

    with BufferClient(address) as client, client.session("math", tasks=tasks, publisher=publisher) as session:
        dataset = BufferDataset(address, "math", start=session.start, collate=partial(pack, multiple_of=64))
        loader = DataLoader(dataset, batch_size=None, num_workers=1)
        for batch in follow(session, loader):
            train(batch)
            session.publish(model.save_pretrained)

The dataset only pulls. Feeding, publishing, commits and checkpoints stay with the session of the main process. `follow`
tells that session of each step that the training loop gets, and learns from it where to begin.

Invariants: items are steps, in order, each once; after a restart they go on at the first one that the loop did not get.
One worker of a loader pulls; the others give nothing. A pull states the version that will train on its step by the rule
of `TrainClock`. That rule uses the service's own record of publishes and commits here, so it holds in any process. An
iteration begins where `seek` said, and any other is refused, so no step comes again by accident.

Needs torch: pip install 'rollout-buffer[torch]'.
"""

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar, cast

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, Group, Sample
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import PULL_SLICE_S, ClientOptions
from trainer_client.client.pulling import PullSpec
from trainer_client.micro_batches import MicroBatches, PullKey
from trainer_client.session.clock import TrainClock
from trainer_client.session.pulls.puller import Puller, PullSource, pulls_of
from trainer_client.session.session import TrainerSession
from trainer_client.state import Resumed, RunState

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    raise ImportError(
        "trainer_client.dataset needs torch, which is not installed: pip install 'rollout-buffer[torch]'"
    ) from error

logger = logging.getLogger("trainer_client")

T = TypeVar("T")

NOTICE_S = 0.2
"""Interval, in seconds, at which `follow` checks that the tasks are used up or could not be fed."""

_POSITION, _ITERATION, _EXHAUSTED, _BEGINS = range(4)
"""Indices of the shared words. _BEGINS holds the iteration that `seek` announced; a worker may begin it much later."""
_TAKEN = -1


@dataclass(frozen=True, slots=True)
class StepSample:
    """Sample with its place in the run: its group, step and train_version."""

    sample: Sample
    group: Group
    group_index: int
    """Index of the sample's group in the shard, from 0."""
    step: int
    train_version: int
    final: bool
    """True for the last sample of this rank's shard of the step."""


class ServiceClock(TrainClock):
    """TrainClock for a process that is not told of publishes; it asks the service.

        train_version(s) = published version + ⌊(s − P) / batches_per_publish⌋

    P is the number of steps in the published weights, which are the committed ones. If the trainer has committed steps
    that it has not published yet, P follows from the number of publishes since the start.
    """

    def __init__(self, look: Callable[[], RunState], start: Resumed) -> None:
        super().__init__(start.version, start.next_step, 1)
        self._look = look
        self._start = start

    def train_version(self, step: int) -> int:
        """Return the version that will train on `step`, from the run's present state."""
        run = self._look()
        per_publish = run.policy.batches_per_publish or 1
        version, committed = run.published.version, run.committed_steps
        by_number = self._start.next_step + (version - self._start.version) * per_publish
        published_steps = by_number if by_number <= committed < by_number + per_publish else committed
        return TrainClock(version, published_steps, per_publish).train_version(step)


@dataclass(eq=False, repr=False)
class BufferDataset(IterableDataset[T], Generic[T]):
    """Iterable dataset: the steps of a run for one rank, each as `collate` returns it.

    `start`: rank 0's `session.start`. `collate`: a function of a `Batch` that can be pickled where workers are spawned
    (`collate`, `pack`, a `functools.partial` or a function of a module); None: the `Batch` itself. `samples`: give one
    `StepSample` after the other instead. `stop_step`: the first step that is not pulled any more; None: all there are.
    `batch_groups`, `pull_timeout_s`: as of a session. `options`: of the client.

    Pickles to a spawned worker; holds no connection. Iterating raises what a session's iteration raises. A DataLoader
    turns an error of its worker into a RuntimeError that quotes it.
    """

    address: str
    run_id: str
    _: KW_ONLY
    start: Resumed
    rank: int = 0
    world_size: int = 1
    collate: Callable[[Batch], T] | None = None
    samples: bool = False
    stop_step: int | None = None
    batch_groups: int | None = None
    pull_timeout_s: float = 3600.0
    options: ClientOptions | None = None

    def __post_init__(self) -> None:
        if self.samples and self.collate is not None:
            raise InvalidField("samples", self.samples, "False where there is a collate")
        # In memory that all processes of a loader share, and a word each: none is ever half written.
        self._shared = torch.tensor([self.start.next_step, 0, 0, 0], dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def seek(self, step: int) -> None:
        """Let the next iteration begin at `step`, and end one that is under way."""
        self.stop()
        self._shared[_BEGINS] = self._shared[_ITERATION]
        self._shared[_POSITION] = step

    def stop(self) -> None:
        """End an iteration that is under way, in whichever process, within the two seconds of a pull's attempt."""
        self._shared[_ITERATION] += 1

    def end(self) -> None:
        """Say that no more tasks will be submitted: an iteration ends when none is pending or being generated.

        `follow` calls it on rank 0; the other ranks have to be told by the trainer.
        """
        self._shared[_EXHAUSTED] = 1

    def __iter__(self) -> Iterator[T]:
        """Iterate over the steps from where `seek` said; gives nothing in a loader's workers beyond the first.

        Raises InvalidField where `seek` was not called since the last iteration began.
        """
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return iter(())
        step = int(self._shared[_POSITION])
        if step == _TAKEN:
            raise InvalidField("step", None, "where to go on: use follow(session, loader), or seek(session.next_step)")
        self._shared[_POSITION] = _TAKEN
        if worker is not None and worker.num_workers > 1:
            logger.info("one of %d workers pulls rank %d; the others have nothing to do", worker.num_workers, self.rank)
        return self._items(step, int(self._shared[_BEGINS]))

    def _items(self, step: int, iteration: int) -> Iterator[T]:
        with BufferClient(self.address, self.options) as client:
            clock = ServiceClock(lambda: client.run(self.run_id, timeout_s=PULL_SLICE_S), self.start)
            puller = Puller(self._source(client, iteration), clock, self.pull_timeout_s)
            while self.stop_step is None or step < self.stop_step:
                try:
                    batch = whole_step(puller, step)
                except _Stopped:
                    return
                if batch is None:
                    return
                if self.samples:
                    yield from cast("Iterator[T]", _samples_of(batch))
                else:
                    yield cast("T", batch) if self.collate is None else self.collate(batch)
                step += 1

    def _source(self, client: BufferClient, iteration: int) -> PullSource:
        def check() -> None:
            parent = multiprocessing.parent_process()
            stopped = int(self._shared[_ITERATION]) != iteration
            if stopped or (get_worker_info() is not None and parent is not None and not parent.is_alive()):
                raise _Stopped

        start = self.start
        shard = PullSpec(term=start.term, step=start.next_step, rank=self.rank, world_size=self.world_size)
        return PullSource(
            pull=pulls_of(client, self.run_id, shard, lambda _: self.batch_groups),
            published=lambda: client.run(self.run_id, timeout_s=PULL_SLICE_S).published.version,
            exhausted=lambda: bool(self._shared[_EXHAUSTED]),
            check=check,
            loop=client.pull_loop(self.run_id),
        )


def follow(session: TrainerSession, loader: "DataLoader[T]") -> Iterator[T]:
    """Yield the loader's items from the session's next step on; each counts as handed to the training loop when it
    comes.

    `loader`: over a `BufferDataset` of whole steps, with batch_size=None and any number of workers. Called again after
    an error or an end, it goes on where the loop stands. Ends as the session's own iteration does.

    Raises InvalidField for another loader. It does so too for one that pulls further ahead than the policy's
    prefetch_batches where there is a max_staleness. Raises what feeding raised, and RuntimeError for a worker that was
    killed or raised.
    """
    dataset = _dataset_of(loader)
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    declared = session.policy.prefetch_batches or 0
    if session.policy.max_staleness is not None and ahead > declared:
        raise InvalidField("num_workers · prefetch_factor", ahead, f"at most the policy's prefetch_batches, {declared}")
    session.check()
    step = session.next_step
    dataset.seek(step)
    try:
        items = iter(loader)
        with _watching(session, dataset):
            for item in items:
                session.took(step)
                step += 1
                yield item
        session.check()
    finally:
        dataset.stop()


class _Stopped(Exception):
    """Signal that the iteration was ended from outside, or that the worker's parent process died."""


def _dataset_of(loader: "DataLoader[T]") -> BufferDataset[T]:
    dataset = loader.dataset
    if not isinstance(dataset, BufferDataset) or dataset.samples or loader.batch_size is not None:
        raise InvalidField("loader", repr(dataset), "a loader with batch_size=None over a BufferDataset of whole steps")
    return dataset


@contextmanager
def _watching(session: TrainerSession, dataset: BufferDataset[T]) -> Iterator[None]:
    """Tell the dataset when the tasks are used up, and stop it when feeding failed, while the block runs."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(NOTICE_S):
            if session.exhausted:
                dataset.end()
            if session.failed:
                # `follow` raises it, in the trainer's thread.
                dataset.stop()
                return

    watcher = threading.Thread(target=watch, name="dataset-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def whole_step(puller: Puller, step: int) -> Batch | None:
    """Pull the whole step, its micro-batches gathered; None when no more comes."""
    micro_batches, pull_key = MicroBatches(), PullKey(step)
    while (whole := micro_batches.whole()) is None:
        batch = puller.take(pull_key)
        if batch is None:
            return None
        micro_batches.add(batch)
        pull_key = PullKey.after(batch)
    return whole


def _samples_of(batch: Batch) -> Iterator[StepSample]:
    for group in batch.groups:
        group.refuse_rows("take whole steps, and collate them with rows=True")
    placed = [(i, group, sample) for i, group in enumerate(batch.groups) for sample in group.samples]
    for at, (i, group, sample) in enumerate(placed, start=1):
        yield StepSample(sample, group, i, batch.step, batch.info.train_version, at == len(placed))
