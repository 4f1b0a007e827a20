"""Lists of a run, page by page or whole."""

from typing import Any

from buffer_service import commands
from buffer_service.domain import inspection as ins
from tests.store.driver import Run


async def tasks(
    run: Run,
    which: ins.TaskSet,
    after: ins.Position = (),
    limit: int = 100,
    environment: str | None = None,
    worker_id: str = "",
) -> ins.Page[ins.TaskFacts]:
    return await run.store.call(
        commands.list_tasks(run.run_id, which, after, limit, environment=environment, worker_id=worker_id)
    )


async def groups(
    run: Run,
    step: int | None = None,
    after: ins.Position = (),
    limit: int = 100,
    environment: str | None = None,
) -> ins.Page[ins.GroupView]:
    _, page = await run.store.call(commands.list_groups(run.run_id, step, after, limit, environment=environment))
    return page


async def all_tasks(run: Run, which: ins.TaskSet, limit: int = 100, **filters: Any) -> list[ins.TaskFacts]:
    found: list[ins.TaskFacts] = []
    page = await tasks(run, which, (), limit, **filters)
    found += page.items
    while page.following:
        page = await tasks(run, which, page.following, limit, **filters)
        found += page.items
    return found


async def all_groups(run: Run, step: int | None = None, limit: int = 100, **filters: Any) -> list[ins.GroupView]:
    found: list[ins.GroupView] = []
    page = await groups(run, step, (), limit, **filters)
    found += page.items
    while page.following:
        page = await groups(run, step, page.following, limit, **filters)
        found += page.items
    return found


async def all_steps(run: Run, limit: int = 100) -> list[ins.StepView]:
    page = await run.store.call(commands.list_steps(run.run_id, (), limit))
    found = list(page.items)
    while page.following:
        page = await run.store.call(commands.list_steps(run.run_id, page.following, limit))
        found += page.items
    return found


def ids(items: Any) -> list[str]:
    return [getattr(item, "group_id", None) or item.task_id for item in items]
