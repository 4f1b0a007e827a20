"""Rows of the fleet's dashboard about those who work: stages, workers by their own metrics, SGLang by its own."""

from deploy.dashboards.panels import Series, TimeSeries
from deploy.dashboards.queries import of_run, of_sglang, of_workers, run_rate, worker_quantile, worker_rate
from deploy.dashboards.rendering import Row

STAGES = Row(
    "Stages",
    [
        TimeSeries(
            title="Groups in stages",
            description=(
                "waiting: queued groups that no worker of the stage holds. Rising in one: it is the bottleneck, start "
                "more of its workers."
            ),
            unit="none",
            stacked=True,
            lines=[Series(of_run("stage_groups", "stage_name", "state"), "{{stage_name}}: {{state}}")],
        ),
        TimeSeries(
            title="Groups through stages",
            description=(
                "Groups in a second that each stage has added to. Below what is accepted for long: groups grow old in "
                "the queue while they wait for it."
            ),
            unit="ops",
            lines=[Series(run_rate("stage_added_total", "stage_name"), "{{stage_name}}")],
        ),
        TimeSeries(
            title="Time of a group in a stage",
            description=(
                "Mean seconds from lease to columns, and leases that failed or expired, in a second. Failures: the log "
                "of the stage's worker has the error."
            ),
            unit="s",
            lines=[
                Series(
                    f"{run_rate('stage_busy_seconds_total', 'stage_name')}"
                    f" / {run_rate('stage_added_total', 'stage_name')}",
                    "{{stage_name}}",
                ),
                Series(run_rate("stage_failed_total", "stage_name"), "{{stage_name}}: failed", right_axis_unit="ops"),
            ],
        ),
    ],
)

WORKERS = Row(
    "Workers, by their own metrics",
    [
        TimeSeries(
            title="Time of a reward",
            description=(
                "Mean seconds in the reward function for a group. Longer than a group takes to decode: rewards hold "
                "the loop back, so use --reward-processes, or the stage rewards."
            ),
            unit="s",
            lines=[
                Series(f"{worker_rate('reward_seconds_total')} / {worker_rate('rewarded_groups_total')}", "a group")
            ],
        ),
        TimeSeries(
            title="Tokens, by what became of them",
            description=(
                "Generated tokens in a second. Many discarded: rollout_buffer_worker_discarded_tokens_total says why "
                "by its label cause."
            ),
            unit="none",
            lines=[
                Series(worker_rate("tokens_total"), "received from engines"),
                Series(worker_rate("pushed_tokens_total"), "pushed"),
                Series(worker_rate("returned_tokens_total"), "returned as partial rollouts"),
                Series(worker_rate("discarded_tokens_total"), "discarded"),
            ],
        ),
        TimeSeries(
            title="KV cache of each engine",
            description=(
                "Part in use when its worker asked last. One engine far above the others: samples are spread badly, "
                "or one of them is very long."
            ),
            unit="percentunit",
            at_most=1,
            lines=[Series(of_workers("engine_kv_usage_ratio", "max", "engine"), "{{engine}}")],
        ),
        TimeSeries(
            title="Size of push bundles",
            description=(
                "Bytes of a message of groups, without payloads that were written to the store. Small ones at a high "
                "rate cost the service CPU."
            ),
            unit="bytes",
            width=12,
            lines=[Series(worker_quantile(share, "bundle_bytes"), f"{share:.0%}") for share in (0.5, 0.95)],
        ),
        TimeSeries(
            title="Retries",
            description=(
                "Samples that were tried again alone, attempts that failed in generation or reward, and leases that "
                "were handed back, in a second. The worker's log has the errors."
            ),
            unit="ops",
            width=12,
            lines=[
                Series(worker_rate("retried_samples_total"), "samples tried again"),
                Series(worker_rate("infrastructure_errors_total"), "attempts that failed"),
                Series(worker_rate("returned_leases_total"), "leases returned"),
            ],
        ),
    ],
)

SGLANG = Row(
    "SGLang, by its own metrics (all servers of the namespace)",
    [
        TimeSeries(
            title="Requests of SGLang",
            description=(
                "Running and queued in the servers. Queued for long: --groups-per-engine is more than the KV cache "
                "holds, and latency grows without more tokens."
            ),
            unit="none",
            lines=[
                Series(of_sglang("num_running_reqs", "sum"), "running"),
                Series(of_sglang("num_queue_reqs", "sum"), "queued"),
            ],
        ),
        TimeSeries(
            title="KV cache and prefix cache of SGLang",
            description=(
                "Part of the KV cache in use (fullest server), and part of input tokens that prefix caches had (mean). "
                "Hits fall after each weight update, which empties the caches."
            ),
            unit="percentunit",
            at_most=1,
            lines=[
                Series(of_sglang("token_usage", "max"), "fullest KV cache"),
                Series(of_sglang("cache_hit_rate", "avg"), "prefix cache hits"),
            ],
        ),
        TimeSeries(
            title="Throughput of SGLang",
            description=(
                "Tokens that the servers decode in a second, as they measure it. Far below what they did: look at the "
                "requests that run, and at reloads."
            ),
            unit="none",
            lines=[Series(of_sglang("gen_throughput", "sum"), "tokens/s")],
        ),
    ],
)
