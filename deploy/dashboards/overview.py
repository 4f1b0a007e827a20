"""Is the run bound by rollouts or by training, is it starved, what was lost and why: the first dashboard to look at."""

from deploy.dashboards.panels import Number, Series, TimeSeries
from deploy.dashboards.queries import of_run, run_rate, run_slope
from deploy.dashboards.rendering import Dashboard, Row

MEASURED = f"sum({of_run('staleness_measured_versions', 'part')})"
_HELD = "~queued|forming|delivered"
_LOST = "~dropped_overflow|dropped_stale|recycled|filtered|rejected|discarded|lost"

_VERDICT = Row(
    "In a minute",
    [
        Number(
            title="State",
            description=(
                "Whether an operator or the service holds the run. Paused: nothing is leased and nothing is assembled; "
                "`rollout-buffer status` says why, `rollout-buffer run continue` ends it. Draining: it ends by itself."
            ),
            line=Series(
                f"max(2 * {of_run('paused', 'run')} or {of_run('draining', 'run')})",
                "state",
            ),
            words=[(0, 0, "runs", "green"), (1, 1, "is drained", "yellow"), (2, 2, "paused", "red")],
        ),
        Number(
            title="Bound by (ρ)",
            description=(
                "Rollout over train throughput, both while busy. Below 0.9 engines are the bottleneck: add engines or "
                "take GPUs from training. Above 1.1 training is: the queue only makes groups older, so make it "
                "shorter or move GPUs. Where pushes wait or admission holds back, the true value is higher."
            ),
            line=Series(of_run("utilization_ratio"), "ρ"),
            unit="none",
            words=[
                (0, 0.9, "rollouts", "blue"),
                (0.9, 1.1, "balanced", "green"),
                (1.1, 1_000_000, "training", "purple"),
            ],
        ),
        Number(
            title="Trainer idle",
            description=(
                "Share of its time that the trainer waits for a batch. Above a half it is starved: look at the queue, "
                "the losses and the fleet below, in this order."
            ),
            line=Series(of_run("trainer_idle_ratio"), "idle"),
            unit="percentunit",
            limits=[(0.2, "yellow"), (0.5, "red")],
        ),
        Number(
            title="Engines busy",
            description=(
                "Share of the time in which an engine decodes anything. Low while the trainer waits: too few tasks, "
                "environments that take long, or a queue that pushes wait for."
            ),
            line=Series(of_run("engine_busy_ratio"), "busy"),
            unit="percentunit",
        ),
        Number(
            title="Staleness",
            description=(
                "Mean versions between the first token of a group and the weights that train on it, as measured. "
                "The dashboard Staleness says where they come from."
            ),
            line=Series(MEASURED, "versions"),
            unit="none",
            limits=[(4, "yellow"), (8, "red")],
        ),
        Number(
            title="Alerts that fire",
            description=(
                "Of this run and of the service, by the rules in the chart's files/alerts; docs/runbooks.md says what "
                "to do about each."
            ),
            line=Series(
                'count(ALERTS{alertname=~"RolloutBuffer.+",alertstate="firing",namespace=~"$namespace",run=~"$run|"})'
                " or vector(0)",
                "alerts",
            ),
            unit="none",
            limits=[(1, "red")],
        ),
    ],
)

_THROUGHPUT = Row(
    "Throughput",
    [
        TimeSeries(
            title="Tokens",
            description=(
                "What engines decode and what is trained, over the last publishes. What lies between them is lost, "
                "filtered, in the queue or part of evaluations."
            ),
            unit="short",
            lines=[
                Series(of_run("decoded_tokens_per_second"), "decoded, tokens/s"),
                Series(of_run("trained_tokens_per_second"), "trained, tokens/s"),
            ],
        ),
        TimeSeries(
            title="Groups",
            description=(
                "Groups accepted from workers and put into batches. Accepted far above assembled: training is the "
                "bottleneck and groups are dropped, or they are filtered."
            ),
            unit="ops",
            lines=[Series(run_rate("summed_groups_total", "stage"), "{{stage}}")],
        ),
        TimeSeries(
            title="Idle shares",
            description=(
                "One of both near 0 is a loop that is bound by that side. Both high: the policy, tasks or "
                "environments hold the loop back."
            ),
            unit="percentunit",
            at_most=1,
            lines=[
                Series(of_run("trainer_idle_ratio"), "trainer waits"),
                Series(f"1 - {of_run('engine_busy_ratio')}", "engines decode nothing"),
            ],
        ),
        TimeSeries(
            title="Times",
            description=(
                "From batch to batch, and from a group's lease to its acceptance. Generation that takes several "
                "periods is staleness before the queue: the longest responses decide it."
            ),
            unit="s",
            lines=[
                Series(of_run("train_period_seconds"), "batch to batch"),
                Series(of_run("group_generation_mean_seconds"), "generation of a group, mean"),
            ],
        ),
        TimeSeries(
            title="Progress",
            description=(
                "Assembled, trained and checkpointed steps, and the published version. Lines that part: the trainer "
                "takes batches without committing, or commits without publishing. Flat lines: nothing moves."
            ),
            unit="none",
            lines=[
                Series(of_run("next_step"), "assembled steps"),
                Series(of_run("committed_steps"), "trained steps"),
                Series(of_run("checkpointed_steps"), "checkpointed steps"),
                Series(of_run("published_version"), "published version"),
            ],
        ),
        TimeSeries(
            title="Tasks",
            description=(
                "Tasks by state. None pending: the feeder is too slow or the data is at its end. Many failed: look at "
                "the workers' logs and at `rollout-buffer run show`."
            ),
            unit="none",
            lines=[Series(of_run("tasks", "state", state="~pending|leased|failed"), "{{state}}")],
        ),
    ],
)

_QUEUE = Row(
    "Queue",
    [
        TimeSeries(
            title="Queued groups",
            description=(
                "Groups that wait for a batch, between the batch size and the cap. Always at the cap: training is the "
                "bottleneck. Always below a batch: the trainer waits for rollouts. awaited: groups in flight that the "
                "pull waits for though enough are queued (stale_action wait, order_window_groups)."
            ),
            unit="none",
            lines=[
                Series(of_run("queue_groups"), "queued"),
                Series(of_run("awaited_groups"), "awaited"),
                Series(of_run("queue_limit_groups"), "cap", dashed=True),
                Series(of_run("batch_groups"), "batch", dashed=True),
            ],
        ),
        TimeSeries(
            title="Queued bytes and tokens",
            description="Sizes of what is queued; the caps are max_queued_bytes and max_queued_tokens of the policy.",
            unit="bytes",
            lines=[
                Series(of_run("queue_bytes"), "bytes"),
                Series(of_run("queue_tokens"), "tokens", right_axis_unit="short"),
            ],
        ),
        TimeSeries(
            title="Where accepted groups are",
            description=(
                "What the run holds in the store. Delivered that grows: the trainer does not commit. At the quota "
                "pushes wait or are dropped, as the policy says."
            ),
            unit="none",
            stacked=True,
            lines=[
                Series(of_run("ledger_groups", "disposition", disposition=_HELD), "{{disposition}}"),
                Series(of_run("quota_limit_groups"), "quota", dashed=True),
            ],
        ),
    ],
)

_LOSSES = Row(
    "Losses",
    [
        TimeSeries(
            title="Groups lost, by what became of them",
            description=(
                "dropped_overflow: the queue was full, training is the bottleneck. dropped_stale, recycled: beyond "
                "max_staleness, which prefers short responses. filtered: by the policy's filter. rejected: by the "
                "trainer. discarded: by a resume. lost: the store lost a payload; that must not happen, see "
                "RolloutBufferGroupsLost."
            ),
            unit="ops",
            stacked=True,
            lines=[Series(run_slope("ledger_groups", "disposition", disposition=_LOST), "{{disposition}}")],
        ),
        TimeSeries(
            title="Share of all groups so far",
            description="What became of the accepted groups since the run began; the rest is trained or still held.",
            unit="percentunit",
            at_most=1,
            lines=[
                Series(
                    f"{of_run('ledger_groups', 'disposition', disposition=_LOST)}"
                    f" / ignoring (disposition) group_left () ({of_run('ledger_groups', disposition='accepted')} > 0)",
                    "{{disposition}}",
                )
            ],
        ),
        TimeSeries(
            title="Filter",
            description=(
                "Groups that the policy filtered, by reason, and the share of recent groups that pass. Below "
                "min_acceptance_milli the filter starves the trainer: tasks are too easy or too hard."
            ),
            unit="ops",
            lines=[
                Series(run_rate("filtered_groups_total", "reason"), "{{reason}}"),
                Series(of_run("recent_acceptance_ratio"), "pass", right_axis_unit="percentunit"),
            ],
        ),
        TimeSeries(
            title="Leases that came to nothing",
            description=(
                "expired: a worker died or hangs. returned: a worker gave up or drained. cancelled: the group could "
                "not have been fresh any more."
            ),
            unit="ops",
            lines=[
                Series(run_rate("leases_expired_total"), "expired"),
                Series(run_rate("leases_returned_total"), "returned"),
                Series(run_rate("leases_cancelled_total"), "cancelled"),
            ],
        ),
        TimeSeries(
            title="Pushes that changed nothing",
            description=(
                "duplicate: repeated after a lost answer, harmless. closed: the task was settled meanwhile, work was "
                "done twice. rejected: the queue was full under overflow action reject."
            ),
            unit="ops",
            lines=[
                Series(run_rate("pushes_duplicate_total"), "duplicate"),
                Series(run_rate("pushes_closed_total"), "closed"),
                Series(run_rate("pushes_rejected_total"), "rejected"),
            ],
        ),
        TimeSeries(
            title="Queued by environment",
            description=(
                "An environment without queued groups that has a share: its tasks are missing, slow or filtered."
            ),
            unit="none",
            stacked=True,
            lines=[Series(of_run("environment_groups", "environment", disposition="queued"), "{{environment}}")],
        ),
        TimeSeries(
            title="Starts and errors by environment",
            width=24,
            description=(
                "Leases of an environment's tasks; those that failed or expired (infrastructure: a sandbox, a judge, "
                "an engine); samples whose answer its function calls wrong (policy), which are trained."
            ),
            unit="ops",
            lines=[
                Series(run_rate("environment_starts_total", "environment"), "{{environment}} leases"),
                Series(run_rate("environment_failed_attempts_total", "environment"), "{{environment}} infrastructure"),
                Series(run_rate("environment_failed_samples_total", "environment"), "{{environment}} policy"),
            ],
        ),
    ],
)

OVERVIEW = Dashboard(
    name="overview",
    title="Rollout buffer / Overview",
    description="Is the run bound by rollouts or by training, is it starved, and what was lost and why.",
    rows=[_VERDICT, _THROUGHPUT, _QUEUE, _LOSSES],
)
