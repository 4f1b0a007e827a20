"""Records of the demo's steps, and the summary that it writes at the end."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from trainer_client.state import RunState


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One training step."""

    step: int
    reward: float
    """Mean exact match over the step's samples."""
    staleness_mean: float
    staleness_max: int
    version: int
    """Published after the step."""
    queued_groups: int
    tokens: int
    """Response tokens of the step."""
    tokens_per_s: float
    """Response tokens a second since the last step."""
    waited_s: float
    train_s: float
    mean_step_s: float
    """Mean wall time of the steps so far."""


def summarize(steps: Sequence[DemoStep], run: RunState, *, seed: int, wall_s: float) -> dict[str, object]:
    """The summary: figures of the trainer beside those that the service counted itself."""
    tenth = max(1, len(steps) // 10)
    rewards = [step.reward for step in steps]
    trained = run.statistics["assembled_groups"]
    return {
        "seed": seed,
        "steps": len(steps),
        "groups_trained": run.ledger.groups.trained.groups,
        "reward_first": fmean(rewards[:tenth]),
        "reward_last": fmean(rewards[-tenth:]),
        "versions_published": run.published.version,
        "engine_reloads": sum(engine.reloads for engine in run.engines),
        "engine_errors": sum(engine.errors for engine in run.engines),
        "engines": [
            {"engine": e.engine_id, "version": e.loaded.version, "last_reload_ms": e.last_reload_ms}
            for e in run.engines
        ],
        "staleness_mean": run.statistics["staleness_sum"] / max(1, trained),
        "staleness_max": run.statistics["staleness_max"],
        "eta": run.policy.max_staleness,
        "groups_spanning_versions": run.statistics["assembled_groups_spanning_versions"],
        "trainer_waited_s": sum(step.waited_s for step in steps),
        "trainer_trained_s": sum(step.train_s for step in steps),
        "wall_s": wall_s,
        "ledger": asdict(run.ledger),
        "ledgers_balanced": run.ledger.balanced,
        "by_step": [asdict(step) for step in steps],
    }


def write_summary(summary: dict[str, object], path: Path) -> None:
    """Write it as JSON, complete or not at all."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(summary, indent=2) + "\n")
    aside.rename(path)
