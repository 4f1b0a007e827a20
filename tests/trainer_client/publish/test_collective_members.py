"""Tests of who takes part in a collective update, and how the members' reports are read."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout_buffer.v1 import weights_pb2
from trainer_client.publish.collective.members import Watch, candidates, next_membership, others, ranked, unheard
from trainer_client.publish.collective.plan import CollectivePlan, PlanMember, TensorSpec
from trainer_client.state import Engine, RunState, WeightVersion

V7 = WeightVersion(2, 7)


def engine(engine_id: str, **changes: Any) -> Engine:
    known: dict[str, Any] = {
        "worker_id": "w", "state": "ready", "loaded": WeightVersion(2, 6), "reloads": 0, "last_reload_ms": 0,
        "last_error": "", "errors": 0,
    }  # fmt: skip
    return Engine(engine_id, **(known | changes))


def run_of(*engines: Engine) -> RunState:
    return cast("RunState", SimpleNamespace(engines=engines))


def test_a_new_group_has_a_number_that_no_engine_knows_and_no_report_can_exhaust_them() -> None:
    assert next_membership(3, [engine("e1", membership=7), engine("e2")]) == 8
    assert next_membership(9, [engine("e1", membership=7)]) == 10
    assert next_membership(0, [engine("e1", membership=(1 << 53) - 1), engine("e2", membership=4)]) == 5


def plan_of(*ids: str) -> CollectivePlan:
    return CollectivePlan(
        version=V7,
        phase="prepare",
        membership=4,
        master_address="trainer",
        master_port=1234,
        group_name="r.4.0a",
        backend="gloo",
        world_size=1 + len(ids),
        members=tuple(PlanMember(engine_id, 1 + i) for i, engine_id in enumerate(ids)),
        tensors=(TensorSpec("w", "bfloat16", (2, 3)),),
        timeout_ms=60_000,
    )


def test_engines_that_serve_or_load_take_part_in_the_order_of_their_ids() -> None:
    run = run_of(
        engine("e3"),
        engine("e1", state="loading"),
        engine("e0", state="starting"),
        engine("e2", silent_ms=60_000),
        engine("e4", state="quarantined"),
        engine("e5", state="stopped"),
        engine("e6"),
    )
    members = candidates(run, {"e6": "failed"})
    assert [member.engine_id for member in members] == ["e1", "e3"]
    assert ranked(members) == (PlanMember("e1", 1), PlanMember("e3", 2))
    # The stopped and the silent one will not ask for files.
    assert others(run, members) == ("e0", "e4", "e6")


@pytest.mark.parametrize(
    ("changes", "missing", "why"),
    [
        ({"membership": 4, "prepared": V7}, False, ""),
        ({"membership": 4, "prepared": WeightVersion(1, 7)}, True, ""),
        ({"membership": 3, "prepared": V7}, True, ""),
        ({"membership": 4}, True, ""),
        ({"errors": 1}, True, ""),
        ({"errors": 2, "last_error": "no route"}, False, "cannot join: no route"),
        ({"errors": 2, "membership": 4}, True, ""),
        ({"state": "quarantined", "last_error": "refused"}, False, "quarantined: refused"),
        ({"silent_ms": 61_000}, False, "silent for 61 s"),
    ],
)
def test_a_member_is_there_late_or_failed(changes: dict[str, Any], missing: bool, why: str) -> None:
    watch = Watch(plan_of("e1"), run_of(engine("e1", errors=1)))
    standing = watch.judge(run_of(engine("e1", **({"errors": 1} | changes))), "prepared")
    assert standing.missing == (("e1",) if missing else ())
    assert standing.failed == ({"e1": why} if why else {})


def test_a_member_that_was_in_the_group_and_is_no_more_has_failed() -> None:
    before = run_of(engine("e1", membership=4))
    assert Watch(plan_of("e1"), before).judge(run_of(engine("e1")), "loaded").failed == {
        "e1": "left the group: without an error"
    }
    watch = Watch(plan_of("e1", "e2"), run_of(engine("e1"), engine("e2")))
    assert watch.judge(run_of(engine("e1", membership=4), engine("e2")), "prepared").missing == ("e1", "e2")
    gone = watch.judge(run_of(engine("e1", last_error="killed")), "prepared")
    assert gone.failed == {"e1": "left the group: killed", "e2": "its worker reports it no more"}


def test_loaded_counts_only_in_the_group() -> None:
    watch = Watch(plan_of("e1"), run_of(engine("e1")))
    assert watch.judge(run_of(engine("e1", membership=3, loaded=V7)), "loaded").missing == ("e1",)
    assert watch.judge(run_of(engine("e1", membership=4, loaded=V7)), "loaded").missing == ()


def test_whoever_has_not_reported_since_is_unheard() -> None:
    run = run_of(engine("e1", silent_ms=900), engine("e2", silent_ms=1_100))
    assert unheard(run, ["e1", "e2", "e3"], 1.0) == ("e2", "e3")


def test_a_plan_travels_as_it_is() -> None:
    wire = plan_of("a", "b").to_wire()
    assert (wire.version.term, wire.version.version) == (2, 7)
    assert (wire.phase, wire.membership, wire.world_size) == (weights_pb2.PLAN_PHASE_PREPARE, 4, 3)
    assert [(member.engine_id, member.rank) for member in wire.members] == [("a", 1), ("b", 2)]
    assert [(spec.name, spec.dtype, list(spec.shape)) for spec in wire.tensors] == [("w", "bfloat16", [2, 3])]
    assert (wire.master_address, wire.master_port, wire.group_name) == ("trainer", 1234, "r.4.0a")
    assert (wire.backend, wire.timeout_ms, wire.established) == ("gloo", 60_000, False)
    assert replace(plan_of("a"), established=True).to_wire().established
