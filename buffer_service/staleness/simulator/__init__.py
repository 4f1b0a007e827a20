"""A simulator of the whole loop: slots that decode, the buffer's rules, a trainer. It jumps from event to event.

The rules of the buffer are those of the service: `ModelBuffer` plays them on the reference model, `CompactBuffer` on as
little state as these questions need, through the same decision functions. Tests hold the two together.
"""

from buffer_service.staleness.simulator.loop import Simulation, simulate
from buffer_service.staleness.simulator.result import SimulationResult
from buffer_service.staleness.simulator.workload import Workload

__all__ = ["Simulation", "SimulationResult", "Workload", "simulate"]
