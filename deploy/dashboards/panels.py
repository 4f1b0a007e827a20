"""The kinds of panel that the dashboards are made of: a number, lines over time, a heatmap of a histogram.

Every panel has a description: what it shows, and what to do when it looks wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

COLUMNS = 24
"""Width of a dashboard, in Grafana's units."""

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Builder: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel


@dataclass(frozen=True, slots=True)
class Series:
    """One query; `legend` may name labels: {{state}}."""

    expression: str
    legend: str
    right_axis_unit: str = ""
    """Unit of an axis of its own at the right; empty: the panel's axis."""
    dashed: bool = False
    """True for limits and targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Base of all kinds. `unit`: Grafana's name of it, for example "s", "percentunit", "reqps"."""

    title: str
    description: str
    width: int = 8
    height: int = 8
    unit: str = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeries(Panel):
    """Lines over time."""

    lines: Sequence[Series]
    stacked: bool = False
    logarithmic: bool = False
    limits: Sequence[tuple[float, str]] = ()
    """Values from which the background takes a colour."""
    at_most: float | None = None
    """Upper end of the axis."""

    def build(self) -> timeseries.Panel:
        """Build it as Grafana takes it."""
        panel = (
            timeseries.Panel()
            .unit(self.unit)
            .line_width(1)
            .fill_opacity(25 if self.stacked else 5)
            .show_points(common.VisibilityMode.NEVER)
            .legend(
                common_builders.VizLegendOptions()
                .display_mode(common.LegendDisplayMode.TABLE)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs(["mean", "lastNotNull"])
            )
            .tooltip(
                common_builders.VizTooltipOptions()
                .mode(common.TooltipDisplayMode.MULTI)
                .sort(common.SortOrder.DESCENDING)
            )
        )
        if self.stacked:
            panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
        if self.logarithmic:
            panel.scale_distribution(
                common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
            )
        else:
            panel.axis_soft_min(0)
        if self.at_most is not None:
            panel.max(self.at_most)
        if self.limits:
            panel.thresholds(_thresholds("transparent", self.limits))
            panel.thresholds_style(
                common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
            )
        for line in self.lines:
            properties = _properties(line)
            if properties:
                panel.override_by_query(_ref_id(self.lines.index(line)), properties)
        return panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Panel):
    """The last value of one query, in the colour of what it means."""

    line: Series
    width: int = 4
    height: int = 4
    limits: Sequence[tuple[float, str]] = ()
    """Values from which it takes a colour; green below."""
    words: Sequence[tuple[float, float, str, str]] = field(default=())
    """Ranges, each with the words and the colour that stand for its values."""

    @property
    def lines(self) -> Sequence[Series]:
        """The one query."""
        return [self.line]

    def build(self) -> stat.Panel:
        """Build it as Grafana takes it."""
        panel = (
            stat.Panel()
            .unit(self.unit)
            .thresholds(_thresholds("green" if self.limits else "text", self.limits))
            .graph_mode(common.BigValueGraphMode.NONE if self.words else common.BigValueGraphMode.AREA)
            .color_mode(common.BigValueColorMode.VALUE)
            .no_value("not known")
            .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        )
        if self.words:
            panel.mappings(
                [
                    models.RangeMap(
                        models.DashboardRangeMapOptions(
                            least, most, models.ValueMappingResult(text=text, color=color, index=index)
                        )
                    )
                    for index, (least, most, text, color) in enumerate(self.words)
                ]
            )
        return panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Panel):
    """A histogram over time; the query gives the rate of each of its buckets."""

    line: Series

    @property
    def lines(self) -> Sequence[Series]:
        """The one query."""
        return [self.line]

    def build(self) -> heatmap.Panel:
        """Build it as Grafana takes it."""
        return (
            heatmap.Panel()
            .calculate(False)
            .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
            .y_axis(heatmap.YAxisConfig().unit(self.unit).axis_placement(common.AxisPlacement.LEFT))
            .cell_gap(1)
            .show_legend()
            .mode(common.TooltipDisplayMode.SINGLE)
        )


Kind: TypeAlias = TimeSeries | Number | Heatmap


def built(panel: Kind) -> Builder:
    """The panel with its queries, but for its place."""
    builder = panel.build()
    builder.title(panel.title).description(panel.description).datasource(DATASOURCE)
    builder.span(panel.width).height(panel.height)
    for index, line in enumerate(panel.lines):
        query = prometheus.Dataquery().expr(line.expression).legend_format(line.legend).ref_id(_ref_id(index)).range()
        if isinstance(panel, Heatmap):
            # Grafana takes the cumulative buckets apart.
            query.format(PromQueryFormat.HEATMAP)
        builder.with_target(query.datasource(DATASOURCE))
    return builder


def _ref_id(index: int) -> str:
    return chr(ord("A") + index)


def _properties(line: Series) -> list[models.DynamicConfigValue]:
    properties = []
    if line.right_axis_unit:
        properties += [
            models.DynamicConfigValue("unit", line.right_axis_unit),
            models.DynamicConfigValue("custom.axisPlacement", "right"),
        ]
    if line.dashed:
        properties += [
            models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
            models.DynamicConfigValue("custom.fillOpacity", 0),
            models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "limit"}),
        ]
    return properties


def _thresholds(below: str, limits: Sequence[tuple[float, str]]) -> dashboard_builders.ThresholdsConfig:
    steps = [models.Threshold(value=None, color=below), *(models.Threshold(value=v, color=c) for v, c in limits)]
    return dashboard_builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
