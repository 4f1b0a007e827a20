"""Dashboard of staleness: how old is what is trained, where that comes from, and whether it changes what is trained."""

from deploy.dashboards.overview import MEASURED
from deploy.dashboards.panels import Heatmap, Series, TimeSeries
from deploy.dashboards.queries import of_run, run_quantile, run_rate, run_slope
from deploy.dashboards.rendering import Dashboard, Row

PREDICTED = f"sum({of_run('staleness_predicted_versions', 'part')})"
TOLERANCE = of_run("staleness_prediction_tolerance_versions")

_PARTS = {"total": "Staleness of groups", "pre_queue": "Before the queue", "in_queue": "In the queue"}


def _mean(total: str, per: str, **labels: str) -> str:
    return f"{run_rate(total, 'stage', **labels)} / {run_rate(per, 'stage', **labels)}"


_MEANS = Row(
    "Measured and predicted",
    [
        TimeSeries(
            title="Staleness",
            description=(
                "Mean over the last publishes: measured, as predicted, and the gate where there is one. With a "
                "gate, measured cannot pass it; near it, groups are dropped and short responses preferred."
            ),
            unit="none",
            lines=[
                Series(MEASURED, "measured, of the head"),
                Series(of_run("staleness_tokens_measured_versions"), "measured, of tokens"),
                Series(PREDICTED, "predicted"),
                Series(of_run("staleness_limit_versions"), "max_staleness", dashed=True),
            ],
        ),
        TimeSeries(
            title="By part",
            description=(
                "pre_queue: versions published while a group was generated; fewer requests at once, a length cap or a "
                "larger batch lower it. in_queue: versions that passed in the queue; a shorter queue or streaming "
                "lowers it. `rollout-buffer status` says by how much."
            ),
            unit="none",
            lines=[
                Series(of_run("staleness_measured_versions", "part"), "{{part}}, measured"),
                Series(of_run("staleness_predicted_versions", "part"), "{{part}}, predicted", dashed=True),
            ],
        ),
        TimeSeries(
            title="Measured minus predicted",
            description=(
                "Between the dashed lines the prediction explains what is measured. Outside of them something is "
                "going on that it does not know: `rollout-buffer status` says which reasons have a number."
            ),
            unit="none",
            lines=[
                Series(f"{MEASURED} - {PREDICTED}", "difference"),
                Series(TOLERANCE, "tolerance", dashed=True),
                Series(f"-1 * {TOLERANCE}", "tolerance, below", dashed=True),
            ],
        ),
    ],
)

_CONTROL = Row(
    "Target",
    [
        TimeSeries(
            title="Target and mean",
            description=(
                "A controller holds the mean at target_staleness_milli. Below it and open: nothing that was lowered is "
                "why. Out of reach: `rollout-buffer status` says what would reach it."
            ),
            unit="none",
            lines=[
                Series(of_run("staleness_target_versions", "measure"), "target, {{measure}}", dashed=True),
                Series(MEASURED, "head, measured"),
                Series(of_run("staleness_tokens_measured_versions"), "tokens, measured"),
            ],
        ),
        TimeSeries(
            title="Values in effect",
            description="What the controller has lowered; the policy's own values are the upper bounds.",
            unit="none",
            lines=[Series(of_run("control_in_effect", "field"), "{{field}}")],
        ),
        TimeSeries(
            title="Outcome of the decisions",
            description="One decision a publish. Many moves in a row: speeds or lengths keep changing.",
            unit="none",
            lines=[Series(of_run("control_outcome", "outcome"), "{{outcome}}")],
        ),
    ],
)

_REUSE = Row(
    "Reuse",
    [
        TimeSeries(
            title="Groups used again",
            description=(
                "With max_uses above 1: trained groups that may be used again, and uses for each new group. Uses below "
                "reuse_share_milli / 1,000: too few groups are young enough; raise reuse_max_staleness or max_uses. "
                "The other panels show new groups alone."
            ),
            width=24,
            lines=[
                Series(of_run("reusable_groups"), "may be used again"),
                Series(
                    f"{run_slope('group_uses', state='drawn')} / {run_rate('assembled_groups_total')}",
                    "uses for a new group",
                    right_axis_unit="none",
                ),
            ],
        ),
    ],
)

_DISTRIBUTIONS = Row(
    "Distributions",
    [
        *(
            Heatmap(
                title=title,
                description=(
                    "Assembled groups by their staleness in versions. A second band far above the first: some "
                    "engines lag or some groups have very long responses."
                ),
                unit="none",
                line=Series(run_rate("group_staleness_versions_bucket", "le", part=part), "{{le}}"),
            )
            for part, title in _PARTS.items()
        ),
        Heatmap(
            title="Staleness of tokens",
            description=(
                "Trained response tokens by their own staleness; less than the head's where weights are updated in "
                "flight."
            ),
            unit="none",
            line=Series(run_rate("token_staleness_versions_bucket", "le"), "{{le}}"),
        ),
        TimeSeries(
            title="Quantiles of groups",
            description=(
                "A 99th percentile far above the median is a long tail: a length cap, partial rollouts or a gate "
                "cut it."
            ),
            unit="none",
            lines=[
                *(
                    Series(run_quantile(share, "group_staleness_versions", part="total"), f"{share:.0%} of groups")
                    for share in (0.5, 0.9, 0.99)
                ),
                Series(of_run("staleness_max_versions"), "worst so far", dashed=True),
            ],
        ),
        TimeSeries(
            title="Groups of several versions",
            description=(
                "Share of assembled groups whose tokens came from more than one weight version: updates in flight. "
                "Train them with an objective that is exact per token (docs/objectives.md)."
            ),
            unit="percentunit",
            at_most=1,
            lines=[
                Series(
                    f"{run_rate('assembled_groups_spanning_versions_total')} / {run_rate('assembled_groups_total')}",
                    "share",
                )
            ],
        ),
    ],
)

_CAUSES = Row(
    "What it comes from",
    [
        TimeSeries(
            title="ρ: rollout over train throughput",
            description=(
                "In-queue staleness jumps from ρ to the queue's length in batches where ρ passes 1; slightly below 1 "
                "is the freshest place at full speed."
            ),
            unit="none",
            width=6,
            lines=[Series(of_run("utilization_ratio"), "ρ")],
            limits=[(1, "orange")],
        ),
        TimeSeries(
            title="M: tailness",
            description=(
                "Longest response of a group over the mean response. Pre-queue staleness grows with it: a length cap "
                "is what lowers it."
            ),
            unit="none",
            width=6,
            lines=[Series(of_run("tailness_ratio"), "M")],
        ),
        TimeSeries(
            title="C: requests at once",
            description=(
                "Requests that all engines decode at once. Pre-queue staleness is M·C over the samples of a batch; "
                "too many at once add staleness and hardly throughput."
            ),
            unit="none",
            width=6,
            lines=[Series(of_run("concurrency_requests"), "C")],
        ),
        TimeSeries(
            title="q: queue over batch",
            description="Room of the queue in batches. Above ρ = 1 in-queue staleness grows with it; 1 is enough.",
            unit="none",
            width=6,
            lines=[Series(of_run("queue_factor_ratio"), "q")],
        ),
    ],
)

_BIAS = Row(
    "What it does to what is trained",
    [
        TimeSeries(
            title="Length bias",
            description=(
                "Mean response length, trained over sampled. Below 1 long responses are lost: to the gate or to a "
                "full queue. `biased` is 1 where lengths, rewards, turns or environments differ beyond chance."
            ),
            unit="none",
            lines=[
                Series(of_run("length_bias_ratio"), "trained over sampled"),
                Series(of_run("sampling_biased"), "biased"),
            ],
        ),
        TimeSeries(
            title="Mean response length",
            description="Tokens of a response, of accepted and of assembled groups.",
            unit="none",
            lines=[Series(_mean("summed_response_tokens_total", "summed_samples_total"), "{{stage}}")],
        ),
        Heatmap(
            title="Response lengths",
            description="Accepted samples by their response's tokens. A band at the cap: responses are cut off.",
            unit="none",
            line=Series(run_rate("response_length_tokens_bucket", "le"), "{{le}}"),
        ),
        TimeSeries(
            title="Truncated responses",
            description=(
                "Share of samples that ended at their length limit. Rising: the model grows longer than "
                "max_new_tokens allows."
            ),
            unit="percentunit",
            at_most=1,
            lines=[Series(_mean("summed_truncated_samples_total", "summed_samples_total"), "{{stage}}")],
        ),
        TimeSeries(
            title="Mean reward",
            description=(
                "Of the samples of accepted and of assembled groups. They differ where a filter or the gate chooses "
                "by reward."
            ),
            unit="none",
            lines=[
                Series(
                    f"{run_slope('summed_rewards', 'stage')} / ({run_rate('summed_samples_total', 'stage')} > 0)",
                    "{{stage}}",
                )
            ],
        ),
        TimeSeries(
            title="Turns of a sample",
            description="Mean turns of role assistant; environments with tools make more than one.",
            unit="none",
            lines=[Series(_mean("summed_turns_total", "summed_samples_total"), "{{stage}}")],
        ),
    ],
)

STALENESS = Dashboard(
    name="staleness",
    title="Rollout buffer / Staleness",
    description="How old is what is trained, where it comes from, and what it does to what is trained.",
    rows=[_MEANS, _CONTROL, _REUSE, _DISTRIBUTIONS, _CAUSES, _BIAS],
)
