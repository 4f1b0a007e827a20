"""`… prime_rl_worker LOAD_S worker --simulate …`: simulated engines that take LOAD_S seconds to load weights."""

import sys
from dataclasses import replace
from typing import Any

from buffer_cli.main import app
from rollout_workers import engines
from rollout_workers.engine.simulated import SimulatedEngineOptions

load_s = float(sys.argv.pop(1))


def slow(**options: Any) -> SimulatedEngineOptions:
    return replace(SimulatedEngineOptions(**options), load_s=load_s)


setattr(engines, "SimulatedEngineOptions", slow)  # noqa: B010 - for mypy, a class is replaced by a function
app()
