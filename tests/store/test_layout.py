"""The layout of keys is one that a cluster could hold: what a script touches lies in one slot, payloads in all."""

import re

from redis.crc import key_slot

from buffer_service.commands.replies import text
from buffer_service.store.keys import ALONE, index_key
from buffer_service.store.scripts import load_scripts
from tests.store.driver import Run

GLOBAL = {ALONE.runs, ALONE.schema}
"""Single keys that no script touches."""


async def load_all_kinds_of_keys(run: Run) -> None:
    """Something in every index there is."""
    await run.create(record_groups=True, max_queued_groups=20, overflow_action="block", retry_backoff_ms=60_000)
    await run.submit("a", "b", ("c", 3), "d")
    c, a, _ = (await run.lease(3)).grants
    assert await run.give_back(a, partial_rollout=b"so far") == ["pending"]
    await run.push(run.group(c), run.group("x"), run.group("y"), run.group("z"))
    await run.batch(0)
    await run.publish(1, commit_through=0)
    await run.batch(1)
    await run.push(run.group("x"))
    await run.fill(*(f"f{number}" for number in range(20)))
    assert await run.push_kinds(run.group("waits")) == ["blocked"]


async def test_all_index_keys_of_a_run_are_in_one_slot_and_payloads_in_any(run: Run) -> None:
    await load_all_kinds_of_keys(run)
    keys = {text(key) for key in await run.command("KEYS", "*")}
    payloads = {key for key in keys if key.startswith("rb:p:")}
    indexes = keys - payloads - GLOBAL
    assert {key.removeprefix(index_key(run.run_id, "")).partition(":")[0] for key in indexes} >= {
        "run", "tasks", "groups", "steps", "q", "a", "staging", "waiting", "record",
    }  # fmt: skip
    assert {key_slot(key.encode()) for key in indexes} == {key_slot(index_key(run.run_id, "run").encode())}
    assert len(payloads) > 20
    assert len({key_slot(key.encode()) for key in payloads}) > len(payloads) * 0.9


def test_runs_lie_in_slots_of_their_own() -> None:
    slots = {key_slot(index_key(f"run-{number}", "run").encode()) for number in range(200)}
    assert len(slots) > 150


def test_scripts_get_one_key_and_make_all_others_from_it() -> None:
    for script in load_scripts().values():
        assert set(re.findall(r"KEYS\[(\d+)\]", script.source)) == {"1"}, script.name
        assert "rb:" not in re.sub(r"--[^\n]*", "", script.source), script.name
