"""`python -m deploy.dashboards [FOLDER]`: write every dashboard as NAME.json, by default into the chart."""

import argparse
from pathlib import Path

from deploy.dashboards.fleet import FLEET
from deploy.dashboards.overview import OVERVIEW
from deploy.dashboards.rendering import rendered
from deploy.dashboards.service import SERVICE
from deploy.dashboards.staleness import STALENESS

CHART_FOLDER = Path(__file__).parent.parent / "helm/rollout-buffer/files/dashboards"
DASHBOARDS = (OVERVIEW, STALENESS, FLEET, SERVICE)


def files() -> dict[str, str]:
    """Text of every file by its name."""
    return {f"{dashboard.name}.json": rendered(dashboard) for dashboard in DASHBOARDS}


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=CHART_FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    made = files()
    for name, text in made.items():
        (folder / name).write_text(text)
    print(f"{len(made)} dashboards in {folder}")  # noqa: T201 - output of a command


if __name__ == "__main__":
    main()
