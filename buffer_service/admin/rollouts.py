"""Groups of a run as the page's JSON: those of the queue or of a step in short, and one with a sample's tokens."""

from typing import Any

from buffer_service import commands
from buffer_service.domain.ports import RunStore
from buffer_service.stored_groups import find_group
from buffer_wire.enums import word
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2

MAX_GROUPS = 64
MAX_TOKENS = 16_384
"""Tokens of a sample that are sent; of a longer one the first so many."""


async def groups(store: RunStore, run_id: str, step: str | None) -> dict[str, Any]:
    """The first MAX_GROUPS of the queue, or of a step. Raises InvalidField, UnknownRun, ReplayGap, StepAhead."""
    at = None if step is None else _number("step", step)
    place, page = await store.call(commands.list_groups(run_id, at, (), MAX_GROUPS, environment=None))
    return {
        "place": place.value,
        "groups": [
            {
                "group_id": group.group_id,
                "environment": group.environment,
                "samples": group.samples,
                "reward": group.reward_milli / 1000 / max(1, group.samples),
            }
            for group in page.items
        ],
    }


async def sample(store: RunStore, run_id: str, group_id: str, index: str) -> dict[str, Any]:
    """A group's samples, and tokens and loss mask of one. Raises InvalidField, UnknownGroup."""
    _, _, _, group = await find_group(store, run_id, group_id)
    part = (_number("sample", index), 0, MAX_TOKENS)
    token_ids, mask = await group.token_ids(store, *part), await group.loss_mask(store, *part)
    header = group.header
    return {
        "group_id": group_id,
        "environment": header.environment,
        "worker_id": header.worker_id,
        "samples": [_facts(one) for one in header.samples],
        "token_ids": token_ids,
        "loss_mask": list(mask),
    }


def _facts(one: groups_pb2.Sample) -> dict[str, Any]:
    return {
        "tokens": one.tokens,
        "prompt_len": one.prompt_len,
        "reward": one.reward,
        "ended_by": word(groups_pb2.FinishReason, one.finish_reason),
        "failure": one.failure,
        "spans": [
            {"version": f"{span.version.term}.{span.version.version}", "start": span.start, "end": span.end}
            for span in one.spans
        ],
    }


def _number(name: str, given: str) -> int:
    """A number of a query. Raises InvalidField."""
    if not (given.isascii() and given.isdecimal() and len(given) <= 15):
        raise InvalidField(name, given[:64], "a number from 0 on")
    return int(given)
