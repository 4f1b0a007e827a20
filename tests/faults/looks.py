"""Looks at a run, recorded with what is checked of them."""

from dataclasses import asdict

from tests.chaos.checker.events import Facts
from tests.chaos.checker.reading import UNITS
from tests.faults.history import History
from trainer_client import AsyncBufferClient
from trainer_client.state import GroupLedger, RunState

EVERY_EVENTS = 60
EVERY_S = 0.4
"""At the latest, for who waits for what is seen."""


async def pause(history: History) -> None:
    """The time between two looks."""
    at = history.now + EVERY_EVENTS
    await history.changes.until(lambda: history.now >= at, EVERY_S)


async def look(history: History, client: AsyncBufferClient, run_id: str) -> RunState:
    """One look, recorded."""
    async with history.call("observer", "view") as op:
        view = await client.run(run_id)
        op.reply = view_facts(view)
    return view


def view_facts(view: RunState) -> Facts:
    """Return what is checked of a view."""
    policy = asdict(view.policy)
    return {
        "revision": view.revision,
        "term": view.term,
        "published": [view.published.term, view.published.version],
        "next_step": view.next_step,
        "committed_steps": view.committed_steps,
        "checkpointed_steps": view.checkpointed_steps,
        "cursor": view.cursor,
        "paused": view.paused,
        "groups": _ledger(view.ledger.groups),
        "environments": {name: _ledger(groups) for name, groups in view.ledger.environments.items()},
        "tasks": asdict(view.ledger.tasks),
        "policy": {name: policy[name] for name in POLICY},
    }


POLICY = (
    "max_queued_groups",
    "max_queued_tokens",
    "max_queued_bytes",
    "quota_groups",
    "quota_tokens",
    "quota_bytes",
    "max_staleness",
    "lease_ttl_ms",
    "max_inflight_groups",
)


def _ledger(ledger: GroupLedger) -> Facts:
    amounts = asdict(ledger)
    amounts.pop("balanced")
    return {name: [amount[unit] for unit in UNITS] for name, amount in amounts.items()}
