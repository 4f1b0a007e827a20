"""/api/events of a real service."""

import json
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_buffer.v1 import runs_pb2
from tests.page.events import watching
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect
from tests.support.service import ServiceProcess, running_service

Named = Callable[..., RunRpc]


def test_a_run_is_told_at_once_and_whole(service: ServiceProcess, named: Named) -> None:
    run = named("math", batch_groups=2, max_staleness=3)
    run.fill(1)
    with watching(service.admin, run.run_id) as said:
        first = next(said)
    assert first.event == "run"
    assert abs(first.data["time_ms"] / 1000 - time.time()) < 10
    told = first.data["run"]
    assert told["groups"]["queued"]["groups"] == 1
    assert told["policy_changed"] == ["batch_groups", "max_staleness"]
    assert told["waits_on"]
    assert told["estimate"]["unknown"]


def test_it_is_told_again_when_something_changed(service: ServiceProcess, named: Named) -> None:
    run = named("math", batch_groups=2, max_queued_groups=8)
    with watching(service.admin, run.run_id) as said:
        first = next(said)
        run.fill(3)
        run.report("engine-7")
        told = first.data["run"]
        while not (told["groups"]["accepted"]["groups"] == 3 and told["engines"]):
            later = next(said)
            assert later.event_id != first.event_id
            told = later.data["run"]
    assert [engine["engine_id"] for engine in told["engines"]] == ["engine-7"]


def test_who_comes_back_with_the_last_id_is_not_told_the_same_again(service: ServiceProcess, named: Named) -> None:
    run = named("math", batch_groups=2)
    with watching(service.admin, run.run_id) as keeps_the_run_watched:
        first = next(keeps_the_run_watched)
        with watching(service.admin, run.run_id, Last_Event_ID=first.event_id) as said:
            run.fill(1)
            assert next(said).data["run"]["groups"]["accepted"]["groups"] == 1
        with watching(service.admin, run.run_id, Last_Event_ID="of-another-process") as said:
            assert next(said).data["run"]["groups"]["accepted"]["groups"] == 1


def test_it_ends_when_the_run_is_deleted(service: ServiceProcess, rpc: Rpc, named: Named) -> None:
    run = named("math", batch_groups=2)
    with watching(service.admin, run.run_id) as said:
        next(said)
        rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)
        (end,) = said
    assert (end.event, end.data["reason"]) == ("end", "unknown_run")


@pytest.mark.parametrize(("run_id", "status", "reason"), [("absent", 404, "unknown_run"), ("", 400, "invalid_field")])
def test_a_run_that_is_not_there_is_refused(service: ServiceProcess, run_id: str, status: int, reason: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused, watching(service.admin, run_id):
        raise AssertionError("it was not refused")
    with refused.value as error:
        assert (error.code, json.load(error)["reason"]) == (status, reason)


def test_sigterm_ends_it_with_a_word_and_at_once(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        client = connect(service.address)
        run = client.create(batch_groups=2)
        client.channel.close()
        with watching(service.admin, run.run_id) as said, watching(service.admin, run.run_id) as other:
            next(said)
            next(other)
            began = time.monotonic()
            assert service.stop() == 0
            assert time.monotonic() - began < 30
            for stream in (said, other):
                *_, end = stream
                assert (end.event, end.data["reason"]) == ("end", "not_ready")
        log = service.log.read_text()
        assert "Traceback" not in log
        assert "Cancel" not in log
