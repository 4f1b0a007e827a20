"""A run as a torch dataset: whole steps in order, each once, whichever process pulls them and whatever dies."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from buffer_wire.errors import InvalidField
from tests.support.push import GroupArrays, Pusher, arrays_for
from tests.support.service import ServiceProcess
from tests.trainer_client.test_service import assert_same, contents, tasks
from tests.workers.process import worker_process
from trainer_client import BufferClient, Policy, SessionOptions
from trainer_client.batch import Batch
from trainer_client.collate import PackedBatch, PaddedBatch, collate, pack
from trainer_client.dataset import NOTICE_S, BufferDataset, StepSample, follow

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

GROUPS_PER_STEP = 2
QUICK = SessionOptions(pull_timeout_s=30)
POLICY = Policy(batch_groups=GROUPS_PER_STEP, max_queued_groups=64, prefetch_batches=8)
DEADLINE_S = 30.0
SIMULATED = ("--simulate", "--tokens-per-s", "4000", "--length-median", "6", "--lease-wait-s", "1")


def pushed(service: ServiceProcess, run_id: str, steps: int) -> list[GroupArrays]:
    """Groups for so many steps, in the queue of the run."""
    groups = [arrays_for(f"t{i}") for i in range(GROUPS_PER_STEP * steps)]
    with Pusher(service.address, run_id) as pusher:
        pusher.push(*groups)
    return groups


def loader_of(dataset: BufferDataset[object], workers: int, **options: object) -> DataLoader[object]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (1, {}),
        (2, {"persistent_workers": True}),
        (1, {"persistent_workers": True, "prefetch_factor": 3}),
        (1, {"multiprocessing_context": "spawn", "persistent_workers": True}),
    ],
    ids=["0", "1", "2-persistent", "1-persistent", "1-spawned"],
)
def test_steps_come_in_order_each_once_and_for_the_version_that_trains_on_them(
    service: ServiceProcess, client: BufferClient, run_id: str, workers: int, options: dict[str, object]
) -> None:
    client.create_run(run_id, POLICY)
    groups = pushed(service, run_id, 6)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](
            service.address, run_id, start=session.start, stop_step=6, pull_timeout_s=DEADLINE_S
        )
        loader = loader_of(dataset, workers, **options)
        for part in range(2):  # the second goes on where the first has ended
            for batch in itertools.islice(follow(session, loader), 3):
                assert isinstance(batch, Batch)
                assert batch.step == session.next_step - 1
                assert_same(batch, groups[GROUPS_PER_STEP * batch.step :][:GROUPS_PER_STEP])
                assert batch.info.train_version == session.version
                session.publish()
            assert session.next_step == 3 * part + 3
        assert list(follow(session, loader)) == []
    run = client.run(run_id)
    assert (run.committed_steps, run.published.version) == (6, 6)
    assert run.ledger.balanced
    assert run.ledger.groups.trained.groups == 12


def test_tasks_are_fed_generated_and_trained_through_a_worker_of_the_loader(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    """The whole loop with a worker process; ends by itself when the tasks are used up."""
    policy = Policy(
        batch_groups=4,
        max_queued_groups=16,
        overflow_action="block",
        max_staleness=4,
        prefetch_batches=2,
        stale_action="recycle",
    )
    seen: list[str] = []
    with (
        client.session(run_id, policy=policy, tasks=tasks(24), options=QUICK) as session,
        worker_process(service.address, run_id, tmp_path, *SIMULATED),
    ):
        dataset = BufferDataset[object](service.address, run_id, start=session.start, pull_timeout_s=60)
        for batch in follow(session, loader_of(dataset, 1, persistent_workers=True)):
            assert isinstance(batch, Batch)
            assert batch.info.train_version == session.version == batch.step
            assert batch.info.staleness_max <= 4
            seen += [group.task_id for group in batch.groups]
            session.publish()
        assert session.next_step == 6
    assert sorted(seen) == sorted(f"t{i}" for i in range(24))
    assert client.run(run_id).ledger.balanced


def test_a_killed_worker_loses_nothing(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    groups = pushed(service, run_id, 5)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](service.address, run_id, start=session.start, pull_timeout_s=DEADLINE_S)
        loader = loader_of(dataset, 1, worker_init_fn=_say_pid, prefetch_factor=1, persistent_workers=True)
        os.environ["PID_FILE"] = str(Path(service.data_dir) / f"{run_id}.pid")
        items = follow(session, loader)
        first = next(items)
        session.publish()

        def go_on_without_the_worker() -> None:
            # It has pulled the next step or is about to; either way nobody has it. torch may raise at any moment now.
            os.kill(int(Path(os.environ["PID_FILE"]).read_text()), signal.SIGKILL)
            list(items)

        with pytest.raises(RuntimeError, match=r"killed|exited unexpectedly"):
            go_on_without_the_worker()
        assert session.next_step < 5

        fresh = loader_of(dataset, 1)
        got = [first]
        for batch in itertools.islice(follow(session, fresh), 5 - session.next_step):
            got.append(batch)
            session.publish()
        assert session.next_step == 5
    last = got[-1]
    assert isinstance(last, Batch)
    assert_same(last, groups[-GROUPS_PER_STEP:])
    assert client.run(run_id).ledger.groups.trained.groups == 10


def _say_pid(_: int) -> None:
    Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))


def test_what_was_pulled_ahead_comes_again_byte_for_byte(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    client.create_run(run_id, POLICY)
    pushed(service, run_id, 4)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](service.address, run_id, start=session.start, stop_step=4)
        ahead = list(dataset)  # nobody has told the session of them
        again = list(follow(session, loader_of(dataset, 1)))
    assert [batch.step for batch in ahead if isinstance(batch, Batch)] == [0, 1, 2, 3]
    for one, other in zip(ahead, again, strict=True):
        assert isinstance(one, Batch)
        assert isinstance(other, Batch)
        assert contents(one) == contents(other)
        assert other.info.replayed


def test_a_session_goes_on_where_the_loader_has_stopped(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    client.create_run(run_id, POLICY)
    pushed(service, run_id, 4)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](service.address, run_id, start=session.start, pull_timeout_s=DEADLINE_S)
        assert len(list(itertools.islice(follow(session, loader_of(dataset, 0)), 2))) == 2
        assert next(session).step == 2
        (last,) = itertools.islice(follow(session, loader_of(dataset, 0)), 1)
        assert isinstance(last, Batch)
        assert last.step == 3
    prefetching = client.session(run_id, next_step=0, prefetch=1, options=QUICK)
    with prefetching as session, pytest.raises(InvalidField, match="where another process pulls"):
        session.took(0)


def test_streamed_steps_come_whole(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=4, micro_batch_groups=2, max_queued_groups=64))
    groups = pushed(service, run_id, 4)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[Batch](service.address, run_id, start=session.start, stop_step=2)
        steps = list(dataset)
    for step, batch in enumerate(steps):
        assert (batch.step, batch.final, batch.info.total_groups) == (step, True, 4)
        assert_same(batch, groups[4 * step :][:4])


def test_an_iteration_ends_when_it_is_told_that_no_tasks_will_come(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    """End that rank 0 sees by itself, and of which the others have to be told."""
    client.create_run(run_id, POLICY)
    pushed(service, run_id, 1)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](service.address, run_id, start=session.start, pull_timeout_s=DEADLINE_S)
        items = iter(loader_of(dataset, 1))
        assert isinstance(next(items), Batch)
        dataset.end()
        assert list(items) == []


@pytest.mark.faults
def test_a_worker_whose_trainer_was_killed_ends(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    client.create_run(run_id, POLICY)
    pid_file = tmp_path / "pid"
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer_client.waiting_loader", service.address, run_id],
        env={**os.environ, "PID_FILE": str(pid_file)},
    )
    try:
        until(pid_file.exists, "the loader's worker to begin", 60)
        service.until_metric(1, "rollout_buffer_open_rpcs", method="PullBatch")
    finally:
        trainer.kill()
        trainer.wait()
    worker = int(pid_file.read_text())
    until(lambda: not alive(worker), "the worker to end", DEADLINE_S)


def until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Tell whether the process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_step_comes_twice_in_silence(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    pushed(service, run_id, 2)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](service.address, run_id, start=session.start, stop_step=1)
        assert len(list(dataset)) == 1
        with pytest.raises(InvalidField, match="seek"):
            iter(dataset)
        dataset.seek(0)
        assert len(list(dataset)) == 1


def test_ranks_get_the_parts_of_each_step(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    groups = pushed(service, run_id, 3)
    with client.session(run_id, world_size=2, options=QUICK) as session:
        ranks = [
            list(
                BufferDataset[Batch](service.address, run_id, start=session.start, rank=rank, world_size=2, stop_step=3)
            )
            for rank in range(2)
        ]
    for step in range(3):
        parts = [group.task_id for rank in ranks for group in rank[step].groups]
        assert sorted(parts) == sorted(group.task_id for group in groups[GROUPS_PER_STEP * step :][:GROUPS_PER_STEP])
        assert all(len(rank[step].groups) == 1 for rank in ranks)


def test_batches_are_collated_in_the_worker(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    groups = pushed(service, run_id, 2)
    tokens = [sum(len(s.token_ids) for g in groups[2 * i : 2 * i + 2] for s in g.samples) for i in range(2)]
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](
            service.address, run_id, start=session.start, stop_step=2, collate=partial(pack, multiple_of=16)
        )
        for step, packed in enumerate(follow(session, loader_of(dataset, 1))):
            assert isinstance(packed, PackedBatch)
            assert (packed.step, int(packed.cu_seqlens[4])) == (step, tokens[step])
            assert len(packed.token_ids) % 16 == 0
            torch.testing.assert_close(
                packed.token_ids[: packed.cu_seqlens[1]], torch.from_numpy(groups[2 * step].samples[0].token_ids).long()
            )


def test_samples_come_one_by_one_and_say_which_is_the_steps_last(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    client.create_run(run_id, POLICY)
    groups = pushed(service, run_id, 2)
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[StepSample](service.address, run_id, start=session.start, stop_step=2, samples=True)
        samples = list(DataLoader(dataset, batch_size=None, num_workers=1))
        for each in samples:
            if each.final:
                session.took(each.step)
        session.commit()
    assert [each.final for each in samples] == [False, False, False, True] * 2
    assert [each.group.task_id for each in samples] == [group.task_id for group in groups for _ in group.samples]
    assert [each.group_index for each in samples] == [0, 0, 1, 1] * 2
    for each, was in zip(samples, [s for g in groups for s in g.samples], strict=True):
        assert each.sample.token_ids.tolist() == was.token_ids.tolist()
        assert each.sample.versions.tolist() == [-1] * 3 + [0] * (len(was.token_ids) - 3)
    assert client.run(run_id).committed_steps == 2


def _late(worker: int) -> None:
    """The loader's worker begins after its loop was told to end."""
    time.sleep(5 * NOTICE_S)


@pytest.mark.parametrize("worker_init_fn", [None, _late], ids=["early", "late"])
def test_what_the_iterable_of_tasks_raises_ends_the_loop(
    service: ServiceProcess, client: BufferClient, run_id: str, worker_init_fn: Callable[[int], None] | None
) -> None:
    def broken() -> Iterator[object]:
        yield from tasks(2)
        raise ValueError("no more prompts")

    client.create_run(run_id, POLICY)
    with client.session(run_id, tasks=broken(), options=QUICK) as session:  # type: ignore[arg-type]
        dataset = BufferDataset[object](service.address, run_id, start=session.start, pull_timeout_s=DEADLINE_S)
        started = time.monotonic()
        with pytest.raises(ValueError, match="no more prompts"):
            list(follow(session, loader_of(dataset, 1, worker_init_fn=worker_init_fn)))
        assert time.monotonic() - started < DEADLINE_S / 2


def test_errors_of_the_service_reach_the_loop(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    pushed(service, run_id, 1)
    with client.session(run_id, options=QUICK) as session:
        client.resume(run_id)  # another trainer
        dataset = BufferDataset[object](service.address, run_id, start=session.start, pull_timeout_s=DEADLINE_S)
        with pytest.raises(RuntimeError, match="StaleTerm"):
            list(follow(session, loader_of(dataset, 1)))


def test_a_loader_that_pulls_further_ahead_than_the_gate_knows_is_refused(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    client.create_run(run_id, Policy(batch_groups=2, max_staleness=4, prefetch_batches=1))
    with client.session(run_id, options=QUICK) as session:
        dataset = BufferDataset[object](service.address, run_id, start=session.start)
        with pytest.raises(InvalidField, match="prefetch_batches, 1") as raised:
            next(follow(session, loader_of(dataset, 1)))
        assert raised.value.attributes["field"] == "num_workers · prefetch_factor"
        with pytest.raises(InvalidField, match="batch_size=None"):
            next(follow(session, DataLoader(dataset)))
        with pytest.raises(InvalidField, match="collate"):
            BufferDataset(service.address, run_id, start=session.start, samples=True, collate=collate)


def test_collated_batches_survive_a_pickle(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    pushed(service, run_id, 1)
    batch = client.pull(run_id, term=1, step=0, timeout_s=10)
    copied = pickle.loads(pickle.dumps(batch))
    assert contents(copied) == contents(batch)
    assert copied.info == batch.info
    one, other = collate(batch), collate(copied)
    assert isinstance(one, PaddedBatch)
    assert torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.versions, other.versions)
