"""Client and session against a real service: every group once, replays exact, zombies refused."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buffer_wire.errors import BatchNotReady, InvalidField, NotCommitted, RunExists, StaleTerm, UnknownRun
from rollout_buffer.v1 import common_pb2, groups_pb2, weights_pb2, weights_pb2_grpc
from tests.support.push import GroupArrays, Pusher, PushingWorker, arrays_for
from tests.support.service import ServiceProcess
from tests.trainer_client.collate.test_rows import of_rows
from trainer_client import (
    AsyncBufferClient,
    BufferClient,
    ClientOptions,
    Policy,
    SamplingParams,
    SessionOptions,
    Submission,
    Task,
    WeightVersion,
)
from trainer_client.batch import Batch
from trainer_client.publish import FilesPublisher

QUICK = SessionOptions(pull_timeout_s=30)


def tasks(count: int, first: int = 0) -> list[Task]:
    sampling = SamplingParams(max_new_tokens=8)
    return [
        Task(
            task_id=f"t{i}",
            group_size=2,
            sampling=sampling,
            prompt_token_ids=[1, 2, 3],
            environment="sums",
            metadata={"answer": i},
        )
        for i in range(first, first + count)
    ]


def assert_same(batch: Batch, groups: list[GroupArrays]) -> None:
    assert [group.task_id for group in batch.groups] == [group.task_id for group in groups]
    for pulled, pushed in zip(batch.groups, groups, strict=True):
        for sample, was in zip(pulled.samples, pushed.samples, strict=True):
            np.testing.assert_array_equal(sample.token_ids, was.token_ids)
            np.testing.assert_array_equal(sample.logprobs, was.logprobs)
            np.testing.assert_array_equal(sample.loss_mask, was.loss_mask)
            assert (sample.reward, sample.prompt_len) == (was.reward, was.prompt_len)


def contents(batch: Batch) -> list[tuple[str, bytes]]:
    return [(group.task_id, bytes(group.payload)) for group in batch.groups]


def ids(batch: Batch) -> list[str]:
    return [group.task_id for group in batch.groups]


def test_groups_come_out_as_they_went_in(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=3, max_queued_groups=6))
    groups = [arrays_for(f"t{i}", group_size=4, response_len=500) for i in range(6)]
    with Pusher(service.address, run_id) as pusher:
        pusher.push(*groups)
    for step in range(2):
        batch = client.pull(run_id, term=1, step=step, timeout_s=10)
        assert_same(batch, groups[3 * step : 3 * step + 3])
        assert (batch.info.total_groups, batch.info.total_samples, batch.info.replayed) == (3, 12, False)
        assert batch.info.total_tokens == sum(sample.tokens for sample in batch.samples)
        assert batch.info.total_loss_tokens == sum(sample.loss_tokens for sample in batch.samples)
    ledger = client.ledger(run_id)
    assert ledger.balanced
    assert (ledger.groups.accepted.groups, ledger.groups.delivered.groups) == (6, 6)
    assert client.commit(run_id, term=1, through_step=1) == 2
    assert client.ledger(run_id).groups.trained.groups == 6


def test_trajectories_are_counted_once_however_many_rows_they_have(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=8, micro_batch_groups=1, filter_equal_rewards=True)
    client.create_run(run_id, policy)
    alike = [replace(sample, reward=1.0) for sample in of_rows("t3").samples]
    groups = [of_rows("t0"), arrays_for("t1", group_size=2), of_rows("t2"), replace(of_rows("t3"), samples=alike)]
    plain = [replace(sample, reward=float(i)) for i, sample in enumerate(groups[1].samples)]
    groups[1] = replace(groups[1], samples=plain)
    with Pusher(service.address, run_id) as pusher:
        outcomes = pusher.push(*groups, of_rows("t4"))
    assert outcomes == [1, 1, 1, groups_pb2.PUSH_OUTCOME_FILTERED, 1]
    counted = []
    for micro_batch in range(4):
        info = client.pull(run_id, term=1, step=0, micro_batch=micro_batch, timeout_s=10).info
        counted.append((info.total_samples, info.total_trajectories))
    assert counted == [(5, 2), (7, 4), (12, 6), (17, 8)]
    assert client.ledger(run_id).balanced
    # A group given back takes its trajectories along.
    client.reject(run_id, term=1, step=0, group_ids=["t0/0"], reason="bad")
    with Pusher(service.address, run_id) as pusher:
        pusher.push(arrays_for("t5", group_size=1))
    info = client.pull(run_id, term=1, step=0, micro_batch=4, timeout_s=10).info
    assert (info.total_samples, info.total_trajectories, info.final) == (13, 7, True)


def test_a_batch_of_many_messages_comes_out_whole(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=12))
    groups = [arrays_for(f"t{i}", group_size=4, response_len=10_000) for i in range(12)]
    with Pusher(service.address, run_id) as pusher:
        for group in groups:
            pusher.push(group)
    batch = client.pull(run_id, term=1, step=0, timeout_s=10)
    assert batch.received_bytes > 4 << 20
    assert_same(batch, groups)


def test_tasks_are_fed_generated_and_pulled_each_once(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
    seen: list[str] = []
    with (
        client.session(run_id, policy=policy, tasks=tasks(24), options=QUICK) as session,
        PushingWorker(service.address, run_id),
    ):
        for batch in session:
            assert batch.info.train_version == session.version == batch.step
            for group in batch.groups:
                assert group.environment == "sums"
                assert group.metadata == {"answer": int(group.task_id[1:])}
            seen += ids(batch)
            session.publish()
        assert (session.next_step, session.version, session.cursor) == (6, 6, 24)
    assert sorted(seen) == sorted(f"t{i}" for i in range(24))
    run = client.run(run_id)
    assert (run.committed_steps, run.published.version, run.cursor) == (6, 6, 24)
    assert run.ledger.balanced
    assert run.ledger.groups.trained.groups == 24


@pytest.mark.parametrize("prefetch", [1, 2])
def test_prefetched_batches_are_judged_at_the_version_that_trains_on_them(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    policy = Policy(batch_groups=2, max_queued_groups=8, max_staleness=prefetch + 2, batches_per_publish=2)
    with (
        client.session(run_id, policy=policy, tasks=tasks(400), prefetch=prefetch, options=QUICK) as session,
        PushingWorker(service.address, run_id),
    ):
        assert session.policy.prefetch_batches == prefetch
        for batch in session:
            assert batch.info.train_version == session.version == batch.step // 2
            assert batch.info.staleness_max <= prefetch + 2
            if batch.step % 2 == 1:
                session.publish()
            if batch.step == 11:
                break
        assert session.next_step == 12


def test_a_resume_replays_what_was_not_in_the_checkpoint(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=2, max_queued_groups=8, overflow_action="block")
    before: dict[int, list[tuple[str, bytes]]] = {}
    seen: list[str] = []
    saved: list[int] = []
    with PushingWorker(service.address, run_id):
        with client.session(run_id, policy=policy, tasks=tasks(40), options=QUICK) as session:
            for batch in session:
                before[batch.step] = contents(batch)
                session.publish()
                if batch.step == 2:
                    session.checkpoint()
                    saved.append(session.next_step)
                if batch.step == 5:
                    break
        assert saved == [3]
        with client.session(run_id, policy=policy, tasks=tasks(40), next_step=saved[0], options=QUICK) as session:
            assert session.start.next_unassembled_step >= 6
            assert (session.version, session.term) == (3, session.start.term)
            for batch in session:
                if batch.step in before:
                    assert contents(batch) == before[batch.step]
                    assert batch.info.replayed
                    assert batch.info.staleness_max <= 1 + batch.info.train_version
                else:
                    assert not batch.info.replayed
                seen += ids(batch)
                session.publish()
    trained = [task for step in range(3) for task, _ in before[step]] + seen
    # Every task once over both sessions, although the second one began in the middle.
    assert sorted(trained) == sorted(f"t{i}" for i in range(40))
    run = client.run(run_id)
    assert run.ledger.balanced
    assert (run.ledger.groups.trained.groups, run.committed_steps, run.published.version) == (40, 20, 20)


def test_a_trainer_that_was_taken_over_is_refused(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    policy = Policy(batch_groups=2, max_queued_groups=8, overflow_action="block")
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(200), options=QUICK) as zombie,
    ):
        next(zombie)
        with client.session(run_id, tasks=tasks(200), options=QUICK) as session:
            assert session.term == zombie.term + 1
            with pytest.raises(StaleTerm):
                zombie.publish()
            with pytest.raises(StaleTerm):
                zombie.checkpoint()
            with pytest.raises(StaleTerm):
                next(zombie)
            # The zombie harmed nobody: its successor gets the very batch that it had.
            batch = next(session)
            assert (batch.step, batch.info.replayed) == (0, True)
            assert session.publish() == 1
    assert client.run(run_id).committed_steps == 1


def test_shards_of_two_ranks_make_up_the_step(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    policy = Policy(batch_groups=6, max_queued_groups=12, overflow_action="block")
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(18), world_size=2, options=QUICK) as first,
        client.session(run_id, rank=1, world_size=2, start=first.start, options=QUICK) as second,
    ):
        for step in range(3):
            # Rank 1 asks first, before rank 0 has published: it knows what will train on the batch.
            two, one = next(second), next(first)
            assert one.step == two.step == step
            assert one.info.train_version == two.info.train_version == step
            assert one.info.total_tokens == two.info.total_tokens
            assert one.info.shard_tokens + two.info.shard_tokens == one.info.total_tokens
            assert len(set(ids(one) + ids(two))) == 6
            second.publish()
            first.publish()
    assert client.run(run_id).published.version == 3


def test_a_rank_that_joins_without_a_broadcast_goes_on_after_the_commit(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=2, max_queued_groups=4, overflow_action="block")
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(8), world_size=1, options=QUICK) as first,
    ):
        for _ in range(2):
            next(first)
            first.publish()
        with client.session(run_id, rank=1, world_size=2, options=QUICK) as second:
            assert (second.term, second.next_step, second.version) == (first.term, 2, 2)


def test_weights_are_published_as_files_and_tidied_up(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    publisher = FilesPublisher(tmp_path / "w", keep=1)
    policy = Policy(batch_groups=2, max_queued_groups=4, overflow_action="block")
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(8), publisher=publisher, options=QUICK) as session,
    ):
        for batch in session:
            session.publish(lambda directory: (directory / "model").write_bytes(b"%d" % session.version))
            if batch.step == 2:
                session.checkpoint()
    assert publisher.versions == [3, 4]
    with BufferClient(service.address) as other:
        stub = weights_pb2_grpc.WeightServiceStub(other._control)
        request = weights_pb2.WatchWeightsRequest(run=common_pb2.RunRef(run_id=run_id))
        watch = stub.WatchWeights(request)
        state = next(iter(watch))
    assert state.published.version == 4
    (file,) = state.manifest.files.files
    assert (Path(state.manifest.files.base_url) / file.name).read_bytes() == b"3"


def test_a_directory_is_published_without_a_publisher(client: BufferClient, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"x")
    with client.session(run_id, policy=Policy(batch_groups=2)) as session:
        assert session.publish(tmp_path) == 1
        with pytest.raises(InvalidField, match="where there is no publisher"):
            session.publish(lambda _: None)
        assert session.state().published == WeightVersion(session.term, 1)


def test_a_checkpoint_commits_what_was_trained(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    with client.session(run_id, policy=Policy(batch_groups=1, max_queued_groups=4)) as session:
        with Pusher(service.address, run_id) as pusher:
            pusher.push(*[arrays_for(f"t{i}") for i in range(3)])
        session.checkpoint()
        next(session)
        next(session)
        session.checkpoint()
        session.checkpoint()
        run = session.state()
        assert (run.next_step, run.committed_steps, run.checkpointed_steps) == (2, 2, 2)
        with pytest.raises(NotCommitted):
            client.checkpoint(run_id, term=session.term, through_step=2)


def test_an_error_in_the_tasks_reaches_the_training_loop(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    def broken() -> Iterator[Task]:
        yield from tasks(2)
        raise OSError("dataset gone")

    policy = Policy(batch_groups=4)
    options = SessionOptions(pull_timeout_s=60, chunk_tasks=2)
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=broken(), options=options) as session,
        pytest.raises(OSError, match="dataset gone"),
    ):
        next(session)


def test_more_prefetch_than_declared_is_refused_where_staleness_is_bounded(client: BufferClient, run_id: str) -> None:
    policy = Policy(batch_groups=2, max_staleness=1)
    client.create_run(run_id, policy)
    with pytest.raises(InvalidField) as raised, client.session(run_id, prefetch=1):
        pass
    assert raised.value.attributes["field"] == "prefetch"
    assert client.run(run_id).term == 1


def test_a_run_must_exist_or_be_described(client: BufferClient, run_id: str) -> None:
    with pytest.raises(UnknownRun), client.session(run_id):
        pass
    client.create_run(run_id, Policy(batch_groups=2))
    with pytest.raises(RunExists) as raised, client.session(run_id, policy=Policy(batch_groups=3)):
        pass
    assert raised.value.attributes["differs"].startswith("batch_groups")
    assert client.update_policy(run_id, Policy(batch_groups=3)).batch_groups == 3
    with client.session(run_id, policy=Policy(batch_groups=3)) as session:
        assert session.term == 2
    assert run_id in client.runs()


def test_waiting_for_engines_ends_when_they_report(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    with client.session(run_id, policy=Policy(batch_groups=2)) as session, BufferClient(service.address) as other:
        session.publish()
        stub = weights_pb2_grpc.WeightServiceStub(other._control)
        report = weights_pb2.EngineReport(
            engine_id="e0",
            worker_id="w0",
            state=weights_pb2.ENGINE_STATE_READY,
            loaded=common_pb2.WeightVersion(term=session.term, version=1),
        )
        told: list[str] = []

        def load(waiting: object) -> None:
            told.append(str(waiting))
            stub.ReportEngine(
                weights_pb2.ReportEngineRequest(run=common_pb2.RunRef(run_id=run_id), report=report), timeout=10
            )

        state = session.wait_for_engines(timeout_s=10, on_wait=load)
        assert [engine.engine_id for engine in state.engines] == ["e0"]
        assert "workers to report their engines" in told[0]


def test_the_asyncio_client_does_the_same(service: ServiceProcess, run_id: str) -> None:
    async def story() -> None:
        async with AsyncBufferClient(service.address, ClientOptions(timeout_s=20)) as client:
            await client.create_run(run_id, Policy(batch_groups=2))
            resumed = await client.resume(run_id)
            submission = Submission(term=resumed.term, expected_cursor=0, cursor=2, tasks=tasks(2))
            assert (await client.submit_tasks(run_id, submission)).task_ids == ("t0", "t1")
            with pytest.raises(BatchNotReady):
                await client.pull(run_id, term=resumed.term, step=0, timeout_s=0.2)
            with PushingWorker(service.address, run_id):
                batch = await client.pull(run_id, term=resumed.term, step=0, timeout_s=20)
            assert sorted(ids(batch)) == ["t0", "t1"]
            done = await client.publish(run_id, term=resumed.term, version=1, commit_through=0)
            assert (done.version, done.committed_steps) == (WeightVersion(resumed.term, 1), 1)
            assert await client.checkpoint(run_id, term=resumed.term, through_step=0) == 1
            assert (await client.ledger(run_id)).balanced
            assert (await client.run(run_id)).cursor == 2
            assert run_id in await client.runs()
            with pytest.raises(StaleTerm):
                await client.commit(run_id, term=resumed.term - 1, through_step=0)

    asyncio.run(story())
