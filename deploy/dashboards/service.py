"""The service's own health: RPCs, who waits, the store, and who was refused."""

from deploy.dashboards.panels import Number, Series, TimeSeries
from deploy.dashboards.queries import of_processes, of_service, process_quantile, process_rate
from deploy.dashboards.rendering import Dashboard, Row

_AT_ONCE = (
    "~GetRun|SubmitTasks|ExtendLeases|Heartbeat|ReturnLeases|PushGroup|Commit|Checkpoint|Resume|Publish|ReportEngine"
)
"""They wait for nothing but the store."""
_WAITING = "~PullBatch|LeaseTasks"
_SHARES = (0.5, 0.9)
_FAULTS = "~INTERNAL|UNKNOWN|UNAVAILABLE|RESOURCE_EXHAUSTED|DATA_LOSS"

_NOW = Row(
    "Now",
    [
        Number(
            title="Store",
            description="Whether every replica of the service reaches the store. Down: see RolloutBufferStoreDown.",
            line=Series(of_service("store_up", how="min"), "up"),
            words=[(0, 0, "down", "red"), (1, 1, "up", "green")],
        ),
        Number(
            title="Store memory",
            description=(
                "Used share of the store's maxmemory. When it is full every write is refused and all runs stand still: "
                "give it more, or lower quotas and retained_steps."
            ),
            line=Series(f"{of_service('store_memory_used_bytes')} / {of_service('store_memory_limit_bytes')}", "used"),
            unit="percentunit",
            limits=[(0.7, "yellow"), (0.85, "red")],
        ),
        Number(
            title="RPCs",
            description="RPCs that ended, in a second.",
            line=Series(process_rate("rpcs_total"), "RPCs"),
            unit="reqps",
        ),
        Number(
            title="Faults",
            description=(
                "Share of RPCs that ended with a code that says the service or its store is in trouble: INTERNAL, "
                "UNKNOWN, UNAVAILABLE, RESOURCE_EXHAUSTED, DATA_LOSS."
            ),
            line=Series(
                f"({process_rate('rpcs_total', code=_FAULTS)} or vector(0)) / {process_rate('rpcs_total')}", "faults"
            ),
            unit="percentunit",
            limits=[(0.01, "yellow"), (0.05, "red")],
        ),
        Number(
            title="Blocked pushes",
            description="Pushes that wait for room in a full queue, by policy; engines may stand still meanwhile.",
            line=Series(of_processes("blocked_pushes"), "blocked"),
            unit="none",
        ),
        Number(
            title="Open RPCs",
            description="In progress, long polls and streams among them. Growing without new workers: clients leak.",
            line=Series(of_processes("open_rpcs"), "open"),
            unit="none",
        ),
    ],
)

_RPCS = Row(
    "RPCs",
    [
        TimeSeries(
            title="Rate by method",
            description="RPCs that ended, in a second. Streams of pushes end rarely: their groups are below.",
            unit="reqps",
            lines=[Series(process_rate("rpcs_total", "method"), "{{method}}")],
        ),
        TimeSeries(
            title="Codes other than OK",
            description=(
                "DEADLINE_EXCEEDED of PullBatch is a batch that was not there yet, UNAVAILABLE a restart or the store, "
                "RESOURCE_EXHAUSTED a limit of the service, UNAUTHENTICATED and PERMISSION_DENIED tokens, INTERNAL a "
                "defect: the log has it."
            ),
            unit="reqps",
            lines=[Series(process_rate("rpcs_total", "method", "code", code="~[A-Z_]{3,}"), "{{method}} {{code}}")],
        ),
        TimeSeries(
            title="Open RPCs by method",
            description="In progress now: pushes and watches are open as long as their worker lives.",
            unit="none",
            stacked=True,
            lines=[Series(of_processes("open_rpcs", "method"), "{{method}}")],
        ),
        TimeSeries(
            title="Duration, median",
            description="Of the calls that wait for nothing but the store.",
            unit="s",
            logarithmic=True,
            lines=[Series(process_quantile(0.5, "rpc_seconds", "method", method=_AT_ONCE), "{{method}}")],
        ),
        TimeSeries(
            title="Duration, 99th percentile",
            description=(
                "Rising for all methods: the store or the processor of the service; compare with the store's calls "
                "below. Rising for one: large messages."
            ),
            unit="s",
            logarithmic=True,
            lines=[Series(process_quantile(0.99, "rpc_seconds", "method", method=_AT_ONCE), "{{method}}")],
        ),
        TimeSeries(
            title="Bytes of groups, relayed and direct",
            description=(
                "Bytes of groups: in from workers, out to trainers; direct: between them and the store, past the "
                "service. Much relayed where direct is expected: see the clients that relay, on Fleet."
            ),
            unit="Bps",
            lines=[
                Series(process_rate("rpc_received_bytes_total", "method"), "in, {{method}}"),
                Series(process_rate("rpc_sent_bytes_total", "method"), "out, {{method}}"),
                Series(process_rate("direct_bytes_total", "method"), "direct, {{method}}"),
            ],
        ),
    ],
)

_WAITS = Row(
    "Who waits",
    [
        TimeSeries(
            title="Waits for a batch",
            description=(
                "How long pulls waited. Near 0: the batch was there, training is the bottleneck. As long as a step: "
                "rollouts are."
            ),
            unit="s",
            lines=[Series(process_quantile(share, "pull_wait_seconds"), f"{share:.0%} of pulls") for share in _SHARES],
        ),
        TimeSeries(
            title="Waits for room",
            description=(
                "How long pushes waited for room in a full queue, under overflow action block. Training is the "
                "bottleneck while they wait."
            ),
            unit="s",
            lines=[Series(process_quantile(share, "push_wait_seconds"), f"{share:.0%} of pushes") for share in _SHARES],
        ),
        TimeSeries(
            title="Pushes that wait",
            description="For room, now. Steady growth: trainers are gone while workers go on.",
            unit="none",
            lines=[Series(of_processes("blocked_pushes"), "blocked")],
        ),
        TimeSeries(
            title="Pushed groups by outcome",
            description=(
                "What became of each pushed group at once. rejected_full: the queue is full under overflow action "
                "reject. Stale or duplicate ones in number: workers repeat or lag."
            ),
            unit="ops",
            stacked=True,
            lines=[Series(process_rate("pushed_groups_total", "outcome"), "{{outcome}}")],
        ),
        TimeSeries(
            title="Long polls, 90th percentile",
            description="Duration of the calls that wait for something: a batch, a task.",
            unit="s",
            lines=[Series(process_quantile(0.9, "rpc_seconds", "method", method=_WAITING), "{{method}}")],
        ),
        TimeSeries(
            title="Leases of evaluations that ended",
            description="By what became of the task.",
            unit="ops",
            lines=[Series(process_rate("evaluation_leases_ended_total", "outcome"), "{{outcome}}")],
        ),
    ],
)

_STORE = Row(
    "Store",
    [
        TimeSeries(
            title="Memory",
            description=(
                "What the store uses, and its maxmemory. It grows with what is queued, held by trainers, retained for "
                "replay, and with evaluations; nothing is evicted, at the limit writes are refused."
            ),
            unit="bytes",
            lines=[
                Series(of_service("store_memory_used_bytes"), "used"),
                Series(of_service("store_memory_limit_bytes"), "maxmemory", dashed=True),
            ],
        ),
        TimeSeries(
            title="Calls, 99th percentile",
            description=(
                "Time of the service's calls of the store, by operation. A slow disk under durability host, a slow "
                "network, or another tenant of the store."
            ),
            unit="s",
            logarithmic=True,
            lines=[Series(process_quantile(0.99, "store_call_seconds", "operation"), "{{operation}}")],
        ),
        TimeSeries(
            title="Calls",
            description="Calls of the store in a second, by operation.",
            unit="ops",
            lines=[Series(process_rate("store_call_seconds_count", "operation"), "{{operation}}")],
        ),
        TimeSeries(
            title="Errors",
            description=(
                "Calls that failed, by kind. Clients repeat them, so a short burst at a failover is nothing; lasting "
                "ones need the store's log."
            ),
            unit="ops",
            lines=[Series(process_rate("store_errors_total", "kind"), "{{kind}}")],
        ),
        TimeSeries(
            title="Connections",
            description="Clients of the store, ours among them. Steady growth: something leaves its connections open.",
            unit="none",
            lines=[Series(of_service("store_clients"), "clients")],
        ),
        TimeSeries(
            title="Reachable",
            description="1 while every replica of the service reaches the store.",
            unit="none",
            at_most=1,
            lines=[Series(of_service("store_up", how="min"), "up")],
        ),
    ],
)

_ACCESS = Row(
    "Access",
    [
        TimeSeries(
            title="Refused calls",
            description=(
                "unauthenticated: no token, an unknown or an expired one. permission_denied: a token of another run or "
                "role. Lasting: a client was not given its new token, or somebody tries."
            ),
            unit="reqps",
            lines=[Series(process_rate("refused_calls_total", "reason"), "{{reason}}")],
        ),
        TimeSeries(
            title="Files of tokens and certificates",
            description=(
                "1 while a file cannot be used and an earlier one stays in force: the service's log says why. Absent "
                "where the service has no such files."
            ),
            unit="none",
            at_most=1,
            lines=[Series(of_service("security_file_broken", "file"), "{{file}} broken")],
        ),
        TimeSeries(
            title="Tokens",
            description="Entries of the tokens file, expired ones among them.",
            unit="none",
            lines=[Series(of_service("tokens"), "tokens")],
        ),
    ],
)

SERVICE = Dashboard(
    name="service",
    title="Rollout buffer / Service",
    description="The service's own health: RPCs, who waits, the store, and who was refused.",
    rows=[_NOW, _RPCS, _WAITS, _STORE, _ACCESS],
    of_a_run=False,
)
