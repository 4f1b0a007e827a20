"""Tests of what a session publishes on a real service: quorums that name who lags, rollbacks, collective plans."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buffer_wire.errors import InvalidField, NotReady, VersionConflict
from rollout_buffer.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess
from tests.trainer_client.publish.test_collective_members import plan_of
from tests.trainer_client.test_service import tasks
from trainer_client import (
    BufferClient,
    CollectiveManifest,
    Policy,
    SessionOptions,
    TensorsManifest,
    TrainerTime,
    Waiting,
    WeightVersion,
    manifest_of,
)
from trainer_client.publish import FilesPublisher, TensorsPublisher

if TYPE_CHECKING:
    from trainer_client.manifest import Manifest

READY, LOADING = weights_pb2.ENGINE_STATE_READY, weights_pb2.ENGINE_STATE_LOADING
QUARANTINED = weights_pb2.ENGINE_STATE_QUARANTINED
POLICY = Policy(batch_groups=2, max_queued_groups=4, overflow_action="block")

Report = Callable[..., None]


@pytest.fixture
def stub(client: BufferClient) -> weights_pb2_grpc.WeightServiceStub:
    return weights_pb2_grpc.WeightServiceStub(client._control)


@pytest.fixture
def report(stub: weights_pb2_grpc.WeightServiceStub, run_id: str) -> Report:
    """report(engine_id, state, version, **further fields), as a worker does."""

    def said(engine_id: str, state: int, version: int, **fields: object) -> None:
        message = weights_pb2.EngineReport(
            engine_id=engine_id,
            worker_id="w",
            state=state,  # type: ignore[arg-type]
            loaded=common_pb2.WeightVersion(term=2, version=version),
            **fields,  # type: ignore[arg-type]
        )
        stub.ReportEngine(
            weights_pb2.ReportEngineRequest(run=common_pb2.RunRef(run_id=run_id), report=message), timeout=10
        )

    return said


def watched(stub: weights_pb2_grpc.WeightServiceStub, run_id: str) -> weights_pb2.WatchWeightsResponse:
    stream = stub.WatchWeights(weights_pb2.WatchWeightsRequest(run=common_pb2.RunRef(run_id=run_id)))
    return next(iter(stream))


def test_the_run_adds_up_the_trainers_time_and_what_engines_decoded(
    service: ServiceProcess, client: BufferClient, run_id: str, report: Report
) -> None:
    with client.session(run_id, policy=POLICY, tasks=tasks(8)) as session:
        session.publish()
        assert client.run(run_id).statistics["trainer_busy_ms"] == 0, "no batch was asked for"
        with PushingWorker(service.address, run_id):
            next(session)
            session.publish()
            first = client.run(run_id).statistics
            spent = session._meter.time_spent()
            assert spent is not None
            next(session)
            session.publish()
        report("e0", READY, 1)
        report("e0", READY, 1, decoded_tokens=700, decode_busy_ms=30, decode_request_ms=90)
        run = client.run(run_id)
    assert first["trainer_busy_ms"] <= spent.busy_ms
    assert 0 < first["trainer_wait_ms"] <= spent.wait_ms
    assert run.statistics["trainer_wait_ms"] > first["trainer_wait_ms"]
    assert run.statistics["trainer_busy_ms"] >= first["trainer_busy_ms"]
    assert (run.statistics["assembled_groups"], run.statistics["accepted_groups"] >= 4) == (4, True)
    assert run.statistics["decoded_tokens"] == 700
    assert (run.engines[0].decode_busy_ms, run.engines[0].decode_request_ms) == (30, 90)


def test_what_is_said_without_a_session_counts_the_same(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, POLICY)
    term = client.resume(run_id).term
    client.publish(run_id, term=term, version=1, time_spent=TrainerTime(busy_ms=500, wait_ms=20))
    client.publish(run_id, term=term, version=2)
    client.publish(run_id, term=term, version=3, time_spent=TrainerTime(busy_ms=900, wait_ms=21))
    statistics = client.run(run_id).statistics
    assert (statistics["trainer_busy_ms"], statistics["trainer_wait_ms"]) == (900, 21)


def test_a_publish_waits_for_its_quorum_and_names_who_lags(client: BufferClient, run_id: str, report: Report) -> None:
    waits: list[Waiting] = []

    def on_wait(waiting: Waiting) -> None:
        waits.append(waiting)
        if len(waits) == 2:
            report("e1", READY, 1)

    with client.session(run_id, policy=POLICY, options=SessionOptions(on_wait=on_wait)) as session:
        report("e0", READY, 1)
        report("e1", LOADING, 0, last_error="no space left")
        report("e2", QUARANTINED, 0)
        assert session.publish(wait_for=1) == 1
        assert waits == []
        # A share counts the engines in service, of which the quarantined one is none.
        session.wait_for_engines(1.0, timeout_s=20, on_wait=on_wait)
        assert waits[0].on == (
            "the engines e1 (loading, version 0, last error: no space left), e2 (quarantined, version 0)"
        )
        assert waits[0].doing == "waiting for version 1 on 100% of the engines"
        with pytest.raises(NotReady, match="0 of 1 engines have loaded version 2") as raised:
            session.publish(wait_for=0.5, timeout_s=0.2)
        assert raised.value.attributes["engines"] == "e0,e1,e2"
        # It is published all the same.
        assert (session.version, session.state().published.version) == (2, 2)


@pytest.mark.parametrize("quorum", [0, -1, 0.0, 1.5, True])
def test_a_quorum_that_means_nothing_is_refused(client: BufferClient, run_id: str, quorum: float) -> None:
    client.create_run(run_id)
    with pytest.raises(InvalidField) as raised:
        client.wait_for_engines(run_id, 1, quorum)
    assert raised.value.attributes["field"] == "wait_for"


def test_reports_show_groups_peers_and_silence(client: BufferClient, run_id: str, report: Report) -> None:
    client.create_run(run_id)
    prepared = common_pb2.WeightVersion(term=1, version=4)
    report("e0", LOADING, 3, membership=2, prepared=prepared, weights_url="http://w0:7000")
    report("e1", READY, 3)
    first, second = client.run(run_id).engines
    assert (first.membership, first.prepared, first.weights_url) == (2, WeightVersion(1, 4), "http://w0:7000")
    assert (second.membership, second.prepared, second.weights_url) == (0, None, "")
    assert 0 <= second.silent_ms < 20_000


def test_a_rollback_offers_older_files_under_a_new_version(
    service: ServiceProcess,
    client: BufferClient,
    stub: weights_pb2_grpc.WeightServiceStub,
    run_id: str,
    tmp_path: Path,
) -> None:
    def save(directory: Path) -> None:
        (directory / "sub").mkdir()
        (directory / "sub" / "model").write_bytes(b"weights %d" % (session.version + 1))

    publisher = FilesPublisher(tmp_path / "w", keep=1)
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=POLICY, tasks=tasks(20), publisher=publisher) as session,
    ):
        for _ in range(3):
            next(session)
            session.publish(save)
        old = publisher.manifest_of(1)
        assert session.rollback(1) == 4
        assert session.state().committed_steps == 3
        offered = watched(stub, run_id)
        assert offered.published.version == 4
        where = Path(offered.manifest.files.base_url)
        assert (where / "sub" / "model").read_bytes() == b"weights 1"
        assert where != Path(old.base_url)
        assert (where / "sub" / "model").samefile(Path(old.base_url) / "sub" / "model")
        # The old directory goes when its time comes, the new one stays.
        session.checkpoint()
        assert publisher.versions == [4]
        assert (where / "sub" / "model").read_bytes() == b"weights 1"
        with pytest.raises(InvalidField, match=r"version is 2; it must be one whose files are still in .*: 4"):
            session.rollback(2)
        next(session)
        assert session.publish(save) == 5
        assert session.state().committed_steps == 4


def test_a_rollback_needs_files_that_are_whole(client: BufferClient, run_id: str, tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path)
    with client.session(run_id, policy=POLICY, publisher=publisher) as session:
        session.publish(lambda directory: (directory / "model").write_bytes(b"1"))
        (Path(publisher.manifest_of(1).base_url) / "model").unlink()
        with pytest.raises(InvalidField, match=r"one whose files are whole: .*/model is gone"):
            session.rollback(1)
    with client.session(run_id) as without, pytest.raises(InvalidField, match="publisher is None"):
        without.rollback(1)


def test_every_kind_of_manifest_is_offered_as_it_is(
    client: BufferClient, stub: weights_pb2_grpc.WeightServiceStub, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    files = manifest_of(tmp_path)
    kinds: list[Manifest] = [files, TensorsManifest(files), CollectiveManifest(3), CollectiveManifest(4, files)]
    with client.session(run_id, policy=POLICY) as session:
        for manifest in kinds:
            session.publish(manifest)
            assert watched(stub, run_id).manifest == manifest.to_wire()


def test_sources_that_are_not_the_publishers_are_refused(client: BufferClient, run_id: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    files = FilesPublisher(tmp_path)
    with client.session(run_id, policy=POLICY, publisher=files) as session:
        sources: tuple[Any, ...] = ({"w": 1}, torch.nn.Linear(1, 1))
        for source in sources:
            with pytest.raises(InvalidField, match="tensors are for TensorsPublisher"):
                session.publish(source)
    with client.session(run_id, publisher=TensorsPublisher(files)) as session:
        assert session.publish(torch.nn.Linear(1, 1)) == 1


def test_a_plan_reaches_the_workers_until_its_version_is_published(
    client: BufferClient, stub: weights_pb2_grpc.WeightServiceStub, run_id: str
) -> None:
    plan = plan_of("e0", "e1")  # of version 7 in term 2
    with client.session(run_id, policy=POLICY) as session:
        client.plan_collective(run_id, term=session.term, plan=plan)
        assert watched(stub, run_id).plan == plan.to_wire()
        session.publish(CollectiveManifest(plan.membership), version=7)
        assert not watched(stub, run_id).HasField("plan")
        with pytest.raises(VersionConflict):
            client.plan_collective(run_id, term=session.term, plan=plan)
