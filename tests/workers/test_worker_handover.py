"""Worker processes that are stopped, killed or lose a lease, with the real service: who goes on with their work."""

import itertools
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_workers.engine.simulated.answers import experts_of
from rollout_workers.main import EXIT_KILLED
from tests.support.service import ServiceProcess, running_service
from tests.workers.process import worker_process
from tests.workers.training import FAST, OPTIONS, SLOW, endless, until
from trainer_client import BufferClient, ClientOptions, Policy
from trainer_client.collate import collate


def test_stopped_worker_hands_its_work_to_the_next(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    asked = ("sampling_mask", "top_logprobs_3", "entropy", "routed_experts")
    tasks = [replace(task, columns=asked) for task in itertools.islice(endless(max_new_tokens=60), 4)]
    with client.session(run_id, policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS) as session:
        with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
            until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
            time.sleep(0.7)
            assert worker.stop() == 0
        state = client.run(run_id)
        assert (state.ledger.tasks.pending, state.ledger.tasks.leased, state.statistics["leases_returned"]) == (4, 0, 4)
        with worker_process(service.address, run_id, tmp_path, *FAST, worker_id="w2") as second:
            batch = next(session)
            assert second.stop() == 0
    assert sorted(group.task_id for group in batch.groups) == [task.task_id for task in tasks]
    assert "partial rollout not used" not in second.said()
    for sample in batch.samples:
        # The simulated engine makes columns of the tokens alone: what two workers made has to be that, token by token.
        experts, prompt = sample.extras["routed_experts"], sample.prompt_len
        assert np.array_equal(experts, np.concatenate([experts_of(sample.token_ids[:-1]), experts[-2:-1]]))
        assert np.array_equal(sample.extras["top_ids"][prompt:, 0], sample.token_ids[prompt:])
        assert np.array_equal(sample.extras["top_logprobs"][prompt:, 0], sample.logprobs[prompt:])
        assert np.array_equal(sample.extras["entropy"][prompt:] * 8, sample.token_ids[prompt:] % 7)
        assert not any(sample.extras[name][:prompt].any() for name in ("top_ids", "entropy", "sampling_mask_counts"))
    collated = collate(batch, extras="all")
    routed, top = collated.extras["routed_experts"], collated.extras["top_logprobs"]
    assert isinstance(routed, torch.Tensor)
    assert isinstance(top, torch.Tensor)
    assert (routed.dtype, top.shape[2]) == (torch.uint8, 3)
    state = client.run(run_id)
    assert state.statistics["partial_rollout_tokens_discarded"] == 0
    assert state.ledger.tasks.completed == 4


def test_killed_worker_loses_its_leases_by_expiry(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=400), 4))
    policy = Policy(batch_groups=4, lease_ttl_ms=1_000, retry_backoff_ms=50)
    with client.session(run_id, policy=policy, tasks=tasks, options=OPTIONS) as session:
        with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
            until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
            worker.kill()
        with worker_process(service.address, run_id, tmp_path, *FAST, worker_id="w2") as second:
            assert len(next(session).groups) == 4
            assert second.stop() == 0
    assert client.run(run_id).statistics["leases_expired"] == 4


def test_restarted_worker_of_the_same_name_gets_its_tasks_back_at_once(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=400), 4))
    with client.session(run_id, policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS) as session:
        with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
            until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
            worker.kill()
        with worker_process(service.address, run_id, tmp_path, *FAST) as second:
            # The leases would live for a minute.
            assert len(next(session).groups) == 4
            assert second.stop() == 0
    assert client.run(run_id).statistics["leases_expired"] == 0


def interrupted(service: ServiceProcess, client: BufferClient, run_id: str, folder: Path) -> None:
    """Four leases are begun by a worker that is stopped, so that four partial rollouts of version 0 are left."""
    with worker_process(service.address, run_id, folder, *SLOW, worker_id="first") as worker:
        until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
        time.sleep(0.7)
        assert worker.stop() == 0
    assert client.ledger(run_id).tasks.pending == 4


@pytest.mark.parametrize(("spread", "kept"), [(1, False), (5, True)])
def test_partial_rollout_beyond_the_spread_starts_anew(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, spread: int, kept: bool
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=200), 4))
    policy = Policy(batch_groups=4, max_version_spread=spread)
    with client.session(run_id, policy=policy, tasks=tasks, options=OPTIONS) as session:
        interrupted(service, client, run_id, tmp_path)
        for _ in range(3):
            session.publish()
        with worker_process(service.address, run_id, tmp_path, *FAST, worker_id="second") as worker:
            batch = next(session)
            assert worker.stop() == 0
        state = session.state()
    versions = {tuple(span.version.version for span in sample.spans) for sample in batch.samples}
    assert versions == ({(0, 3)} if kept else {(3,)})
    assert {group.incarnation for group in batch.groups} == {0}
    assert state.statistics["partial_rollouts_beyond_spread"] == (0 if kept else 4)
    assert (state.statistics["partial_rollout_tokens_discarded"] > 0) == (not kept)


def test_lease_that_can_no_longer_be_fresh_is_taken_back_and_begun_anew(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    # Heartbeats are minutes apart, unless something is published.
    policy = Policy(batch_groups=4, max_staleness=1, cancel_stale_leases=True, lease_ttl_ms=600_000)
    tasks = list(itertools.islice(endless(max_new_tokens=60), 4))
    with (
        client.session(run_id, policy=policy, tasks=tasks, options=OPTIONS) as session,
        worker_process(service.address, run_id, tmp_path, *SLOW) as worker,
    ):
        until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
        session.publish()
        session.publish()
        until(lambda: client.run(run_id).statistics["leases_cancelled"] == 4, "four cancelled leases", 10)
        batch = next(session)
        assert worker.stop() == 0
        state = session.state()
    assert {sample.spans[0].version.version for sample in batch.samples} == {2}
    assert batch.info.staleness_max == 0
    assert "lease cancelled" in worker.said()
    # Nobody's attempt has failed.
    assert (state.ledger.tasks.failed, state.statistics["leases_expired"], state.ledger.groups.accepted.groups) == (
        0,
        0,
        4,
    )
    assert state.ledger.balanced


def test_second_signal_ends_a_drain_that_nobody_answers(tmp_path: Path) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=400), 4))
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        client.session("r", policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS),
        worker_process(service.address, "r", tmp_path, *SLOW, "--drain-grace-s", "600") as worker,
    ):
        until(lambda: client.ledger("r").tasks.leased == 4, "four leases")
        service.kill()
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: "to='return leases'" in worker.said(), "the worker tries to hand its work back")
        assert worker.process.poll() is None
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(10) == EXIT_KILLED
        service.start()
