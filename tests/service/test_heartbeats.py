"""Heartbeats of a worker on the wire: leases of several holders and reports of several engines in one call."""

from rollout_buffer.v1 import tasks_pb2, weights_pb2
from tests.support.rpc import TIMEOUT_S, VERSION_0, Rpc, failure, make_task


def report(engine_id: str, **more: object) -> weights_pb2.ReportEngineRequest:
    kept = weights_pb2.EngineReport(
        engine_id=engine_id,
        worker_id="w",
        state=weights_pb2.ENGINE_STATE_READY,
        loaded=VERSION_0,
        **more,  # type: ignore[arg-type]
    )
    return weights_pb2.ReportEngineRequest(report=kept)


def extension(holder: str, *lease_ids: str) -> tasks_pb2.ExtendLeasesRequest:
    return tasks_pb2.ExtendLeasesRequest(worker_id=holder, instance_id="i", lease_ids=lease_ids)


def test_one_call_extends_and_reports_all(rpc: Rpc) -> None:
    run = rpc.create()
    run.submit([make_task(), make_task()])
    (mine,) = run.lease(1, worker_id="e0", instance_id="i").leases
    (other,) = run.lease(1, worker_id="e1", instance_id="i").leases
    run.publish(1)
    request = tasks_pb2.HeartbeatRequest(
        run=run.ref,
        extensions=[extension("e0", mine.lease_id, other.lease_id), extension("e1", other.lease_id)],
        reports=[report("e0"), report("e1")],
    )
    reply = rpc.tasks.Heartbeat(request, timeout=TIMEOUT_S)
    live, lost = tasks_pb2.LEASE_STATE_LIVE, tasks_pb2.LEASE_STATE_LOST
    assert [list(each.states) for each in reply.extended] == [[live, lost], [live]]
    assert all(each.ttl_ms for each in reply.extended)
    assert [each.published.version for each in reply.reported] == [1, 1]
    assert {engine.engine_id for engine in run.get().engines} == {"e0", "e1"}
    request.run.seen_revision, request.run.seen_proof = reply.revision, reply.revision_proof
    assert rpc.tasks.Heartbeat(request, timeout=TIMEOUT_S).revision >= reply.revision


def test_a_wrong_part_is_named_and_nothing_is_done(rpc: Rpc) -> None:
    run = rpc.create()
    request = tasks_pb2.HeartbeatRequest(run=run.ref, reports=[report("e0"), report("")])
    error = failure(lambda: rpc.tasks.Heartbeat(request, timeout=TIMEOUT_S))
    assert error.attributes["field"] == "reports[1].report.engine_id"
    assert error.message.startswith("reports[1].report.engine_id is ''")
    assert not run.get().engines
    empty = failure(lambda: rpc.tasks.Heartbeat(tasks_pb2.HeartbeatRequest(run=run.ref), timeout=TIMEOUT_S))
    assert empty.attributes["field"] == "extensions"
