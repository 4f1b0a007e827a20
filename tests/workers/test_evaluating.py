"""Evaluations end to end: the real service, worker processes with simulated engines, and a training trainer."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.service import ServiceProcess
from tests.workers.process import worker_process
from trainer_client import BufferClient, Evaluation, Group, Policy, SamplingParams, SessionOptions, Task
from trainer_client.publish import FilesPublisher

ENGINE = ("--simulate", "--groups-per-engine", "4", "--lease-wait-s", "1")
FAST = (*ENGINE, "--tokens-per-s", "400")
SLOW = (*ENGINE, "--tokens-per-s", "25", "--length-median", "48", "--length-sigma", "0.1")
OPTIONS = SessionOptions(pull_timeout_s=60)
POLICY = Policy(batch_groups=4, overflow_action="block", lease_ttl_ms=5_000, retry_backoff_ms=10)
EVALUATED = [
    Task(group_size=2, sampling=SamplingParams(max_new_tokens=64), prompt_token_ids=[7, 8, i]) for i in range(6)
]


def training() -> Iterator[Task]:
    sampling = SamplingParams(max_new_tokens=16)
    for i in itertools.count():
        yield Task(task_id=f"t{i:05d}", group_size=2, sampling=sampling, prompt_token_ids=[1, 2, 3])


def write_weights(content: int) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors").write_bytes(b"%d" % content)


def assert_wholly_at(evaluation: Evaluation, groups: list[Group]) -> None:
    """Every task has its group, and every token of it is of the version that is evaluated."""
    assert sorted(group.task_id for group in groups) == [f"{evaluation.eval_id}.{i}" for i in range(len(EVALUATED))]
    found = {span.version for group in groups for sample in group.samples for span in sample.spans}
    assert found == {evaluation.version}


def assert_balanced(client: BufferClient, run_id: str, trained: list[str]) -> None:
    ledger = client.ledger(run_id)
    assert ledger.balanced
    assert all(task_id.startswith("t") for task_id in trained)
    assert len(set(trained)) == len(trained)
    assert ledger.groups.accepted.samples == 2 * ledger.groups.accepted.groups


def test_an_evaluation_that_comes_right_before_a_publish_is_generated_wholly_before_it(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    trained: list[str] = []
    with (
        FilesPublisher(tmp_path / "published") as publisher,
        worker_process(service.address, run_id, tmp_path, *SLOW, "--engines", "2") as worker,
        client.session(run_id, policy=POLICY, tasks=training(), publisher=publisher, options=OPTIONS) as session,
    ):
        for batch in itertools.islice(session, 3):
            trained += [group.task_id for group in batch.groups]
            session.publish(write_weights(batch.step), wait_for=2, timeout_s=60)
        with session.evaluate(EVALUATED) as evaluation:
            assert evaluation.version.version == 3
            session.publish(write_weights(99))
            batches = itertools.islice(session, 2)
            trained += [group.task_id for group in next(batches).groups]
            assert_wholly_at(evaluation, list(evaluation.groups(60)))
            trained += [group.task_id for group in next(batches).groups]
        session.wait_for_engines(2, timeout_s=60)
        assert worker.stop() == 0
    assert_balanced(client, run_id, trained)


def test_weights_that_no_trainer_has_changed_yet_are_evaluated_in_any_term(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with worker_process(service.address, run_id, tmp_path, *FAST) as worker:
        for _ in range(2):  # The second trainer's version 0 is of another term, and the same weights.
            with (
                client.session(run_id, policy=POLICY, options=OPTIONS) as session,
                session.evaluate(EVALUATED) as evaluation,
            ):
                assert evaluation.version.version == 0
                assert_wholly_at(evaluation, list(evaluation.groups(60)))
        assert worker.stop() == 0


def test_a_worker_for_evaluations_only_loads_an_older_version(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    client.create_run(run_id, POLICY)
    with (
        FilesPublisher(tmp_path / "published") as publisher,
        client.session(run_id, publisher=publisher, options=OPTIONS) as session,
    ):
        session.publish(write_weights(1))
        older = session.evaluate(EVALUATED)
        session.publish(write_weights(2))
        newer = session.evaluate(EVALUATED)
        with worker_process(service.address, run_id, tmp_path, *FAST, "--evaluations", "only") as worker:
            for evaluation, version in ((older, 1), (newer, 2)):
                assert evaluation.version.version == version
                assert_wholly_at(evaluation, list(evaluation.groups(60)))
            assert worker.stop() == 0
    assert client.run(run_id).engines == ()
    assert client.ledger(run_id).tasks.submitted == 0


def test_weights_are_held_no_longer_than_asked_and_the_rest_is_made_elsewhere(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    client.create_run(run_id, POLICY)
    with (
        FilesPublisher(tmp_path / "published") as publisher,
        client.session(run_id, publisher=publisher, options=OPTIONS) as session,
        worker_process(service.address, run_id, tmp_path, *SLOW, "--evaluation-hold-s", "0.3") as worker,
    ):
        session.publish(write_weights(1), wait_for=1, timeout_s=60)
        evaluation = session.evaluate(EVALUATED)
        until_leased(evaluation)
        session.publish(write_weights(2), wait_for=1, timeout_s=60)
        state = evaluation.state()
        assert (state.pending, state.finished) == (len(EVALUATED), 0)
        with worker_process(service.address, run_id, tmp_path / "other", *FAST, "--evaluations", "only"):
            assert_wholly_at(evaluation, list(evaluation.groups(60)))
        assert worker.stop() == 0


def test_what_a_killed_worker_evaluated_is_evaluated_by_another(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    client.create_run(run_id, POLICY)
    evaluation = client.evaluate(run_id, EVALUATED, term=1)
    with worker_process(service.address, run_id, tmp_path / "one", *SLOW) as killed:
        until_leased(evaluation)
        killed.kill()
    with worker_process(service.address, run_id, tmp_path / "two", *FAST) as worker:
        assert_wholly_at(evaluation, list(evaluation.groups(60)))
        assert worker.stop() == 0


def test_a_worker_that_is_stopped_hands_its_evaluations_back(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    client.create_run(run_id, POLICY)
    evaluation = client.evaluate(run_id, EVALUATED, term=1)
    with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
        until_leased(evaluation)
        assert worker.stop() == 0
    state = evaluation.state()
    assert (state.leased, state.pending + state.finished) == (0, len(EVALUATED))


def until_leased(evaluation: Evaluation) -> None:
    """Wait until a worker has begun."""
    deadline = time.monotonic() + 30
    while not evaluation.state().leased:
        assert time.monotonic() < deadline, "nothing is leased"
        time.sleep(0.05)
