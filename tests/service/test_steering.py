"""A controller at work in a service: decided by the call that publishes, and seen wherever a run is looked at."""

from dataclasses import replace

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.decisions import Decision, Outcome
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.observability.control import lowered, target
from buffer_service.rpc.convert.runs import to_run, view_of
from rollout_buffer.v1 import runs_pb2
from tests.support.rpc import Rpc, make_task
from tests.support.views import make_view
from trainer_client.client.replies import run_state

STEERED = RunPolicy(
    batch_groups=8, max_queued_groups=32, max_lookahead=4, micro_batch_groups=4, target_staleness_milli=1_500
)
DECISION = Decision(
    version=7,
    moved_at=3,
    moves=2,
    target_milli=1_500,
    outcome=Outcome.HOLDING,
    measured_milli=1_490,
    reason="mean staleness 1.49 over 8 publishes, target 1.50",
    knobs=Knobs(lookahead_milli=1_250, micro_batch_groups=2),
)


def steered() -> RunView:
    return replace(make_view(STEERED, world_size=1), decision=DECISION)


def test_a_decision_and_the_values_in_effect_travel_with_the_run_and_come_back() -> None:
    run = to_run(steered())
    assert run.control.reason == DECISION.reason
    assert (run.control.max_lookahead, run.control.micro_batch_groups) == (1.25, 2)
    assert (run.policy.max_lookahead, run.policy.micro_batch_groups) == (4, 4), "as stated"
    there = view_of(run)
    assert (there.decision.outcome, there.decision.reason) == (Outcome.HOLDING, DECISION.reason)
    assert there.in_effect == steered().in_effect


def test_a_trainer_reads_it_from_the_state_of_its_run() -> None:
    control = run_state(to_run(steered()), 1).control
    assert control is not None
    assert (control.outcome, control.reason) == ("holding", DECISION.reason)
    assert (control.measured, control.max_lookahead) == (1.49, 1.25)
    assert run_state(to_run(make_view()), 1).control is None


def test_what_is_lowered_is_said_beside_what_was_stated() -> None:
    assert lowered(steered()) == "max_lookahead 1.25 of 4, micro_batch_groups 2 of 4"
    assert target(steered()) == f"1.50 by head, holding: {DECISION.reason}"
    assert target(make_view(STEERED)) == "1.50 by head: decided with the next publish"
    assert target(make_view(RunPolicy())) == lowered(make_view(RunPolicy())) == ""


def test_the_call_that_publishes_decides_and_a_repeat_of_it_decides_nothing_more(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4, max_queued_groups=16, target_staleness_milli=1_250)
    run.submit([make_task() for _ in range(40)])
    assert not run.get().HasField("control")
    run.publish(1)
    control = run.get().control
    assert (control.outcome, control.version) == (runs_pb2.CONTROL_OUTCOME_MOVED, 1)
    assert "unbounded -> 1.25" in control.reason
    assert len(run.lease(50).leases) == 4 + 5
    run.publish(1)
    assert run.get().control == control
