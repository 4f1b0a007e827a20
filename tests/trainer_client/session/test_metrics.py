"""Metrics of a step: right by a second calculation, complete, and never in the way of the training."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_buffer.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess
from tests.trainer_client.fake_service import FakeService
from tests.trainer_client.session.test_outcomes import Heard
from tests.trainer_client.stand_ins import batch_of
from tests.trainer_client.streamed_run import StreamedRun
from tests.trainer_client.test_service import tasks
from trainer_client import Batch, BufferClient, ClientOptions, Policy, RunState, SessionOptions, TrainerTime
from trainer_client.session.metrics import GRACE_S, StepMeter

POLICY = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
P = "rollout_buffer/"


@pytest.fixture
def fake_client() -> Iterator[tuple[FakeService, BufferClient]]:
    with FakeService() as fake, BufferClient(fake.target, ClientOptions(timeout_s=10, attempt_timeout_s=5)) as made:
        yield fake, made


class Steps(list[tuple[int, dict[str, float]]]):
    """An on_step that keeps what it is given."""

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.append((step, metrics))


def expected(batch: Batch) -> dict[str, float]:
    """The figures of a batch on a single rank, from its arrays."""
    samples = [(group, sample) for group in batch.groups for sample in group.samples]
    response = [sample.versions[sample.prompt_len :] for _, sample in samples]
    token_staleness = np.concatenate(
        [np.maximum(0, group.train_version - versions) for (group, _), versions in zip(samples, response, strict=True)]
    )
    lengths = np.array([len(versions) for versions in response])
    rewards = np.concatenate([group.rewards for group in batch.groups])
    return {
        "step": batch.step,
        "train_version": batch.info.train_version,
        "groups": len(batch.groups),
        "samples": len(samples),
        "tokens": sum(sample.tokens for _, sample in samples),
        "loss_tokens": sum(int(sample.loss_mask.sum()) for _, sample in samples),
        "staleness_mean": float(np.mean([group.staleness for group in batch.groups])),
        "staleness_max": max(group.staleness for group in batch.groups),
        "pre_queue_staleness": float(np.mean([group.tail_version - group.head_version for group in batch.groups])),
        "in_queue_staleness": float(np.mean([group.train_version - group.tail_version for group in batch.groups])),
        "token_staleness_mean": float(token_staleness.mean()),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.astype(np.float64).std()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": int(lengths.max()),
    }


def test_figures_are_those_of_the_batches_and_the_ledgers(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    steps, wanted, at_hand = Steps(), [], []
    with (
        PushingWorker(service.address, run_id) as worker,
        client.session(
            run_id, policy=POLICY, tasks=tasks(24), options=SessionOptions(on_step=steps, pull_timeout_s=30)
        ) as session,
    ):
        for batch in session:
            # A step is told of when the next batch is asked for.
            assert [step for step, _ in steps] == list(range(batch.step))
            wanted.append(expected(batch))
            at_hand.append(session.metrics())
            session.log({"loss": np.float32(0.5) * batch.step, "kl": 1})
            session.publish()
        assert len(steps) == 6
    assert len(worker.acknowledged) == 24
    for (step, metrics), figures, early in zip(steps, wanted, at_hand, strict=True):
        assert {name: metrics[P + name] for name in figures} == pytest.approx(figures)
        assert metrics[P + "published_version"] == step + 1
        assert (metrics["loss"], metrics["kl"]) == (0.5 * step, 1.0)
        assert metrics[P + "environment_share/sums"] == 1.0
        assert (metrics[P + "truncated_share"], metrics[P + "replayed"]) == (0.0, 0.0)
        assert all(isinstance(value, float) for value in metrics.values())
        # What was known with the batch in hand is the same, without the times and what came after.
        assert "loss" not in early
        assert early[P + "published_version"] == step
        assert {name: early[P + name] for name in figures} == pytest.approx(figures)
    ledger = client.ledger(run_id)
    # What happened to the last batch comes after the last look at the run.
    assert sum(metrics[P + "ledger/accepted"] for _, metrics in steps) == ledger.groups.accepted.groups == 24
    assert sum(metrics[P + "ledger/trained"] for _, metrics in steps) == 20
    assert sum(metrics[P + "tasks/submitted"] for _, metrics in steps) == ledger.tasks.submitted == 24
    assert steps[-1][1][P + "tasks/pending"] == 0


def documented() -> set[str]:
    """The names in the table of docs/trainer.md; the first of a row may begin with what the others share."""
    page = Path(__file__).parents[3].joinpath("docs", "trainer.md").read_text()
    table = page.partition("All names begin with")[2].partition("| key |")[2].partition("\n\n")[0]
    names = set()
    for row in table.splitlines()[2:]:
        first, *others = re.findall(r"`([^`]+)`", row.split("|")[1])
        shared = first.partition("/")[0] + "/" if "/" in first else ""
        names |= {first, *(name if name.startswith(shared) else shared + name for name in others)}
    return names


def test_every_figure_is_documented_and_the_other_way_micro_batch(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    steps = Steps()
    options = SessionOptions(on_step=steps, pull_timeout_s=30)
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=POLICY, tasks=Heard(tasks(4)), options=options) as session,
    ):
        next(session)
        session.publish()
    ((_, metrics),) = steps
    assert metrics[P + "outcomes/groups"] == 4
    given = {name.removeprefix(P) for name in metrics}
    assert {name.replace("environment_share/sums", "environment_share/NAME") for name in given} == documented()


def test_drops_and_engines_are_shown(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    policy = Policy(batch_groups=2, max_queued_groups=4, overflow_action="block", max_staleness=0)
    steps = Steps()
    with client.session(
        run_id, policy=policy, tasks=tasks(40), options=SessionOptions(on_step=steps, pull_timeout_s=30)
    ) as session:
        stub = weights_pb2_grpc.WeightServiceStub(client._control)
        for engine_id, version in (("e0", 0), ("e1", 7)):
            report = weights_pb2.EngineReport(
                engine_id=engine_id,
                worker_id="w",
                state=weights_pb2.ENGINE_STATE_READY,
                loaded=common_pb2.WeightVersion(term=session.term, version=version),
            )
            run = common_pb2.RunRef(run_id=run_id)
            stub.ReportEngine(weights_pb2.ReportEngineRequest(run=run, report=report), timeout=10)
        with PushingWorker(service.address, run_id):
            next(session)
            session.wait_for_engines(1)
            # Whatever is queued now is of version 0, and nothing of it may be trained under version 1.
            _until(lambda: client.ledger(run_id).groups.queued.groups == 4)
            session.publish()
            next(session)
            session.publish()
            next(session)
    (_, first), (_, second), (_, third) = steps
    assert (first[P + "engines_ready"], first[P + "engines_lagging"]) == (2, 0)
    assert (second[P + "engines_ready"], second[P + "engines_lagging"]) == (1, 1)
    assert first[P + "ledger/dropped_stale"] == 0
    assert second[P + "ledger/dropped_stale"] >= 4
    dropped = sum(metrics[P + "ledger/dropped_stale"] for metrics in (first, second, third))
    assert dropped == client.ledger(run_id).groups.dropped_stale.groups
    assert third[P + "staleness_max"] == 0


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.02)


def test_micro_batches_of_a_step_are_one_step(fake_client: tuple[FakeService, BufferClient]) -> None:
    fake, client = fake_client
    StreamedRun(fake, batch_groups=5, micro=2)
    steps, groups = Steps(), 0
    with client.session("r", options=SessionOptions(on_step=steps)) as session:
        for micro in session.micro_batches():
            groups += len(micro.groups)
            seen = session.metrics()
            assert (seen[P + "step"], seen[P + "shard_groups"]) == (micro.step, groups - 5 * micro.step)
            if micro.final:
                session.publish()
            if groups == 14:
                break
    # The third step was not complete.
    assert [step for step, _ in steps] == [0, 1]
    for _, metrics in steps:
        assert (metrics[P + "micro_batches"], metrics[P + "groups"], metrics[P + "shard_groups"]) == (3, 5, 5)
        assert metrics[P + "shard_tokens"] == metrics[P + "tokens"]


def test_other_ranks_tell_of_their_own_groups_and_leave_the_service_alone(
    fake_client: tuple[FakeService, BufferClient],
) -> None:
    fake, client = fake_client
    StreamedRun(fake, batch_groups=6, micro=3)
    steps = Steps()
    with client.session("r") as first:
        start = first.start
    looks: list[str] = []
    run = client.run

    def counted(run_id: str, *, timeout_s: float | None = None) -> RunState:
        looks.append(run_id)
        return run(run_id, timeout_s=timeout_s)

    with client.session("r", rank=1, world_size=2, start=start, options=SessionOptions(on_step=steps)) as second:
        client.run = counted  # type: ignore[method-assign]
        next(second)
        assert second.metrics()[P + "shard_groups"] == 3
        second.publish()
    assert looks == []
    ((_, metrics),) = steps
    assert (metrics[P + "groups"], metrics[P + "shard_groups"]) == (6, 3)
    assert metrics[P + "published_version"] == 1
    assert not [name for name in metrics if "ledger" in name or "engines" in name]


# ── in nobody's way ──────────────────────────────────────────────────────────


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_times_are_split_into_waiting_training_and_publishing() -> None:
    clock, steps, before = Clock(), Steps(), _no_run()
    meter = StepMeter(steps, None, before, clock=clock)
    with meter.timing("publish"):
        clock.now = 100.0  # before the first batch is asked for
    for step in range(2):
        # A wait that came to nothing was a wait of this step all the same.
        for wait_s in (4.0, 2.0):
            meter.next()
            with meter.timing("pull_wait"):
                clock.now += wait_s
        meter.got(batch_of(step))
        clock.now += 10.0
        with meter.timing("publish"):
            clock.now += 3.0
        with meter.timing("checkpoint"):
            clock.now += 1.0
    meter.end()
    for _, metrics in steps:
        times = {"pull_wait_s": 6.0, "train_s": 10.0, "publish_s": 3.0, "checkpoint_s": 1.0, "step_s": 20.0}
        assert {name: metrics[P + name] for name in times} == times
        assert (metrics[P + "busy_share"], metrics[P + "idle_share"]) == (0.5, 0.3)
    assert [step for step, _ in steps] == [0, 1]
    meter.end()
    assert len(steps) == 2


def test_the_trainers_time_is_waiting_for_batches_and_everything_else() -> None:
    clock = Clock()
    meter = StepMeter(None, None, _no_run(), clock=clock)
    with meter.timing("publish"):
        clock.now += 100.0
    assert meter.time_spent() is None, "before the first batch is asked for"
    for step in range(2):
        meter.next()
        with meter.timing("pull_wait"):
            clock.now += 4.0
            during = meter.time_spent()
        assert during == TrainerTime(busy_ms=13_000 * step, wait_ms=4_000 * (step + 1)), "a wait that goes on is in it"
        meter.got(batch_of(step))
        clock.now += 10.0
        with meter.timing("publish"):
            clock.now += 3.0
            assert meter.time_spent() == TrainerTime(busy_ms=13_000 * (step + 1), wait_ms=4_000 * (step + 1))


def _no_run() -> Any:
    return None  # of a rank that never looks


def test_a_service_that_does_not_answer_costs_keys_not_time(caplog: pytest.LogCaptureFixture) -> None:
    answer, asked = threading.Event(), []

    def look(timeout_s: float) -> RunState:
        asked.append(timeout_s)
        assert answer.wait(20)
        raise ConnectionError("the service is away")

    steps = Steps()
    meter = StepMeter(steps, look, _no_run())
    began = time.monotonic()
    for step in range(20):
        meter.next()
        meter.got(batch_of(step))
    meter.end()
    assert [step for step, _ in steps] == list(range(20))
    # The first question is still open, so no other was asked, and it is not waited for again.
    assert len(asked) == 1
    assert time.monotonic() - began < 10 * GRACE_S
    assert not [name for _, metrics in steps for name in metrics if "ledger" in name]
    meter.got(batch_of(20))
    answer.set()
    meter.end()
    _until(lambda: "no figures" in caplog.text)
    assert "no figures of the run for this step's metrics: the service is away" in caplog.text


def test_what_on_step_raises_is_logged_and_the_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        told.append(step)
        raise OSError("the tracker is full")

    meter = StepMeter(on_step, None, _no_run())
    with caplog.at_level(logging.ERROR, "trainer_client"):
        for step in range(2):
            meter.next()
            meter.got(batch_of(step))
        meter.end()
    assert told == [0, 1]
    assert caplog.text.count("on_step failed for step") == 2
    assert "the tracker is full" in caplog.text


def test_a_payload_lives_no_longer_than_the_trainer_needs_it() -> None:
    import gc
    import weakref

    meter = StepMeter(None, None, _no_run())
    batch = batch_of(0)
    group = weakref.ref(batch.groups[0])
    meter.got(batch)
    del batch
    gc.collect()
    assert group() is None
    assert meter.metrics(0.0)[P + "shard_groups"] == 1


def test_there_are_none_before_the_first_batch() -> None:
    assert StepMeter(None, None, _no_run()).metrics(0.0) == {}


class Writer:
    """Has tensorboard's `add_scalar` and wandb's `log`, with their types."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert isinstance(tag, str)
        assert isinstance(scalar_value, float)
        self.points.append((tag, scalar_value, global_step))

    def log(self, data: dict[str, float], step: int) -> None:
        for name, value in data.items():
            self.add_scalar(name, value, step)


def test_they_go_to_a_writer_of_scalars_as_they_are(fake_client: tuple[FakeService, BufferClient]) -> None:
    fake, client = fake_client
    StreamedRun(fake, batch_groups=2, micro=0)
    board, wandb = Writer(), Writer()

    def on_step(step: int, metrics: dict[str, float]) -> None:
        wandb.log(metrics, step=step)
        for name, value in metrics.items():
            board.add_scalar(name, value, step)

    with client.session("r", options=SessionOptions(on_step=on_step)) as session:
        for _ in range(3):
            next(session)
            session.publish()
    assert board.points == wandb.points
    assert {step for _, _, step in board.points} == {0, 1, 2}
    assert [value for name, value, _ in board.points if name == P + "groups"] == [2.0] * 3
