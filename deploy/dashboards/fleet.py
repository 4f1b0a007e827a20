"""Dashboard of the fleet: which engine lags, how long reloads take, and what becomes of leases and tasks."""

from deploy.dashboards.panels import Number, Series, TimeSeries
from deploy.dashboards.queries import of_run, run_rate
from deploy.dashboards.rendering import Dashboard, Row
from deploy.dashboards.workers import SGLANG, STAGES, WORKERS


def _engines(state: str) -> str:
    """0 where no engine is in this state, as long as the run is known."""
    return f"{of_run('engines', 'run', state=state)} or 0 * {of_run('next_step', 'run')}"


_NOW = Row(
    "Now",
    [
        Number(
            title="Engines ready",
            description="Engines that serve. None: see the runbook of RolloutBufferNoEngineReady.",
            line=Series(_engines("ready"), "ready"),
            unit="none",
            words=[(0, 0, "none", "red")],
        ),
        Number(
            title="Quarantined",
            description=(
                "Engines that could not load new weights in time and get no work. `rollout-buffer run show` has each "
                "one's last error."
            ),
            line=Series(_engines("quarantined"), "quarantined"),
            unit="none",
            limits=[(1, "red")],
        ),
        Number(
            title="Silent",
            description=(
                "Engines that were not heard of for a minute and did not say good-bye: their worker was killed or "
                "cannot reach the service. Forgotten after an hour."
            ),
            line=Series(_engines("silent"), "silent"),
            unit="none",
            limits=[(1, "red")],
        ),
        Number(
            title="Largest lag",
            description=(
                "Published version minus the oldest that a ready engine has loaded. Above max_staleness the groups of "
                "that engine are too old when they are made."
            ),
            line=Series(of_run("engine_lag_max_versions"), "versions"),
            unit="none",
            limits=[(2, "yellow"), (4, "red")],
        ),
        Number(
            title="Tasks in flight",
            description="Groups that are being generated: leases that workers hold.",
            line=Series(of_run("tasks", state="leased"), "leased"),
            unit="none",
        ),
        Number(
            title="Published version",
            description="The weights that engines should have.",
            line=Series(of_run("published_version"), "version"),
            unit="none",
        ),
    ],
)

_ENGINES = Row(
    "Engines",
    [
        TimeSeries(
            title="Engines by state",
            description=(
                "loading for long: fetching or loading weights takes as long as a step, see the reload times. "
                "starting: not connected yet. stopped: said good-bye. silent: not heard of for a minute."
            ),
            unit="none",
            width=6,
            stacked=True,
            lines=[Series(of_run("engines", "state"), "{{state}}")],
        ),
        TimeSeries(
            title="Lag of the slowest ready engine",
            description=(
                "Above the dashed line what that engine makes cannot be trained any more. Look for slow weight "
                "transfers, or for max_unavailable_engines below what the fleet needs."
            ),
            unit="none",
            width=6,
            lines=[
                Series(of_run("engine_lag_max_versions"), "versions behind"),
                Series(of_run("staleness_limit_versions"), "max_staleness", dashed=True),
            ],
        ),
        TimeSeries(
            title="Longest silence",
            description=(
                "Since the last report of an engine that has not stopped. Workers report every 30 s at least; after "
                "60 s the engine counts as silent."
            ),
            unit="s",
            width=6,
            lines=[Series(of_run("engine_silent_max_seconds"), "silence")],
            limits=[(60, "red")],
        ),
        TimeSeries(
            title="Clients whose payloads are relayed",
            description=(
                "Workers (pushes) and trainers (pulls) that cannot use the store themselves. All works, at more CPU of "
                "the service; `rollout-buffer status` says why."
            ),
            unit="none",
            width=6,
            lines=[Series(of_run("relaying_clients", "of"), "{{of}}")],
        ),
        TimeSeries(
            title="Reloads",
            description=(
                "Weight updates that engines finished, in a second, over all of them. Fewer than engines times "
                "publishes: engines skip versions that are superseded before they come to them."
            ),
            unit="ops",
            width=6,
            lines=[Series(run_rate("engine_reloads_total"), "reloads")],
        ),
        TimeSeries(
            title="Time of a reload",
            description=(
                "Of each engine's last weight update, from pause to continue; what it decodes stands still meanwhile, "
                "the fetch of files is not in it. One engine far above the mean: look at its disk or its network."
            ),
            unit="s",
            width=6,
            lines=[
                Series(of_run("engine_last_reload_mean_seconds"), "mean over engines"),
                Series(of_run("engine_last_reload_max_seconds"), "longest"),
            ],
        ),
        TimeSeries(
            title="Time of a reload, by phase",
            description=(
                "Mean seconds of each phase of a weight update. fetch: the network or the publisher. wait: for a turn, "
                "max_unavailable_engines. join: a process group. pause, load, resume: the engine and its disk."
            ),
            unit="s",
            width=6,
            stacked=True,
            lines=[
                Series(
                    f"{run_rate('reload_seconds_total', 'phase')} / {run_rate('reloads_total', 'phase')}", "{{phase}}"
                )
            ],
        ),
        TimeSeries(
            title="Engine errors",
            description=(
                "Calls of engines and loads that failed. `rollout-buffer run show` has each engine's last error; the "
                "worker's log has all."
            ),
            unit="ops",
            width=6,
            lines=[Series(run_rate("engine_errors_total"), "errors")],
        ),
        TimeSeries(
            title="Samples in flight",
            description=(
                "Samples that run on engines, and as many as workers let run. Below the dashed line: admission or "
                "tasks hold engines back. With --kv-target the line follows the KV caches."
            ),
            unit="none",
            width=12,
            lines=[
                Series(of_run("engine_samples"), "run"),
                Series(of_run("engine_samples_limit"), "may run", dashed=True),
            ],
        ),
        TimeSeries(
            title="KV cache and moved samples",
            description=(
                "Part in use of the fullest engine's cache: at 1 SGLang retracts requests, so lower "
                "--groups-per-engine or set --kv-target. And samples that idle engines took over, in a second."
            ),
            unit="none",
            width=12,
            lines=[
                Series(of_run("engine_kv_usage_max_ratio"), "fullest cache"),
                Series(run_rate("engine_moved_samples_total"), "samples moved"),
                Series(run_rate("engine_surplus_samples_total"), "surplus samples cut off"),
            ],
        ),
    ],
)

_WORK = Row(
    "Leases and tasks",
    [
        TimeSeries(
            title="Leases",
            description=(
                "granted should be about what is accepted. Many expired: workers die or hang; many returned: engines "
                "fail or workers drain; cancelled: the groups could not have been fresh any more."
            ),
            unit="ops",
            lines=[
                Series(run_rate(f"leases_{what}_total"), what)
                for what in ("granted", "expired", "returned", "cancelled")
            ],
        ),
        TimeSeries(
            title="Tasks by state",
            description=(
                "pending near 0: the feeder does not keep up. leased far below what the engines can hold: admission "
                "holds back, or workers are missing."
            ),
            unit="none",
            lines=[Series(of_run("tasks", "state", state="~pending|leased"), "{{state}}")],
        ),
        TimeSeries(
            title="Failed and cancelled tasks",
            description=(
                "Tasks that were given up for good. Failed ones count against the policy's failure_budget; beyond it "
                "the run pauses."
            ),
            unit="none",
            lines=[Series(of_run("tasks", "state", state="~failed|cancelled"), "{{state}}")],
        ),
        TimeSeries(
            title="Partial rollouts given up",
            description=(
                "Tokens of partial work that was thrown away because its head was too stale, and partial rollouts "
                "beyond "
                "max_version_spread. Much of it: engines are interrupted too often, or the limits are tight."
            ),
            unit="ops",
            lines=[
                Series(run_rate("partial_rollout_discarded_tokens_total"), "tokens"),
                Series(run_rate("partial_rollouts_beyond_spread_total"), "partial rollouts beyond the spread"),
            ],
        ),
        TimeSeries(
            title="Tasks of evaluations",
            description=("Of the evaluations that are kept, by state. Pending for long: no worker takes evaluations."),
            unit="none",
            stacked=True,
            lines=[Series(of_run("evaluation_tasks", "state"), "{{state}}")],
        ),
        TimeSeries(
            title="Evaluations that are kept",
            description="Delete those that were read (`delete` of the evaluation): they take the memory of the store.",
            unit="none",
            lines=[
                Series(of_run("evaluations"), "evaluations"),
                Series(of_run("evaluation_stored_bytes"), "bytes", right_axis_unit="bytes"),
            ],
        ),
    ],
)

FLEET = Dashboard(
    name="fleet",
    title="Rollout buffer / Fleet",
    description="Which engine lags, how long reloads take, and what becomes of leases and tasks.",
    rows=[_NOW, _ENGINES, _WORK, STAGES, WORKERS, SGLANG],
)
