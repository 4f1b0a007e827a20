"""A worker that is killed in the middle of a group: whoever goes on writes into the group's trace."""

import itertools
from pathlib import Path

import pytest

from bench.traces.receiver import Receiver
from bench.traces.tree import trace_of, tree
from buffer_wire.tracing import process
from tests.support.service import running_service
from tests.support.traces import received
from tests.workers.process import worker_process
from tests.workers.training import FAST, OPTIONS, SLOW, endless, until
from trainer_client import BufferClient, Policy

__all__ = ["received"]


@pytest.mark.faults
def test_a_group_whose_worker_is_killed_goes_on_in_its_trace(
    received: Receiver,
    tmp_path: Path,
) -> None:
    policy = Policy(batch_groups=1, lease_ttl_ms=1_000)
    with running_service(tmp_path / "data") as service, BufferClient(service.address) as client:
        client.create_run("killed", policy)
        tasks = itertools.islice(endless(), 1)
        with client.session("killed", tasks=tasks, options=OPTIONS) as session:
            with worker_process(service.address, "killed", tmp_path / "a", *SLOW, worker_id="a") as first:
                until(lambda: client.run("killed").ledger.tasks.leased == 1, "leased")
                first.kill()
            with worker_process(service.address, "killed", tmp_path / "b", *FAST, worker_id="b"):
                (group,) = next(session).groups
                session.publish()
    process.stop()

    (train,) = [span for span in received.spans if span.name == "train" and span.facts.get("group") == group.group_id]
    trace = trace_of(received.spans, train.trace_id)
    print(tree(trace))
    (rollout,) = [span for span in trace if span.name == "rollout"]
    assert (rollout.parent_id, rollout.facts["worker"], rollout.facts["attempt"]) == ("", "b", 2)
    assert {"lease", "generate", "reward", "push", "queue", "train"} <= {span.name for span in trace}
    known = {span.span_id for span in trace}
    assert {span.parent_id for span in trace if span is not rollout} <= known
