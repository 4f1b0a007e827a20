"""Evaluations through the trainer's clients, against a real service."""

import asyncio
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from buffer_wire.connection.channel import client_options
from buffer_wire.errors import EvaluationNotReady, UnknownEvaluation
from rollout_buffer.v1 import common_pb2
from tests.support.evaluations import EvaluatingWorker
from tests.support.push import PushingWorker
from tests.support.rpc import make_group
from tests.support.service import ServiceProcess
from trainer_client import (
    AsyncBufferClient,
    BufferClient,
    ClientOptions,
    Policy,
    SamplingParams,
    SessionOptions,
    Task,
    Waiting,
    WeightVersion,
)

SAMPLING = SamplingParams(max_new_tokens=8)
TASKS = [Task(group_size=2, sampling=SAMPLING, prompt_token_ids=[1, 2, i]) for i in range(5)]


@pytest.fixture
def worker(service: ServiceProcess, run_id: str) -> Iterator[EvaluatingWorker]:
    with grpc.insecure_channel(service.address, client_options()) as channel:
        yield EvaluatingWorker(channel, run_id)


def test_a_session_evaluates_beside_its_training(
    service: ServiceProcess, client: BufferClient, run_id: str, worker: EvaluatingWorker
) -> None:
    training = [
        Task(task_id=f"t{i}", group_size=2, sampling=SAMPLING, prompt_token_ids=[1, 2, 3], environment="sums")
        for i in range(8)
    ]
    policy = Policy(batch_groups=4, max_queued_groups=8)
    trained: list[str] = []
    with (
        client.session(run_id, policy=policy, tasks=training, options=SessionOptions(pull_timeout_s=30)) as session,
        PushingWorker(service.address, run_id),
    ):
        with session.evaluate(TASKS) as evaluation:
            assert evaluation.version == WeightVersion(session.term, 0)
            working = worker.work(5, loaded=_wire(evaluation.version))
            for batch in session:
                trained += [group.task_id for group in batch.groups]
                session.publish()
            groups = list(evaluation)
            working.join(20)
            assert sorted(group.task_id for group in groups) == [f"{evaluation.eval_id}.{i}" for i in range(5)]
            for group in groups:
                sent = make_group(group.task_id, lengths=[4, 4], version=_wire(evaluation.version))
                assert bytes(group.payload) == sent.payload
                assert group.staleness == 0
                assert {int(v) for sample in group.samples for v in np.unique(sample.versions)} == {-1, 0}
            assert evaluation.state().done
            assert [state.eval_id for state in client.evaluations(run_id)] == [evaluation.eval_id]
        assert client.evaluations(run_id) == ()
    assert sorted(trained) == sorted(task.task_id for task in training)
    ledger = client.ledger(run_id)
    assert ledger.balanced
    assert (ledger.groups.accepted.groups, ledger.tasks.submitted) == (8, 8)


def test_groups_come_while_others_are_still_being_made(
    client: BufferClient, run_id: str, worker: EvaluatingWorker
) -> None:
    client.create_run(run_id, Policy(batch_groups=1))
    evaluation = client.evaluate(run_id, TASKS[:2], term=1, eval_id="mine")
    first, second = worker.lease(2).leases
    worker.finish(second)
    groups = evaluation.groups(20)
    assert next(groups).task_id == "mine.1"
    worker.finish(first)
    assert [group.task_id for group in groups] == ["mine.0"]


def test_a_wait_says_on_whom_and_gives_up_at_its_deadline(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=1))
    evaluation = client.evaluate(run_id, TASKS[:1], term=1)
    notices: list[Waiting] = []
    with pytest.raises(EvaluationNotReady, match=r"weights 1\.0 loaded"):
        evaluation.wait(0.2, on_wait=notices.append)
    with pytest.raises(EvaluationNotReady):
        list(evaluation.groups(0.0))
    found = client.evaluation(run_id, evaluation.eval_id)
    found.delete()
    with pytest.raises(UnknownEvaluation):
        evaluation.state()


def test_failed_tasks_have_no_group_and_say_why(client: BufferClient, run_id: str, worker: EvaluatingWorker) -> None:
    client.create_run(run_id, Policy(batch_groups=1, retry_backoff_ms=1))
    evaluation = client.evaluate(run_id, TASKS[:2], term=1)
    worker.finish(worker.lease(1).leases[0])
    for attempt in range(5):
        worker.hand_back(worker.lease(1, wait_ms=10_000).leases[0], f"broken {attempt}")
    state = evaluation.wait(20)
    assert (state.finished, state.failed, state.waits_on) == (1, 1, "")
    assert [(failure.task_index, failure.error) for failure in state.failures] == [(1, "broken 4")]
    assert len(list(evaluation)) == 1


def test_the_asyncio_client_evaluates(
    service: ServiceProcess, client: BufferClient, run_id: str, worker: EvaluatingWorker
) -> None:
    client.create_run(run_id, Policy(batch_groups=1))

    async def evaluate() -> list[str]:
        async with (
            AsyncBufferClient(service.address, ClientOptions(timeout_s=20)) as aio,
            await aio.evaluate(run_id, TASKS, term=1, eval_id="aio") as evaluation,
        ):
            worker.work(5)
            assert (await evaluation.wait(20)).done
            assert (await (await aio.evaluation(run_id, "aio")).state()).finished == 5
            return [group.task_id async for group in evaluation]

    assert asyncio.run(evaluate()) == [f"aio.{i}" for i in range(5)]
    assert client.evaluations(run_id) == ()


def _wire(version: WeightVersion) -> common_pb2.WeightVersion:
    return common_pb2.WeightVersion(term=version.term, version=version.version)
