"""A worker process with simulated engines, the real service and a real trainer session: the loop without SGLang."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.service import ServiceProcess, running_service
from tests.workers.process import worker_process
from tests.workers.training import FAST, OPTIONS, endless, seen_once, until, write_weights
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, Task
from trainer_client.collate import pack
from trainer_client.publish import FilesPublisher


@pytest.mark.parametrize("serve", ["path", "http"])
def test_loop_trains_publishes_and_reloads(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, serve: str
) -> None:
    seen: set[str] = set()
    policy = Policy(batch_groups=8, max_staleness=2, overflow_action="block")
    with (
        FilesPublisher(tmp_path / "published", serve=serve) as publisher,  # type: ignore[arg-type]
        worker_process(service.address, run_id, tmp_path, *FAST, "--engines", "2") as worker,
        client.session(run_id, policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as session,
    ):
        for batch in itertools.islice(session, 12):
            seen_once(seen, [group.task_id for group in batch.groups])
            assert all(sample.reward == sample.tokens - sample.prompt_len for sample in batch.samples)
            session.publish(write_weights(b"%d" % batch.step))
        until(
            lambda: [engine.loaded.version for engine in client.run(run_id).engines] == [12, 12], "both engines at 12"
        )
        assert worker.stop() == 0
    state = client.run(run_id)
    assert state.ledger.groups.balanced
    assert state.ledger.tasks.balanced
    assert state.statistics["staleness_max"] <= 2
    assert all(engine.reloads >= 3 and engine.errors == 0 for engine in state.engines)
    assert state.ledger.tasks.leased == 0
    assert state.statistics["leases_expired"] == 0


def test_columns_that_tasks_ask_of_the_engine_reach_the_trainer(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    asked = [
        Task(
            group_size=2,
            sampling=SamplingParams(max_new_tokens=16, top_p=0.9, seed=i),
            prompt_token_ids=[1, 2, i],
            columns=["sampling_mask"],
        )
        for i in range(2)
    ]
    with (
        worker_process(service.address, run_id, tmp_path, *FAST),
        client.session(run_id, policy=Policy(batch_groups=2), tasks=asked, options=OPTIONS) as session,
    ):
        batch = next(session)
    for sample in batch.samples:
        kept, counts = sample.extras["sampling_mask"], sample.extras["sampling_mask_counts"]
        assert counts[: sample.prompt_len].tolist() == [0, 0, 0]
        assert counts.sum() == len(kept)
        starts = np.cumsum(counts)[sample.prompt_len - 1 : -1]
        assert kept[starts].tolist() == sample.token_ids[sample.prompt_len :].tolist()
    packed = pack(batch, extras=("sampling_mask", "sampling_mask_counts"))
    values, offsets = packed.extras["sampling_mask"]
    assert len(values) == offsets[-1] == torch.as_tensor(packed.extras["sampling_mask_counts"]).sum()


def test_killed_service_comes_back_and_the_loop_goes_on(tmp_path: Path) -> None:
    seen: set[str] = set()
    policy = Policy(batch_groups=4, max_queued_groups=16, overflow_action="block")
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        FilesPublisher(tmp_path / "published") as publisher,
        worker_process(service.address, "r", tmp_path, *FAST) as worker,
        client.session("r", policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as session,
    ):
        for batch in itertools.islice(session, 15):
            seen_once(seen, [group.task_id for group in batch.groups])
            session.publish(write_weights(b"%d" % batch.step))
            if batch.step in (4, 9):
                service.kill()
                service.start()
        assert worker.process.poll() is None
        assert worker.stop() == 0
        state = client.run("r")
    assert state.ledger.groups.balanced
    assert state.ledger.tasks.balanced
    assert state.ledger.groups.trained.groups == 60
    assert state.ledger.tasks.failed == 0


def test_worker_that_comes_first_waits_for_the_run(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with worker_process(service.address, run_id, tmp_path, *FAST) as worker:
        until(lambda: "the trainer, which creates the run" in worker.said(), "the worker says on whom it waits")
        tasks = list(itertools.islice(endless(), 2))
        with client.session(run_id, policy=Policy(batch_groups=2), tasks=tasks, options=OPTIONS) as session:
            assert len(next(session).groups) == 2
        assert worker.stop() == 0


def test_resumed_trainer_takes_the_workers_back_to_its_version(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_staleness=2)
    with (
        FilesPublisher(tmp_path / "published", keep=10) as publisher,
        worker_process(service.address, run_id, tmp_path, *FAST) as worker,
    ):
        with client.session(run_id, policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as first:
            for batch in itertools.islice(first, 6):
                first.publish(write_weights(b"%d" % batch.step))
            term = first.term
        with client.session(run_id, tasks=endless(), publisher=publisher, next_step=3, options=OPTIONS) as second:
            assert second.version == 3
            until(
                lambda: (
                    (client.run(run_id).engines[0].loaded.term, client.run(run_id).engines[0].loaded.version)
                    == (term + 1, 3)
                ),
                "the engine is back at version 3",
            )
            for batch in itertools.islice(second, 6):
                second.publish(write_weights(b"again %d" % batch.step))
        assert worker.stop() == 0
    state = client.run(run_id)
    assert state.ledger.groups.balanced
    assert state.ledger.tasks.failed == 0


def test_worker_waits_while_the_run_drains_and_goes_on_when_it_is_continued(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
    with (
        client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session,
        worker_process(service.address, run_id, tmp_path, *FAST) as worker,
    ):
        next(session)
        client.drain_run(run_id)
        batches = sum(1 for _ in session)
        state = session.state()
        assert (state.ledger.tasks.leased, state.draining) == (0, True)
        assert state.ledger.groups.queued.groups < 4
        until(lambda: "being drained" in worker.said(), "the worker says why it is idle")
        assert worker.process.poll() is None
        client.continue_run(run_id)
        assert next(session).step == batches + 1
        assert worker.stop() == 0
    assert client.run(run_id).ledger.balanced


def test_worker_outlives_a_run_that_is_deleted_and_made_anew(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
    with worker_process(service.address, run_id, tmp_path, *FAST) as worker:
        with client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session:
            for _ in range(3):
                next(session)
                session.publish()
        client.delete_run(run_id)
        until(lambda: "the trainer, which creates the run" in worker.said(), "the worker misses the run")
        with client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session:
            for _ in range(3):
                assert len(next(session).groups) == 4
                session.publish()
            assert session.state().paused == ""
        assert worker.stop() == 0
