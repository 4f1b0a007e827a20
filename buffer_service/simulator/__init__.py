"""A simulator of the whole loop: slots that decode, the buffer's rules, a trainer. It jumps from event to event.

The rules of the buffer are those of the service: `CompactBuffer` plays them on as little state as these questions need.
Tests hold it to the reference model, decision for decision.
"""

from buffer_service.simulator.loop import Simulation, simulate
from buffer_service.simulator.result import SimulationResult
from buffer_service.simulator.workload import Workload

__all__ = ["Simulation", "SimulationResult", "Workload", "simulate"]
