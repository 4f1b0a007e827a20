"""Dashboards and rules name metrics that the service has, by its metrics reference."""

import json
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy/helm/rollout-buffer/files"
ALERTS = sorted((FILES / "alerts").glob("*.yaml"))
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
OF_HISTOGRAMS = ("_bucket", "_count", "_sum")


def known() -> dict[str, set[str]]:
    """Labels by name, as a scrape has it."""
    row = re.compile(r"^\| `(\w+)` \| (\w+) \| [^|]*\| ([^|]*)\|", re.MULTILINE)
    found = {}
    for name, kind, labels in row.findall((ROOT / "docs/metrics.md").read_text()):
        own = set(re.findall(r"`(\w+)`", labels))
        for suffix in OF_HISTOGRAMS if kind == "histogram" else ("",):
            found[f"rollout_buffer_{name}{suffix}"] = own | ({"le"} if suffix == "_bucket" else set())
    assert found
    return found


def expressions(path: Path) -> list[str]:
    if path.suffix == ".json":
        return [
            target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel.get("targets", ())
        ]
    return [rule["expr"] for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("path", [*ALERTS, *DASHBOARDS], ids=lambda path: path.stem)
def test_metrics_and_their_labels_exist(path: Path) -> None:
    metrics = known()
    for expression in expressions(path):
        for name, matchers in re.findall(r"\b(rollout_buffer_\w+)(?:\{([^}]*)\})?", expression):
            assert name in metrics, expression
            # The namespace is Prometheus' own label of a target.
            used = set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) - {"namespace"}
            assert used <= metrics[name], expression
