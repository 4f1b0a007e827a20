"""Mean staleness as it was measured: of the window's assembled groups, and of each environment over the whole run."""

from collections.abc import Mapping

from buffer_service.domain.ops import RunView
from buffer_wire.estimate import EnvironmentStaleness, Measured


def measured(view: RunView) -> Measured:
    """Measured staleness; means are None where no group was assembled."""
    environments = tuple(
        _environment(name, sums)
        for name, sums in sorted(view.environment_statistics.items())
        if sums["assembled_groups"]
    )
    worst = view.statistics["staleness_max"] if view.statistics["assembled_groups"] else None
    groups = view.window.grown("assembled_groups") if view.window else 0
    if view.window is None or not groups:
        return Measured(worst=worst, environments=environments)
    grown = view.window.grown
    return Measured(
        groups=groups,
        pre_queue=grown("pre_queue_staleness_sum") / groups,
        in_queue=grown("in_queue_staleness_sum") / groups,
        staleness=grown("staleness_sum") / groups,
        tokens=_of_tokens(grown("token_staleness_milli_sum"), grown("assembled_response_tokens")),
        worst=worst,
        environments=environments,
    )


def _environment(name: str, sums: Mapping[str, int]) -> EnvironmentStaleness:
    groups = sums["assembled_groups"]
    return EnvironmentStaleness(
        environment=name,
        groups=groups,
        pre_queue=sums["pre_queue_staleness_sum"] / groups,
        in_queue=sums["in_queue_staleness_sum"] / groups,
        staleness=sums["staleness_sum"] / groups,
        tokens=_of_tokens(sums["token_staleness_milli_sum"], sums["assembled_response_tokens"]),
    )


def _of_tokens(milli_sum: int, tokens: int) -> float | None:
    return milli_sum / tokens / 1000 if tokens else None
