"""Promises about prompts and the feeder's cursor, held against a history; see promises.py."""

import json
from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.checker.events import Facts, Op
from tests.chaos.checker.reading import Reading


def no_prompt_is_lost_or_repeated(reading: Reading) -> Iterator[str]:
    """Accepted submits follow one another without overlap, and each prompt is one task. A resume knows the cursor and
    the state that was stored with it. In the end every prompt up to the cursor was leased.
    """
    leased: set[int] = set()
    for era in range(len(reading.losses) + 1):
        submits = [op for op in reading.history.of("submit", ok=True) if reading.era(op) == era]
        yield from _overlaps(submits)
        task_of: dict[int, str] = {}
        for op in submits:
            for item, task_id in enumerate(op.got["task_ids"], op.given["expected_cursor"]):
                if task_of.setdefault(item, task_id) != task_id:
                    yield f"prompt {item} is the tasks {task_of[item]} and {task_id}"
        for op in reading.history.of("lease", ok=True):
            for lease in op.got["leases"] if reading.era(op) == era and not reading.straddles(op) else ():
                item = _item(lease)
                leased.add(item)
                if task_of.setdefault(item, lease["task_id"]) != lease["task_id"]:
                    yield f"prompt {item} is the tasks {task_of[item]} and {lease['task_id']}"
    yield from _resumed_cursors(reading)
    view = reading.last_view
    if view["tasks"]["submitted"] != view["cursor"]:
        yield f"{view['cursor']} prompts were fed, {view['tasks']['submitted']} are tasks"
    never = set(range(view["cursor"])) - leased
    if never and view["tasks"]["completed"] == view["cursor"] and not reading.losses:
        yield f"prompts {sorted(never)} were never leased"


def _item(lease: Facts) -> int:
    return int(json.loads(lease["metadata"])["item"])


def _overlaps(submits: list[Op]) -> Iterator[str]:
    for one, other in pairwise(sorted(submits, key=lambda op: (op.given["expected_cursor"], op.begin))):
        if one.given["cursor"] > other.given["expected_cursor"]:
            yield f"{one.actor} and {other.actor} both fed the prompts from {other.given['expected_cursor']} on"
    for op in submits:
        fed = op.given["cursor"] - op.given["expected_cursor"]
        if op.got["cursor"] != op.given["cursor"] or len(op.got["task_ids"]) != fed:
            yield f"submit {op.given} was answered {op.got}"


def _resumed_cursors(reading: Reading) -> Iterator[str]:
    for resume in reading.resumes.values():
        fed = [
            op.given["cursor"]
            for op in reading.history.of("submit", ok=True)
            if op.before(resume) and reading.era(op) == reading.era(resume)
        ]
        if resume.got["cursor"] < max(fed, default=0):
            yield f"{max(fed)} prompts were fed before the resume, which goes on at {resume.got['cursor']}"
        if resume.got["feeder_state"] != (str(resume.got["cursor"]) if resume.got["cursor"] else ""):
            yield f"the feeder's state is {resume.got['feeder_state']!r} at cursor {resume.got['cursor']}"


def groups_are_of_their_prompts(reading: Reading) -> Iterator[str]:
    """A group comes with the prompt that its task was leased with. No task's id is given to another prompt, not even
    when the task was lost.
    """
    given: dict[str, int] = {}
    for op in reading.history.of("submit", ok=True):
        for item, task_id in enumerate(op.got["task_ids"], op.given["expected_cursor"]):
            if given.setdefault(task_id, item) != item:
                yield f"the id {task_id} was given to the prompts {given[task_id]} and {item}"
    item_of: dict[tuple[int, str], int] = {}
    for op in reading.history.of("lease", ok=True):
        for lease in op.got["leases"] if not reading.straddles(op) else ():
            item_of[reading.era(op), lease["task_id"]] = _item(lease)
    for op in reading.history.of("pull", ok=True):
        for group in op.got["groups"]:
            item = item_of.get((reading.era(op), group["group_id"].rpartition("/")[0]), group["item"])
            if item != group["item"]:
                yield f"group {group['group_id']} is of prompt {group['item']}, its task of prompt {item}"
