"""The estimate of a run that a real service counted: by RPC, on the admin page and as metrics."""

import json
import urllib.request

import pytest

from tests.support.rpc import Rpc
from tests.support.service import ServiceProcess

PUBLISHES = 5


def test_what_was_counted_is_estimated_everywhere(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=4)

    for step in range(PUBLISHES + 1):
        # 300 tokens/s in 4 requests at a time.
        seconds = step + 1
        run.report("e", decoded_tokens=300 * seconds, decode_busy_ms=1_000 * seconds, decode_request_ms=4_000 * seconds)
        # Two samples of 3 and 5 response tokens a group: 16 tokens a step, in 40 ms of training.
        run.fill(2, prefix=f"s{step}-")
        run.pull(step)
        spent = 40 * (step + 1)
        run.publish(step + 1, commit_through_step=step, trainer_busy_ms=spent, trainer_wait_ms=spent)
    found = run.get().estimate
    known = found.quantities
    assert found.publishes == PUBLISHES
    assert (known.concurrency, known.rollout_tokens_per_s, known.slot_tokens_per_s) == (4, 300, 75)
    assert known.train_tokens_per_s == pytest.approx(400)
    assert (known.rho, known.trainer_idle_share) == (0.75, 0.5)
    assert (known.mean_length, known.tailness, known.group_size) == (4, 1.25, 2)
    assert (known.groups_per_batch, known.batches_per_publish, known.queue_factor) == (2, 1, 2)
    # Every group is of version 0: step s trains by version s, and the window has steps 1 to 5.
    assert (found.measured.groups, found.measured.staleness) == (2 * PUBLISHES, 3)
    assert found.predicted.staleness == pytest.approx(1.25 * 4 / 4 + 0.75)
    assert found.verdict.bound == "rollout"
    assert [one.name for one in found.unknown] == ["group_generation_s"]

    assert service.metric("rollout_buffer_utilization_ratio", run=run.run_id) == 0.75
    assert service.metric("rollout_buffer_staleness_measured_versions", run=run.run_id) == 3
    assert service.metric("rollout_buffer_response_length_tokens_sum", run=run.run_id) == 16 * (PUBLISHES + 1)
    assert service.metric("rollout_buffer_response_length_tokens_count", run=run.run_id) == 4 * (PUBLISHES + 1)
    assert service.metric("rollout_buffer_summed_turns_total", run=run.run_id, stage="assembled") == 4 * (PUBLISHES + 1)
    with urllib.request.urlopen(f"{service.admin}/api/runs/{run.run_id}", timeout=10) as answer:
        assert json.load(answer)["estimate"]["quantities"]["rho"] == 0.75
