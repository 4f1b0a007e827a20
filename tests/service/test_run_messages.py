"""The state of a run on the wire, and what programs that show it make of it."""

from dataclasses import replace

from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, RunPolicy
from buffer_service.observability.estimate import estimate
from buffer_service.rpc.convert.runs import to_run, view_of
from buffer_wire.estimate import Estimate
from buffer_wire.messages import value_of
from rollout_buffer.v1 import runs_pb2
from tests.support.views import ledger, make_loop, make_view
from trainer_client.client.replies import run_state

SOME = ops.Amount(groups=2, samples=8, tokens=800, bytes=9_000)
MORE = ops.Amount(groups=3, samples=12, tokens=1_200, bytes=12_000)

VIEW = make_view(
    RunPolicy(preset="areal(1)", environments=(EnvironmentRule(environment="math", share=2),)),
    groups={"queued": SOME, "filtered": MORE, "forming": SOME},
    environments={"math": {"queued": SOME}, "code": {"filtered": MORE, "forming": SOME}},
    tasks={"pending": 3, "failed": 1},
    statistics={
        "recent_acceptance_ppm": 400_000,
        "filtered_equal_rewards": 3,
        "leases_cancelled": 2,
        "accepted_reward_milli": -(10**13),
        "token_staleness_milli_sum": 1 << 52,
    },
    draining=True,
    paused="operator",
    published=ops.WeightVersion(2, 7),
    engines=[
        ops.EngineReport("e", "w", "ready", ops.WeightVersion(2, 6), 4, 30, "slow", 1),
        ops.EngineReport(
            "f",
            "w",
            "loading",
            ops.WeightVersion(2, 7),
            4,
            30,
            "",
            0,
            membership=3,
            prepared=ops.WeightVersion(2, 8),
            weights_url="http://w:9000",
            silent_ms=12_000,
            decoded_tokens=90_000,
            decode_busy_ms=4_000,
            decode_request_ms=70_000,
        ),
    ],
    failures=[ops.TaskFailure("t", 5, "no reward", 99)],
    awaited=2,
    awaited_task="a",
    environment_work=[ops.EnvironmentWork("code", 9, 2, 1, 3, 400)],
    stages=[
        ops.StageState("rewards", 3, 2, 9, 1, 4_000, 250, 6, 720),
        ops.StageState("reference", 0, 0, 0, 0, 0, None),
    ],
    reuse=ops.ReuseLedger(reusable_groups=4, drawn=9, delivered=2, trained=5, given_back=1, lost=1),
    blob_bytes=9_000,
    max_blob_bytes=1 << 30,
    relaying=[ops.RelayingClient("w", writes=True, why="connection refused", silent_ms=7)],
)


def test_a_run_travels_there_and_back() -> None:
    message = runs_pb2.Run.FromString(to_run(VIEW).SerializeToString())
    assert view_of(message, VIEW.revision) == VIEW


def test_a_policy_that_went_beyond_its_preset_is_shown_as_it_is() -> None:
    loose = replace(VIEW, policy=RunPolicy(preset="areal(1)"))
    assert view_of(to_run(loose)).policy.max_staleness == RunPolicy().max_staleness


def test_environments_are_listed_in_order_with_their_ledgers() -> None:
    run = to_run(VIEW)
    assert [entry.environment for entry in run.environments] == ["code", "math"]
    assert run.environments[0].groups.filtered.groups == 3
    assert run.environments[1].groups.accepted.tokens == 800
    assert all(entry.groups.balanced for entry in run.environments)
    assert run.draining
    assert run.statistics.recent_acceptance_ppm == 400_000


def test_an_environment_that_does_not_balance_says_so() -> None:
    broken = {**ledger(queued=SOME), "accepted": MORE}
    run = to_run(replace(VIEW, environments={"math": broken, "code": VIEW.environments["code"]}))
    assert [entry.groups.balanced for entry in run.environments] == [True, False]
    assert run.groups.balanced


def test_an_estimate_travels_there_and_back_and_to_the_trainer() -> None:
    slow = {"trainer_busy_ms": 0, "trainer_wait_ms": 0}
    views = (make_loop(rho=1.5), make_loop(rho=0.6, grown=slow), make_loop(publishes=2), VIEW)
    for view in (replace(each, run_id=f"never asked before {number}") for number, each in enumerate(views)):
        message = runs_pb2.Run.FromString(to_run(view).SerializeToString())
        # What was never asked before is being simulated, where it can be.
        found = estimate(view, lambda *_: (None, True))
        assert value_of(Estimate, message.estimate) == found
        assert run_state(message, 1).estimate == found


def test_an_older_service_sends_no_uses() -> None:
    message = to_run(VIEW)
    assert run_state(message, 1).reuse.trained == 5
    message.ClearField("reuse")
    assert view_of(message).reuse == ops.ReuseLedger()
    assert run_state(message, 1).reuse.drawn == 0


def test_an_older_service_sends_no_estimate() -> None:
    message = to_run(VIEW)
    message.ClearField("estimate")
    assert run_state(message, 1).estimate is None
