"""Callers of a push that go away, more than once even, while the store decides: what it blocks is given up."""

import asyncio
import contextlib
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from buffer_service.domain import ops
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.pushes import Pushes
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_wire.errors import StoreUnavailable
from buffer_wire.revision import NO_REVISION
from tests.service.test_waits_of_a_process import Notes, settled


class Store:
    """Store that decides when it is told to."""

    def __init__(self) -> None:
        self.decides = asyncio.Event()
        self.fails = False

    async def push(self, _run_id: str, groups: list[ops.NewGroup], seen_revision: object) -> ops.PushResult:
        del seen_revision
        await self.decides.wait()
        if self.fails:
            raise StoreUnavailable("the store", "it is gone")
        kinds = [ops.PushKind.BLOCKED, *[ops.PushKind.QUEUED] * (len(groups) - 1)]
        outcomes = [ops.Pushed(kind, f"g{i}", payload_key=f"k{i}") for i, kind in enumerate(kinds)]
        return ops.PushResult(NO_REVISION, outcomes, ops.WeightVersion(1, 0))


class Janitor:
    """Janitor that notes what was given up."""

    def __init__(self) -> None:
        self.given_up: list[str] = []

    def abandon(self, _run_id: str, payload_keys: list[str]) -> None:
        self.given_up += payload_keys


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_what_is_blocked_after_its_caller_has_gone_is_given_up(times: int, fails: bool) -> None:
    store, janitor, metrics = Store(), Janitor(), RpcMetrics(CollectorRegistry())
    store.fails = fails
    lines = WaitingLines(Notes(), Drain())
    pushes = Pushes(cast("Any", store), lines, cast("Any", janitor), metrics)
    facts = cast("Any", type("Facts", (), {"first_revision": 0}))
    groups = [ops.NewGroup(facts, b"body", checksum=i) for i in range(2)]
    pushing = asyncio.create_task(pushes.push("r", groups, NO_REVISION))
    for _ in range(times):
        await settled()
        pushing.cancel()
    await settled()
    store.decides.set()
    with contextlib.suppress(asyncio.CancelledError):
        await pushing
    await settled()
    assert pushing.cancelled()
    assert janitor.given_up == ([] if fails else ["k0"])
