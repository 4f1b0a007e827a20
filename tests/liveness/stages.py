"""A worker of every stage of a simulated run: it leases, holds, adds, and now and then fails or dies."""

from dataclasses import replace

from buffer_service.domain import ops
from tests.liveness.simulation import RUN, Simulation

TICK_MS = 30
HELD_AT_ONCE = 2
LONGEST_MS = 80
DIES, FAILS = 2, 5
"""Per cent of the groups that it holds."""


class StageWorker:
    """One worker of one stage."""

    def __init__(self, simulation: Simulation, stage: str) -> None:
        self._simulation = simulation
        self._stage = stage
        self._lives = 1
        self._tick()

    @property
    def _instance(self) -> str:
        return f"{self._stage}-{self._lives}"

    def _tick(self) -> None:
        simulation = self._simulation
        ask = ops.StageAsk(self._stage, self._stage, self._instance, simulation.request_id(), HELD_AT_ONCE)
        leases = simulation.model.lease_groups(RUN, ask).leases
        for lease in leases:
            if simulation.random.randrange(100) < DIES:
                # What it held is the next process's.
                self._lives += 1
                break
            self._work_on(lease)
        simulation.at(TICK_MS + simulation.random.randrange(LONGEST_MS), self._tick)

    def _work_on(self, lease: ops.StageLease) -> None:
        simulation = self._simulation
        group = next((one for one in simulation.state.queue if one.group_id == lease.group_id), None)
        if group is None or simulation.random.randrange(100) < FAILS:
            given = ops.LeaseReturn(lease.lease_id, ops.ReturnKind.FAILED, "failed", b"", None, 0)
            simulation.model.give_back(RUN, self._stage, self._instance, [given])
            return
        reward = simulation.random.choice((0, 500, 1_000))
        facts = replace(
            group.facts,
            lease_id=lease.lease_id,
            stored=False,
            equal_rewards=reward == 0,
            mean_reward_milli=reward,
            reward_milli=2 * reward,
        )
        simulation.model.push(RUN, [ops.NewGroup(facts, lease.lease_id.encode())])
