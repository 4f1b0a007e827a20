"""Streamed runs: micro-batches as they come, whole batches gathered from them, on one rank and on several."""

import asyncio
from collections.abc import Iterator

import pytest

from buffer_wire.errors import BatchNotReady, InvalidField
from tests.trainer_client.fake_service import OPTIONS, FakeService
from tests.trainer_client.streamed_run import StreamedRun
from trainer_client import AsyncBufferClient, BufferClient, SessionOptions
from trainer_client.batch import Batch

pytestmark = pytest.mark.matrix

QUICK = SessionOptions(pull_timeout_s=5)


@pytest.fixture
def client(fake: FakeService) -> Iterator[BufferClient]:
    with BufferClient(fake.target, OPTIONS) as made:
        yield made


def ids(*batches: Batch) -> list[str]:
    return [group.task_id for batch in batches for group in batch.groups]


def loss_tokens(*batches: Batch) -> int:
    return sum(sample.loss_tokens for batch in batches for sample in batch.samples)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_micro_batches_say_what_they_are_and_their_totals_end_at_the_steps(
    fake: FakeService, client: BufferClient, prefetch: int
) -> None:
    run = StreamedRun(fake, batch_groups=5, micro=2)
    seen: list[Batch] = []
    with client.session("r", prefetch=prefetch, options=QUICK) as session:
        for batch in session.micro_batches():
            seen.append(batch)
            assert batch.info.train_version == session.version
            # What a token-mean loss is divided by when the step is complete.
            assert batch.info.total_loss_tokens == loss_tokens(*(b for b in seen if b.step == batch.step))
            assert session.next_step == batch.step + batch.final
            if batch.final:
                session.publish()
            if batch.step == 3:
                break
    assert [(b.step, b.micro_batch, b.final) for b in seen[:9]] == [
        (step, micro_batch, micro_batch == 2) for step in range(3) for micro_batch in range(3)
    ]
    assert [len(b.groups) for b in seen[:3]] == [2, 2, 1]
    assert ids(*seen) == [f"g{i:03d}" for i in range(17)]
    assert run.committed == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_trainer_of_whole_batches_gets_them_from_a_run_that_streams(
    fake: FakeService, client: BufferClient, prefetch: int
) -> None:
    run = StreamedRun(fake, batch_groups=5, micro=2)
    with client.session("r", prefetch=prefetch, options=QUICK) as session:
        for step in range(3):
            batch = next(session)
            assert (batch.step, batch.final, batch.info.train_version) == (step, True, step)
            assert ids(batch) == [f"g{i:03d}" for i in range(5 * step, 5 * step + 5)]
            assert (batch.info.total_groups, batch.info.shard_groups) == (5, 5)
            assert batch.info.total_loss_tokens == loss_tokens(batch)
            assert batch.info.shard_tokens == batch.info.total_tokens == sum(s.tokens for s in batch.samples)
            session.publish()
    assert run.committed == 3


def test_micro_batches_of_a_run_of_whole_batches_are_its_batches(fake: FakeService, client: BufferClient) -> None:
    StreamedRun(fake, batch_groups=3, micro=0)
    with client.session("r", options=QUICK) as session:
        batches = [batch for batch, _ in zip(session.micro_batches(), range(3), strict=False)]
    assert [(b.step, b.micro_batch, b.final, len(b.groups)) for b in batches] == [(s, 0, True, 3) for s in range(3)]


def test_ranks_get_their_parts_of_every_micro_batch(fake: FakeService, client: BufferClient) -> None:
    run = StreamedRun(fake, batch_groups=6, micro=2)
    with (
        client.session("r", world_size=2, options=QUICK) as first,
        client.session("r", rank=1, world_size=2, start=first.start, options=QUICK) as second,
    ):
        for one, two in zip(first.micro_batches(), second.micro_batches(), strict=False):
            assert (one.step, one.micro_batch, one.final) == (two.step, two.micro_batch, two.final)
            assert one.info.total_loss_tokens == two.info.total_loss_tokens
            assert not set(ids(one)) & set(ids(two))
            if one.final:
                assert one.info.train_version == two.info.train_version == one.step
                second.publish()
                first.publish()
            if one.step == 2:
                break
    assert [len(step.micro_batches[0]) for step in run.steps] == [4, 4, 4]
    assert {pull.train_version for pull in run.pulls if pull.micro_batch == 0} == {0, 1, 2}
    assert not any(pull.HasField("train_version") for pull in run.pulls if pull.micro_batch)


def test_a_session_that_resumes_within_a_step_gets_its_micro_batches_again(
    fake: FakeService, client: BufferClient
) -> None:
    run = StreamedRun(fake, batch_groups=4, micro=1)
    with client.session("r", options=QUICK) as session:
        micro_batches = session.micro_batches()
        before = [next(micro_batches) for _ in range(6)]
        assert session.next_step == 1
    # The step is older than the weights that were published in between, and stays what it was.
    run.published = 7
    with client.session("r", next_step=1, options=QUICK) as session:
        micro_batches = session.micro_batches()
        after = [next(micro_batches) for _ in range(4)]
    assert ids(*after[:2]) == ids(*before[4:])
    assert [b.info.replayed for b in after] == [True, True, False, False]
    assert {b.info.train_version for b in after} == {0}
    with client.session("r", next_step=1, options=QUICK) as session:
        whole = next(session)
    assert (ids(whole), whole.info.replayed) == (ids(*after), True)


def test_a_batch_that_is_only_begun_is_finished_at_the_next_call(fake: FakeService, client: BufferClient) -> None:
    run = StreamedRun(fake, batch_groups=4, micro=1, arrived=2)
    with client.session("r", options=SessionOptions(pull_timeout_s=0.2)) as session:
        with pytest.raises(BatchNotReady):
            next(session)
        run.arrived = 8
        assert ids(next(session)) == ["g000", "g001", "g002", "g003"]
        # Nothing was pulled twice.
        assert [pull.micro_batch for pull in run.pulls] == [0, 1, 2, 3]


def test_a_begun_batch_can_be_gone_on_with_in_micro_batches_but_not_the_other_way(
    fake: FakeService, client: BufferClient
) -> None:
    run = StreamedRun(fake, batch_groups=3, micro=1, arrived=2)
    with client.session("r", options=SessionOptions(pull_timeout_s=0.2)) as session:
        with pytest.raises(BatchNotReady):
            next(session)
        run.arrived = 20
        micro_batches = session.micro_batches()
        assert [next(micro_batches).micro_batch for _ in range(4)] == [0, 1, 2, 0]
        with pytest.raises(InvalidField, match="gave a part of step 1"):
            next(session)
        assert [next(micro_batches).micro_batch for _ in range(2)] == [1, 2]
        assert next(session).step == 2


def test_n_can_change_from_step_to_step(fake: FakeService, client: BufferClient) -> None:
    run = StreamedRun(fake, batch_groups=4, micro=2)
    with client.session("r", batch_groups=2, options=QUICK) as session:
        assert len(next(session).groups) == 2
        session.batch_groups = 6
        assert len(next(session).groups) == 6
        session.batch_groups = None
        assert len(next(session).groups) == 4
    said = [pull.batch_groups if pull.HasField("batch_groups") else None for pull in run.pulls]
    assert said == [2, 6, None, None, None, None]


def test_n_as_a_function_of_the_step_holds_for_steps_pulled_ahead(fake: FakeService, client: BufferClient) -> None:
    StreamedRun(fake, batch_groups=4, micro=2)
    with client.session("r", prefetch=3, batch_groups=lambda step: step + 1, options=QUICK) as session:
        assert [len(next(session).groups) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_pull_without_a_session_takes_the_whole_step_or_one_micro_batch(
    fake: FakeService, client: BufferClient
) -> None:
    run = StreamedRun(fake, batch_groups=4, micro=2)
    one = client.pull("r", term=1, step=0, micro_batch=0, train_version=3, timeout_s=5)
    assert (one.micro_batch, one.final, one.info.train_version) == (0, False, 3)
    assert ids(client.pull("r", term=1, step=0, timeout_s=5)) == ["g000", "g001", "g002", "g003"]
    assert len(client.pull("r", term=1, step=1, batch_groups=6, timeout_s=5).groups) == 6
    with pytest.raises(InvalidField):
        client.pull("r", term=1, step=2, micro_batch=4, timeout_s=5)

    async def story() -> None:
        async with AsyncBufferClient(fake.target, OPTIONS) as other:
            assert (await other.pull("r", term=1, step=0, micro_batch=1, timeout_s=5)).final
            assert ids(await other.pull("r", term=1, step=1, timeout_s=5)) == [f"g{i:03d}" for i in range(4, 10)]
            assert len((await other.pull("r", term=1, step=2, batch_groups=3, timeout_s=5)).groups) == 3

    asyncio.run(story())
    assert [step.groups for step in run.steps] == [4, 6, 3]


def test_the_deadline_of_a_pull_is_for_the_whole_step(fake: FakeService, client: BufferClient) -> None:
    StreamedRun(fake, batch_groups=4, micro=1, arrived=3)
    with pytest.raises(BatchNotReady) as raised:
        client.pull("r", term=1, step=0, timeout_s=0.3)
    assert raised.value.attributes["needed_groups"] == "1"
