"""A dashboard with its variables, and the JSON that Grafana takes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from deploy.dashboards.panels import COLUMNS, DATASOURCE, Kind, built

TAG = "rollout-buffer"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; each line of them fills the width of the dashboard."""

    title: str
    panels: Sequence[Kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard. `name`: its file and its address in Grafana."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]
    of_a_run: bool = True
    """True if one run is chosen; else it is about the service."""


def rendered(dashboard: Dashboard) -> str:
    """The JSON. Raises ValueError for a line of panels that does not fill the width."""
    builder = (
        builders.Dashboard(dashboard.title)
        .uid(f"{TAG}-{dashboard.name}")
        .description(dashboard.description)
        .tags([TAG])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .link(
            builders.DashboardLink("Other dashboards of rollout-buffer")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            _labels("namespace", "rollout_buffer_blocked_pushes")
            .label("Namespace")
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
        )
    )
    if dashboard.of_a_run:
        builder.with_variable(
            _labels("run", 'rollout_buffer_next_step{namespace=~"$namespace"}').label("Run").include_all(False)
        )
    for row in dashboard.rows:
        _check_width(dashboard, row)
        builder.with_row(builders.Row(row.title))
        for panel in row.panels:
            builder.with_panel(built(panel))
    model = builder.build()
    for number, placed in enumerate(model.panels or [], start=1):
        placed.id_val = number
    return json.dumps(json.loads(JSONEncoder().encode(model)), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _labels(label: str, metric: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(label)
        .query(f"label_values({metric}, {label})")
        .datasource(DATASOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _check_width(dashboard: Dashboard, row: Row) -> None:
    """A line that is too wide would be laid out by Grafana some other way."""
    filled = 0
    for panel in row.panels:
        filled += panel.width
        if filled > COLUMNS:
            raise ValueError(f"{dashboard.name}, {row.title}: {panel.title!r} does not fit the width of its line")
        filled %= COLUMNS
    if filled:
        raise ValueError(f"{dashboard.name}, {row.title}: the last line leaves {COLUMNS - filled} columns empty")
