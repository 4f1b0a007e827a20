"""`rollout-buffer plan`, `simulate`, `lab` and `worth` and their options."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import JsonOption, SetOption

_loop = partial(typer.Option, rich_help_panel="Workload")
_lengths = partial(typer.Option, rich_help_panel="Lengths of responses")
_policy = partial(typer.Option, rich_help_panel="Policy")
_simulation = partial(typer.Option, rich_help_panel="Simulation")
_budget = partial(typer.Option, rich_help_panel="A budget of GPUs")

LengthsFile = Annotated[
    Path | None,
    _lengths(
        "--lengths",
        metavar="FILE",
        help="Recorded lengths: a recording's folder or Parquet file, or a text file with a number a line.",
    ),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs the extra `lab`.")]


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop: slots, batch, and throughputs."""

    concurrency: Annotated[int, _loop(metavar="C", help="Slots: responses decoded at once, over all engines.")] = 128
    groups_per_batch: Annotated[int, _loop(metavar="N", help="Groups of a train batch.")] = 16
    group_size: Annotated[int, _loop(metavar="G", help="Responses of a group.")] = 8
    rho: Annotated[float, _loop(metavar="ρ", help="Utilization: rollout over train throughput, from busy time.")] = 0.8


@dataclass(frozen=True)
class WorkloadOptions(LoopOptions):
    """Options of a loop that is simulated."""

    length_mean: Annotated[float, _lengths(metavar="TOKENS", help="Mean response, cap included.")] = 1_000.0
    length_sigma: Annotated[float, _lengths(metavar="σ", help="Of the logarithm of lengths; 0: all alike.")] = 0.5
    length_cap: Annotated[int, _lengths(metavar="TOKENS", help="Longest response; 0 for no cap.")] = 0
    lengths: LengthsFile = None
    turn_tokens: Annotated[int, _loop(metavar="TOKENS", help="Response tokens of a turn; 0: one turn.")] = 0
    turn_latency: Annotated[
        float, _loop(metavar="TOKENS", help="Wait between turns, in tokens a slot decodes meanwhile.")
    ] = 0.0
    reload_pause: Annotated[
        float, _loop(metavar="TOKENS", help="Pause at a publish, in tokens a slot decodes meanwhile.")
    ] = 0.0
    publish_lag: Annotated[
        float,
        _loop(metavar="TOKENS", help="From a publish until engines begin to load, in tokens a slot decodes meanwhile."),
    ] = 0.0
    groups_in_flight: Annotated[
        int,
        _loop(
            metavar="GROUPS",
            help="Generated at once, groups_per_engine over all engines; 0: as many as the slots need.",
        ),
    ] = 0
    surplus: Annotated[
        int, _loop(metavar="SAMPLES", help="Begun beyond G; those that have not ended with the first G are cut off.")
    ] = 0


@dataclass(frozen=True)
class QueueOptions:
    """Options of the policy that is named."""

    queue_factor: Annotated[
        float | None,
        _policy(metavar="q", help="Queue capacity over the batch. Default: the policy's, 1 for queue_drop."),
    ] = None
    max_staleness: Annotated[
        int | None,
        _policy(metavar="η", help="Staleness (off-policy lag) that is allowed, in versions: queue_max, areal."),
    ] = None
    micro_batch: Annotated[
        int | None, _policy(metavar="n", help="Groups of a micro-batch: streaming. Default: an eighth.")
    ] = None


@dataclass(frozen=True)
class StepOptions:
    """Options of every simulation."""

    steps: Annotated[int, _simulation(help="Train steps that are measured.")] = 400
    warmup: Annotated[int, _simulation(help="Train steps before them that do not count.")] = 100
    seed: Annotated[int, _simulation(help="Of the lengths.")] = 0


@runs("buffer_cli.staleness.plan:run")
def plan(
    loop: LoopOptions,
    queue: QueueOptions,
    simulation: StepOptions,
    tailness: Annotated[
        float | None, _lengths(metavar="M", help="Longest response of a group over the mean one.")
    ] = None,
    lengths: LengthsFile = None,
    length_mean: Annotated[
        float | None, _lengths(metavar="TOKENS", help="Mean response, for seconds. Default: of --lengths.")
    ] = None,
    policy: Annotated[str, _policy(metavar="POLICY", help="queue_drop, streaming or areal.")] = "queue_drop",
    gpus: Annotated[int | None, _budget(metavar="n", help="GPUs to split.")] = None,
    rollout_tps_per_gpu: Annotated[float | None, _budget(metavar="r", help="Tokens/s that one GPU generates.")] = None,
    train_tps_per_gpu: Annotated[float | None, _budget(metavar="t", help="Tokens/s that one GPU trains.")] = None,
    batches: Annotated[str, _budget(metavar="N,N", help="Batches to try. Default: N/2, N, 2N, 4N.")] = "",
    concurrencies: Annotated[
        str,
        _budget(
            metavar="c,c",
            help="Slots of a rollout GPU to try. Default: half, once and twice what makes C at the balanced split.",
        ),
    ] = "",
    total_concurrency: Annotated[
        bool,
        _budget(
            "--total-concurrency",
            help="Hold the slots in all over the splits: --concurrencies are totals, by default C/2, C and 2C.",
        ),
    ] = False,
    staleness_limit: Annotated[float, _budget(help="Recommend the fastest split up to this staleness.")] = 2.0,
    as_json: JsonOption = False,
    plot: Plot = None,
) -> None:
    """Predict staleness (off-policy lag) before a run: what it will be, what each lever changes, how to split GPUs.

    Near balance (0.8 < ρ < 1.2) the closed form is rough, so the simulator runs too. With --gpus, and
    --rollout-tps-per-gpu and --train-tps-per-gpu, prints the splits, batches and concurrencies that none beats;
    every rollout GPU has the same slots, whatever the split.

    Example: rollout-buffer plan --concurrency 120 --groups-per-batch 15 --rho 0.67 --tailness 1.42
    """


@runs("buffer_cli.staleness.simulate:run")
def simulate(
    workload: WorkloadOptions,
    queue: QueueOptions,
    simulation: StepOptions,
    policy: Annotated[
        str, _policy(metavar="POLICY", help="queue_drop, queue_max, streaming, or a preset as it is written, areal(2).")
    ] = "queue_drop",
    assignments: SetOption = None,
    as_json: JsonOption = False,
    plot: Plot = None,
) -> None:
    """Simulate a loop event by event, with the service's own rules: staleness, period, what is dropped, length bias.

    Example: rollout-buffer simulate --rho 1.1 --policy queue_max --max-staleness 2 --length-sigma 0.8
    """


@runs("buffer_cli.staleness.lab:run")
def lab(
    workload: WorkloadOptions,
    simulation: StepOptions,
    policies: Annotated[
        list[str] | None,
        _policy(
            "--policy",
            metavar="POLICY",
            help="A preset as it is written, and fields to set, 'streaming(4) order=lifo'; repeatable. Also surplus, "
            "samples beyond G, and estimate_error. The first one sets the pace. Default: a selection.",
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: Plot = None,
) -> None:
    """Compare policies on one workload at equal throughput: staleness, length bias, and what it costs.

    The first policy runs on the engines given; every other one gets as many more as it needs to train as fast.

    Example: rollout-buffer lab --rho 1.1 --length-sigma 0.8 --policy queue_drop --policy 'streaming(2) order=lifo'
    """


@runs("buffer_cli.staleness.worth:run")
def worth(
    workload: WorkloadOptions,
    simulation: StepOptions,
    rollout_gpus: Annotated[int | None, _budget(metavar="n_r", help="GPUs that generate, with ρ and C.")] = None,
    train_gpus: Annotated[int | None, _budget(metavar="n_t", help="GPUs that train.")] = None,
    switch_pause: Annotated[
        float,
        _budget(
            metavar="TOKENS",
            help="Of shared GPUs: time a step to change roles, there and back, in tokens a slot decodes meanwhile.",
        ),
    ] = 0.0,
    slot_tps: Annotated[float | None, _loop(metavar="v", help="Tokens/s of one slot, for seconds.")] = None,
    policies: Annotated[
        list[str] | None,
        _policy(
            "--policy",
            metavar="POLICY",
            help="A preset as it is written, and fields to set, 'streaming(4) order=lifo'; repeatable. "
            "Default: one_step_off, queue_drop and streaming.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Is asynchrony worth it? The same loop synchronous and asynchronous: period, idle shares, staleness.

    With --rollout-gpus and --train-gpus also on shared GPUs, all of which generate and then train.

    Example: rollout-buffer worth --rho 0.9 --rollout-gpus 12 --train-gpus 4 --switch-pause 500 --length-sigma 0.8
    """
