"""Many simulations at once, on processes of their own; results come in the order of the simulations."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from buffer_service.staleness.simulator.loop import Simulation, simulate
from buffer_service.staleness.simulator.result import SimulationResult


def simulate_all(
    simulations: Sequence[Simulation], *, processes: int | None = None, done: Callable[[int], None] | None = None
) -> list[SimulationResult]:
    """Simulate all. `processes` None: one per core; 1: in this process. `done` is told how many are, as they end.

    Raises what `simulate` raises.
    """
    count = min(processes or os.cpu_count() or 1, len(simulations))
    if count <= 1:
        results = []
        for simulation in simulations:
            results.append(simulate(simulation))
            if done is not None:
                done(len(results))
        return results
    # Spawned, not forked: whoever shows progress meanwhile has threads.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(simulate, simulation) for simulation in simulations]
        for finished, future in enumerate(as_completed(futures), start=1):
            future.result()
            if done is not None:
                done(finished)
        return [future.result() for future in futures]
