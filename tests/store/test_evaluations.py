"""Evaluations on the store: limits, portions, and what is left of them. Their rules are compared with the model's in
tests/model.
"""

from typing import Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import nothing, pack, text
from buffer_service.domain import evaluations as ev
from buffer_service.domain.command import Command
from buffer_service.domain.ports import Topic
from buffer_service.store.keys import index_key
from buffer_wire.errors import EvaluationsFull, StoreRolledBack, UnknownEvaluation
from buffer_wire.revision import NO_REVISION
from tests.store.driver import Run, claim, weights


async def submit(run: Run, name: str = "e", count: int = 1, *, spec: bytes = b"spec", seen: int = 0) -> Any:
    tasks = [ev.EvaluationTask(f"{name}.{i}", 1, spec) for i in range(count)]
    request = ev.SubmitEvaluation(run.epoch, name, None, f"{name}{count}".encode(), tasks)
    return await run.store.call(commands.submit_evaluation(run.run_id, request, seen_revision=claim(seen)))


async def lease(run: Run, count: int = 256, request: str = "r", instance: str = "i") -> list[ev.EvaluationGrant]:
    ask = ev.EvaluationAsk("w", instance, request, "e", weights(0), count, would_load=False)
    return list((await run.store.call(commands.lease_evaluation(run.run_id, ask))).grants)


async def finish(run: Run, grant: ev.EvaluationGrant, body: bytes = b"body") -> ev.EvaluationOutcome:
    pinned = grant.version
    done = ev.FinishEvaluation(
        "w",
        "i",
        grant.lease_id,
        ev.FinishKind.GROUP,
        body=body,
        task_id=grant.task_id,
        samples=1,
        head=pinned,
        tail=pinned,
    )
    _, outcome = await run.store.call(commands.finish_evaluation(run.run_id, done))
    return outcome


async def indexes(run: Run) -> set[str]:
    """Index keys of evaluations."""
    start = index_key(run.run_id, "eval")
    return {text(key).removeprefix(index_key(run.run_id, "")) for key in await run.command("KEYS", f"{start}*")}


async def test_results_are_stored_once_and_deleted_with_their_evaluation(run: Run) -> None:
    await run.create()
    await submit(run, count=600)
    for number in range(3):
        for grant in await lease(run, request=f"r{number}"):
            assert await finish(run, grant) is ev.EvaluationOutcome.ACCEPTED
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
    with pytest.raises(EvaluationsFull, match="stored_bytes"):
        await finish(run, grant, b"0123456789ab")
    await run.store.sweep()
    assert await run.payload_keys() == set()
    assert await finish(run, grant, b"1234") is ev.EvaluationOutcome.ACCEPTED


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


async def test_nothing_is_kept_of_a_worker_that_holds_no_lease(run: Run) -> None:
    await run.create()
    await submit(run)
    (grant,) = await lease(run)
    assert await run.command("HLEN", index_key(run.run_id, "eval_workers")) == 1
    await finish(run, grant)
    assert await lease(run, request="another") == []
    assert {key.partition(":")[0] for key in await indexes(run)} == {"evals", "eval_tasks", "eval_ended"}


async def test_leases_of_a_deleted_evaluation_lapse_and_leave_nothing(run: Run) -> None:
    await run.create(lease_ttl_ms=1_000)
    await submit(run)
    (grant,) = await lease(run)
    await run.store.call(commands.delete_evaluation(run.run_id, "e"))
    # Another one of the same name has nothing to do with it.
    await submit(run)
    assert await finish(run, grant) is ev.EvaluationOutcome.CLOSED
    await run.pass_ms(1_001)
    await run.store.sweep()
    _, view = await run.store.call(commands.evaluation(run.run_id, "e"))
    assert (view.pending, view.leased) == (1, 0)
    assert not await indexes(run) & {"eval_leases", "eval_workers", "eval_held:w"}


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
