"""A value of an enum that a rule does not know fails loudly, wherever the rule is applied."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest

from buffer_service import commands
from buffer_service.commands.replies import unpack
from buffer_service.domain import ops
from buffer_service.domain.policy import ENUMS, OverflowAction, RunPolicy
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.leasing import Leasing
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.simulator import Simulation, Workload, simulate
from buffer_service.simulator.compact_buffer import CompactBuffer
from buffer_service.simulator.lengths import Fixed
from buffer_service.store.keys import index_key
from buffer_wire.errors import InvalidField, RolloutBufferError
from buffer_wire.revision import NO_REVISION
from scripts.rules_tables import without_tables
from tests.docs.pages import ROOT
from tests.oracle.behaviour.world import RUN, World
from tests.store.driver import Run

if TYPE_CHECKING:
    from buffer_service.domain.ports import Notifications, RunStore

FOURTH = cast("OverflowAction", "drop_unheard_of")


async def plant(run: Run, **fields: str) -> None:
    """Write values into a run's stored policy that the service would refuse."""
    key = index_key(run.run_id, "run")
    stored = {name.decode(): value for name, value in unpack(await run.command("HGET", key, "policy")).items()}
    await run.command("HSET", key, "policy", msgpack.packb({**stored, **fields}, use_bin_type=False))


async def test_the_store_refuses_to_make_room_by_an_action_that_it_does_not_know(run: Run) -> None:
    await run.create(max_queued_groups=1, batch_groups=1)
    await plant(run, overflow_action=FOURTH)
    with pytest.raises(RolloutBufferError, match=f"unknown overflow_action {FOURTH}"):
        await run.push(run.group("a"))


async def test_the_store_queues_by_no_measure_that_it_does_not_know(run: Run) -> None:
    await run.create(batch_groups=1)
    await plant(run, staleness_measure="unheard_of")
    with pytest.raises(RolloutBufferError, match="unknown staleness_measure unheard_of"):
        await run.push(run.group("a"))


async def test_the_store_pulls_in_no_order_that_it_does_not_know(run: Run) -> None:
    await run.create(batch_groups=1)
    await run.push(run.group("a"))
    await plant(run, order="unheard_of")
    with pytest.raises(RolloutBufferError, match="unknown order unheard_of"):
        await run.pull(0)


async def test_the_store_evicts_nothing_by_an_action_that_it_does_not_know(run: Run) -> None:
    await run.create(max_queued_groups=1, batch_groups=1, max_staleness=0)
    await run.push(run.group("a"))
    await run.publish(1)
    await plant(run, stale_action="unheard_of")
    with pytest.raises(RolloutBufferError, match="unknown stale_action unheard_of"):
        await run.pull(0, train_version=1)


async def test_the_store_knows_no_other_mode_of_a_resume(run: Run) -> None:
    await run.create(batch_groups=1)
    with pytest.raises(RolloutBufferError, match="unknown mode of a resume: unheard_of"):
        await run.resume(0, mode=cast("Any", SimpleNamespace(value="unheard_of")))


async def test_the_store_takes_leases_back_in_no_way_that_it_does_not_know(run: Run) -> None:
    await run.create(batch_groups=1)
    await run.submit("a", "b")
    known, other = [await run.one_lease() for _ in range(2)]
    returns = [
        ops.LeaseReturn(known.lease_id, ops.ReturnKind.INTERRUPTED, "", b"", None, 0),
        ops.LeaseReturn(other.lease_id, cast("Any", SimpleNamespace(value="unheard_of")), "", b"", None, 0),
    ]
    with pytest.raises(RolloutBufferError, match="unknown kind of return: unheard_of"):
        await run.store.call(commands.give_back(run.run_id, "w", "i", returns))
    assert (await run.view()).tasks["leased"] == 2, "those before it stay leased too"


async def test_the_store_lists_no_set_of_tasks_that_it_does_not_know(run: Run) -> None:
    await run.create(batch_groups=1)
    unknown = cast("Any", SimpleNamespace(value="unheard_of"))
    with pytest.raises(RolloutBufferError, match="unknown set of tasks: unheard_of"):
        await run.store.call(commands.list_tasks(run.run_id, unknown, (), 9, environment=None, worker_id=""))


class OddStore:
    """Grants nothing, for a reason that nobody knows."""

    async def lease(self, run_id: str, ask: ops.LeaseAsk, *, seen_revision: object) -> Any:
        return SimpleNamespace(grants=(), wanted=None, wait="unheard_of")


def leasing() -> Leasing:
    tickets = SimpleNamespace(ticket=lambda run_id, topic: 0)
    return Leasing(cast("RunStore", OddStore()), WaitingLines(cast("Notifications", tickets), Drain()))


async def test_a_request_for_leases_of_an_unknown_sink_is_not_one_for_the_queue() -> None:
    with pytest.raises(AssertionError, match="unheard_of"):
        await leasing().leased(RUN, cast("Any", SimpleNamespace(sink="unheard_of")), NO_REVISION, 1.0)


@pytest.mark.parametrize("sink", ops.TaskSink)
async def test_a_request_for_leases_does_not_wait_for_a_reason_that_nobody_knows(sink: ops.TaskSink) -> None:
    with pytest.raises(AssertionError, match="unheard_of"):
        await leasing().leased(RUN, cast("Any", SimpleNamespace(sink=sink)), NO_REVISION, 1.0)


def test_the_model_refuses_to_make_room_by_an_action_that_it_does_not_know() -> None:
    world = World(batch_groups=1)
    world.model.update_policy(RUN, RunPolicy(batch_groups=1, overflow_action=FOURTH))
    with pytest.raises(AssertionError, match=FOURTH):
        world.push("a")


def test_the_simulator_refuses_an_action_that_it_does_not_know() -> None:
    policy = RunPolicy(batch_groups=1, overflow_action=FOURTH)
    with pytest.raises(InvalidField, match=FOURTH):
        simulate(Simulation(policy=policy, workload=Workload(1, 1, 1.0, Fixed(10)), steps=1, warmup=0))
    with pytest.raises(KeyError, match=FOURTH):
        CompactBuffer(policy)


@pytest.mark.parametrize("page", ["docs/policies.md", "docs/protocol_reference.md"])
def test_the_docs_name_every_value_of_every_enum(page: str) -> None:
    text = without_tables((ROOT / page).read_text("utf-8")).lower()
    for field, kind in ENUMS.items():
        assert [value for value in kind if value not in text] == [], field
    assert FOURTH not in text
