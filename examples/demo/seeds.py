"""The runs of `make demo-seeds` side by side: a table on the terminal, and their curves in seeds.png."""

import json
import sys
from pathlib import Path

from examples.demo.plot import StepRecord, plot_seeds


def main(directory: Path) -> None:
    """Read `directory`/seed-*/summary.json; write `directory`/seeds.png."""
    summaries = [json.loads(path.read_text()) for path in sorted(directory.glob("seed-*/summary.json"))]
    if not summaries:
        sys.exit(f"no {directory}/seed-*/summary.json: run `make demo-seeds` first")
    heads = f"{'seed':>6} {'reward':>16} {'versions':>9} {'reloads':>8}"
    print(f"{heads} {'staleness mean, max':>20} {'ledgers':>9} {'wall':>7}")
    for s in summaries:
        print(
            f"{s['seed']:>6} {s['reward_first']:>7.3f} → {s['reward_last']:<6.3f} {s['versions_published']:>9} "
            f"{s['engine_reloads']:>8} {s['staleness_mean']:>13.2f}, {s['staleness_max']:<5} "
            f"{'balance' if s['ledgers_balanced'] else 'DIFFER':>9} {s['wall_s']:>5.0f} s"
        )
    records = {f"seed {s['seed']}": [_record(step) for step in s["by_step"]] for s in summaries}
    plot_seeds(
        records, directory / "seeds.png", title="A policy learns sums through the buffer", eta=summaries[0]["eta"]
    )
    print(f"curves: {directory}/seeds.png")


def _record(step: dict[str, float]) -> StepRecord:
    return StepRecord(
        int(step["step"]), step["reward"], step["staleness_mean"], int(step["staleness_max"]), int(step["version"])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo_out"))
