"""Hosts of simulated engines, which run in the worker's own process."""

from rollout_workers.engine import options as bounds
from rollout_workers.engine.options import HostOptions, SimulatedOptions
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import Engine


def check(options: HostOptions) -> None:
    bounds.check("sglang_version", options.sglang_version, lambda v: not v, "given together with SGLang servers")


def own_hosts(options: HostOptions) -> "list[SimulatedHost]":
    simulated = options.simulated
    return [SimulatedHost(i, options, simulated) for i in range(simulated.engines)] if simulated is not None else []


class SimulatedHost:
    """Host of one simulated engine."""

    ended = False
    why_ended = ""
    base_model: str | None = None

    def __init__(self, index: int, options: HostOptions, simulated: SimulatedOptions) -> None:
        self.engine = SimulatedEngine(
            SimulatedEngineOptions(
                tokens_per_s=simulated.tokens_per_s,
                slots=simulated.slots,
                generate_timeout_s=options.generate_timeout_s,
                answers=AnswerOptions(
                    length_median=simulated.length_median,
                    length_sigma=simulated.length_sigma,
                    vocab_size=simulated.vocab_size,
                    seed=simulated.seed + index,
                ),
            ),
            address=f"simulated://{index}",
        )

    async def open(self) -> Engine:
        """The engine."""
        return self.engine

    async def revive(self) -> Engine:
        """The engine, if it lives. Raises EngineUnavailable."""
        await self.engine.loaded_version()
        return self.engine

    async def close(self) -> None:
        """Disconnect."""
        await self.engine.close()
