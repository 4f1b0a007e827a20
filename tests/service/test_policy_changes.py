"""Single fields of a policy are changed, by several callers at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_buffer.v1 import runs_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure


def change(rpc: Rpc, run: RunRpc, *fields: str, **policy: Any) -> runs_pb2.RunPolicy:
    request = runs_pb2.UpdatePolicyRequest(run=run.ref, policy=runs_pb2.RunPolicy(**policy), fields=fields)
    return rpc.runs.UpdatePolicy(request, timeout=TIMEOUT_S).policy


def test_single_fields_of_a_policy_are_replaced(rpc: Rpc) -> None:
    rules = [runs_pb2.EnvironmentRule(environment=name, share=1) for name in ("a", "b")]
    run = rpc.create(preset="miles", batch_groups=4, max_queued_groups=9, max_staleness=2, environments=rules)
    before = run.get().policy
    # What is not named is not looked at.
    got = change(rpc, run, "max_staleness", "order", "environments", order=runs_pb2.ORDER_LIFO, batch_groups=7)
    wanted = runs_pb2.RunPolicy()
    wanted.CopyFrom(before)
    wanted.order = runs_pb2.ORDER_LIFO
    # Miles' gate is lifted too: it is not Miles' policy any more.
    wanted.ClearField("max_staleness")
    wanted.ClearField("preset")
    wanted.ClearField("environments")
    assert got == run.get().policy == wanted
    assert change(rpc, run, "order", "order") == run.get().policy
    assert run.get().policy.order == runs_pb2.ORDER_FIFO


def test_fields_of_a_policy_that_are_changed_at_the_same_time_are_all_changed(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=9)
    wished = {
        "max_staleness": 3,
        "max_attempts": 7,
        "retry_backoff_ms": 900,
        "failure_budget": 11,
        "lease_ttl_ms": 5_000,
    }
    with ThreadPoolExecutor() as pool:
        for _ in range(10):
            changes = [pool.submit(change, rpc, run, name, **{name: value}) for name, value in wished.items()]
            for one in changes:
                one.result(TIMEOUT_S)
            policy = run.get().policy
            assert {name: getattr(policy, name) for name in wished} == wished
            run.update_policy(batch_groups=1, max_queued_groups=9)


@pytest.mark.parametrize(
    ("names", "field"),
    [(["order", "orders"], "fields[1]"), (["preset"], "fields[0]"), (["order"] * 100, "fields")],
)
def test_names_that_are_no_fields_of_a_policy_are_refused(rpc: Rpc, names: list[str], field: str) -> None:
    run = rpc.create()
    before = run.get()
    error = failure(lambda: change(rpc, run, *names))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", field)
    assert run.get() == before
