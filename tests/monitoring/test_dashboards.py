"""The dashboards in the chart are those that the code makes, and each panel says what it shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="make install")

from deploy.dashboards.__main__ import CHART_FOLDER, files
from deploy.dashboards.panels import Number, Series
from deploy.dashboards.rendering import Dashboard, Row, rendered

ROOT = Path(__file__).parents[2]
BUILT = {name: json.loads(text) for name, text in files().items()}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_chart_has_what_the_code_makes() -> None:
    written = {path.name: path.read_text() for path in Path(CHART_FOLDER).glob("*")}
    assert written == files(), "run: python -m deploy.dashboards"


@pytest.mark.parametrize("name", BUILT)
def test_every_panel_says_what_it_shows_and_what_to_do(name: str) -> None:
    found = panels(BUILT[name])
    titles = [panel["title"] for panel in found]
    assert len(set(titles)) == len(titles)
    for panel in found:
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        drawn = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
        assert drawn["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'namespace=~"$namespace"' in target["expr"], panel["title"]


@pytest.mark.parametrize("name", BUILT)
def test_panels_fill_the_width_and_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BUILT[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len(taken) == 24 * (1 + max(y for _, y in taken)), "there are holes"


@pytest.mark.parametrize("name", BUILT)
def test_a_source_and_a_run_are_chosen_at_the_top(name: str) -> None:
    variables = {one["name"]: one for one in BUILT[name]["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    about_a_run = any("$run" in target["expr"] for panel in panels(BUILT[name]) for target in panel["targets"])
    assert ("run" in variables) == about_a_run
    if about_a_run:
        assert variables["run"]["query"] == 'label_values(rollout_buffer_next_step{namespace=~"$namespace"}, run)'


@pytest.mark.engine
def test_what_is_asked_of_sglang_is_what_it_says() -> None:
    (package,) = (ROOT / ".venv-sglang").glob("lib/python3*/site-packages/sglang/srt")
    said = {name for path in package.rglob("*.py") for name in re.findall(r"sglang:(\w+)", path.read_text())}
    asked = {name for text in files().values() for name in re.findall(r"sglang:(\w+)", text)}
    assert asked
    assert asked <= said


def test_names_under_which_grafana_keeps_them_differ() -> None:
    assert len({dashboard["uid"] for dashboard in BUILT.values()}) == len(BUILT)
    assert len({dashboard["title"] for dashboard in BUILT.values()}) == len(BUILT)


def test_a_line_that_does_not_fill_the_width_is_refused() -> None:
    panel = Number(title="t", description="d", line=Series("up", "up"))
    with pytest.raises(ValueError, match="20 columns empty"):
        rendered(Dashboard(name="n", title="t", description="d", rows=[Row("r", [panel])]))
