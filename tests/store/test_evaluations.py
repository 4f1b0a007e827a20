"""Evaluations on the store: limits, portions, and what is left of them. Their rules are compared with the model's in
tests/model.
"""

from typing import Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import nothing, pack, text
from buffer_service.domain import evaluations as ev
from buffer_service.domain import inspection as ins
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.policy import OverflowAction
from buffer_service.domain.ports import Topic
from buffer_service.store.keys import index_key
from buffer_wire.errors import EvaluationsFull, StoreRolledBack, UnknownEvaluation
from buffer_wire.revision import NO_REVISION
from tests.store.driver import Run, claim, weights

EVALUATOR = "evaluator"


async def submit(run: Run, name: str = "e", count: int = 1, *, spec: bytes = b"spec", seen: int = 0) -> Any:
    tasks = [ev.EvaluationTask(f"{name}.{i}", 1, spec) for i in range(count)]
    request = ev.SubmitEvaluation(run.term, name, None, f"{name}{count}".encode(), tasks)
    return await run.store.call(commands.submit_evaluation(run.run_id, request, seen_revision=claim(seen)))


async def lease(run: Run, count: int = 256, request: str = "r", instance: str = "i") -> list[ops.LeaseGrant]:
    ask = ops.LeaseAsk(EVALUATOR, instance, request, "e", weights(0), count, sink=ops.TaskSink.EVALUATIONS)
    return list((await run.store.lease(run.run_id, ask)).grants)


async def finish(run: Run, grant: ops.LeaseGrant, body: bytes = b"body") -> str:
    assert grant.pinned is not None
    (kind,) = await run.push_kinds(run.group(grant, body, head=grant.pinned, samples=1))
    return kind


async def indexes(run: Run) -> set[str]:
    """Index keys of evaluations."""
    start = index_key(run.run_id, "eval")
    return {text(key).removeprefix(index_key(run.run_id, "")) for key in await run.command("KEYS", f"{start}*")}


async def test_results_are_stored_once_and_deleted_with_their_evaluation(run: Run) -> None:
    await run.create()
    await submit(run, count=600)
    for number in range(3):
        for grant in await lease(run, request=f"r{number}"):
            assert await finish(run, grant) == "recorded"
    _, view = await run.store.call(commands.evaluation(run.run_id, "e"))
    assert (view.finished, view.stored_bytes) == (600, 600 * len(b"body"))
    assert len(await run.payload_keys()) == 600
    portion = await run.store.call(commands.evaluation_results(run.run_id, "e", 590, 100))
    bodies = await run.store.fetch(run.run_id, [result.payload_key for result in portion.results])
    assert [bytes(body or b"") for body in bodies] == [b"body"] * 10
    await run.store.call(commands.delete_evaluation(run.run_id, "e"))
    await run.store.sweep()
    assert await run.payload_keys() == set()
    assert await indexes(run) == set()
    with pytest.raises(UnknownEvaluation):
        await run.store.call(commands.evaluation(run.run_id, "e"))
    await run.check()


async def test_a_deletion_that_was_broken_off_is_gone_on_with_by_the_sweep(run: Run) -> None:
    await run.create()
    await submit(run, count=300)
    for number in range(2):
        for grant in await lease(run, request=f"r{number}"):
            await finish(run, grant)
    await run.store.call(Command(run.run_id, "eval_delete", pack(NO_REVISION, "e"), nothing))
    assert await run.command("SCARD", index_key(run.run_id, "eval_deleting")) == 1
    await run.store.sweep()
    assert await run.payload_keys() == set()
    assert await indexes(run) == set()


async def test_a_run_is_deleted_with_its_evaluations(run: Run) -> None:
    await run.create()
    await submit(run, "a", count=300)
    await submit(run, "b", count=3)
    for grant in (await lease(run))[:200]:
        await finish(run, grant)
    await run.store.delete_run(run.run_id)
    assert await run.payload_keys() == set()
    assert await indexes(run) == set()


async def test_what_is_stored_for_evaluations_is_bounded(run: Run) -> None:
    await run.create()
    for number in range(ev.MAX_EVALUATIONS):
        await submit(run, f"e{number}")
    with pytest.raises(EvaluationsFull, match="64"):
        await submit(run, "one-more")
    await run.store.call(commands.delete_evaluation(run.run_id, "e0"))
    assert (await submit(run, "one-more")).created

    (grant,) = await lease(run, 1)
    nearly = ev.MAX_STORED_BYTES - 2
    await run.command("HSET", index_key(run.run_id, "run"), "eval_bytes", nearly)
    await run.store.call(commands.delete_evaluation(run.run_id, "e2"))
    with pytest.raises(EvaluationsFull, match=str(ev.MAX_STORED_BYTES)):
        await submit(run, "large", spec=b"0123456789")
    assert await finish(run, grant, b"0123456789ab") == "evaluations_full"
    await run.store.sweep()
    assert await run.payload_keys() == set()
    assert await finish(run, grant, b"1234") == "recorded"


async def test_a_new_process_releases_any_number_of_leases(run: Run) -> None:
    await run.create()
    await submit(run, count=700)
    for number in range(3):
        await lease(run, request=f"r{number}")
    _, view = await run.store.call(commands.evaluation(run.run_id, "e"))
    assert view.leased == 700
    assert len(await lease(run, 1, request="r0", instance="another")) == 1
    _, view = await run.store.call(commands.evaluation(run.run_id, "e"))
    assert (view.leased, view.pending) == (1, 699)


async def test_a_reply_that_is_full_asks_for_no_wait_though_others_back_off(run: Run) -> None:
    await run.create(retry_backoff_ms=60_000)
    await submit(run, count=3, spec=b"s" * 1_000)
    (failing,) = await lease(run, 1)
    back = ops.LeaseReturn(failing.lease_id, ops.ReturnKind.FAILED, "error", b"", None, 0)
    await run.store.call(commands.give_back(run.run_id, EVALUATOR, "i", [back]))
    full, last = [
        await run.store.lease(
            run.run_id,
            ops.LeaseAsk(EVALUATOR, "i", request, "e", weights(0), 3, 3_000, ops.TaskSink.EVALUATIONS),
        )
        for request in ("full", "last")
    ]
    assert (len(full.grants), full.wait) == (1, None)
    assert (len(last.grants), last.wait) == (1, ops.LeaseWait.BACKING_OFF)


async def test_nothing_is_kept_of_a_worker_that_was_silent_for_an_hour(run: Run) -> None:
    await run.create()
    await submit(run)
    (grant,) = await lease(run)
    assert await run.command("HLEN", index_key(run.run_id, "workers")) == 1
    await finish(run, grant)
    assert await lease(run, request="another") == []
    assert {key.partition(":")[0] for key in await indexes(run)} == {"evals", "eval_tasks", "eval_ended"}
    await run.pass_ms(3_600_001)
    await run.store.sweep()
    assert await run.command("HLEN", index_key(run.run_id, "workers")) == 0


async def test_leases_of_a_deleted_evaluation_end_with_it_and_leave_nothing(run: Run) -> None:
    await run.create(lease_ttl_ms=1_000)
    await submit(run)
    (grant,) = await lease(run)
    await run.store.call(commands.delete_evaluation(run.run_id, "e"))
    # Another one of the same name has nothing to do with it.
    await submit(run)
    assert await finish(run, grant) == "closed"
    await run.pass_ms(1_001)
    await run.store.sweep()
    _, view = await run.store.call(commands.evaluation(run.run_id, "e"))
    assert (view.pending, view.leased) == (1, 0)
    assert not await indexes(run) & {"eval_leases"}
    assert not await run.command("EXISTS", index_key(run.run_id, f"held:{EVALUATOR}"))


async def test_a_store_that_lost_evaluations_says_so(run: Run) -> None:
    await run.create()
    revision = (await submit(run)).revision
    with pytest.raises(StoreRolledBack):
        await submit(run, "other", seen=revision + 1)


async def test_the_hints_come_when_there_is_work_and_when_there_are_results(run: Run) -> None:
    await run.create()
    hints = run.store.notifications
    before = {topic: hints.ticket(run.run_id, topic) for topic in (Topic.EVALUATIONS, Topic.RESULTS)}
    await submit(run)
    assert await hints.wait(run.run_id, Topic.EVALUATIONS, before[Topic.EVALUATIONS], 5) > before[Topic.EVALUATIONS]
    assert hints.ticket(run.run_id, Topic.RESULTS) == before[Topic.RESULTS]
    (grant,) = await lease(run)
    await finish(run, grant)
    assert await hints.wait(run.run_id, Topic.RESULTS, before[Topic.RESULTS], 5) > before[Topic.RESULTS]


async def test_results_need_no_room_in_a_full_queue_and_wait_behind_no_blocked_group(run: Run) -> None:
    await run.create(max_queued_groups=2, batch_groups=2, overflow_action=OverflowAction.BLOCK)
    await submit(run)
    (grant,) = await lease(run)
    await run.fill("a", "b")
    assert grant.pinned is not None
    result = run.group(grant, b"result", head=grant.pinned, samples=1)
    assert await run.push_kinds(run.group("c", b"c"), result) == ["blocked", "recorded"]
    view = await run.view()
    assert (view.groups["queued"].groups, view.tasks["submitted"], view.tasks["leased"]) == (2, 2, 0)
    assert await finish(run, grant) == "duplicate"
    assert (await run.view()).statistics["pushes_duplicate"] == 0


async def test_leases_of_evaluations_take_nothing_of_what_admission_allows(run: Run) -> None:
    await run.create(max_inflight_groups=1)
    await submit(run, count=3)
    await run.submit("t1", "t2")
    assert len(await lease(run)) == 3
    leased = await run.lease(max_tasks=2)
    assert [grant.task_id for grant in leased.grants] == ["t1"]
    assert leased.wait is ops.LeaseWait.AT_CAPACITY
    assert [task.task_id for task in await leased_tasks(run, "")] == ["t1"]
    assert await leased_tasks(run, EVALUATOR) == []


async def test_an_interrupted_task_keeps_its_place_and_one_that_failed_comes_last(run: Run) -> None:
    await run.create(retry_backoff_ms=100)
    await submit(run, count=4)
    failing, interrupted = await lease(run, 2, request="first")
    backs = [
        ops.LeaseReturn(failing.lease_id, ops.ReturnKind.FAILED, "error", b"", None, 0),
        ops.LeaseReturn(interrupted.lease_id, ops.ReturnKind.INTERRUPTED, "", b"", None, 0),
    ]
    await run.store.call(commands.give_back(run.run_id, EVALUATOR, "i", backs))
    await run.pass_ms(101)
    assert [grant.task_id for grant in await lease(run, request="second")] == ["e.1", "e.2", "e.3", "e.0"]


async def test_requests_for_the_two_sinks_are_remembered_apart(run: Run) -> None:
    await run.create()
    await submit(run, count=2)
    await run.submit("t1")
    (first,) = await lease(run, 1, request="v1")
    ask = ops.LeaseAsk(EVALUATOR, "i", "r1", "e", weights(0), 1)
    (trained,) = (await run.store.lease(run.run_id, ask)).grants
    assert await lease(run, 1, request="v1") == [first]
    assert list((await run.store.lease(run.run_id, ask)).grants) == [trained]
    states = (
        await run.store.call(commands.extend(run.run_id, EVALUATOR, "i", [first.lease_id, trained.lease_id]))
    ).states
    assert states == [ops.LeaseState.LIVE] * 2


async def test_a_heartbeat_cancels_no_lease_of_an_evaluation_however_old_its_weights(run: Run) -> None:
    await run.create(max_staleness=0, cancel_stale_leases=True)
    await submit(run)
    (grant,) = await lease(run)
    await run.publish(1)
    await run.publish(2)
    (state,) = (await run.store.call(commands.extend(run.run_id, EVALUATOR, "i", [grant.lease_id]))).states
    assert state is ops.LeaseState.LIVE
    assert await finish(run, grant) == "recorded"


async def leased_tasks(run: Run, worker_id: str) -> Any:
    look = commands.list_tasks(run.run_id, ins.TaskSet.LEASED, (), 100, environment=None, worker_id=worker_id)
    return (await run.store.call(look)).items
