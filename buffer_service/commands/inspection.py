"""Commands that look into a run. Each is one script, which writes nothing."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from buffer_service.commands.replies import pack, text
from buffer_service.commands.run_view import as_policy
from buffer_service.domain import inspection as ins
from buffer_service.domain.command import Command, Fields
from buffer_wire.errors import InvalidField
from buffer_wire.payloads.keys import size_of

T = TypeVar("T")


def list_tasks(
    run_id: str,
    which: ins.TaskSet,
    after: ins.Position,
    limit: int,
    *,
    environment: str | None,
    worker_id: str,
) -> Command[ins.Page[ins.TaskFacts]]:
    """Tasks of a set; `worker_id` "" is any, and else for LEASED alone."""
    if which is ins.TaskSet.LEASED and after and not _is_cursor(after[0]):
        raise InvalidField("page_token", str(after[0])[:64], "the next_page_token of the page before")
    arguments = pack(which.value, limit, int(environment is not None), environment or "", worker_id, after)
    return _look(run_id, "inspect_tasks", arguments, _tasks)


def task(run_id: str, task_id: str) -> Command[tuple[int, int, ins.TaskFacts]]:
    """Revision, time and one task. Raises UnknownTask."""
    return _look(run_id, "inspect_task", pack(task_id), _one_task)


def list_groups(
    run_id: str, step: int | None, after: ins.Position, limit: int, *, environment: str | None
) -> Command[tuple[ins.Place, ins.Page[ins.GroupView]]]:
    """Groups of the queue, or of a step. Raises ReplayGap, StepAhead, InvalidField (page_token)."""
    at = -1 if step is None else step
    arguments = pack(at, limit, int(environment is not None), environment or "", after)
    return _look(run_id, "inspect_groups", arguments, _groups)


def list_steps(run_id: str, after: ins.Position, limit: int) -> Command[ins.Page[ins.StepView]]:
    """Steps that are stored, newest first."""
    below = after[0] if after else -1
    return _look(run_id, "inspect_steps", pack(limit, below), _steps)


def waits(run_id: str, limit: int) -> Command[tuple[ins.Waits, Sequence[str]]]:
    """Waits of the run: who waits on whom, and the payload keys of the blocked pushes.

    A store's `waits` reads the heads of these payloads too.
    """
    return _look(run_id, "inspect_waits", pack(limit), _waits)


def _look(run_id: str, script: str, arguments: bytes, unpack: Callable[[str, Fields], T]) -> Command[T]:
    return Command(run_id, script, arguments, unpack, reads=True, acknowledges=False)


def _tasks(_tag: str, fields: Fields) -> ins.Page[ins.TaskFacts]:
    revision, now, ttl_ms, tasks, following = fields
    return ins.Page(revision, now, [_task(task, ttl_ms) for task in tasks], _position(following))


def _one_task(_tag: str, fields: Fields) -> tuple[int, int, ins.TaskFacts]:
    revision, now, ttl_ms, task = fields
    return revision, now, _task(task, ttl_ms)


def _groups(_tag: str, fields: Fields) -> tuple[ins.Place, ins.Page[ins.GroupView]]:
    revision, now, place, groups, following = fields
    views = [ins.GroupView(*map(_plain, group)) for group in groups]
    return ins.Place(text(place)), ins.Page(revision, now, views, _position(following))


def _steps(_tag: str, fields: Fields) -> ins.Page[ins.StepView]:
    revision, now, steps, following = fields
    views = [ins.StepView(step, ins.Place(text(place)), *facts) for step, place, *facts in steps]
    return ins.Page(revision, now, views, (following,) if following >= 0 else ())


def _waits(_tag: str, fields: Fields) -> tuple[ins.Waits, Sequence[str]]:
    revision, now, policy, blocked, pushes, leased, leases, workers, asked, clock, needed = fields
    effective = as_policy(policy)
    found = ins.Waits(
        revision=revision,
        now_ms=now,
        policy=effective,
        blocked=blocked,
        pushes=[ins.BlockedPush(size_of(text(key)), since, tried, b"") for key, since, tried in pushes],
        leased=leased,
        expiring=[_task(lease, effective.lease_ttl_ms) for lease in leases],
        workers=workers,
        asked=[ins.WorkerView(text(name), text(instance), ms, held) for name, instance, ms, held in asked],
        clock=ins.AdmissionClock(*clock),
        needed_groups=needed,
    )
    return found, [text(key) for key, _, _ in pushes]


def _is_cursor(part: int | str) -> bool:
    """Test whether the part is a cursor of SCAN."""
    return isinstance(part, str) and part.isascii() and part.isdecimal() and len(part) <= 20 and int(part) < 1 << 64


def _plain(value: Any) -> Any:  # noqa: ANN401 - integers and strings of a reply
    return text(value) if isinstance(value, bytes) else value


def _position(following: Sequence[Any]) -> ins.Position:
    # Lua cannot tell an empty map from an empty array.
    return tuple(map(_plain, following))


def _task(fields: Sequence[Any], ttl_ms: int) -> ins.TaskFacts:
    values = [*map(_plain, fields), ttl_ms]
    for flag in (9, 10, 21):
        values[flag] = bool(values[flag])
    values[22] = ins.Place(values[22])
    return ins.TaskFacts(*values)
