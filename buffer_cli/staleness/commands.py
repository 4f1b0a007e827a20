"""`rollout-buffer plan`, `simulate`, `lab` and `worth` and their options. What they run is imported when they run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from buffer_cli.options import JsonOption, SetOption

_WORKLOAD = "Workload"
_LENGTHS = "Lengths of responses"
_POLICY = "Policy"
_SIMULATION = "Simulation"
_BUDGET = "A budget of GPUs"

Concurrency = Annotated[
    int,
    typer.Option(metavar="C", help="Slots: responses decoded at once, over all engines.", rich_help_panel=_WORKLOAD),
]
GroupsPerBatch = Annotated[int, typer.Option(metavar="N", help="Groups of a train batch.", rich_help_panel=_WORKLOAD)]
GroupSize = Annotated[int, typer.Option(metavar="G", help="Responses of a group.", rich_help_panel=_WORKLOAD)]
Rho = Annotated[
    float,
    typer.Option(
        metavar="ρ", help="Utilization: rollout over train throughput, from busy time.", rich_help_panel=_WORKLOAD
    ),
]
QueueFactor = Annotated[
    float | None,
    typer.Option(
        metavar="q",
        help="Queue capacity over the batch. Default: the policy's, 1 for queue_drop.",
        rich_help_panel=_POLICY,
    ),
]
MaxStaleness = Annotated[
    int | None,
    typer.Option(metavar="η", help="Versions that a group may be behind: queue_max, areal.", rich_help_panel=_POLICY),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(metavar="n", help="Groups of a micro-batch: streaming. Default: an eighth.", rich_help_panel=_POLICY),
]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="Recorded lengths: a recording's folder or Parquet file, or a text file with a number a line.",
        rich_help_panel=_LENGTHS,
    ),
]
LengthMean = Annotated[
    float, typer.Option(metavar="TOKENS", help="Mean response, cap included.", rich_help_panel=_LENGTHS)
]
LengthSigma = Annotated[
    float, typer.Option(metavar="σ", help="Of the logarithm of lengths; 0: all alike.", rich_help_panel=_LENGTHS)
]
LengthCap = Annotated[
    int, typer.Option(metavar="TOKENS", help="Longest response; 0 for no cap.", rich_help_panel=_LENGTHS)
]
TurnTokens = Annotated[
    int, typer.Option(metavar="TOKENS", help="Response tokens of a turn; 0: one turn.", rich_help_panel=_WORKLOAD)
]
TurnLatency = Annotated[
    float,
    typer.Option(
        metavar="TOKENS", help="Wait between turns, in tokens a slot decodes meanwhile.", rich_help_panel=_WORKLOAD
    ),
]
ReloadPause = Annotated[
    float,
    typer.Option(
        metavar="TOKENS", help="Pause at a publish, in tokens a slot decodes meanwhile.", rich_help_panel=_WORKLOAD
    ),
]
PublishLag = Annotated[
    float,
    typer.Option(
        metavar="TOKENS",
        help="From a publish until engines begin to load, in tokens a slot decodes meanwhile.",
        rich_help_panel=_WORKLOAD,
    ),
]
GroupsInFlight = Annotated[
    int,
    typer.Option(
        metavar="GROUPS",
        help="Generated at once, groups_per_engine over all engines; 0: as many as the slots need.",
        rich_help_panel=_WORKLOAD,
    ),
]
Steps = Annotated[int, typer.Option(help="Train steps that are measured.", rich_help_panel=_SIMULATION)]
Warmup = Annotated[int, typer.Option(help="Train steps before them that do not count.", rich_help_panel=_SIMULATION)]
Seed = Annotated[int, typer.Option(help="Of the lengths.", rich_help_panel=_SIMULATION)]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs the extra `lab`.")]


def plan(
    concurrency: Concurrency = 128,
    groups_per_batch: GroupsPerBatch = 16,
    group_size: GroupSize = 8,
    queue_factor: QueueFactor = None,
    rho: Rho = 0.8,
    tailness: Annotated[
        float | None,
        typer.Option(metavar="M", help="Longest response of a group over the mean one.", rich_help_panel=_LENGTHS),
    ] = None,
    lengths: LengthsFile = None,
    length_mean: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS", help="Mean response, for seconds. Default: of --lengths.", rich_help_panel=_LENGTHS
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="POLICY", help="queue_drop, streaming or areal.", rich_help_panel=_POLICY)
    ] = "queue_drop",
    max_staleness: MaxStaleness = None,
    micro_batch: MicroBatch = None,
    gpus: Annotated[int | None, typer.Option(metavar="n", help="GPUs to split.", rich_help_panel=_BUDGET)] = None,
    rollout_tps_per_gpu: Annotated[
        float | None, typer.Option(metavar="r", help="Tokens/s that one GPU generates.", rich_help_panel=_BUDGET)
    ] = None,
    train_tps_per_gpu: Annotated[
        float | None, typer.Option(metavar="t", help="Tokens/s that one GPU trains.", rich_help_panel=_BUDGET)
    ] = None,
    batches: Annotated[
        str, typer.Option(metavar="N,N", help="Batches to try. Default: N/2, N, 2N, 4N.", rich_help_panel=_BUDGET)
    ] = "",
    concurrencies: Annotated[
        str,
        typer.Option(
            metavar="c,c",
            help="Slots of a rollout GPU to try. Default: half, once and twice what makes C at the balanced split.",
            rich_help_panel=_BUDGET,
        ),
    ] = "",
    total_concurrency: Annotated[
        bool,
        typer.Option(
            "--total-concurrency",
            help="Hold the slots in all over the splits: --concurrencies are totals, by default C/2, C and 2C.",
            rich_help_panel=_BUDGET,
        ),
    ] = False,
    staleness_limit: Annotated[
        float, typer.Option(help="Recommend the fastest split up to this staleness.", rich_help_panel=_BUDGET)
    ] = 2.0,
    steps: Steps = 400,
    warmup: Warmup = 100,
    seed: Seed = 0,
    as_json: JsonOption = False,
    plot: Plot = None,
) -> None:
    """Predict staleness before a run: what it will be, what each lever changes, how to split GPUs.

    Near balance (0.8 < ρ < 1.2) the closed form is rough, so the simulator runs too. With --gpus, and
    --rollout-tps-per-gpu and --train-tps-per-gpu, prints the splits, batches and concurrencies that none beats;
    every rollout GPU has the same slots, whatever the split.

    Example: rollout-buffer plan --concurrency 120 --groups-per-batch 15 --rho 0.67 --tailness 1.42
    """
    # First, while the locals are the options.
    given: dict[str, Any] = dict(locals())
    from buffer_cli.staleness.plan import run

    raise typer.Exit(run(given))


def simulate(
    concurrency: Concurrency = 128,
    groups_per_batch: GroupsPerBatch = 16,
    group_size: GroupSize = 8,
    queue_factor: QueueFactor = None,
    rho: Rho = 0.8,
    length_mean: LengthMean = 1_000.0,
    length_sigma: LengthSigma = 0.5,
    length_cap: LengthCap = 0,
    lengths: LengthsFile = None,
    turn_tokens: TurnTokens = 0,
    turn_latency: TurnLatency = 0.0,
    reload_pause: ReloadPause = 0.0,
    publish_lag: PublishLag = 0.0,
    groups_in_flight: GroupsInFlight = 0,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="queue_drop, queue_max, streaming, or a preset as it is written, areal(2).",
            rich_help_panel=_POLICY,
        ),
    ] = "queue_drop",
    max_staleness: MaxStaleness = None,
    micro_batch: MicroBatch = None,
    assignments: SetOption = None,
    steps: Steps = 400,
    warmup: Warmup = 100,
    seed: Seed = 0,
    as_json: JsonOption = False,
    plot: Plot = None,
) -> None:
    """Simulate a loop event by event, with the service's own rules: staleness, period, what is dropped, length bias.

    Example: rollout-buffer simulate --rho 1.1 --policy queue_max --max-staleness 2 --length-sigma 0.8
    """
    given: dict[str, Any] = dict(locals())
    from buffer_cli.staleness.simulate import run

    raise typer.Exit(run(given))


def lab(
    concurrency: Concurrency = 128,
    groups_per_batch: GroupsPerBatch = 16,
    group_size: GroupSize = 8,
    rho: Rho = 0.8,
    length_mean: LengthMean = 1_000.0,
    length_sigma: LengthSigma = 0.5,
    length_cap: LengthCap = 0,
    lengths: LengthsFile = None,
    turn_tokens: TurnTokens = 0,
    turn_latency: TurnLatency = 0.0,
    reload_pause: ReloadPause = 0.0,
    publish_lag: PublishLag = 0.0,
    groups_in_flight: GroupsInFlight = 0,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="A preset as it is written, and fields to set, 'streaming(4) order=lifo'; repeatable. "
            "The first one sets the pace. Default: a selection.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    steps: Steps = 400,
    warmup: Warmup = 100,
    seed: Seed = 0,
    as_json: JsonOption = False,
    plot: Plot = None,
) -> None:
    """Compare policies on one workload at equal throughput: staleness, length bias, and what it costs.

    The first policy runs on the engines given; every other one gets as many more as it needs to train as fast.

    Example: rollout-buffer lab --rho 1.1 --length-sigma 0.8 --policy queue_drop --policy 'streaming(2) order=lifo'
    """
    given: dict[str, Any] = dict(locals())
    from buffer_cli.staleness.lab import run

    raise typer.Exit(run(given))


def worth(
    concurrency: Concurrency = 128,
    groups_per_batch: GroupsPerBatch = 16,
    group_size: GroupSize = 8,
    rho: Rho = 0.8,
    length_mean: LengthMean = 1_000.0,
    length_sigma: LengthSigma = 0.5,
    length_cap: LengthCap = 0,
    lengths: LengthsFile = None,
    turn_tokens: TurnTokens = 0,
    turn_latency: TurnLatency = 0.0,
    reload_pause: ReloadPause = 0.0,
    publish_lag: PublishLag = 0.0,
    groups_in_flight: GroupsInFlight = 0,
    rollout_gpus: Annotated[
        int | None, typer.Option(metavar="n_r", help="GPUs that generate, with ρ and C.", rich_help_panel=_BUDGET)
    ] = None,
    train_gpus: Annotated[
        int | None, typer.Option(metavar="n_t", help="GPUs that train.", rich_help_panel=_BUDGET)
    ] = None,
    switch_pause: Annotated[
        float,
        typer.Option(
            metavar="TOKENS",
            help="Of shared GPUs: time a step to change roles, there and back, in tokens a slot decodes meanwhile.",
            rich_help_panel=_BUDGET,
        ),
    ] = 0.0,
    slot_tps: Annotated[
        float | None,
        typer.Option(metavar="v", help="Tokens/s of one slot, for seconds.", rich_help_panel=_WORKLOAD),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="A preset as it is written, and fields to set, 'streaming(4) order=lifo'; repeatable. "
            "Default: one_step_off, queue_drop and streaming.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    steps: Steps = 400,
    warmup: Warmup = 100,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Is asynchrony worth it? The same loop synchronous and asynchronous: period, idle shares, staleness.

    With --rollout-gpus and --train-gpus also on shared GPUs, all of which generate and then train.

    Example: rollout-buffer worth --rho 0.9 --rollout-gpus 12 --train-gpus 4 --switch-pause 500 --length-sigma 0.8
    """
    given: dict[str, Any] = dict(locals())
    from buffer_cli.staleness.worth import run

    raise typer.Exit(run(given))
