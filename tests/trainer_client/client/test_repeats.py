"""Both clients against a scripted server: what they repeat, on whom they wait, and what they raise."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from buffer_wire.errors import (
    BatchNotReady,
    InvalidField,
    NotReady,
    PendingFull,
    StaleTerm,
    StoreUnavailable,
    UnknownRun,
)
from buffer_wire.status import ServiceUnreachable
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import OPTIONS, Do, FakeService, pull_messages
from trainer_client import (
    BufferClient,
    ClientOptions,
    SamplingParams,
    Submission,
    Task,
    Waiting,
)

pytestmark = pytest.mark.matrix

TASK = Task(group_size=1, sampling=SamplingParams(max_new_tokens=1), prompt_token_ids=[1])


def not_ready(step: int = 0) -> BatchNotReady:
    return BatchNotReady(step=step, queued_groups=1, needed_groups=4, leased=2, pending=3, waits_on="the workers")


@pytest.mark.parametrize(
    "error",
    [StaleTerm(1, 2), UnknownRun("r"), InvalidField("through_step", 3, "assembled")],
    ids=lambda error: error.reason,
)
def test_errors_of_the_service_are_raised_again_at_once(fake: FakeService, do: Do, error: Any) -> None:
    fake.answer("BatchService/Commit", error)
    with pytest.raises(type(error)) as raised:
        do("commit", "r", term=1, through_step=3)
    assert raised.value.attributes == error.attributes
    assert raised.value.message == error.message
    assert len(fake.requests["BatchService/Commit"]) == 1


def test_retryable_errors_are_repeated_until_they_are_cured(fake: FakeService, do: Do) -> None:
    fake.answer(
        "BatchService/Commit",
        StoreUnavailable("unix:s", "loading"),
        StoreUnavailable("unix:s", "loading"),
        batches_pb2.CommitResponse(revision=1, committed_steps=4),
    )
    assert do("commit", "r", term=1, through_step=3) == 4
    assert len(fake.requests["BatchService/Commit"]) == 3


def test_repeats_carry_the_same_identity(fake: FakeService, do: Do) -> None:
    down = StoreUnavailable("unix:s", "loading")
    fake.answer("BatchService/Resume", down, batches_pb2.ResumeResponse(revision=1, term=3, next_step=2, version=5))
    fake.answer("TaskService/SubmitTasks", down, tasks_pb2.SubmitTasksResponse(revision=2, cursor=1))
    resumed = do("resume", "r", mode="requeue")
    do("submit_tasks", "r", Submission(term=3, expected_cursor=0, cursor=1, tasks=[TASK]))
    do("submit_tasks", "r", Submission(term=3, expected_cursor=1, cursor=2, tasks=[TASK]))
    assert (resumed.term, resumed.next_step, resumed.version) == (3, 2, 5)
    first, again = fake.requests["BatchService/Resume"]
    assert first.request_id == again.request_id != ""
    assert not first.HasField("next_step")
    assert first.mode == batches_pb2.RESUME_MODE_REQUEUE
    ids = [request.request_id for request in fake.requests["TaskService/SubmitTasks"]]
    assert ids[0] == ids[1] != ids[2]


def test_a_pull_waits_for_a_batch_and_says_on_whom(fake: FakeService, do: Do) -> None:
    fake.answer("BatchService/PullBatch", not_ready(), not_ready(), pull_messages([arrays_for("a")]))
    waits: list[Waiting] = []
    batch = do("pull", "r", term=1, step=0, on_wait=waits.append)
    assert len(batch.groups) == 1
    assert [(waiting.doing, waiting.on) for waiting in waits] == [("pulling step 0", "the workers")] * 2
    assert not fake.requests["BatchService/PullBatch"][0].HasField("train_version")


def test_a_pull_whose_deadline_passes_raises_what_is_short(fake: FakeService, do: Do) -> None:
    fake.answer("BatchService/PullBatch", not_ready())
    with pytest.raises(BatchNotReady, match="1 of 4 groups") as raised:
        do("pull", "r", term=1, step=0, timeout_s=0.3)
    assert raised.value.attributes["waits_on"] == "the workers"
    waits_ms = [request.wait_ms for request in fake.requests["BatchService/PullBatch"]]
    assert len(waits_ms) > 1
    assert max(waits_ms) <= 300


def test_a_pull_that_must_not_wait_asks_once(fake: FakeService, do: Do) -> None:
    fake.answer("BatchService/PullBatch", not_ready())
    with pytest.raises(BatchNotReady):
        do("pull", "r", term=1, step=0, timeout_s=0)
    (request,) = fake.requests["BatchService/PullBatch"]
    assert request.wait_ms == 0


def test_a_caller_can_end_a_wait(fake: FakeService, do: Do) -> None:
    def end(_: Waiting) -> None:
        raise KeyError("enough")

    fake.answer("BatchService/PullBatch", not_ready())
    with pytest.raises(KeyError, match="enough"):
        do("pull", "r", term=1, step=0, on_wait=end)


def test_a_stream_cut_in_the_middle_is_pulled_again(fake: FakeService, do: Do) -> None:
    messages = pull_messages([arrays_for(f"t{i}") for i in range(4)])

    def cut(_: object, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield messages[0]
        yield messages[1]
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    fake.answer("BatchService/PullBatch", cut, messages[:-1], messages)
    batch = do("pull", "r", term=1, step=0)
    assert [group.task_id for group in batch.groups] == ["t0", "t1", "t2", "t3"]
    assert len(fake.requests["BatchService/PullBatch"]) == 3


def test_a_server_that_cancels_its_calls_is_asked_again(fake: FakeService, do: Do) -> None:
    def cancel(_: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.CANCELLED, "shutting down")

    fake.answer("BatchService/PullBatch", cancel, pull_messages([arrays_for("a")]))
    assert len(do("pull", "r", term=1, step=0).groups) == 1


def test_a_full_run_is_named_when_a_submit_gives_up(fake: FakeService, do: Do) -> None:
    fake.answer("TaskService/SubmitTasks", PendingFull(10, 10))
    waits: list[Waiting] = []
    submission = Submission(term=1, expected_cursor=0, cursor=1, tasks=[TASK])
    with pytest.raises(PendingFull) as raised:
        do("submit_tasks", "r", submission, timeout_s=0.3, on_wait=waits.append)
    assert raised.value.attributes == {"pending": "10", "limit": "10"}
    assert waits[0].on == "the workers: 10 tasks are pending, the cap is 10"
    assert waits[0].doing == "submitting 1 tasks"


def engine(name: str, state: int, term: int, version: int, error: str = "") -> weights_pb2.EngineReport:
    return weights_pb2.EngineReport(
        engine_id=name,
        state=state,  # type: ignore[arg-type]
        loaded=common_pb2.WeightVersion(term=term, version=version),
        last_error=error,
    )


def run_with(*engines: weights_pb2.EngineReport) -> runs_pb2.GetRunResponse:
    return runs_pb2.GetRunResponse(revision=1, run=runs_pb2.Run(run_id="r", term=2, engines=engines))


READY, LOADING = weights_pb2.ENGINE_STATE_READY, weights_pb2.ENGINE_STATE_LOADING


def test_waiting_for_engines_ends_when_enough_have_loaded(fake: FakeService, do: Do) -> None:
    fake.answer(
        "RunService/GetRun",
        run_with(),
        # A higher version of the term before is another timeline's.
        run_with(engine("a", READY, 1, 9), engine("b", READY, 2, 3)),
        run_with(engine("a", LOADING, 2, 3), engine("b", READY, 2, 3)),
        run_with(engine("a", READY, 2, 4), engine("b", READY, 2, 3)),
    )
    waits: list[Waiting] = []
    state = do("wait_for_engines", "r", 3, 2, on_wait=waits.append)
    assert [report.engine_id for report in state.engines] == ["a", "b"]
    assert len(fake.requests["RunService/GetRun"]) == 4
    assert waits[0].on == "workers to report their engines"
    assert waits[1].on == "the engines a (ready, version 9)"


def test_waiting_for_engines_gives_up_naming_who_is_behind(fake: FakeService, do: Do) -> None:
    fake.answer("RunService/GetRun", run_with(engine("a", LOADING, 2, 1, "no space left")))
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


def test_a_service_that_comes_back_is_found_again(fake: FakeService) -> None:
    """The server goes away while a pull waits in it, and another one takes its address."""
    entered, port = threading.Event(), fake.port

    def hold(_: object, context: grpc.ServicerContext) -> list[bytes]:
        entered.set()
        while context.is_active():
            threading.Event().wait(0.01)
        return []

    fake.answer("BatchService/PullBatch", hold)
    pulled: list[Any] = []
    with BufferClient(fake.target, OPTIONS) as client:
        thread = threading.Thread(target=lambda: pulled.append(client.pull("r", term=1, step=0)))
        thread.start()
        assert entered.wait(10)
        fake.stop()
        with FakeService(port) as successor:
            successor.answer("BatchService/PullBatch", pull_messages([arrays_for("a")]))
            thread.join(20)
    assert [group.task_id for group in pulled[0].groups] == ["a"]


def test_a_closed_client_refuses_further_calls(fake: FakeService) -> None:
    client = BufferClient(fake.target, OPTIONS)
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.run("r")
