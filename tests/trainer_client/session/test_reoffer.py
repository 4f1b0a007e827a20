"""Engines that are all replaced after a broadcast without files, while the trainer waits for their groups."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from buffer_wire.errors import BatchNotReady, InvalidField, NotReady
from tests.support.service import ServiceProcess
from tests.trainer_client.broadcast_worker import BroadcastWorker
from tests.trainer_client.fleet import Fleet, fleet_of
from tests.trainer_client.test_service import tasks
from trainer_client import (
    BufferClient,
    ClientOptions,
    CollectiveManifest,
    Policy,
    Publication,
    SessionOptions,
)
from trainer_client.publish import CollectivePublisher, FilesPublisher
from trainer_client.publish.copies import KeptCopy
from trainer_client.session import publishing

POLICY = Policy(batch_groups=2, max_queued_groups=4, overflow_action="block", max_staleness=2)


@pytest.fixture(scope="module")
def engines() -> Iterator[Fleet]:
    with fleet_of("e0", "e1") as fleet:
        yield fleet


@pytest.fixture
def client(service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferClient]:
    monkeypatch.setattr(publishing, "POLL_EVERY_S", 0.3)
    with BufferClient(service.address, ClientOptions(timeout_s=20)) as made:
        yield made


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((40, 30), value), "b": torch.full((7,), value, dtype=torch.bfloat16)}


def sums(value: float) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in weights(value).items()}


def train(state: dict[str, torch.Tensor]) -> None:
    for tensor in state.values():
        tensor.add_(1.0)


def test_without_a_copy_the_trainer_waits_until_it_publishes_once_more(
    service: ServiceProcess, client: BufferClient, engines: Fleet, run_id: str
) -> None:
    first, second = engines.engines
    model = weights(1.0)
    options = SessionOptions(pull_timeout_s=6)
    with (
        CollectivePublisher(timeout_s=20) as publisher,
        client.session(run_id, policy=POLICY, tasks=tasks(40), publisher=publisher, options=options) as session,
    ):
        with BroadcastWorker(service.address, run_id, first, most_groups=2):
            next(session)
            session.publish(model)
        with BroadcastWorker(service.address, run_id, second):
            with pytest.raises(BatchNotReady):
                next(session)
            assert second.received == []
            assert session.version == session.state().published.version == 1
            session.publish(model)
            assert next(session).info.train_version == 2
    assert second.received == [sums(1.0)]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_copy_is_broadcast_again_and_the_trainer_gets_its_groups(
    service: ServiceProcess,
    client: BufferClient,
    engines: Fleet,
    run_id: str,
    prefetch: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = engines.engines
    model = weights(1.0)
    options = SessionOptions(pull_timeout_s=60)
    with (
        CollectivePublisher(timeout_s=20, keep_copy=True) as publisher,
        client.session(
            run_id, policy=POLICY, tasks=tasks(40), publisher=publisher, prefetch=prefetch, options=options
        ) as session,
    ):
        with BroadcastWorker(service.address, run_id, first, most_groups=2):
            next(session)
            train(model)
            session.publish(model)
            # What the trainer does to its weights until it waits is not what it has published.
            train(model)
        with BroadcastWorker(service.address, run_id, second):
            batch = next(session)
            assert second.received == [sums(2.0)]
            assert (batch.step, batch.info.train_version, session.version) == (1, 2, 2)
            assert {group.head_version for group in batch.groups} == {2}
            # No step was trained between the versions: one is committed, and the cadence goes on.
            assert session.state().committed_steps == 1
            assert session.publish(model) == 3
            batch = next(session)
            assert (batch.step, batch.info.train_version) == (2, 3)
            assert second.received == [sums(2.0), sums(3.0)]
        # A resume finds the version that it would have found anyway, under its newest number.
        assert session.state().committed_steps == 2
    assert client.resume(run_id, next_step=1).version == 2
    assert "no engine has version 1, and e1 can have it by a broadcast only" in caplog.text


def test_a_repetition_in_the_middle_of_a_step_changes_nothing_of_the_step(
    service: ServiceProcess, client: BufferClient, engines: Fleet, run_id: str
) -> None:
    first, second = engines.engines
    model = weights(1.0)
    policy = Policy(batch_groups=4, micro_batch_groups=2, max_queued_groups=4, overflow_action="block", max_staleness=1)
    with (
        CollectivePublisher(timeout_s=20, keep_copy=True) as publisher,
        client.session(run_id, policy=policy, tasks=tasks(40), publisher=publisher) as session,
    ):
        micro_batches = session.micro_batches()
        with BroadcastWorker(service.address, run_id, first, most_groups=6):
            for _ in range(2):
                micro = next(micro_batches)
            session.publish(model)
            micro = next(micro_batches)
            assert (micro.step, micro.micro_batch, micro.final) == (1, 0, False)
        with BroadcastWorker(service.address, run_id, second):
            micro = next(micro_batches)
            assert (micro.step, micro.micro_batch, micro.final) == (1, 1, True)
            # The step keeps the version under which it began; the groups come from the same weights' newer number.
            assert (micro.info.train_version, session.version) == (1, 2)
            assert {group.staleness for group in micro.groups} == {0}
            assert session.publish(model) == 3
            assert next(micro_batches).info.train_version == 3
    assert second.received == [sums(1.0), sums(1.0)]


class Repeats:
    """A publisher that can always repeat what it offered."""

    def __init__(self) -> None:
        self.repeated: list[int] = []

    def offer(self, source: object, publication: Publication) -> CollectiveManifest:
        return CollectiveManifest(publication.version)

    def offer_again(self, version: int, publication: Publication) -> CollectiveManifest:
        raise InvalidField("version", version, "kept")

    def published(self, manifest: object, *, committed_steps: int) -> None:
        pass

    def checkpointed(self, steps: int) -> None:
        pass

    def resumed(self, next_step: int) -> None:
        pass

    def repeats(self, version: int) -> bool:
        return True

    def repeat(self, publication: Publication) -> CollectiveManifest:
        self.repeated.append(publication.version)
        return CollectiveManifest(publication.version)


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_several_ranks_none_repeats_what_the_others_would_not_know_of(
    client: BufferClient, run_id: str, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Repeats()
    with client.session(run_id, policy=POLICY, publisher=publisher, world_size=world_size) as session:
        session.publish(weights(1.0))
        assert session._publishing.can_repeat()
        session._publishing.repeat()
        assert session.version == session.state().published.version == (2 if world_size == 1 else 1)
    assert publisher.repeated == ([2] if world_size == 1 else [])
    assert ("by all ranks together" in caplog.text) == (world_size == 2)


# ── what is kept ─────────────────────────────────────────────────────────────


def test_versions_with_files_are_not_kept(engines: Fleet, tmp_path: Path) -> None:
    for one in engines.engines:
        one.state = "ready"
    fleet = Fleet(*engines.engines)
    with CollectivePublisher(timeout_s=20, files=FilesPublisher(tmp_path), files_every=2, keep_copy=True) as publisher:
        kept = []
        for value in (1.0, 2.0, 3.0, 4.0):
            publication = fleet.publication()
            publisher.offer(weights(value), publication)
            kept.append(publisher.repeats(publication.version))
        assert kept == [False, True, False, True]
        # The repetition is a version like any other: this one is due to have files, so nothing waits for it any more.
        publication = fleet.publication()
        publisher.repeat(publication)
        assert engines.engines[0].received[-1] == sums(4.0)
        assert not publisher.repeats(publication.version)


@pytest.mark.parametrize("why", ["its timeline was abandoned", "its number has files now"])
def test_a_copy_is_forgotten_when(engines: Fleet, tmp_path: Path, why: str) -> None:
    for one in engines.engines:
        one.state = "ready"
    fleet = Fleet(*engines.engines)
    with CollectivePublisher(timeout_s=20, keep_copy=True) as publisher, FilesPublisher(tmp_path) as files:
        publication = fleet.publication()
        publisher.offer(weights(1.0), publication)
        assert publisher.repeats(publication.version)
        if why == "its timeline was abandoned":
            publisher.resumed(0)
        else:
            others = files.write(lambda d: (d / "w").write_bytes(b"other"), term=2, version=publication.version)
            publisher.published(others, committed_steps=0)
        assert not publisher.repeats(publication.version)


def test_a_copy_outlives_a_repetition_that_failed(engines: Fleet) -> None:
    for one in engines.engines:
        one.state, one.mute = "ready", False
    fleet = Fleet(*engines.engines)
    with CollectivePublisher(timeout_s=20) as without, CollectivePublisher(timeout_s=20, keep_copy=True) as publisher:
        publication = fleet.publication()
        publisher.offer(weights(5.0), publication)
        assert publisher.repeats(publication.version)
        assert not without.repeats(publication.version)
        for one in engines.engines:
            one.state = "quarantined"
        publisher._timeout_s = 0.2
        with pytest.raises(NotReady, match="no engine can receive version"):
            publisher.repeat(fleet.publication())
        assert publisher.repeats(publication.version)
        publisher._timeout_s = 20
        for one in engines.engines:
            one.state = "ready"
        again = fleet.publication()
        publisher.repeat(again)
        assert [one.received[-1] for one in engines.engines] == [sums(5.0)] * 2
        assert publisher.repeats(again.version)


def test_a_copy_names_no_version_while_a_part_of_it_is_of_another_one() -> None:
    kept = KeptCopy()
    dict(kept.copying(weights(1.0).items)())
    kept.version = 1
    before = dict(kept.tensors())
    versions = [kept.version for _ in kept.copying(weights(2.0).items)()]
    assert versions == [None, None]
    after = dict(kept.tensors())
    # The same memory, with the newer values, apart from the tensors that were sent.
    assert [after[name].data_ptr() for name in after] == [before[name].data_ptr() for name in before]
    assert {name: float(tensor.double().sum()) for name, tensor in after.items()} == sums(2.0)
    # A model that has changed its tensors is copied as it is.
    dict(kept.copying({"w": torch.ones(3)}.items)())
    assert [(name, tensor.shape) for name, tensor in kept.tensors()] == [("w", (3,))]


def test_nothing_can_be_repeated_before_the_first_version(engines: Fleet) -> None:
    with CollectivePublisher(keep_copy=True) as publisher, pytest.raises(InvalidField, match="keep_copy is None"):
        publisher.repeat(Fleet().publication())
