"""Publishes that took effect although they were answered with an error: the next one gets a number of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import NotReplicated, StaleTerm, VersionConflict
from rollout_buffer.v1 import runs_pb2, weights_pb2
from tests.trainer_client.fake_service import FakeService
from tests.trainer_client.streamed_run import StreamedRun
from trainer_client import BufferClient, ClientOptions, SessionOptions
from trainer_client.publish import FilesPublisher

OPTIONS = ClientOptions(timeout_s=0.3, attempt_timeout_s=5)


class Replicated(StreamedRun):
    """A run whose replica may be away: writes are done, and the trainer hears that they are not safe."""

    def __init__(self, fake: FakeService) -> None:
        super().__init__(fake, batch_groups=2, micro=2)
        self.manifest = b""
        self.replica_away = False
        self.looks = 0
        fake.answer("RunService/GetRun", self.look)

    def look(self, *_: Any) -> runs_pb2.GetRunResponse:
        self.looks += 1
        return runs_pb2.GetRunResponse(revision=1, run=self.run())

    def publish(self, request: weights_pb2.PublishRequest, context: Any) -> Any:
        manifest = request.manifest.SerializeToString()
        if request.term != self.term:
            return StaleTerm(request.term, self.term)
        if request.version <= self.published and (request.version, manifest) != (self.published, self.manifest):
            return VersionConflict(request.version, self.published)
        self.manifest = manifest
        reply = super().publish(request, context)
        return NotReplicated(1, 0, 1000) if self.replica_away else reply


@pytest.fixture
def fake() -> Iterator[FakeService]:
    with FakeService() as made:
        yield made


@pytest.fixture
def run(fake: FakeService) -> Replicated:
    return Replicated(fake)


@pytest.fixture
def client(fake: FakeService) -> Iterator[BufferClient]:
    with BufferClient(fake.target, OPTIONS) as made:
        yield made


def saved(folder: Path, content: str) -> Path:
    """A directory of weights."""
    folder.mkdir()
    (folder / "model.safetensors").write_text(content)
    return folder


def test_next_weights_of_a_session_get_the_next_number(run: Replicated, client: BufferClient, tmp_path: Path) -> None:
    """Case as under `follow`, where another process pulls and nothing else tells the session of the version."""
    with client.session("r", publisher=FilesPublisher(tmp_path / "w"), options=SessionOptions()) as session:
        run.replica_away = True
        with pytest.raises(NotReplicated):
            session.publish(saved(tmp_path / "a", "a"))
        with pytest.raises(NotReplicated):
            session.publish(saved(tmp_path / "b", "b"))
        assert run.published == 2
        run.replica_away = False
        assert session.publish(saved(tmp_path / "c", "c")) == 3
        assert (session.version, run.published) == (3, 3)
        looks = run.looks
        assert session.publish(saved(tmp_path / "d", "d")) == 4
        assert session.rollback(3) == 5
        assert run.looks == looks, "what was answered needs no look"


def test_rollback_that_took_effect_takes_its_number_too(run: Replicated, client: BufferClient, tmp_path: Path) -> None:
    with client.session("r", publisher=FilesPublisher(tmp_path / "w")) as session:
        assert session.publish(saved(tmp_path / "a", "a")) == 1
        run.replica_away = True
        with pytest.raises(NotReplicated):
            session.rollback(1)
        run.replica_away = False
        assert session.publish(saved(tmp_path / "b", "b")) == 3


def test_files_that_are_published_without_an_answer_stay_for_a_resume(
    run: Replicated, client: BufferClient, tmp_path: Path
) -> None:
    publisher = FilesPublisher(tmp_path / "w", keep=1)
    with client.session("r", publisher=publisher) as session:
        run.replica_away = True
        with pytest.raises(NotReplicated):
            session.publish(saved(tmp_path / "a", "a"))
        run.replica_away = False
        next(session)
        assert session.publish(saved(tmp_path / "b", "b")) == 2
        # A resume at step 0 would offer version 1 again.
        assert publisher.versions == [1, 2]


def test_number_of_a_publish_that_did_not_take_effect_is_used_again(
    run: Replicated, fake: FakeService, client: BufferClient, tmp_path: Path
) -> None:
    with client.session("r", publisher=FilesPublisher(tmp_path / "w")) as session:
        fake.answer("WeightService/Publish", NotReplicated(1, 0, 1000))
        with pytest.raises(NotReplicated):
            session.publish(saved(tmp_path / "a", "a"))
        fake.answer("WeightService/Publish", run.publish)
        assert session.publish(saved(tmp_path / "b", "b")) == 1


def test_version_of_another_trainer_is_not_taken_over(run: Replicated, client: BufferClient, tmp_path: Path) -> None:
    with client.session("r", publisher=FilesPublisher(tmp_path / "w")) as session:
        run.replica_away = True
        with pytest.raises(NotReplicated):
            session.publish(saved(tmp_path / "a", "a"))
        run.term, run.published, run.replica_away = run.term + 1, 7, False
        with pytest.raises(StaleTerm):
            session.publish(saved(tmp_path / "b", "b"))
        assert (session.version, run.published) == (0, 7)
