"""`rollout-buffer size`: its costs are the measured ones, and what it says follows from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_cli.size import costs
from buffer_cli.size.sizing import BUSY, HEARTBEAT_S, MAX_CONNECTIONS, PENDING_TASKS, USABLE, Fleet, Machines, size
from buffer_service.domain.policy import RunPolicy
from buffer_service.settings import Settings
from buffer_wire.errors import InvalidField
from tests.support.commands import command

RESULTS = Path(__file__).parents[2] / "bench" / "results"
NEAR = 0.3
"""Part by which a cost may differ from the newest measurement, on a machine that was busy then or is now."""
SMALL = Fleet(gpus=1_024, tokens_per_s=2_000, length=8_000, retained_steps=4)
HEAVY = Fleet(gpus=1_024, tokens_per_s=2_000, length=8_000, bytes_per_token=393, retained_steps=4)


def measured(source: str) -> Any:
    """The value at "file.json > key > key"."""
    name, *keys = source.split(" > ")
    value = json.loads((RESULTS / name).read_text())
    for key in keys:
        value = value[key]
    return value


# ── costs ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", costs.CALLS)
def test_a_call_costs_what_was_measured(name: str) -> None:
    call = costs.CALLS[name]
    us = measured(call.source)
    assert (call.rpc_us, call.store_us) == pytest.approx((us["rpc"], us["store"]), rel=NEAR)


@pytest.mark.parametrize("name", costs.WAYS)
def test_a_byte_costs_what_a_larger_group_costs_more(name: str) -> None:
    way = costs.WAYS[name]
    larger, smaller = (measured(source) for source in way.source.split(", less "))
    more_gb = (measured("peers.json > sizes > 1.2 MB > group_bytes") - 147_000) / 1e9
    for side, cost in (("service", way.service_s), ("store", way.store_s)):
        more_s = (larger["cpu_ms"][side] - smaller["cpu_ms"][side]) / 1e3
        assert cost == pytest.approx(more_s / more_gb, rel=NEAR), side


@pytest.mark.parametrize(
    "one", [costs.TASK_BYTES, costs.LEASE_BYTES, costs.GROUP_BYTES, costs.TOLD_US, costs.WORKER_KB]
)
def test_what_each_takes_is_what_was_measured(one: costs.Measured) -> None:
    assert one.value == pytest.approx(measured(one.source), rel=NEAR)


def test_connections_of_a_worker_are_those_that_were_counted() -> None:
    connections = measured("rebalance.json > connections")
    workers = measured("rebalance.json > workers")
    assert costs.CONNECTIONS.value == pytest.approx(sum(connections.values()) / workers, rel=NEAR)


def test_bounds_are_the_defaults_of_service_and_policy() -> None:
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert defaults["direct_from_bytes"] == costs.DIRECT_FROM_BYTES
    assert defaults["max_connections"] == 4 * MAX_CONNECTIONS
    assert RunPolicy(batch_groups=1).max_pending_tasks == PENDING_TASKS
    assert RunPolicy(batch_groups=1).lease_ttl_ms == 3_000 * HEARTBEAT_S


# ── sizes ────────────────────────────────────────────────────────────────────


def test_demand_is_tokens_times_bytes() -> None:
    assert SMALL.groups_per_s == 1_024 * 2_000 / (8 * 8_000)
    assert SMALL.group_bytes == 8 * 8_000 * 9
    assert SMALL.bytes_per_s == pytest.approx(1_024 * 2_000 * 9)
    assert SMALL.held_groups == 512 * (1 + 1 + 4)


def test_a_run_that_fits_on_one_store_has_no_shards() -> None:
    sized = size(SMALL, Machines())
    assert (sized.shards, sized.fits, sized.direct, sized.replicas) == (0, True, True, 2)


def test_memory_that_is_held_makes_the_shards_and_each_holds_its_part() -> None:
    machines = Machines()
    sized = size(HEAVY, machines)
    assert sized.limit == "memory for payloads"
    assert sized.held_bytes <= sized.shards * machines.memory_gb * 1e9 * USABLE
    more = size(Fleet(gpus=1_024, tokens_per_s=2_000, length=8_000, bytes_per_token=393, retained_steps=40), machines)
    assert more.held_bytes > (more.shards - 1) * machines.memory_gb * 1e9 * USABLE
    assert more.shards > sized.shards
    assert size(HEAVY, Machines(memory_gb=1_000)).shards == 0


def test_every_shard_is_within_what_is_planned_with() -> None:
    sized = size(Fleet(gpus=16_384, tokens_per_s=2_000, length=8_000, bytes_per_token=393), Machines(store_replicas=2))
    assert all(load.needed <= sized.shards for load in sized.payloads)
    assert max(load.needed for load in sized.payloads) > sized.shards - 1


def test_too_many_decisions_are_said_with_the_fleet_that_they_suffice_for() -> None:
    short = {"tokens_per_s": 5_000, "length": 500, "retained_steps": 4}
    sized = size(Fleet(gpus=16_384, **short), Machines())
    assert (sized.fits, sized.limit) == (False, "decisions of one run")
    largest = sized.largest_gpus
    assert size(Fleet(gpus=largest, **short), Machines()).decision_cores == pytest.approx(BUSY, rel=0.01)


def test_engines_that_do_nothing_but_connect_take_replicas() -> None:
    idle = size(Fleet(gpus=50_000, tokens_per_s=1, length=100_000), Machines())
    assert idle.service_cores < idle.rpc_processes * BUSY / 2
    assert idle.connections == 110_000
    assert idle.replicas == 12


@pytest.mark.parametrize(("name", "value"), [("gpus", 0), ("length", -1.0), ("tokens_per_s", float("nan"))])
def test_what_no_fleet_can_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidField, match=name):
        Fleet(**{"gpus": 1, "tokens_per_s": 1.0, name: value})  # type: ignore[arg-type]


# ── the command ──────────────────────────────────────────────────────────────


def test_the_command_says_it_for_people_and_for_programs() -> None:
    asked = ("size", "--gpus", "1024", "--tokens-per-s", "2000", "--length", "8000", "--bytes-per-token", "393")
    shown = command(*asked, "--retained-steps", "4")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "memory for payloads" in shown.stdout
    told = json.loads(command(*asked, "--retained-steps", "4", "--json").stdout)
    sized = size(HEAVY, Machines())
    assert (told["shards"], told["replicas"], told["limit"]) == (sized.shards, sized.replicas, sized.limit)
    assert {source.partition(" ")[0] for source in told["sources"]} == {
        "calls.json",
        "fleet.json",
        "peers.json",
        "rebalance.json",
    }
    refused = command("size", "--gpus", "0", "--tokens-per-s", "2000")
    assert "gpus" in refused.stderr
    assert refused.returncode != 0
