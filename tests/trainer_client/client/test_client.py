"""Both clients against a scripted server: what they send, what they repeat, what they raise."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from buffer_wire.errors import (
    BatchNotReady,
    InvalidField,
    NotReady,
    PendingFull,
    StaleEpoch,
    StoreUnavailable,
    UnknownRun,
)
from buffer_wire.status import ServiceUnreachable
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import FakeService, pull_messages
from tests.trainer_client.publish.test_collective_members import plan_of
from trainer_client import (
    AsyncBufferClient,
    BufferClient,
    ClientOptions,
    FilesManifest,
    Policy,
    SamplingParams,
    Submission,
    Task,
    Waiting,
    WeightFile,
    WeightVersion,
)

pytestmark = pytest.mark.matrix

OPTIONS = ClientOptions(timeout_s=10, attempt_timeout_s=5)
TASK = Task(group_size=1, sampling=SamplingParams(max_new_tokens=1), prompt_token_ids=[1])

Do = Callable[..., Any]
"""do(method, *args, **kwargs): the method's result, of either client."""


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService() as fake:
        yield fake


@pytest.fixture(params=["sync", "asyncio"])
def do(request: pytest.FixtureRequest, service: FakeService) -> Iterator[Do]:
    if request.param == "sync":
        with BufferClient(service.target, OPTIONS) as client:
            yield lambda method, *args, **kwargs: getattr(client, method)(*args, **kwargs)
        return
    with asyncio.Runner() as runner:
        async_client: AsyncBufferClient = runner.run(_open(service.target))
        yield lambda method, *args, **kwargs: runner.run(getattr(async_client, method)(*args, **kwargs))
        runner.run(async_client.close())


async def _open(target: str) -> AsyncBufferClient:
    return AsyncBufferClient(target, OPTIONS)


def not_ready(step: int = 0) -> BatchNotReady:
    return BatchNotReady(step=step, queued_groups=1, needed_groups=4, leased=2, pending=3, waits_on="the workers")


def test_a_run_is_created_with_the_stated_policy_only(service: FakeService, do: Do) -> None:
    run = runs_pb2.Run(run_id="r", epoch=1, policy=runs_pb2.RunPolicy(batch_groups=4, max_attempts=5))
    service.answer("RunService/CreateRun", runs_pb2.CreateRunResponse(revision=3, run=run, created=True))
    state = do("create_run", "r", Policy(batch_groups=4))
    (request,) = service.requests["RunService/CreateRun"]
    assert request.policy == runs_pb2.RunPolicy(batch_groups=4)
    assert (state.run_id, state.epoch, state.revision) == ("r", 1, 3)
    assert state.policy == Policy(batch_groups=4, max_attempts=5)


def test_the_whole_state_of_a_run_is_decoded(service: FakeService, do: Do) -> None:
    run = runs_pb2.Run(
        run_id="r",
        epoch=2,
        published=common_pb2.WeightVersion(epoch=2, version=7),
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
                loaded=common_pb2.WeightVersion(epoch=2, version=6),
                reloads=6,
            )
        ],
    )
    service.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=12, run=run))
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


def test_the_highest_revision_seen_goes_out_with_every_request(service: FakeService, do: Do) -> None:
    replies = [
        batches_pb2.CommitResponse(revision=revision, revision_proof=f"of {revision}", committed_steps=1)
        for revision in (12, 9)
    ]
    service.answer("BatchService/Commit", *replies)
    for run_id in ("r", "r", "r", "other"):
        do("commit", run_id, epoch=1, through_step=0)
    refs = [request.run for request in service.requests["BatchService/Commit"]]
    proven = [(0, ""), (12, "of 12"), (12, "of 12"), (0, "")]
    assert [(ref.seen_revision, ref.seen_proof) for ref in refs] == proven


def test_a_view_promises_nothing(service: FakeService, do: Do) -> None:
    """It shows writes that the run's replicas may not have yet: no store is behind because it lacks these."""
    service.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=12, run=runs_pb2.Run(run_id="r")))
    service.answer("BatchService/Commit", batches_pb2.CommitResponse(revision=11, committed_steps=1))
    assert do("run", "r").revision == 12
    do("commit", "r", epoch=1, through_step=0)
    assert [request.run.seen_revision for request in service.requests["BatchService/Commit"]] == [0]


def test_a_field_of_the_policy_is_changed_and_the_others_stay(service: FakeService, do: Do) -> None:
    policy = runs_pb2.RunPolicy(
        batch_groups=4, max_attempts=5, environments=[runs_pb2.EnvironmentRule(environment="a")]
    )
    run = runs_pb2.Run(run_id="r", policy=policy)
    service.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=1, run=run))
    service.answer("RunService/UpdatePolicy", runs_pb2.UpdatePolicyResponse(revision=2, policy=policy))
    assert do("update_policy", "r", environments={"easy": 1, "hard": 3}).batch_groups == 4
    do("update_policy", "r", Policy(batch_groups=8))
    do("update_policy", "r", Policy(batch_groups=8), order="lifo")
    with pytest.raises(InvalidField, match="one of its fields \\(batch_groups is close"):
        do("update_policy", "r", batch_group=8)
    assert do("update_policy", "r").batch_groups == 4
    with pytest.raises(InvalidField, match="part of a whole policy"):
        do("update_policy", "r", preset="miles")
    assert do("update_policy", "r", environments=None, max_staleness=None).batch_groups == 4
    requests = service.requests["RunService/UpdatePolicy"]
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
def test_a_run_is_paused_drained_and_continued(service: FakeService, do: Do, verb: str) -> None:
    method = f"RunService/{verb.title()}Run"
    reply = getattr(runs_pb2, f"{verb.title()}RunResponse")(revision=3)
    service.answer(method, StoreUnavailable("unix:s", "loading"), reply)
    assert do(f"{verb}_run", "r") is None
    assert [request.run.run_id for request in service.requests[method]] == ["r", "r"]


def test_a_deleted_run_has_no_past(service: FakeService, do: Do) -> None:
    run = runs_pb2.Run(run_id="r")
    service.answer("RunService/GetRun", runs_pb2.GetRunResponse(revision=12, run=run))
    service.answer(
        "BatchService/Commit", batches_pb2.CommitResponse(revision=12, revision_proof="of 12", committed_steps=1)
    )
    service.answer("RunService/DeleteRun", StoreUnavailable("unix:s", "loading"), UnknownRun("r"))
    do("commit", "r", epoch=1, through_step=0)
    # The first try did it, its answer was lost.
    do("delete_run", "r")
    do("run", "r")
    with pytest.raises(UnknownRun):
        do("delete_run", "r")
    assert [request.run.seen_revision for request in service.requests["RunService/GetRun"]] == [0]
    # Deleted and made anew by others, in between.
    service.answer("RunService/CreateRun", runs_pb2.CreateRunResponse(revision=1, run=run, created=True))
    do("commit", "r", epoch=1, through_step=0)
    do("create_run", "r")
    do("run", "r")
    assert [request.run.seen_revision for request in service.requests["RunService/GetRun"]][1:] == [0]


@pytest.mark.parametrize(
    "error",
    [StaleEpoch(1, 2), UnknownRun("r"), InvalidField("through_step", 3, "assembled")],
    ids=lambda error: error.reason,
)
def test_errors_of_the_service_are_raised_again_at_once(service: FakeService, do: Do, error: Any) -> None:
    service.answer("BatchService/Commit", error)
    with pytest.raises(type(error)) as raised:
        do("commit", "r", epoch=1, through_step=3)
    assert raised.value.attributes == error.attributes
    assert raised.value.message == error.message
    assert len(service.requests["BatchService/Commit"]) == 1


def test_retryable_errors_are_repeated_until_they_are_cured(service: FakeService, do: Do) -> None:
    service.answer(
        "BatchService/Commit",
        StoreUnavailable("unix:s", "loading"),
        StoreUnavailable("unix:s", "loading"),
        batches_pb2.CommitResponse(revision=1, committed_steps=4),
    )
    assert do("commit", "r", epoch=1, through_step=3) == 4
    assert len(service.requests["BatchService/Commit"]) == 3


def test_repeats_carry_the_same_identity(service: FakeService, do: Do) -> None:
    down = StoreUnavailable("unix:s", "loading")
    service.answer("BatchService/Resume", down, batches_pb2.ResumeResponse(revision=1, epoch=3, next_step=2, version=5))
    service.answer("TaskService/SubmitTasks", down, tasks_pb2.SubmitTasksResponse(revision=2, cursor=1))
    resumed = do("resume", "r", mode="requeue")
    do("submit_tasks", "r", Submission(epoch=3, expected_cursor=0, cursor=1, tasks=[TASK]))
    do("submit_tasks", "r", Submission(epoch=3, expected_cursor=1, cursor=2, tasks=[TASK]))
    assert (resumed.epoch, resumed.next_step, resumed.version) == (3, 2, 5)
    first, again = service.requests["BatchService/Resume"]
    assert first.request_id == again.request_id != ""
    assert not first.HasField("next_step")
    assert first.mode == batches_pb2.RESUME_MODE_REQUEUE
    ids = [request.request_id for request in service.requests["TaskService/SubmitTasks"]]
    assert ids[0] == ids[1] != ids[2]


def test_a_publish_carries_its_manifest_and_commit(service: FakeService, do: Do) -> None:
    reply = weights_pb2.PublishResponse(
        revision=1, published=common_pb2.WeightVersion(epoch=2, version=3), committed_steps=6
    )
    service.answer("WeightService/Publish", reply)
    manifest = FilesManifest("/w", (WeightFile("a", 1, b"x" * 32),))
    done = do("publish", "r", epoch=2, version=3, manifest=manifest, commit_through=5)
    assert (done.version, done.committed_steps) == (WeightVersion(2, 3), 6)
    do("publish", "r", epoch=2, version=3)
    full, bare = service.requests["WeightService/Publish"]
    assert full.manifest == manifest.to_wire()
    assert full.commit_through_step == 5
    assert not bare.HasField("manifest")
    assert not bare.HasField("commit_through_step")


def test_a_plan_is_announced_as_it_is(service: FakeService, do: Do) -> None:
    service.answer("WeightService/PlanCollective", weights_pb2.PlanCollectiveResponse(revision=4))
    plan = plan_of("e0", "e1")
    do("plan_collective", "r", epoch=2, plan=plan)
    (request,) = service.requests["WeightService/PlanCollective"]
    assert (request.run.run_id, request.epoch, request.plan) == ("r", 2, plan.to_wire())


def test_a_pull_becomes_a_batch(service: FakeService, do: Do) -> None:
    service.answer("BatchService/PullBatch", pull_messages([arrays_for("a"), arrays_for("b")], step=4))
    batch = do("pull", "r", epoch=2, step=4, rank=1, world_size=2, train_version=9)
    assert [group.task_id for group in batch.groups] == ["a", "b"]
    (request,) = service.requests["BatchService/PullBatch"]
    assert (request.epoch, request.step, request.rank, request.world_size) == (2, 4, 1, 2)
    assert request.train_version == 9


def test_a_pull_waits_for_a_batch_and_says_on_whom(service: FakeService, do: Do) -> None:
    service.answer("BatchService/PullBatch", not_ready(), not_ready(), pull_messages([arrays_for("a")]))
    waits: list[Waiting] = []
    batch = do("pull", "r", epoch=1, step=0, on_wait=waits.append)
    assert len(batch.groups) == 1
    assert [(waiting.doing, waiting.on) for waiting in waits] == [("pulling step 0", "the workers")] * 2
    assert not service.requests["BatchService/PullBatch"][0].HasField("train_version")


def test_a_pull_whose_deadline_passes_raises_what_is_short(service: FakeService, do: Do) -> None:
    service.answer("BatchService/PullBatch", not_ready())
    with pytest.raises(BatchNotReady, match="1 of 4 groups") as raised:
        do("pull", "r", epoch=1, step=0, timeout_s=0.3)
    assert raised.value.attributes["waits_on"] == "the workers"
    waits_ms = [request.wait_ms for request in service.requests["BatchService/PullBatch"]]
    assert len(waits_ms) > 1
    assert max(waits_ms) <= 300


def test_a_pull_that_must_not_wait_asks_once(service: FakeService, do: Do) -> None:
    service.answer("BatchService/PullBatch", not_ready())
    with pytest.raises(BatchNotReady):
        do("pull", "r", epoch=1, step=0, timeout_s=0)
    (request,) = service.requests["BatchService/PullBatch"]
    assert request.wait_ms == 0


def test_a_caller_can_end_a_wait(service: FakeService, do: Do) -> None:
    def end(_: Waiting) -> None:
        raise KeyError("enough")

    service.answer("BatchService/PullBatch", not_ready())
    with pytest.raises(KeyError, match="enough"):
        do("pull", "r", epoch=1, step=0, on_wait=end)


def test_a_stream_cut_in_the_middle_is_pulled_again(service: FakeService, do: Do) -> None:
    messages = pull_messages([arrays_for(f"t{i}") for i in range(4)])

    def cut(_: object, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield messages[0]
        yield messages[1]
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    service.answer("BatchService/PullBatch", cut, messages[:-1], messages)
    batch = do("pull", "r", epoch=1, step=0)
    assert [group.task_id for group in batch.groups] == ["t0", "t1", "t2", "t3"]
    assert len(service.requests["BatchService/PullBatch"]) == 3


def test_a_server_that_cancels_its_calls_is_asked_again(service: FakeService, do: Do) -> None:
    def cancel(_: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.CANCELLED, "shutting down")

    service.answer("BatchService/PullBatch", cancel, pull_messages([arrays_for("a")]))
    assert len(do("pull", "r", epoch=1, step=0).groups) == 1


def test_a_full_run_is_named_when_a_submit_gives_up(service: FakeService, do: Do) -> None:
    service.answer("TaskService/SubmitTasks", PendingFull(10, 10))
    waits: list[Waiting] = []
    submission = Submission(epoch=1, expected_cursor=0, cursor=1, tasks=[TASK])
    with pytest.raises(PendingFull) as raised:
        do("submit_tasks", "r", submission, timeout_s=0.3, on_wait=waits.append)
    assert raised.value.attributes == {"pending": "10", "limit": "10"}
    assert waits[0].on == "the workers: 10 tasks are pending, the cap is 10"
    assert waits[0].doing == "submitting 1 tasks"


def engine(name: str, state: int, epoch: int, version: int, error: str = "") -> weights_pb2.EngineReport:
    return weights_pb2.EngineReport(
        engine_id=name,
        state=state,  # type: ignore[arg-type]
        loaded=common_pb2.WeightVersion(epoch=epoch, version=version),
        last_error=error,
    )


def run_with(*engines: weights_pb2.EngineReport) -> runs_pb2.GetRunResponse:
    return runs_pb2.GetRunResponse(revision=1, run=runs_pb2.Run(run_id="r", epoch=2, engines=engines))


READY, LOADING = weights_pb2.ENGINE_STATE_READY, weights_pb2.ENGINE_STATE_LOADING


def test_waiting_for_engines_ends_when_enough_have_loaded(service: FakeService, do: Do) -> None:
    service.answer(
        "RunService/GetRun",
        run_with(),
        # A higher version of the epoch before is another timeline's.
        run_with(engine("a", READY, 1, 9), engine("b", READY, 2, 3)),
        run_with(engine("a", LOADING, 2, 3), engine("b", READY, 2, 3)),
        run_with(engine("a", READY, 2, 4), engine("b", READY, 2, 3)),
    )
    waits: list[Waiting] = []
    state = do("wait_for_engines", "r", 3, 2, on_wait=waits.append)
    assert [report.engine_id for report in state.engines] == ["a", "b"]
    assert len(service.requests["RunService/GetRun"]) == 4
    assert waits[0].on == "workers to report their engines"
    assert waits[1].on == "the engines a (ready, version 9)"


def test_waiting_for_engines_gives_up_naming_who_is_behind(service: FakeService, do: Do) -> None:
    service.answer("RunService/GetRun", run_with(engine("a", LOADING, 2, 1, "no space left")))
    with pytest.raises(NotReady, match="0 of 1 engines have loaded version 3") as raised:
        do("wait_for_engines", "r", 3, timeout_s=0.2)
    assert "a (loading, version 1, last error: no space left)" in raised.value.message


def test_a_service_that_is_not_there_is_named_after_the_deadline() -> None:
    with FakeService() as gone:
        target = gone.target
    with (
        BufferClient(target, ClientOptions(timeout_s=0.3)) as client,
        pytest.raises(ServiceUnreachable) as raised,
    ):
        client.run("r")
    assert f"waiting on the service at {target}" in raised.value.__notes__[0]


def test_a_service_that_comes_back_is_found_again(service: FakeService) -> None:
    """The server goes away while a pull waits in it, and another one takes its address."""
    entered, port = threading.Event(), service.port

    def hold(_: object, context: grpc.ServicerContext) -> list[bytes]:
        entered.set()
        while context.is_active():
            threading.Event().wait(0.01)
        return []

    service.answer("BatchService/PullBatch", hold)
    pulled: list[Any] = []
    with BufferClient(service.target, OPTIONS) as client:
        thread = threading.Thread(target=lambda: pulled.append(client.pull("r", epoch=1, step=0)))
        thread.start()
        assert entered.wait(10)
        service.stop()
        with FakeService(port) as successor:
            successor.answer("BatchService/PullBatch", pull_messages([arrays_for("a")]))
            thread.join(20)
    assert [group.task_id for group in pulled[0].groups] == ["a"]


def test_a_closed_client_refuses_further_calls(service: FakeService) -> None:
    client = BufferClient(service.target, OPTIONS)
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.run("r")
