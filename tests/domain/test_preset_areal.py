"""The preset areal(η) beside AReaL's own staleness manager, number by number.

With a checkout (AREAL_SRC) the manager is AReaL's class, otherwise a copy of its formula; the two are held together.
"""

import ast
import importlib.util
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from buffer_service.domain import ops
from tests.domain.test_presets import N, feed, preset
from tests.oracle.behaviour.world import World
from tests.support.upstreams import checkout, needs


class Areal:
    """AReaL's staleness manager: capacity = min(max(1, max_concurrent) - running,
    (max_head_offpolicyness + version + 1) * B - (accepted + running)).
    """

    def __init__(self, max_head_offpolicyness: int, max_concurrent: int) -> None:
        self.eta, self.max_concurrent = max_head_offpolicyness, max_concurrent
        self.version = self.accepted = self.running = 0

    @property
    def capacity(self) -> int:
        concurrency = max(1, self.max_concurrent) - self.running
        staleness = (self.eta + self.version + 1) * N - (self.accepted + self.running)
        return max(0, min(concurrency, staleness))

    def submit(self, rollouts: int) -> None:
        self.running += rollouts

    def end(self, *, accepted: bool) -> None:
        self.running -= 1
        self.accepted += accepted

    def recover(self, version: int) -> None:
        self.version, self.accepted, self.running = version, version * N, 0


class TheirAreal(Areal):
    """Manager by AReaL's class, of a checkout."""

    def __init__(self, max_head_offpolicyness: int, max_concurrent: int) -> None:
        super().__init__(max_head_offpolicyness, max_concurrent)
        self._make()

    def _make(self) -> None:
        manager = _their_module().StalenessManager
        self._manager = manager(self, self.max_concurrent, N, self.eta)

    def get_version(self) -> int:
        return self.version

    @property
    def capacity(self) -> int:
        return max(0, int(self._manager.get_capacity()))

    def submit(self, rollouts: int) -> None:
        for _ in range(rollouts):
            self._manager.on_rollout_enqueued()
            self._manager.on_rollout_submitted()

    def end(self, *, accepted: bool) -> None:
        (self._manager.on_rollout_accepted if accepted else self._manager.on_rollout_rejected)()

    def recover(self, version: int) -> None:
        self._make()
        self.version = version
        self._manager.on_version_recovered(version)


def _their_module() -> Any:
    """Its module alone: the whole package imports ray and an inference engine. Of those it needs one dataclass."""
    root = checkout("areal")
    assert root is not None
    api = ModuleType("areal.api")
    source = (root / "areal" / "api" / "io_struct.py").read_text()
    wanted: list[ast.stmt] = [
        n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "RolloutStat"
    ]
    exec(
        compile(ast.Module(wanted, []), "io_struct.py", "exec"), {"dataclass": dataclass, "field": field}, api.__dict__
    )
    path = Path(root) / "areal" / "infra" / "staleness_manager.py"
    spec = importlib.util.spec_from_file_location("areal_staleness_manager", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "areal", ModuleType("areal"))
        patch.setitem(sys.modules, "areal.api", api)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[Areal, pytest.param(TheirAreal, marks=needs("areal"))])
def manager(request: pytest.FixtureRequest) -> type[Areal]:
    chosen: type[Areal] = request.param
    return chosen


def granted(world: World, areal: Areal) -> list[ops.LeaseGrant]:
    """Lease whatever may be leased; it must be as much as AReaL would submit."""
    grants = list(world.lease(1_000).grants)
    assert len(grants) == areal.capacity
    areal.submit(len(grants))
    return grants


def test_areal_lets_as_many_groups_run_as_its_formula_says(manager: type[Areal]) -> None:
    world, areal = World(**preset("areal(2)", max_inflight_groups=1_000)), manager(2, 1_000)
    feed(world, 100)
    running = granted(world, areal)
    assert len(running) == (2 + 0 + 1) * 4 - (0 + 0) == 12
    for grant in running[:7]:
        world.push(grant)
        areal.end(accepted=True)
    assert granted(world, areal) == [], "(2 + 0 + 1) * 4 - (7 + 5) = 0"
    world.batch()
    assert granted(world, areal) == [], "a batch that is consumed stays accepted"
    world.publish(1, commit=0)
    areal.version = 1
    assert len(granted(world, areal)) == (2 + 1 + 1) * 4 - (7 + 5) == 4


def test_by_default_a_batch_of_groups_runs_at_once(manager: type[Areal]) -> None:
    """max_concurrent_rollouts is consumer_batch_size where it is not set."""
    world, areal = World(**preset("areal(2)")), manager(2, N)
    feed(world, 100)
    first, *_ = granted(world, areal)
    world.push(first)
    areal.end(accepted=True)
    assert len(granted(world, areal)) == 1


def test_areal_follows_its_formula_number_by_number(manager: type[Areal]) -> None:
    concurrency = 9
    policy = preset("areal(3)", max_inflight_groups=concurrency, filter_equal_rewards=True)
    world, areal = World(**policy), manager(3, concurrency)
    chance = random.Random(3)
    running: list[ops.LeaseGrant] = []
    recoveries, rejections, steps = 0, 0, 0
    while steps < 40:
        if world.tasks("pending") < 50:
            feed(world, 50)
        running += granted(world, areal)
        word = chance.randrange(12)
        if word < 8 and running:
            rejected = chance.randrange(4) == 0
            grant = running.pop(chance.randrange(len(running)))
            kind = world.push(grant, equal_rewards=rejected, head=areal.version)
            assert (kind is ops.PushKind.FILTERED) == rejected
            areal.end(accepted=not rejected)
            rejections += rejected
        elif word < 11 and world.groups("queued") >= N:
            step = world.batch().step
            world.publish(areal.version + 1, commit=step)
            areal.version += 1
            steps += 1
        elif chance.randrange(3) == 0:
            recover(world, areal, running)
            running, recoveries = [], recoveries + 1
    assert recoveries > 3
    assert rejections > 20
    assert areal.version == 40
    assert world.statistic("staleness_max") <= 3


def recover(world: World, areal: Areal, running: list[ops.LeaseGrant]) -> None:
    """The trainer starts anew from its last checkpoint; as in AReaL, what was generated and not trained is gone."""
    for grant in running:
        world.interrupt(grant.lease_id)
    step = world.view.next_step
    while world.groups("queued") >= N:
        world.batch(batch_groups=N)
    if world.groups("queued"):
        world.batch(batch_groups=world.groups("queued"))
    world.resume(step, ops.ResumeMode.DISCARD)
    areal.recover(world.view.published.version)
    assert world.view.published.version == world.view.committed_steps


def test_areal_counts_what_it_recovered_as_its_versions_batches(manager: type[Areal]) -> None:
    world, areal = World(**preset("areal(0)")), manager(0, N)
    world.queue(N)
    world.commit(world.batch().step)
    world.resume()
    feed(world, 100)
    areal.recover(0)
    assert len(granted(world, areal)) == N, "the batch was committed, its version never published: accepted = 0 * B"


def test_areal_frees_capacity_for_a_rejected_group() -> None:
    world = World(**preset("areal(0)", filter_equal_rewards=True))
    feed(world, 10)
    first, *_ = world.lease(10).grants
    assert world.lease(10).wait is ops.LeaseWait.AT_CAPACITY
    assert world.push(first, equal_rewards=True) is ops.PushKind.FILTERED
    assert len(world.lease(10).grants) == 1
