"""Both clients against a scripted server: what they send, and what they make of the answers."""

import pytest

from buffer_wire.errors import (
    InvalidField,
    StoreUnavailable,
    UnknownRun,
)
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, weights_pb2
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import Do, FakeService, pull_messages
from tests.trainer_client.publish.test_collective_members import plan_of
from trainer_client import (
    FilesManifest,
    Policy,
    WeightFile,
    WeightVersion,
)

pytestmark = pytest.mark.matrix


def test_a_run_is_created_with_the_stated_policy_only(fake: FakeService, do: Do) -> None:
    run = runs_pb2.Run(run_id="r", term=1, policy=runs_pb2.RunPolicy(batch_groups=4, max_attempts=5))
    fake.answer("RunService/CreateRun", runs_pb2.CreateRunResponse(revision=3, run=run, created=True))
    state = do("create_run", "r", Policy(batch_groups=4))
    (request,) = fake.requests["RunService/CreateRun"]
    assert request.policy == runs_pb2.RunPolicy(batch_groups=4)
    assert (state.run_id, state.term, state.revision) == ("r", 1, 3)
    assert state.policy == Policy(batch_groups=4, max_attempts=5)


def test_the_whole_state_of_a_run_is_decoded(fake: FakeService, do: Do) -> None:
    run = runs_pb2.Run(
        run_id="r",
        term=2,
        published=common_pb2.WeightVersion(term=2, version=7),
        next_step=5,
        committed_steps=4,
        checkpointed_steps=3,
        world_size=2,
        cursor=99,
        paused="failure_budget_exceeded",
        draining=True,
        groups=runs_pb2.GroupLedger(accepted=runs_pb2.Amount(groups=3, samples=6, tokens=60, bytes=600), balanced=True),
        tasks=runs_pb2.TaskLedger(submitted=9, pending=9, balanced=True),
        statistics=runs_pb2.RunStatistics(leases_expired=4),
        environments=[
            runs_pb2.EnvironmentLedger(
                environment="sums",
                groups=runs_pb2.GroupLedger(
                    accepted=runs_pb2.Amount(groups=2), filtered=runs_pb2.Amount(groups=2), balanced=True
                ),
            )
        ],
        failures=[runs_pb2.TaskFailure(task_id="a", attempts=5, error="boom", time_ms=1)],
        engines=[
            weights_pb2.EngineReport(
                engine_id="e0",
                worker_id="w",
                state=weights_pb2.ENGINE_STATE_READY,
                loaded=common_pb2.WeightVersion(term=2, version=6),
                reloads=6,
            )
        ],
    )
    fake.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=12, run=run))
    state = do("run", "r")
    assert state.published == WeightVersion(2, 7)
    assert (state.next_step, state.committed_steps, state.checkpointed_steps, state.cursor) == (5, 4, 3, 99)
    assert (state.paused, state.draining) == ("failure_budget_exceeded", True)
    assert state.ledger.environments["sums"].filtered.groups == 2
    assert (state.ledger.groups.accepted.tokens, state.ledger.tasks.pending) == (60, 9)
    assert state.ledger.balanced
    assert state.statistics["leases_expired"] == 4
    assert state.failures[0].error == "boom"
    assert (state.engines[0].state, state.engines[0].loaded) == ("ready", WeightVersion(2, 6))
    assert do("ledger", "r").groups.accepted.groups == 3


def test_the_highest_revision_seen_goes_out_with_every_request(fake: FakeService, do: Do) -> None:
    replies = [
        batches_pb2.CommitResponse(revision=revision, revision_proof=f"of {revision}", committed_steps=1)
        for revision in (12, 9)
    ]
    fake.answer("BatchService/Commit", *replies)
    for run_id in ("r", "r", "r", "other"):
        do("commit", run_id, term=1, through_step=0)
    refs = [request.run for request in fake.requests["BatchService/Commit"]]
    proven = [(0, ""), (12, "of 12"), (12, "of 12"), (0, "")]
    assert [(ref.seen_revision, ref.seen_proof) for ref in refs] == proven


def test_a_view_promises_nothing(fake: FakeService, do: Do) -> None:
    """It shows writes that the run's replicas may not have yet: no store is behind because it lacks these."""
    fake.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=12, run=runs_pb2.Run(run_id="r")))
    fake.answer("BatchService/Commit", batches_pb2.CommitResponse(revision=11, committed_steps=1))
    assert do("run", "r").revision == 12
    do("commit", "r", term=1, through_step=0)
    assert [request.run.seen_revision for request in fake.requests["BatchService/Commit"]] == [0]


def test_a_field_of_the_policy_is_changed_and_the_others_stay(fake: FakeService, do: Do) -> None:
    policy = runs_pb2.RunPolicy(
        batch_groups=4, max_attempts=5, environments=[runs_pb2.EnvironmentRule(environment="a")]
    )
    run = runs_pb2.Run(run_id="r", policy=policy)
    fake.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=1, run=run))
    fake.answer("RunService/UpdatePolicy", runs_pb2.UpdatePolicyResponse(revision=2, policy=policy))
    assert do("update_policy", "r", environments={"easy": 1, "hard": 3}).batch_groups == 4
    do("update_policy", "r", Policy(batch_groups=8))
    do("update_policy", "r", Policy(batch_groups=8), order="lifo")
    with pytest.raises(InvalidField, match="one of its fields \\(batch_groups is close"):
        do("update_policy", "r", batch_group=8)
    assert do("update_policy", "r").batch_groups == 4
    with pytest.raises(InvalidField, match="part of a whole policy"):
        do("update_policy", "r", preset="miles")
    assert do("update_policy", "r", environments=None, max_staleness=None).batch_groups == 4
    requests = fake.requests["RunService/UpdatePolicy"]
    assert [list(request.fields) for request in requests] == [
        ["environments"],
        [],
        [],
        ["environments", "max_staleness"],
    ]
    last = requests.pop().policy
    assert (list(last.environments), last.HasField("max_staleness")) == ([], False)
    first, second, third = (request.policy for request in requests)
    assert Policy.from_wire(first) == Policy(batch_groups=4, max_attempts=5, environments={"easy": 1, "hard": 3})
    assert Policy.from_wire(second) == Policy(batch_groups=8)
    assert Policy.from_wire(third) == Policy(batch_groups=8, order="lifo")


@pytest.mark.parametrize("verb", ["pause", "drain", "continue"])
def test_a_run_is_paused_drained_and_continued(fake: FakeService, do: Do, verb: str) -> None:
    method = f"RunService/{verb.title()}Run"
    reply = getattr(runs_pb2, f"{verb.title()}RunResponse")(revision=3)
    fake.answer(method, StoreUnavailable("unix:s", "loading"), reply)
    assert do(f"{verb}_run", "r") is None
    assert [request.run.run_id for request in fake.requests[method]] == ["r", "r"]


def test_a_deleted_run_has_no_past(fake: FakeService, do: Do) -> None:
    run = runs_pb2.Run(run_id="r")
    fake.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=12, run=run))
    fake.answer(
        "BatchService/Commit", batches_pb2.CommitResponse(revision=12, revision_proof="of 12", committed_steps=1)
    )
    fake.answer("RunService/DeleteRun", StoreUnavailable("unix:s", "loading"), UnknownRun("r"))
    do("commit", "r", term=1, through_step=0)
    # The first try did it, its answer was lost.
    do("delete_run", "r")
    do("run", "r")
    with pytest.raises(UnknownRun):
        do("delete_run", "r")
    assert [request.run.seen_revision for request in fake.requests["RunService/GetRun"]] == [0]
    # Deleted and made anew by others, in between.
    fake.answer("RunService/CreateRun", runs_pb2.CreateRunResponse(revision=1, run=run, created=True))
    do("commit", "r", term=1, through_step=0)
    do("create_run", "r")
    do("run", "r")
    assert [request.run.seen_revision for request in fake.requests["RunService/GetRun"]][1:] == [0]


def test_a_publish_carries_its_manifest_and_commit(fake: FakeService, do: Do) -> None:
    reply = weights_pb2.PublishResponse(
        revision=1, published=common_pb2.WeightVersion(term=2, version=3), committed_steps=6
    )
    fake.answer("WeightService/Publish", reply)
    manifest = FilesManifest("/w", (WeightFile("a", 1, b"x" * 32),))
    done = do("publish", "r", term=2, version=3, manifest=manifest, commit_through=5)
    assert (done.version, done.committed_steps) == (WeightVersion(2, 3), 6)
    do("publish", "r", term=2, version=3)
    full, bare = fake.requests["WeightService/Publish"]
    assert full.manifest == manifest.to_wire()
    assert full.commit_through_step == 5
    assert not bare.HasField("manifest")
    assert not bare.HasField("commit_through_step")


def test_a_plan_is_announced_as_it_is(fake: FakeService, do: Do) -> None:
    fake.answer("WeightService/PlanCollective", weights_pb2.PlanCollectiveResponse(revision=4))
    plan = plan_of("e0", "e1")
    do("plan_collective", "r", term=2, plan=plan)
    (request,) = fake.requests["WeightService/PlanCollective"]
    assert (request.run.run_id, request.term, request.plan) == ("r", 2, plan.to_wire())


def test_a_pull_becomes_a_batch(fake: FakeService, do: Do) -> None:
    fake.answer("BatchService/PullBatch", pull_messages([arrays_for("a"), arrays_for("b")], step=4))
    batch = do("pull", "r", term=2, step=4, rank=1, world_size=2, train_version=9)
    assert [group.task_id for group in batch.groups] == ["a", "b"]
    (request,) = fake.requests["BatchService/PullBatch"]
    assert (request.term, request.step, request.rank, request.world_size) == (2, 4, 1, 2)
    assert request.train_version == 9
